# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a small checkpoint, a home, and what tests of faults share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.campaign import Campaign
from support.fork_server import LIMIT_S, ForkServer, Meeting
from support.saves import BOTH_RANKS, SaveRequest, names_in

from faults.small import save_small


@pytest.fixture(scope="session")
def small_checkpoint(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the checkpoint of ``faults.small``: two data files of less than a block. Tests must not change it."""
    path = tmp_path_factory.mktemp("small") / "ckpt"
    requests = [SaveRequest(path, 0, rank, 2, str(path.parent / "store")) for rank in BOTH_RANKS]
    for pid in [server.start(save_small, request) for request in requests]:
        server.wait(pid).unwrap()
    assert len(names_in(path)) == 3
    return path


@pytest.fixture
def campaign(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Campaign]:
    """Yields a campaign, and puts what it covered into the summary of the test run."""
    campaign = Campaign(request.node.name)
    yield campaign
    record_property("covered", str(campaign))


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    meeting.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Yields a directory that every user may enter and write to."""
    if os.geteuid() != 0:
        yield tmp_path
        return
    closed = [folder for folder in (tmp_path, *tmp_path.parents) if not folder.stat().st_mode & 0o001]
    for folder in closed:
        folder.chmod(folder.stat().st_mode | 0o011)
    tmp_path.chmod(0o777)
    yield tmp_path
    subprocess.run(["chmod", "-R", "u+rwX", str(tmp_path)], timeout=LIMIT_S, check=True)
