# SPDX-License-Identifier: Apache-2.0
"""DCP makes its process for saves for the ranks of the first save. Saves of other ranks get a new one, or fail."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bytecheckpoint import BcpWriter, registered, verify
from bytecheckpoint.errors import ProcessGroupChangedError
from distributed.worlds import begin_world, check_whole, sharded

PROCESS = AsyncCheckpointerType.PROCESS
# A new process imports torch.
LIMIT_S = 100.0


def state(number: int) -> dict[str, Any]:
    return {"model": {"weight": sharded(number)}, "of_rank": {str(dist.get_rank()): number}}


def save_in_other_worlds(directory: Path) -> None:
    """Saves with other ranks each time. The groups of the first save are destroyed while it runs."""
    rank = dist.get_rank()
    futures: list[Any] = []
    worlds = ([0, 1], [1, 0], [rank])
    for number, ranks in enumerate(worlds):
        dist.destroy_process_group()
        begin_world(directory, number, ranks, rank, LIMIT_S)
        path = directory / (f"own-{rank}" if len(ranks) == 1 else f"shared-{number}")
        futures.append(dcp.async_save(state(number), checkpoint_id=path, async_checkpointer_type=PROCESS))
        if number > 0:
            futures[-1].result(LIMIT_S)
            check_whole("own", path, number, len(ranks))
        else:
            await_process()
    check_answers(directory)
    futures[0].result(LIMIT_S)
    check_whole("own", directory / "shared-0", 0, 2)
    dist.destroy_process_group()
    begin_world(directory, len(worlds), [0, 1], rank, LIMIT_S)


def await_process() -> None:
    """Waits until DCP has begun its process: until then it asks the groups for their ranks."""
    until = time.monotonic() + LIMIT_S
    while _async_process_executor._CHECKPOINT_PROCESS is None:
        assert time.monotonic() < until
        time.sleep(0.01)


def check_answers(directory: Path) -> None:
    """Asserts that two saves through one process get their own answers. Both are called before either is waited for."""
    path = directory / f"good-{dist.get_rank()}"
    good = dcp.async_save(state(7), checkpoint_id=path, async_checkpointer_type=PROCESS)
    bad = dcp.async_save(state(7), checkpoint_id="/proc/nowhere", async_checkpointer_type=PROCESS)
    assert "/proc/nowhere" in str(bad.exception(LIMIT_S))  # type: ignore[union-attr]
    good.result(LIMIT_S)  # type: ignore[union-attr]
    assert not verify(path).problems


def register_and_save_in_other_worlds(directory: Path) -> None:
    with registered():
        save_in_other_worlds(directory)


@pytest.mark.timeout(400)
def test_after_register_a_process_is_made_for_the_ranks_of_each_save(tmp_path: Path) -> None:
    run_ranks(2, register_and_save_in_other_worlds, tmp_path, limit_s=300.0)


def save_plainly_in_another_world(directory: Path) -> None:
    rank = dist.get_rank()
    path = directory / "ckpt"

    def save(number: int) -> Any:
        return dcp.async_save(state(number), storage_writer=BcpWriter(path), async_checkpointer_type=PROCESS)

    save(1).result(LIMIT_S)
    dist.destroy_process_group()
    begin_world(directory, 0, [rank], rank)
    error = save(2).exception(LIMIT_S)
    if rank == 1:  # on rank 0 the process is rank 0 of 2, and the call is of rank 0 of 1
        assert isinstance(error, ProcessGroupChangedError)
        assert "rank 0 of 1, and DCP's process for saves was made for rank 1 of 2" in str(error)
    assert error is not None
    dist.destroy_process_group()
    begin_world(directory, 1, [0, 1], rank)
    check_whole("own", path, 1, 2)


@pytest.mark.timeout(400)
def test_plain_dcp_refuses_other_ranks_than_those_of_its_process(tmp_path: Path) -> None:
    run_ranks(2, save_plainly_in_another_world, tmp_path, limit_s=300.0)
