# SPDX-License-Identifier: Apache-2.0
"""What tests of one process share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from bytecheckpoint.dcp import _staged


@pytest.fixture
def no_state_is_left() -> Iterator[None]:
    """What a failed test still holds must not hold up the next one."""
    yield
    gc.collect()
    for _, lease in _staged._watched:
        lease.release()
