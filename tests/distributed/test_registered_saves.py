# SPDX-License-Identifier: Apache-2.0
"""``dcp.async_save`` after ``register()`` saves what it was called with, and all ranks commit the same save."""

from __future__ import annotations

import functools
import gc
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._async_thread_executor as executor
from support.pausing_planner import PausingPlanner
from support.ranks import run_ranks

from bytecheckpoint import BcpStager, BcpWriter, Config, load_state_dict, registered
from bytecheckpoint.errors import CheckpointError, InvalidPlanError, ProcessGroupChangedError, StagingBusyError
from bytecheckpoint.staging import leases as _leases
from distributed.worlds import LIMIT_S, Hold, begin_world, check_whole, sharded
from distributed.worlds import save as begin_save

RAISES = Config(on_staging_busy="raise")


def state(number: int) -> dict[str, Any]:
    return {"model": {"weight": sharded(number)}, "of_rank": {str(dist.get_rank()): number}}


def stage_while_a_save_takes_long(directory: Path) -> None:
    _leases._BEGIN_WITHIN_S = 0.05
    planner = PausingPlanner()
    with registered(config=RAISES):
        future: Any = dcp.async_save(state(1), checkpoint_id=directory / "1", planner=planner)
        assert planner.arrived.wait(LIMIT_S)

        def from_another_depth() -> None:
            dcp.async_save(state(2), checkpoint_id=directory / "2")

        for _ in range(3):
            with pytest.raises(StagingBusyError):
                from_another_depth()
        planner.go_on.set()
        future.result(LIMIT_S)
    check_whole("own", directory / "1", 1, dist.get_world_size())


def test_the_memory_of_a_save_that_takes_long_is_not_given_on(tmp_path: Path) -> None:
    run_ranks(2, stage_while_a_save_takes_long, tmp_path)


def direct_the_writer_elsewhere(directory: Path) -> None:
    writer = BcpWriter(directory / "unused", config=Config(on_staging_busy="double_buffer"))
    futures: list[Any] = []
    with registered():
        for number in range(3):
            writer.reset(directory / str(number))
            futures.append(dcp.async_save(state(number), storage_writer=writer))
        for future in futures:
            future.result(LIMIT_S)
    for number in range(3):
        check_whole("own", directory / str(number), number, dist.get_world_size())


def test_a_save_goes_where_its_writer_was_directed_to_at_the_call(tmp_path: Path) -> None:
    run_ranks(2, direct_the_writer_elsewhere, tmp_path)


def fail_unseen_on_one_rank(directory: Path) -> None:
    """On rank 1 the next save raises a failure that nobody looked at. The saves of rank 0 and 1 must not be mixed."""
    path = directory / "ckpt"
    (directory / "file").touch()
    with registered():
        begin_save("registered", path, 1).result(LIMIT_S)
        failed = begin_save("registered", directory / "file" / "no-folder", 0)
        if dist.get_rank() == 0:
            assert failed.exception(LIMIT_S) is not None
        else:
            while not failed.done():
                dist.get_rank()
        dist.barrier()
        if dist.get_rank() == 0:
            future = begin_save("registered", path, 2)
            assert "its result was not read" in str(future.exception(LIMIT_S))
        else:
            with pytest.raises(CheckpointError, match="its result was not read"):
                begin_save("registered", path, 2)
        dist.barrier()
        check_whole("own", path, 1, 2)
        begin_save("registered", path, 3).result(LIMIT_S)
    check_whole("own", path, 3, 2)


def test_what_one_rank_raises_fails_the_save_of_all(tmp_path: Path) -> None:
    run_ranks(2, fail_unseen_on_one_rank, tmp_path)


class LateFailure(BcpStager):
    """On rank 1 its future fails after ``async_save`` has returned."""

    later: Future[Any] | None = None

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        staged = super().stage(state_dict, **kwargs)
        if dist.get_rank() != 1:
            return staged
        self.later = Future()
        return self.later


def fail_staging_late(path: Path) -> None:
    with registered():
        stager = LateFailure()
        response: Any = dcp.async_save(state(1), checkpoint_id=path, async_stager=stager)
        if stager.later is not None:
            response = response.upload_completion
            stager.later.set_exception(RuntimeError("device lost"))
        assert "device lost" in str(response.exception(LIMIT_S))
    assert not path.exists()


def test_staging_that_fails_on_one_rank_fails_the_save_of_all(tmp_path: Path) -> None:
    run_ranks(2, fail_staging_late, tmp_path / "ckpt")


def fail_staging_at_once(path: Path) -> None:
    values = state(1)
    with registered():
        if dist.get_rank() == 1:
            values["lock"] = threading.Lock()
            with pytest.raises(InvalidPlanError, match="'lock': a lock cannot be copied"):
                dcp.async_save(values, checkpoint_id=path)
        else:
            future: Any = dcp.async_save(values, checkpoint_id=path)
            assert "'lock': a lock cannot be copied" in str(future.exception(LIMIT_S))
        dist.barrier()
        assert not path.exists()
        begin_save("registered", path, 2).result(LIMIT_S)
    check_whole("own", path, 2, 2)


def test_a_state_that_one_rank_cannot_stage_fails_the_save_of_all(tmp_path: Path) -> None:
    run_ranks(2, fail_staging_at_once, tmp_path / "ckpt")


def save_over_one_of_several_groups(path: Path) -> None:
    """Saves over one of two groups. Ranks are in different numbers of groups, as with pipelines."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [1, 2])]
    if rank < 2:
        with registered():
            future: Any = dcp.async_save({"rank": {str(rank): rank}}, checkpoint_id=path, process_group=groups[0])
            future.result(LIMIT_S)
        got = {"rank": {"0": -1, "1": -1}}
        load_state_dict(path, got, no_dist=True)
        assert got == {"rank": {"0": 0, "1": 1}}
    dist.barrier()


def test_a_group_that_the_caller_gives_is_saved_over(tmp_path: Path) -> None:
    run_ranks(3, save_over_one_of_several_groups, tmp_path / "ckpt")


def lose_the_group_before_plain_dcp_begins(directory: Path) -> None:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    begin_world(directory, 0, [0, 1], rank)
    hold = Hold(0, "before")
    theirs = executor.save_wrapper

    @functools.wraps(theirs)
    def held(*args: Any, **kwargs: Any) -> Any:
        hold.stop()
        return theirs(*args, **kwargs)

    executor.save_wrapper = held
    path = directory / "ckpt"
    future: Any = dcp.async_save({"of_rank": {str(rank): rank}}, storage_writer=BcpWriter(path))
    assert hold.arrived.wait(LIMIT_S)
    dist.destroy_process_group()
    gc.collect()  # now nothing refers to the group any more
    hold.go_on.set()
    assert isinstance(future.exception(LIMIT_S), ProcessGroupChangedError)
    assert not path.exists()
    begin_world(directory, 1, [0, 1], rank)


def test_plain_dcp_with_a_group_that_is_gone_altogether_fails(tmp_path: Path) -> None:
    run_ranks(2, lose_the_group_before_plain_dcp_begins, tmp_path)
