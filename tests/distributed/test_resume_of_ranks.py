# SPDX-License-Identifier: Apache-2.0
"""All ranks resume from one step, whichever of them finds the damage; and refuse runs that they do not share."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import run_ranks

from bytecheckpoint import latest, resume, save_state_dict
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _core

NUM_RANKS = 4


def state(step: int) -> dict[str, Any]:
    """Each rank writes, and loads, a tensor of its own."""
    return {f"of_{dist.get_rank()}": torch.full((50_000,), float(step)), "step": step}


def damage(step: Path, key: str) -> None:
    checkpoint = _core.Checkpoint.open(str(step))
    offset, num_bytes = checkpoint.elements(key)[0]
    (name,) = {chunk for chunk in step.glob("__*.distcp") if chunk.name.startswith(f"__{key[-1]}_")}
    with name.open("r+b") as opened:
        opened.seek(offset + num_bytes - 1)
        opened.write(b"\x55")


def go_back(run: Path) -> tuple[int, int, list[str]]:
    rank = dist.get_rank()
    assert resume(run, state(0)) is None
    for step in (1, 2, 3):
        save_state_dict(run / f"step_{step}", state(step), user_metadata={"step": step})
    if rank == 0:
        damage(run / "step_3", "of_2")  # which rank 2 alone reads
    dist.barrier()
    into = state(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = resume(run, into)
    assert resumed is not None
    assert resumed.user_metadata == {"step": 2}
    assert bool((into[f"of_{rank}"] == 2).all())
    assert latest(run, before=3, process_group=dist.group.WORLD) == str(run / "step_2")
    return resumed.step, into["step"], [str(each.message) for each in caught if "damaged" in str(each.message)]


def test_damage_that_one_rank_finds(tmp_path: Path) -> None:
    first, *others = run_ranks(NUM_RANKS, go_back, tmp_path / "run")
    assert first[:2] == (2, 2)
    assert "step_3 is damaged, so step_2 is loaded" in first[2][0]
    assert others == [(2, 2, [])] * (NUM_RANKS - 1)


def resume_apart(root: Path) -> str:
    rank = dist.get_rank()
    run = root / f"of_{rank}"
    if rank == 1:
        save_state_dict(run / "step_1", {"w": torch.ones(1)}, no_dist=True)
    dist.barrier()
    try:
        resume(run, {"w": torch.zeros(1)})
    except CheckpointError as error:
        return str(error)
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root)
    return ""


def test_a_rank_that_sees_a_run_where_the_lowest_sees_none(tmp_path: Path) -> None:
    for said in run_ranks(2, resume_apart, tmp_path / "runs"):
        assert "rank 0 on" in said
        assert "sees no checkpoint, and rank 1 on" in said
        assert "step_1" in said
