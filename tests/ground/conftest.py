# SPDX-License-Identifier: Apache-2.0
"""Mounts each file system once for all tests of it in a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.late import LATE

from ground.mounts import KINDS, Ground
from ground.shared_mounts import SHARED_KINDS

_ALL = KINDS | SHARED_KINDS | LATE
_NOW = KINDS | SHARED_KINDS if os.environ.get("BCP_GROUND") == "1" else KINDS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives tests of one machine real file systems, and those of two also such as show changes late."""
    if "ground" in metafunc.fixturenames:
        kinds = [*_NOW, *LATE] if metafunc.module.__name__.endswith(("two_machines", "two_jobs")) else [*_NOW]
        metafunc.parametrize("ground", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    root = tmp_path_factory.mktemp("ground")
    with contextlib.ExitStack() as stack:
        yield Ground(request.param, _ALL[request.param](stack, root))


@pytest.fixture
def path(ground: Ground, request: pytest.FixtureRequest) -> Path:
    """Returns a directory in the first view that no other test uses."""
    return ground.views[0] / request.node.originalname
