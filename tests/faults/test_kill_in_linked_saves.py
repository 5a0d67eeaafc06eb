# SPDX-License-Identifier: Apache-2.0
"""Tests SIGKILL in saves that link files of the step before: that step stays whole, and the next save links again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.fork_server import ForkServer

from bytecheckpoint import Config, SaveReport, read, save_state_dict, verify
from faults.points import CASES, Start

BASE = 200_000
OF_FIRST_SAVES = [case for case in CASES if case.start == Start.NOTHING and not case.file_a_record and not case.fails]
POINTS = sorted({case.point for case in OF_FIRST_SAVES})


def save(run: str, step: int) -> SaveReport:
    state = {"base": torch.arange(BASE), "adapter": torch.full((1000,), float(step))}
    return save_state_dict(f"{run}/step-{step}", state, no_dist=True, config=Config(link_unchanged=True))


def check(step: Path, number: int) -> None:
    verify(step).raise_if_damaged()
    found = read(step)
    assert torch.equal(found["base"], torch.arange(BASE))
    assert torch.equal(found["adapter"], torch.full((1000,), float(number)))


def test_there_are_points() -> None:
    assert {"write_file_created", "commit_renamed", "sweep_listed"} <= {*POINTS}


@pytest.mark.parametrize("point", POINTS)
def test_kill(server: ForkServer, failpoint_server: ForkServer, tmp_path: Path, point: str) -> None:
    assert server.run(save, str(tmp_path), 1).unwrap().bytes_linked == 0
    assert failpoint_server.run(save, str(tmp_path), 2, env={"BCP_FAILPOINT": point}).was_killed
    check(tmp_path / "step-1", 1)
    is_committed = (tmp_path / "step-2" / ".metadata").exists()
    assert is_committed or point not in ("commit_renamed", "commit_done")
    if is_committed:
        check(tmp_path / "step-2", 2)
    again = server.run(save, str(tmp_path), 2).unwrap()
    assert is_committed or again.bytes_linked > BASE * 8
    third = server.run(save, str(tmp_path), 3).unwrap()
    assert third.bytes_linked > BASE * 8
    for step in (1, 2, 3):
        check(tmp_path / f"step-{step}", step)
        assert len([*(tmp_path / f"step-{step}").glob("*.distcp")]) == (1 if step == 1 else 2)
