# SPDX-License-Identifier: Apache-2.0
"""What one machine commits, another one sees: two mounts of one storage."""

from __future__ import annotations

from typing import Any

import torch
from support.equality import assert_equal, blank

from bytecheckpoint import latest, load_state_dict, prune, save_state_dict, verify
from ground.mounts import Ground

# The file of metadata gets longer and shorter.
NUM_KEYS = (1, 200, 40, 120, 3)


def state(generation: int) -> dict[str, Any]:
    names = [f"layers.{number}.weight" for number in range(NUM_KEYS[generation])]
    return {"generation": generation, **{name: torch.full((9,), float(generation)) for name in names}}


def test_another_machine_reads_what_was_committed_over_what_it_has_read(ground: Ground) -> None:
    here, there = (view / "overwritten" for view in ground.views)
    for generation in range(len(NUM_KEYS)):
        save_state_dict(here / "step-1", state(generation), no_dist=True)
        got = blank(state(generation))
        load_state_dict(there / "step-1", got, no_dist=True)
        assert_equal(got, state(generation))
        assert not verify(there / "step-1").problems
        assert latest(there) == str(there / "step-1")


def test_another_machine_takes_no_whole_step_for_a_damaged_one(ground: Ground) -> None:
    here, there = (view / "pruned" for view in ground.views)
    for generation in range(len(NUM_KEYS)):
        for step in (1, 2):
            save_state_dict(here / f"step-{step}", state(generation), no_dist=True)
        report = prune(there, keep_latest=2, remove_corrupt=True, grace_s=0.0)
        assert (report.kept, report.removed, report.swept) == ([1, 2], [], [])
