# SPDX-License-Identifier: Apache-2.0
"""Tests SIGKILL in ``copy_checkpoint``, at named points of its commit: the copy is there, or what was before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.fork_server import ForkServer

from bytecheckpoint import copy_checkpoint, read, save_state_dict, verify
from faults.points_of_copies import COMMITTED, POINTS


def save_value(path: Path, value: float) -> None:
    state = {"a": torch.full((3 << 18,), value), "b": torch.full((5,), value), "value": value}
    save_state_dict(path, state, no_dist=True)


def value_at(path: Path) -> float:
    verify(path).raise_if_damaged()
    state = dict(read(path))
    assert {*state["a"].tolist(), *state["b"].tolist()} == {state["value"]}
    value: float = state["value"]
    return value


def copy(source: str, target: str) -> None:
    copy_checkpoint(source, target, overwrite=True)


@pytest.mark.parametrize("is_old_there", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_kill(failpoint_server: ForkServer, tmp_path: Path, point: str, is_old_there: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_value(source, 2.0)
    if is_old_there:
        save_value(target, 1.0)
    assert failpoint_server.run(copy, str(source), str(target), env={"BCP_FAILPOINT": point}).was_killed
    is_new = POINTS.index(point) >= COMMITTED
    if is_new or is_old_there:
        assert value_at(target) == (2.0 if is_new else 1.0)
    else:
        assert not (target / ".metadata").exists()
    assert copy_checkpoint(source, target, overwrite=True).is_new != is_new
    assert value_at(target) == 2.0
    left = {path.name for path in target.iterdir()} - {path.name for path in source.iterdir()} - {".bcp"}
    # Whoever dies behind the rename leaves the files of the old checkpoint to the next save there, as a save does.
    assert len(left) == (point == "commit_renamed" and is_old_there)
    shutil.rmtree(source)
    assert value_at(target) == 2.0
