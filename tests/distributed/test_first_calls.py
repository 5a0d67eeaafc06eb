# SPDX-License-Identifier: Apache-2.0
"""The first call over a process group, to which some ranks do not come, or in which ranks wait for each other."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ports import free_port
from support.ranks import run_ranks

import bytecheckpoint
from bytecheckpoint import (
    Config,
    async_save_state_dict,
    load_state_dict,
    new_group,
    registered,
    save_state_dict,
)
from bytecheckpoint.distributed.meeting import Meeting
from bytecheckpoint.errors import OutOfStepError, RankLostError

STALL_S = 2.0
CONFIG = Config(stall_timeout_s=STALL_S)
LIMIT_S = 90.0


def state() -> dict[str, Any]:
    return {"weight": torch.ones(4), "step": 7}


def registered_save(path: Path) -> None:
    with registered(config=CONFIG):
        dcp.async_save(state(), checkpoint_id=path)


FIRST_CALLS: dict[str, Callable[[Path], Any]] = {
    "save_state_dict": lambda path: save_state_dict(path, state(), config=CONFIG),
    "async_save_state_dict": lambda path: async_save_state_dict(path, state(), config=CONFIG),
    "load_state_dict": lambda path: load_state_dict(path, state(), config=CONFIG),
    "bytecheckpoint.save": lambda path: bytecheckpoint.save(
        path, {"model": torch.nn.Linear(2, 2)}, "ddp", config=CONFIG
    ),
    "register": registered_save,
    "new_group": lambda path: new_group(stall_timeout=STALL_S),
}


def lost(call: Callable[[], Any]) -> RankLostError:
    try:
        call()
    except RankLostError as error:
        return error
    raise AssertionError("nothing was raised")


def only_the_first_calls(path: Path, how: str, fate: str) -> str:
    if dist.get_rank() == 1:
        if fate == "destroys":
            dist.destroy_process_group()
            return ""
        os._exit(0)  # as a rank that has come to the end of its script
    error = lost(lambda: FIRST_CALLS[how](path))
    assert list(error.ranks) == [1]
    return str(error)


@pytest.mark.parametrize("how", FIRST_CALLS)
def test_a_rank_that_has_ended(tmp_path: Path, how: str) -> None:
    (said,) = run_ranks(2, only_the_first_calls, tmp_path / "ckpt", how, "exits", may_die=1, limit_s=LIMIT_S)
    assert "rank 1 died, or destroyed its process group: its connection has ended" in said
    assert said.startswith("new_group(all ranks): " if how == "new_group" else ("load(", "save("))
    assert not (tmp_path / "ckpt").exists()


def one_dies_after_it_came(path: Path) -> str:
    rank = dist.get_rank()
    if rank == 2:  # it comes only after the loss of the other was noticed
        store().wait(["noticed"], timedelta(seconds=LIMIT_S))
        return ""
    if rank == 1:
        come = Meeting._come

        def die(self: Meeting) -> bool:
            come(self)
            os._exit(0)

        Meeting._come = die  # type: ignore[method-assign]
        save_state_dict(path, state(), config=CONFIG)
    error = lost(lambda: save_state_dict(path, state(), config=CONFIG))
    store().set("noticed", "")
    assert list(error.ranks) == [1]
    return str(error)


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def test_a_rank_that_dies_while_others_are_awaited(tmp_path: Path) -> None:
    said, _ = run_ranks(3, one_dies_after_it_came, tmp_path / "ckpt", may_die=1, limit_s=LIMIT_S)
    assert "rank 1 died" in said


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.has_some = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.has_some.set()


@contextmanager
def heard() -> Iterator[Lines]:
    lines = Lines()
    logger = logging.getLogger("bytecheckpoint")
    logger.addHandler(lines)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)


def one_comes_late(path: Path) -> None:
    rank = dist.get_rank()
    if rank == 1:  # it trains on, for longer than stall_timeout_s
        store().wait(["warned"], timedelta(seconds=LIMIT_S))
    with heard() as lines:
        if rank == 0:
            threading.Thread(target=lambda: lines.has_some.wait(LIMIT_S) and store().set("warned", "")).start()
        save_state_dict(path, state(), config=CONFIG)
    if rank == 0:
        assert f"save({path}): has waited" in lines.lines[0]
        assert "for rank 1 of 2 ranks to come to the same call" in lines.lines[0]
    got = {"weight": torch.zeros(4), "step": 0}
    load_state_dict(path, got, config=CONFIG)
    assert got["step"] == 7


def test_a_slow_rank_is_awaited_and_named(tmp_path: Path) -> None:
    run_ranks(2, one_comes_late, tmp_path / "ckpt", limit_s=LIMIT_S)


def other_order(path: Path) -> None:
    rank = dist.get_rank()
    calls = [FIRST_CALLS["save_state_dict"], FIRST_CALLS["async_save_state_dict"]]
    with pytest.raises(OutOfStepError, match=f"rank {1 - rank} waits in save"):
        calls[rank](path)
    store().set(f"told {rank}", "")
    store().wait([f"told {1 - rank}"], timedelta(seconds=LIMIT_S))  # else this one's next call may be what it waits for
    for call in calls:  # what was not made is as if nobody had come
        call(path)
    bytecheckpoint.shutdown()
    got = {"weight": torch.zeros(4), "step": 0}
    load_state_dict(path, got, config=CONFIG)
    assert got["step"] == 7


def test_first_calls_in_another_order(tmp_path: Path) -> None:
    run_ranks(2, other_order, tmp_path / "ckpt", limit_s=LIMIT_S)


def test_a_meeting_of_more_ranks_than_one_counter_has_bits(tmp_path: Path) -> None:
    size = 130
    store = dist.HashStore()
    meetings = [
        Meeting(store, "bytecheckpoint/0/x/1/", "0", range(size), rank, ("save", "there"), lambda _: False)
        for rank in range(size)
    ]
    late = 100
    for rank, meeting in enumerate(meetings):
        if rank != late:
            assert not meeting._come()
    assert meetings[0]._missing() == [late]
    with pytest.raises(RankLostError, match=r"save\(there\): rank 100 has not come to this call within 1 s") as raised:
        meetings[0]._refuse_late([late], 1.0)
    assert list(raised.value.ranks) == [late]
    assert meetings[1]._missing() == [0, late]  # rank 0 has left
    assert not meetings[late]._come()
    assert meetings[0]._come()
    for meeting in meetings[1:]:
        assert meeting._all_come(60.0, 60.0)
        assert not meeting._leave()  # it is too late


def over_tcp(path: Path, port: int, victim: int) -> str:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    world = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=30))
    dist.init_process_group("gloo", store=world, rank=rank, world_size=2)
    dist.barrier()
    if rank == victim:
        os._exit(0)
    return str(lost(lambda: save_state_dict(path, state(), config=CONFIG)))


@pytest.mark.parametrize("victim", [0, 1])
def test_the_store_lives_in_a_rank(tmp_path: Path, victim: int) -> None:
    (said,) = run_ranks(2, over_tcp, tmp_path / "ckpt", free_port(), victim, may_die=victim, limit_s=LIMIT_S)
    assert "the process that held it has ended" in said if victim == 0 else "rank 1 died" in said
