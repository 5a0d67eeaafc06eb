# SPDX-License-Identifier: Apache-2.0
"""What one machine commits, another one sees: two mounts of one storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.equality import assert_equal, blank

from bytecheckpoint import latest, load_state_dict, prune, save_state_dict, verify
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
    report = prune(run, keep_latest=2, remove_corrupt=True, grace_s=0.0)
    return report.kept, report.removed, report.swept


def test_another_machine_takes_no_whole_step_for_a_damaged_one(ground: Ground, machines: Machines) -> None:
    here, there = (view / "pruned" for view in ground.views)
    for generation in range(len(NUM_KEYS)):
        for step in (1, 2):
            machines[0].run(save, here / f"step-{step}", generation).unwrap()
        assert machines[1].run(pruned, there).unwrap() == ([1, 2], [], [])
