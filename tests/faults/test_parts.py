# SPDX-License-Identifier: Apache-2.0
"""Tests SIGKILL in ``bytecheckpoint.save``, at named points of each part, and in a removal of a whole step.

Afterwards the old step or the new one is there, whole. A step with only some new parts never counts as a checkpoint.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork_server import ForkServer

import bytecheckpoint
from bytecheckpoint import Retention, find_latest_ckpt_path, load, scan_steps
from bytecheckpoint.errors import CheckpointChangedError, CheckpointNotFoundError
from bytecheckpoint.storage import local_removal as _removal

PARTS = 3
# In the order in which the save of one part reaches them.
POINTS = ("begin_locked", "write_data_done", "commit_metadata_synced", "commit_renamed", "commit_done")


def state_of(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value).detach()
    return {"model": model, "optimizer": optimizer, "extra_state": {"value": value}}


def values_in(state: dict[str, Any]) -> set[float]:
    optimizer = state["optimizer"]
    tensors = [*state["model"].parameters(), *(each["momentum_buffer"] for each in optimizer.state.values())]
    return {float(state["extra_state"]["value"])} | {x for tensor in tensors for x in tensor.flatten().tolist()}


def save_value(path: str, step: int, value: float) -> None:
    bytecheckpoint.save(path, state_of(value), "ddp", global_steps=step)


def loaded(path: str | Path) -> float:
    state = state_of(-1)
    load(path, state, "ddp")
    (value,) = values_in(state)
    return value


@pytest.mark.parametrize("hit", range(1, PARTS + 1))
@pytest.mark.parametrize("point", POINTS)
def test_kill(failpoint_server: ForkServer, tmp_path: Path, point: str, hit: int) -> None:
    env = {"BCP_FAILPOINT": f"{point}:{hit}"}
    save_value(str(tmp_path), 1, 1)
    # The save makes a new step: it is there with all of its parts, or not at all.
    assert failpoint_server.run(save_value, str(tmp_path), 2, 2.0, env=env).was_killed
    is_last = hit == PARTS and POINTS.index(point) >= POINTS.index("commit_renamed")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")
    assert loaded(tmp_path / "global_step_1") == 1
    assert [folder.is_complete for folder in scan_steps(tmp_path)] == [True, is_last]
    if is_last:
        assert loaded(tmp_path / "global_step_2") == 2
    else:
        with pytest.raises((CheckpointNotFoundError, CheckpointChangedError)):
            loaded(tmp_path / "global_step_2")
    save_value(str(tmp_path), 2, 3)
    assert loaded(find_latest_ckpt_path(tmp_path) or "") == 3

    # The save replaces a step: a load gets a whole step or fails, and never mixes the two.
    assert failpoint_server.run(save_value, str(tmp_path), 2, 4.0, env=env).was_killed
    is_renamed = POINTS.index(point) >= POINTS.index("commit_renamed")
    num_new = hit - 1 + is_renamed
    if num_new in (0, PARTS):
        assert loaded(tmp_path / "global_step_2") == (4 if num_new else 3)
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_2")
    else:
        with pytest.raises(CheckpointChangedError, match="different saves"):
            loaded(tmp_path / "global_step_2")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")
        assert [folder.is_complete for folder in scan_steps(tmp_path)] == [True, False]
    save_value(str(tmp_path), 2, 5)
    assert loaded(find_latest_ckpt_path(tmp_path) or "") == 5
    assert [folder.state for folder in scan_steps(tmp_path, deep=True)] == ["complete"] * 2


def prune_and_die(root: str, number: int) -> None:
    """Prunes, and kills itself before operation ``number``, counted from 0, of those that change the disk."""
    numbers = itertools.count()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if next(numbers) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **keywords)

        return call

    core = _removal._core
    for kind, names in ((core.Removal, ("remove_marks", "finish")), (core.Directory, ("remove", "remove_empty"))):
        for name in names:
            setattr(kind, name, counted(getattr(kind, name)))
    core.Removal = counted(core.Removal)  # type: ignore[assignment,misc]
    report = Retention(root, keep_latest=1).prune()
    assert report.warnings == []


def test_kill_of_a_prune(server: ForkServer, tmp_path: Path) -> None:
    template = tmp_path / "template"
    for step in (1, 2):
        save_value(str(template), step, step)
    (template / "global_step_1" / "notes.txt").touch()
    num_killed = 0
    for number in itertools.count():
        root = tmp_path / f"run {number}"
        shutil.copytree(template, root)
        outcome = server.run(prune_and_die, str(root), number)
        if not outcome.was_killed:
            outcome.unwrap()
            break
        num_killed += 1
        states = {folder.step: folder.state for folder in scan_steps(root)}
        assert states[2] == "complete"
        if states.get(1) == "complete":
            assert loaded(root / "global_step_1") == 1
            assert loaded(root / "global_step_2") == 2  # what was loaded last is never removed
        elif 1 in states:
            with pytest.raises(CheckpointNotFoundError):  # not even the model loads: its mark is removed first
                load(root / "global_step_1", {"model": torch.nn.Linear(3, 5)}, "ddp")
        report = Retention(root, keep_latest=1, grace_s=0).prune()
        assert report.warnings == []
        assert report.skipped == {}, number
        left = [path.name for path in (root / "global_step_1").rglob("*")] if 1 in states else []
        # A prune that dies after it removed all files leaves empty folders, and the next prune does not take those for
        # a checkpoint.
        assert left in ([], ["model"], ["optimizer"], ["extra_state"]), left
        assert loaded(root / "global_step_2") == 2
    assert num_killed >= 3 * 4
    assert not (root / "global_step_1").exists()
