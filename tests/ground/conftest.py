# SPDX-License-Identifier: Apache-2.0
"""Mounts each file system once for all tests of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ground.mounts import KINDS, Ground


@pytest.fixture(scope="module", params=KINDS)
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    root = tmp_path_factory.mktemp("ground")
    with contextlib.ExitStack() as stack:
        yield Ground(request.param, KINDS[request.param](stack, root))


@pytest.fixture
def path(ground: Ground, request: pytest.FixtureRequest) -> Path:
    """Returns a directory in the first view that no other test uses."""
    return ground.views[0] / request.node.originalname
