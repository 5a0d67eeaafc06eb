# SPDX-License-Identifier: Apache-2.0
"""Some ranks make each public call in a group, others alone or in another group, and then all ranks together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.public_calls import CALLS, Place, prepare
from support.ranks import run_ranks

from bytecheckpoint import BcpReader, BcpWriter, new_group
from bytecheckpoint.calls import of_dcp


def call_in_subgroups(root: Path, is_watched: bool) -> None:
    """Makes each call on ranks 0 and 1 together and on rank 2 alone; then on ranks 1 and 2; then on all three."""
    rank, ready = dist.get_rank(), root / "ready"
    if is_watched:
        first = new_group([0, 1]) if rank < 2 else None
        second = new_group([1, 2]) if rank > 0 else None
    else:
        groups = dist.new_group([0, 1]), dist.new_group([1, 2])
        first, second = (group if dist.get_rank(group) >= 0 else None for group in groups)
    for call in CALLS:
        if not call.is_collective:
            continue  # it has nothing to do with ranks
        name = str(call)
        if first is not None:
            call.run(Place(root / f"{name}-first", ready, first))
        elif name not in (
            "save",
            "save_fast",
            "load",
            "resume",
        ):  # a rank cannot make these alone where there are groups
            call.run(Place(root / f"{name}-alone", ready))
        if second is not None:
            call.run(Place(root / f"{name}-second", ready, second))
        call.run(Place(root / f"{name}-all", ready, dist.group.WORLD))
        # The user's own collectives and groups still work.
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 3
    dist.barrier(dist.new_group())


@pytest.mark.parametrize("is_watched", [False, True])
def test_calls_in_subgroups_and_then_over_all(tmp_path: Path, is_watched: bool) -> None:
    prepare(tmp_path / "ready")
    run_ranks(3, call_in_subgroups, tmp_path, is_watched)


def look_for_calls(root: Path) -> int:
    """Saves and loads by DCP itself over ranks 0 and 1. Returns how often this rank has looked for the call."""
    looks, find_calls = [], of_dcp.find_calls
    of_dcp.find_calls = lambda *functions, **more: looks.append(functions) or find_calls(*functions, **more)  # type: ignore[func-returns-value]
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        state = {"a": torch.full((4,), float(dist.get_rank()))}
        dcp.save(state, storage_writer=BcpWriter(root), process_group=group)
        dcp.load(state, storage_reader=BcpReader(root), process_group=group)
        assert not state["a"].any()
    return len(looks)


def test_each_rank_of_a_subgroup_looks_for_its_call_once(tmp_path: Path) -> None:
    assert run_ranks(3, look_for_calls, tmp_path) == [2, 2, 0]
