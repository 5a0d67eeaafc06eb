# SPDX-License-Identifier: Apache-2.0
"""What tests of `bytecheckpoint.save` and `load` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bytecheckpoint import shutdown


@pytest.fixture
def all_is_saved() -> Iterator[None]:
    """No save goes on behind the test."""
    yield
    shutdown(60.0)
