# SPDX-License-Identifier: Apache-2.0
"""Saves and loads in which one rank dies or stops at a point that the test names."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import (
    BcpReader,
    BcpWriter,
    Config,
    async_save_state_dict,
    load_state_dict,
    new_group,
    save_state_dict,
)
from bytecheckpoint.errors import RankLostError
from bytecheckpoint.observability import read_failures

__all__ = ["DEATH_LIMIT_S", "PHASES", "STALL_S", "STOP_LIMIT_S", "Loss", "lose", "state"]

STALL_S = 3.0
# We promise these limits to users.
DEATH_LIMIT_S = 10.0
STOP_LIMIT_S = STALL_S + 5.0
LIMIT_S = 60.0
# When the rank is lost: it has not called yet; it plans; it has begun its file; it waits for the others; it is the
# coordinator and about to commit; it reads.
PHASES = ("before_call", "before_plan", "within_write", "after_write", "before_finish", "within_read")


@dataclass(frozen=True)
class Loss:
    """What happens to which rank, and when.

    Attributes:
        entry: ``own``, ``own_async``: our entry points; ``dcp``, ``dcp_async``: DCP's, on a group of ``new_group``.
        phase: One of ``PHASES``.
        victim: The rank that is lost; rank 0 is the coordinator.
        signal: SIGKILL or SIGSTOP.
    """

    entry: str
    phase: str
    victim: int
    signal: int

    def __str__(self) -> str:
        return f"{self.entry}-{self.phase}-{self.victim}-{signal.Signals(self.signal).name}"


def state(number: int) -> dict[str, Any]:
    """Returns a state, the same on all ranks, in which each rank that is left has something to write."""
    return {"shared": {f"part_{i}": torch.full((50,), number) for i in range(4)}, "number": number}


def empty() -> dict[str, Any]:
    return {"shared": {f"part_{i}": torch.zeros(50, dtype=torch.int64) for i in range(4)}, "number": 0}


_has_happened = threading.Event()  # the process is one rank of one test


def happen(loss: Loss, phase: str) -> None:
    """Sends the signal if this rank and phase are those of ``loss``. Only once, so that a stopped rank can continue."""
    if loss.phase == phase and dist.get_rank() == loss.victim and not _has_happened.is_set():
        _has_happened.set()
        store().set("lost at", repr(time.monotonic()))
        os.kill(os.getpid(), loss.signal)


def store() -> dist.Store:
    """Returns the store of the default group. It is a file, so it outlives every rank."""
    return dist.distributed_c10d._get_default_store()


class _Losing:
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.at = partial(happen, loss)


class LosingSavePlanner(_Losing, DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        self.at("before_plan")
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        self.at("within_write")
        return super().resolve_data(write_item)


class LosingLoadPlanner(_Losing, DefaultLoadPlanner):
    def create_local_plan(self) -> Any:
        self.at("before_plan")
        return super().create_local_plan()

    def resolve_tensor(self, read_item: Any) -> Any:
        self.at("within_read")
        return super().resolve_tensor(read_item)


def make_writer_lose(loss: Loss) -> None:
    """Makes all writers of this process lose the rank, because our entry points make writers of their own."""
    finish, write_data = BcpWriter.finish, BcpWriter.write_data

    def losing_finish(self: BcpWriter, metadata: Any, results: Any) -> None:
        happen(loss, "before_finish")
        finish(self, metadata, results)

    def losing_write_data(self: BcpWriter, plan: Any, planner: Any) -> Any:
        written = write_data(self, plan, planner)
        happen(loss, "after_write")
        return written

    BcpWriter.finish = losing_finish  # type: ignore[method-assign]
    BcpWriter.write_data = losing_write_data  # type: ignore[method-assign]


def call(loss: Loss, path: Path, group: dist.ProcessGroup | None) -> None:
    """Makes the save or load in which the rank is lost."""
    config = Config(stall_timeout_s=STALL_S)
    happen(loss, "before_call")
    if loss.phase == "within_read":
        loader = LosingLoadPlanner(loss)
        if loss.entry == "own":
            load_state_dict(path, empty(), planner=loader, config=config)
        else:
            dcp.load(empty(), storage_reader=BcpReader(path), planner=loader, process_group=group)
        return
    values = state(2) | {"own": {str(dist.get_rank()): 2}}
    planner = LosingSavePlanner(loss)
    if loss.entry == "own":
        save_state_dict(path, values, planner=planner, config=config)
    elif loss.entry == "own_async":
        async_save_state_dict(path, values, planner=planner, config=config).committed.result(LIMIT_S)
    elif loss.entry == "dcp":
        dcp.save(values, storage_writer=BcpWriter(path), planner=planner, process_group=group)
    else:
        future: Any = dcp.async_save(values, storage_writer=BcpWriter(path), planner=planner, process_group=group)
        future.result(LIMIT_S)


def lose(root: Path, loss: Loss) -> None:
    """Runs on each rank: loses ``loss.victim``, and saves again with the others. Then a stopped victim continues."""
    path, rank = root / "ckpt", dist.get_rank()
    save_state_dict(path, state(1), config=Config(stall_timeout_s=STALL_S))
    group = new_group(stall_timeout=STALL_S) if loss.entry.startswith("dcp") else None
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    make_writer_lose(loss)
    error = raised(partial(call, loss, path, group))
    noticed = time.monotonic()
    assert_told(loss, error)
    if rank == loss.victim:  # it was stopped, and continued
        store().set("went on", "")
        return
    passed = noticed - float(store().get("lost at"))
    assert passed < (DEATH_LIMIT_S if loss.signal == signal.SIGKILL else STOP_LIMIT_S), (passed, error)
    if loss.entry.startswith("own") and loss.signal == signal.SIGKILL:
        # A rank that tries again with the group of the dead rank does not wait for it.
        call_again = partial(save_state_dict, path, state(9), config=Config(stall_timeout_s=STALL_S))
        assert isinstance(raised(call_again), RankLostError)
    left = [other for other in range(len(pids)) if other != loss.victim]
    fresh = new_group(left, stall_timeout=STALL_S)
    assert_saved(path, 1, fresh)
    save_state_dict(path, state(3), process_group=fresh)
    if loss.signal == signal.SIGSTOP:
        if rank == left[0]:
            os.kill(pids[loss.victim], signal.SIGCONT)
        store().wait(["went on"])
    assert_saved(path, 3, fresh)
    save_state_dict(path, state(4), process_group=fresh)
    assert_saved(path, 4, fresh)
    files = {info.relative_path for info in BcpReader(path).read_metadata().storage_data.values()}
    there = {entry.name for entry in path.iterdir() if entry.name != ".bcp"}
    assert there == files | {".metadata"}, "nothing is left of the save that failed"
    had_right = loss.phase in ("within_write", "after_write", "before_finish")
    if had_right or (loss.entry.startswith("own") and loss.phase == "before_plan"):
        assert {each["error_type"] for each in read_failures(path)} & {"RankLostError", "UnendedSave"}, "it is not told"
    dist.barrier(fresh)


def assert_saved(path: Path, number: int, group: dist.ProcessGroup) -> None:
    got = empty()
    load_state_dict(path, got, process_group=group)
    assert_equal(got, state(number))
    dist.barrier(group)


def raised(function: Callable[[], None]) -> BaseException:
    try:
        function()
    except (Exception, CheckpointException) as error:
        return error
    raise AssertionError("nothing was raised")


def assert_told(loss: Loss, error: BaseException) -> None:
    if loss.entry.startswith("own"):
        assert isinstance(error, RankLostError), repr(error)
        word = "died" if loss.signal == signal.SIGKILL else "stopped"
        assert list(error.ranks) == [loss.victim], error
        assert error.ranks[loss.victim].startswith(word), error
        assert f"rank {loss.victim} {word}" in str(error)
