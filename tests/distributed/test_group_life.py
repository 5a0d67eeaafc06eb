# SPDX-License-Identifier: Apache-2.0
"""A background save keeps the ranks that it was called with, also if process groups end or begin while it runs.

The tests stop a save before and after each of its exchanges with other ranks, and destroy the groups at each stop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._async_thread_executor as executor
from support.ranks import run_ranks
from torch.distributed.checkpoint.utils import _DistWrapper as DcpWrapper

from bytecheckpoint import BcpStager, BcpWriter, async_save_state_dict, registered, scan_steps
from bytecheckpoint.errors import ConfigError
from distributed.worlds import EXCHANGES, LIMIT_S, STAGES, Hold, begin_world, check_whole, save, sharded

HOWS = ("own", "parts", "registered")
# Timeout of a later group: ranks that get into it in DCP's own exchanges wait for so long.
WAIT_S = 2.0


def destroy_at_every_stage(directory: Path, how: str, is_first: bool, then: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    everybody = [*range(num_ranks)]
    dist.barrier()
    dist.destroy_process_group()
    with registered():
        for number, (exchange, when) in enumerate(STAGES):
            path = directory / f"run-{number}"
            begin_world(directory, 2 * number, everybody, rank)
            if not is_first:
                save(how, path, 1).result(LIMIT_S)
            with Hold(exchange, when).patched() as hold:
                future = save(how, path, 2)
                assert hold.arrived.wait(LIMIT_S)
                if then == "barrier":
                    dist.barrier()
                dist.destroy_process_group()
                if then == "another world":
                    begin_world(directory, 2 * number + 1, [rank], rank)
                elif then == "other ranks":
                    begin_world(directory, 2 * number + 1, everybody[::-1], rank)
                hold.go_on.set()
                future.result(LIMIT_S)
            if then in ("another world", "other ranks"):
                dist.destroy_process_group()
            check_whole(how, path, 2, num_ranks)
    begin_world(directory, -1, everybody, rank)


@pytest.mark.parametrize("then", ["nothing", "barrier", "another world", "other ranks"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("how", HOWS)
def test_a_save_goes_on_without_the_group(tmp_path: Path, how: str, is_first: bool, then: str) -> None:
    run_ranks(2, destroy_at_every_stage, tmp_path, how, is_first, then)


@pytest.mark.parametrize("how", HOWS)
def test_a_save_goes_on_without_the_group_on_four_ranks(tmp_path: Path, how: str) -> None:
    run_ranks(4, destroy_at_every_stage, tmp_path, how, True, "nothing")


def plain_async_save(how: str, path: Path, number: int) -> Future[Any]:
    """Begins a save through DCP alone. Each exchange uses what is the default group at that moment."""
    state = {"model": {"weight": sharded(number)}, "of_rank": {str(dist.get_rank()): number}}
    if how == "stock writer":
        writer: Any = dcp.FileSystemWriter(path)
        return dcp.async_save(state, storage_writer=writer, async_stager=BcpStager())  # type: ignore[return-value]
    return dcp.async_save(state, storage_writer=BcpWriter(path))  # type: ignore[return-value]


def destroy_under_plain_dcp(directory: Path, how: str, then: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    everybody = [*range(num_ranks)]
    dist.barrier()
    dist.destroy_process_group()
    # None: before the save begins, when there has been no exchange.
    for number, stage in enumerate((None, *STAGES)):
        path = directory / f"run-{number}"
        begin_world(directory, 2 * number, everybody, rank)
        plain_async_save(how, path, 1).result(LIMIT_S)
        hold = Hold(*stage or (0, "before"))
        with hold.patched(DcpWrapper) if stage else held_before_begin(hold):
            future = plain_async_save(how, path, 2)
            assert hold.arrived.wait(LIMIT_S)
            dist.barrier()
            dist.destroy_process_group()
            if then == "another world":
                begin_world(directory, 2 * number + 1, [rank], rank, WAIT_S)
            elif then == "other ranks":
                begin_world(directory, 2 * number + 1, everybody[::-1], rank, WAIT_S)
            hold.go_on.set()
            error = future.exception(LIMIT_S)
        if dist.is_initialized():
            dist.destroy_process_group()
        found = scan_steps(directory, pattern=rf"run-({number})")[0]
        is_committed = stage is not None and EXCHANGES[stage[0]] == "broadcast_object"
        if how == "our writer" or stage is None:
            assert found.is_complete, found
            check_whole("own", path, 2 if is_committed else 1, num_ranks)
        else:
            # The stock writer overwrites the old checkpoint, and does not check whether ranks are missing.
            assert found.state in ("complete", "incomplete", "half", "corrupt")
        if how == "our writer" and rank == 0 and then != "other ranks":  # there another rank tells DCP of the end
            assert (error is None) == is_committed or then == "nothing"
    begin_world(directory, -1, everybody, rank)


@contextmanager
def held_before_begin(hold: Hold) -> Iterator[None]:
    """Holds the thread of DCP's executor before it asks whether there are groups."""
    theirs = executor.save_wrapper

    @functools.wraps(theirs)
    def held(*args: Any, **kwargs: Any) -> Any:
        hold.stop()
        return theirs(*args, **kwargs)

    executor.save_wrapper = held
    try:
        yield
    finally:
        executor.save_wrapper = theirs


@pytest.mark.parametrize("then", ["nothing", "another world", "other ranks"])
@pytest.mark.parametrize("how", ["our writer", "stock writer"])
def test_plain_dcp_is_whole_or_fails(tmp_path: Path, how: str, then: str) -> None:
    run_ranks(2, destroy_under_plain_dcp, tmp_path, how, then)


def save_over_destroyed_group(path: Path) -> None:
    group = dist.new_group(backend="gloo")
    dist.destroy_process_group(group)
    with pytest.raises(ConfigError, match="process_group was destroyed before the call"):
        async_save_state_dict(path, {"weight": sharded(0)}, process_group=group)
    assert not path.exists()


def test_a_group_that_is_gone_is_refused(tmp_path: Path) -> None:
    run_ranks(2, save_over_destroyed_group, tmp_path / "ckpt")
