# SPDX-License-Identifier: Apache-2.0
"""Mounts each file system once for all tests of it in a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.late import LATE

from ground.mounts import KINDS, Ground, Machines
from ground.record import pytest_runtest_logreport, pytest_sessionfinish  # noqa: F401  # hooks
from ground.shared_mounts import FOR_ONE_MACHINE, NFS_KINDS, SHARED_KINDS, SLOW_KINDS

_MOUNTS = KINDS | SHARED_KINDS | SLOW_KINDS | LATE
_IS_ASKED_FOR = os.environ.get("BCP_GROUND") == "1"
_NOW = [*KINDS, *SHARED_KINDS, *NFS_KINDS] if _IS_ASKED_FOR else [*KINDS]
_NOW += SLOW_KINDS if os.environ.get("BCP_LONG") == "1" else ()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives tests of one machine real file systems, and those of two also such as show changes late."""
    if "ground" in metafunc.fixturenames:
        module = metafunc.module.__name__
        kinds = [*_NOW, *LATE] if module.endswith(("two_machines", "two_jobs")) else _NOW
        if module.endswith(("two_machines", "two_jobs", "one_after_another")):
            alone = pytest.mark.skip(reason="other machines see what was saved there after minutes")
            kinds = [pytest.param(kind, marks=alone) if kind in FOR_ONE_MACHINE else kind for kind in kinds]
        metafunc.parametrize("ground", kinds, indirect=True, scope="module")


@pytest.fixture(scope="session")
def machines_of_nfs() -> Iterator[tuple[contextlib.ExitStack, dict[str, Ground]]]:
    """Yields what has been started by kind: the machines take half a minute, so they serve all files of tests."""
    with contextlib.ExitStack() as stack:
        yield stack, {}


@pytest.fixture(scope="module")
def ground(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    machines_of_nfs: tuple[contextlib.ExitStack, dict[str, Ground]],
) -> Iterator[Ground]:
    kind = request.param
    if kind in NFS_KINDS:
        stack, started = machines_of_nfs
        if kind not in started:
            started[kind] = NFS_KINDS[kind](stack, tmp_path_factory.mktemp("ground"))
        yield started[kind]
        return
    with contextlib.ExitStack() as stack:
        yield Ground(kind, _MOUNTS[kind](stack, tmp_path_factory.mktemp("ground")))


@pytest.fixture
def machines(ground: Ground, server: ForkServer) -> Machines:
    """Returns what runs functions on each of the two machines: processes of this one, or a kernel of its own each."""
    return ground.machines or (server, server)


@pytest.fixture
def mortal_machines(ground: Ground, failpoint_server: ForkServer) -> Machines:
    """Returns the same with failpoints."""
    return ground.machines or (failpoint_server, failpoint_server)


@pytest.fixture
def path(ground: Ground, request: pytest.FixtureRequest) -> Path:
    """Returns a directory in the first view that no other test uses."""
    return ground.views[0] / request.node.originalname
