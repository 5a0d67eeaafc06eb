# SPDX-License-Identifier: Apache-2.0
"""Whatever a hook raises on one rank in a bare call of DCP, all ranks raise, and know the reason."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.failing_hooks import (
    LOAD_PLANNER_HOOKS,
    SAVE_PLANNER_HOOKS,
    WRITER_HOOKS,
    FailingBcpLoadPlanner,
    FailingBcpSavePlanner,
    FailingLoadPlanner,
    FailingSavePlanner,
    FailingWriter,
    Unpicklable,
    Unreadable,
    Unspeakable,
)
from support.ranks import failures, run_ranks
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from bytecheckpoint import BcpReader, BcpWriter, load_state_dict, registered, save_state_dict
from bytecheckpoint.errors import RankError

LIMIT_S = 120.0
ON_COORDINATOR = ("create_global_plan", "prepare_global_plan", "finish", "after_finish", "broken_metadata")


def of_one_rank() -> BaseException:
    """Returns an error of a class that can be pickled here, but that other ranks may not be able to import."""
    module = sys.modules.setdefault("of_one_rank", types.ModuleType("of_one_rank"))
    module.Odd = type("Odd", (Exception,), {"__module__": "of_one_rank"})  # type: ignore[attr-defined]
    error: BaseException = module.Odd("why")  # type: ignore[attr-defined]
    return error


def with_odd_cause() -> BaseException:
    error = Unreadable("this", "that")
    error.__cause__ = Unpicklable("of a cause")
    error.held = lambda: None  # type: ignore[attr-defined]
    return error


ODD: list[tuple[Callable[[], BaseException], type, str]] = [
    (lambda: Unreadable("this", "that"), RankError, "support.failing_hooks.Unreadable: this and that"),
    (lambda: Unpicklable("why"), RankError, "support.failing_hooks.Unpicklable: why"),
    (lambda: Unspeakable("why"), RankError, "__str__ raises ValueError"),
    (of_one_rank, Exception, "of_one_rank.Odd: why"),
    (with_odd_cause, RankError, "this and that"),
    (lambda: SystemExit("stop"), SystemExit, "stop"),
    (lambda: KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
]


def state(number: int) -> dict[str, Any]:
    shared = {f"of_rank_{rank}": torch.full((50,), number) for rank in range(2)}
    return {"shared": shared, "number": number, "own": {str(dist.get_rank()): number}}


def raises_on_both(call: Callable[[], Any], rank: int, kind: type, text: str, where: object) -> None:
    (reason,) = failures(call).values()
    reasons = getattr(reason, "reasons", {rank: reason})  # what fails in writing is told by a SaveFailedError
    assert list(reasons) == [rank], (where, reasons)
    named = reasons[rank]
    # On the rank that failed, and on a rank that got nothing else, the class may be the real one.
    assert isinstance(named, kind) or rank == dist.get_rank(), (where, repr(named))
    assert text in f"{type(named).__module__}.{type(named).__qualname__}: {named}", (where, named)


def bare_calls(path: Path, hooks: tuple[str, ...]) -> None:
    save_state_dict(path, state(1))
    turn = 0
    for hook in hooks:
        for rank in (0, 1):
            if hook in ON_COORDINATOR and rank == 1:
                continue
            for planner_of in (FailingBcpSavePlanner, FailingSavePlanner):
                make, kind, text = ODD[turn % len(ODD)]
                turn += 1
                if hook == "broken_metadata":
                    continue
                planner = planner_of(hook=hook, rank=rank, error=make() if rank == dist.get_rank() else None)
                save = partial(dcp.save, state(2), storage_writer=BcpWriter(path), planner=planner)
                raises_on_both(save, rank, kind, text, ("save", hook, rank, planner_of))
    assert_whole(path)


def bare_loads(path: Path, hooks: tuple[str, ...]) -> None:
    save_state_dict(path, state(1))
    turn = 0
    for hook in hooks:
        for rank in (0, 1):
            if hook in ON_COORDINATOR and rank == 1:
                continue
            for planner_of in (FailingBcpLoadPlanner, FailingLoadPlanner):
                make, kind, text = ODD[turn % len(ODD)]
                turn += 1
                planner = planner_of(hook=hook, rank=rank, error=make() if rank == dist.get_rank() else None)
                load = partial(dcp.load, state(0), storage_reader=BcpReader(path), planner=planner)
                raises_on_both(load, rank, kind, text, ("load", hook, rank, planner_of))
    assert_whole(path)


def assert_whole(path: Path) -> None:
    got = state(0)
    dcp.load(got, storage_reader=BcpReader(path))
    assert_equal(got, state(1))


def test_planners_of_saves(tmp_path: Path) -> None:
    run_ranks(2, bare_calls, tmp_path / "ckpt", SAVE_PLANNER_HOOKS, limit_s=LIMIT_S)


def test_planners_of_loads(tmp_path: Path) -> None:
    run_ranks(2, bare_loads, tmp_path / "ckpt", LOAD_PLANNER_HOOKS, limit_s=LIMIT_S)


def other_ways(path: Path) -> None:
    rank = 1
    error, kind, text = ODD[1]
    for hook in WRITER_HOOKS[1:]:  # with an odd failure of the first, nobody has seen the call yet
        at = 0 if hook in ON_COORDINATOR else rank
        writer = FailingWriter(path, hook=hook, rank=at, error=error())
        raises_on_both(partial(dcp.save, state(2), storage_writer=writer), at, kind, text, hook)
    # Our planner with the storage of others.
    planner = FailingBcpSavePlanner(hook="create_local_plan", rank=rank, error=error())
    stock = partial(dcp.save, state(2), storage_writer=FileSystemWriter(path / "stock"), planner=planner)
    raises_on_both(stock, rank, kind, text, "stock writer")
    dcp.save(state(1), storage_writer=FileSystemWriter(path / "stock"))
    of_load = FailingBcpLoadPlanner(hook="create_local_plan", rank=rank, error=error())
    loading = partial(dcp.load, state(0), storage_reader=FileSystemReader(path / "stock"), planner=of_load)
    raises_on_both(loading, rank, kind, text, "stock reader")
    with registered():  # here even the planner and the writer of others
        stock_planner = FailingSavePlanner(hook="set_up_planner", rank=rank, error=error())
        foreign = partial(dcp.save, state(2), storage_writer=FileSystemWriter(path / "x"), planner=stock_planner)
        raises_on_both(foreign, rank, kind, text, "registered")
        first = FailingWriter(path, hook="storage_meta", rank=rank, error=error())
        raises_on_both(partial(dcp.save, state(2), storage_writer=first), rank, kind, text, "registered")
    planner = FailingBcpSavePlanner(hook="finish_plan", rank=rank, error=error())
    future: Any = dcp.async_save(state(2), storage_writer=BcpWriter(path), planner=planner)
    raises_on_both(partial(future.result, LIMIT_S), rank, kind, text, "async")


def test_writers_storage_of_others_and_the_background(tmp_path: Path) -> None:
    run_ranks(2, other_ways, tmp_path / "ckpt", limit_s=LIMIT_S)


class Part:
    """A Stateful that fails in one of its methods on rank 1."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.weight = torch.ones(3)

    def fail(self, method: str) -> None:
        if method == self.fails_in and dist.get_rank() == 1:
            raise Unreadable("this", "that")

    def state_dict(self) -> dict[str, Any]:
        self.fail("state_dict")
        return {"weight": self.weight}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fail("load_state_dict")
        self.weight = state_dict["weight"].clone()


def statefuls(path: Path) -> None:
    save_state_dict(path, {"part": Part(), "step": 7})
    for method in ("state_dict", "load_state_dict"):
        with pytest.raises(Exception, match="this and that"):
            load_state_dict(path, {"part": Part(method), "step": 0})
    part = Part()
    part.weight = torch.zeros(3)
    got = {"part": part, "step": 0}
    load_state_dict(path, got)
    assert torch.equal(part.weight, torch.ones(3))
    assert got == {"part": part, "step": 7}


def test_statefuls_in_our_entry_points(tmp_path: Path) -> None:
    run_ranks(2, statefuls, tmp_path / "ckpt", limit_s=LIMIT_S)
