# SPDX-License-Identifier: Apache-2.0
"""The two fork servers: the installed package, and the build with failpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.fork_server import ForkServer, Meeting

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bytecheckpoint"
FAILPOINT_BUILD = ROOT / "build" / "failpoints" / "lib"


def is_same(file: Path) -> bool:
    built = FAILPOINT_BUILD / file.relative_to(ROOT)
    return built.exists() and built.read_bytes() == file.read_bytes()


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def failpoint_server() -> Iterator[ForkServer]:
    if not (FAILPOINT_BUILD / "bytecheckpoint").is_dir():
        pytest.skip(f"KILL TESTS NOT RUN: {FAILPOINT_BUILD} is missing; `make build/failpoints/.built` makes it")
    stale = [str(file) for file in PACKAGE.rglob("*.py") if not is_same(file)]
    if stale:
        pytest.fail(f"{FAILPOINT_BUILD} is not of these sources; `make build/failpoints/.built` updates it: {stale}")
    server = ForkServer(FAILPOINT_BUILD)
    assert Path(server.info["file"]).is_relative_to(FAILPOINT_BUILD), server.info
    assert server.info["failpoints"], "this build has no failpoints"
    yield server
    server.close()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    meeting.close()
