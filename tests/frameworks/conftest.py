# SPDX-License-Identifier: Apache-2.0
"""Fixtures that tests of `bytecheckpoint.save` and `load` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ranks import forked_with

from bytecheckpoint import shutdown


@pytest.fixture
def all_is_saved() -> Iterator[None]:
    """Waits after the test until every background save has finished."""
    yield
    shutdown(60.0)


@pytest.fixture(scope="module")
def ranks_with_torchtitan() -> Iterator[None]:
    """Forks the module's ranks from a process that has imported torchtitan, because that import takes seconds."""
    with forked_with("frameworks.titan_imported"):
        yield
