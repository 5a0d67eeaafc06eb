# SPDX-License-Identifier: Apache-2.0
"""What tests of `bytecheckpoint.save` and `load` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ranks import forked_with

from bytecheckpoint import shutdown


@pytest.fixture
def all_is_saved() -> Iterator[None]:
    """No save goes on behind the test."""
    yield
    shutdown(60.0)


@pytest.fixture(scope="module")
def ranks_with_torchtitan() -> Iterator[None]:
    """Ranks of the module are forked from a process that has imported torchtitan, which takes seconds."""
    with forked_with("frameworks.titan_imported"):
        yield
