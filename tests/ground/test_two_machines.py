# SPDX-License-Identifier: Apache-2.0
"""What one machine commits, another one sees, and ranks on both save together: two mounts of one storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.equality import assert_equal, blank
from support.jobs import Job
from support.mounts import mount_for_this_process
from support.nfs_machines import MEETING, MEETING_ENV
from support.saves import BOTH_RANKS, SaveRequest, generation_on_disk, load_then_save
from support.saves import save as save_rank

from bytecheckpoint import Retention, latest, load_state_dict, save_state_dict, verify
from ground.mounts import Ground, Machines

# The file of metadata gets longer and shorter.
NUM_KEYS = (1, 200, 40, 120, 3)


def state(generation: int) -> dict[str, Any]:
    names = [f"layers.{number}.weight" for number in range(NUM_KEYS[generation])]
    return {"generation": generation, **{name: torch.full((9,), float(generation)) for name in names}}


def save(path: Path, generation: int) -> None:
    save_state_dict(path, state(generation), no_dist=True)


def check(run: Path, generation: int) -> None:
    """Fails unless the run's first step is that generation, and whole."""
    got = blank(state(generation))
    load_state_dict(run / "step-1", got, no_dist=True)
    assert_equal(got, state(generation))
    assert not verify(run / "step-1").problems
    assert latest(run) == str(run / "step-1")


def test_another_machine_reads_what_was_committed_over_what_it_has_read(ground: Ground, machines: Machines) -> None:
    here, there = (view / "overwritten" for view in ground.views)
    for generation in range(len(NUM_KEYS)):
        machines[0].run(save, here / "step-1", generation).unwrap()
        machines[1].run(check, there, generation).unwrap()


def pruned(run: Path) -> tuple[list[int], list[str], list[str]]:
    report = Retention(run, keep_latest=2, remove_corrupt=True, grace_s=0.0).prune()
    return report.kept, report.removed, report.swept


def test_another_machine_takes_no_whole_step_for_a_damaged_one(ground: Ground, machines: Machines) -> None:
    here, there = (view / "pruned" for view in ground.views)
    for generation in range(len(NUM_KEYS)):
        for step in (1, 2):
            machines[0].run(save, here / f"step-{step}", generation).unwrap()
        assert machines[1].run(pruned, there).unwrap() == ([1, 2], [], [])


def on_own_machine(views: tuple[Path, Path], at: Path, request: SaveRequest) -> Any:
    """Saves, and loads what is there before, as a rank that sees the storage at ``at`` as its machine does."""
    if at != views[request.rank]:
        mount_for_this_process("--bind", str(views[request.rank]), str(at))
    return save_rank(request) if request.generation == 0 else load_then_save(BOTH_RANKS, request)


def test_ranks_on_two_machines_save_and_load_together(ground: Ground, machines: Machines, tmp_path: Path) -> None:
    at, store, env = tmp_path / "at", "", {}
    at.mkdir()
    if ground.machines is not None:  # kernels of their own, with mounts of their own
        at, store, env = ground.views[0], MEETING, MEETING_ENV
    for generation in range(3):
        request = SaveRequest(at / "together", generation, store=store)
        envs = dict.fromkeys(range(2), env)
        outcomes = Job(machines, request, 2, function=on_own_machine, arguments=(ground.views, at), env=envs).wait()
        for outcome in outcomes:
            loaded, saved = (-1, outcome.unwrap()) if generation == 0 else outcome.unwrap()
            assert (loaded, saved.errors) == (generation - 1, {})
        for machine, view in zip(machines, ground.views, strict=True):
            assert machine.run(generation_on_disk, view / "together", BOTH_RANKS).unwrap() == generation
