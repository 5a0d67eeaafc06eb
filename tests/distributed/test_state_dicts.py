# SPDX-License-Identifier: Apache-2.0
"""Our entry points for state dicts on several ranks: all ranks make one save, and all raise its errors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pausing_planner import PausingPlanner
from support.ranks import run_ranks
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from bytecheckpoint import BcpSavePlanner, Config, async_save_state_dict, load_state_dict, save_state_dict, shutdown
from bytecheckpoint.errors import CheckpointError, SaveCancelledError, StagingFullError

LIMIT_S = 60.0


def state_of(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.arange(4000.0).reshape(40, 100) + value, mesh, [Shard(0)])
    return {"sharded": sharded, "own": {str(dist.get_rank()): torch.full((9,), float(value))}, "step": value}


def assert_saved(path: Path, value: float) -> None:
    got, wanted = state_of(0), state_of(value)
    load_state_dict(path, got)
    assert torch.equal(got["sharded"].full_tensor(), wanted["sharded"].full_tensor())
    assert torch.equal(got["own"][str(dist.get_rank())], wanted["own"][str(dist.get_rank())])
    assert got["step"] == value


def save_while_training_communicates(path: Path) -> None:
    for step in (1.0, 2.0, 3.0):
        state = state_of(step)
        handle = async_save_state_dict(path, state, config=Config(on_staging_busy="double_buffer"))
        state["sharded"].to_local().zero_()
        state["own"][str(dist.get_rank())].zero_()
        for _ in range(50):  # on the default group, which the save does not use
            total = torch.tensor([1.0])
            dist.all_reduce(total)
            assert total.item() == dist.get_world_size()
    report = handle.committed.result(LIMIT_S)
    assert len(report.ranks) == (dist.get_world_size() if dist.get_rank() == 0 else 0)
    assert_saved(path, 3.0)
    shutdown(LIMIT_S)


def test_training_uses_its_group_while_saves_use_theirs(tmp_path: Path) -> None:
    run_ranks(4, save_while_training_communicates, tmp_path)


def save_in_subgroups(root: Path) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    path = root / str(rank % 2)
    state = {str(rank): torch.full((10,), float(rank)), "both": torch.arange(100.0)}
    for _ in range(2):
        async_save_state_dict(path, state, process_group=groups[rank % 2]).committed.result(LIMIT_S)
    got = {str(rank): torch.zeros(10), "both": torch.zeros(100)}
    load_state_dict(path, got, process_group=groups[rank % 2])
    assert torch.equal(got[str(rank)], state[str(rank)])
    assert torch.equal(got["both"], state["both"])
    alone = root / f"alone-{rank}"
    save_state_dict(alone, state, no_dist=True)
    load_state_dict(alone, got, no_dist=True)


def test_groups_and_single_ranks_save_apart(tmp_path: Path) -> None:
    run_ranks(4, save_in_subgroups, tmp_path)


def fail_to_stage_on_one_rank(path: Path) -> None:
    save_state_dict(path, state_of(1.0))
    config = Config(staging_bytes=1) if dist.get_rank() == 1 else Config()
    if dist.get_rank() == 1:
        with pytest.raises(StagingFullError):
            async_save_state_dict(path, state_of(2.0), config=config)
    else:
        with pytest.raises(StagingFullError, match="staging_bytes"):
            async_save_state_dict(path, state_of(2.0), config=config).committed.result(LIMIT_S)
    assert_saved(path, 1.0)
    async_save_state_dict(path, state_of(3.0)).committed.result(LIMIT_S)
    assert_saved(path, 3.0)


def test_a_rank_that_cannot_stage_is_told_to_all(tmp_path: Path) -> None:
    run_ranks(3, fail_to_stage_on_one_rank, tmp_path)


def cancel_on_one_rank(path: Path) -> None:
    save_state_dict(path, state_of(1.0))
    before = sorted(file.name for file in path.iterdir())
    dist.barrier()
    planner = PausingPlanner()
    handle = async_save_state_dict(path, state_of(2.0), planner=planner)
    assert planner.arrived.wait(LIMIT_S)
    if dist.get_rank() == 1:
        with pytest.raises(TimeoutError):
            handle.cancel(0.1)
    planner.go_on.set()
    with pytest.raises(SaveCancelledError, match="rank 1"):
        handle.committed.result(LIMIT_S)
    dist.barrier()
    assert sorted(file.name for file in path.iterdir()) == before
    assert_saved(path, 1.0)


def test_a_save_that_one_rank_cancels_is_cancelled_on_all(tmp_path: Path) -> None:
    run_ranks(3, cancel_on_one_rank, tmp_path)


class WaitingPlanner(BcpSavePlanner):
    """Waits with its plan until the test lets it continue. Until then its save fails on no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def create_local_plan(self) -> SavePlan:
        assert self.go_on.wait(LIMIT_S)
        return super().create_local_plan()


def fail_unseen(path: Path) -> None:
    planner = WaitingPlanner()
    async_save_state_dict("/proc/nowhere", state_of(1.0), planner=planner)
    second = async_save_state_dict(path, state_of(2.0), config=Config(on_staging_busy="double_buffer"))
    planner.go_on.set()  # now the first save fails, on all ranks
    second.committed.result(LIMIT_S)
    with pytest.raises(CheckpointError, match="its result was not read"):
        save_state_dict(path, state_of(3.0))
    save_state_dict(path, state_of(4.0))
    assert_saved(path, 4.0)


def test_a_failure_nobody_looked_at_is_raised_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, fail_unseen, tmp_path)
