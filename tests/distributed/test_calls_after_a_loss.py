# SPDX-License-Identifier: Apache-2.0
"""After a rank was lost, each later call of the others fails in time, too; a rank that goes on is let in again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ports import free_port
from support.ranks import run_ranks

from bytecheckpoint import Config, async_save_state_dict, load_state_dict, new_group, save_state_dict
from bytecheckpoint.distributed import meeting
from bytecheckpoint.errors import OutOfStepError, RankLostError
from distributed.losing import store

STALL_S = 1.0
CONFIG = Config(stall_timeout_s=STALL_S)
NUM_RANKS = 3
STOPPED = "stopped: nothing was heard from it for more than 1 s"


def state() -> dict[str, Any]:
    return {f"of {rank}": torch.full((10,), rank) for rank in range(NUM_RANKS)}


def calls(path: Path) -> dict[str, Callable[[], object]]:
    return {
        "save": lambda: save_state_dict(path, state(), config=CONFIG),
        "load": lambda: load_state_dict(path, state(), config=CONFIG),
        "async_save": lambda: async_save_state_dict(path, state(), config=CONFIG).committed.result(),
    }


def lost_by(call: Callable[[], object]) -> dict[int, str]:
    with pytest.raises(RankLostError) as caught:
        call()
    return caught.value.ranks


def stop(path: Path, victim: int) -> list[int]:
    """Saves once, and stops ``victim``. Returns the process ids of the ranks."""
    save_state_dict(path, state(), config=CONFIG)
    pids = [0] * NUM_RANKS
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    return pids


def end(path: Path, pid: int, num_left: int) -> None:
    """Kills the stopped rank, once ``num_left`` ranks have come here: else the test would wait for it."""
    (path.parent / f"done {dist.get_rank()}").touch()
    if len([*path.parent.glob("done *")]) == num_left:
        os.kill(pid, signal.SIGKILL)


def never_goes_on(path: Path, victim: int) -> list[dict[int, str]]:
    pid = stop(path, victim)[victim]
    said = [lost_by(call) for call in calls(path).values()]
    left = [rank for rank in range(NUM_RANKS) if rank != victim]
    group = new_group(left, stall_timeout=STALL_S)
    save_state_dict(path, state(), process_group=group)
    end(path, pid, len(left))
    return said


def test_every_later_call_fails_while_a_rank_stays_stopped(tmp_path: Path) -> None:
    """As after a machine has lost its power: its connections stay, and nothing comes through them."""
    victim = 1
    for said in run_ranks(NUM_RANKS, never_goes_on, tmp_path / "ckpt", victim, limit_s=40, may_die=victim):
        assert said == [{victim: said[0][victim]}] * len(said)
        assert said[0][victim].startswith(STOPPED)


def with_the_store(path: Path, port: int) -> list[dict[int, str]]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    pid = stop(path, victim=0)[0]
    said = [lost_by(calls(path)[kind]) for kind in ("save", "load")]
    end(path, pid, NUM_RANKS - 1)
    return said


def test_a_store_that_stopped_with_its_rank_holds_up_no_later_call(tmp_path: Path) -> None:
    for said in run_ranks(NUM_RANKS, with_the_store, tmp_path / "ckpt", free_port(), limit_s=40, may_die=0):
        assert [list(ranks) for ranks in said] == [[0]] * len(said)


def goes_on(path: Path) -> int:
    """Returns how many saves fail on this rank after the victim has gone on, until one succeeds."""
    victim, rank = 1, dist.get_rank()
    pids = stop(path, victim)
    save = calls(path)["save"]
    if rank != victim:
        assert list(lost_by(save)) == [victim]
        assert list(lost_by(save)) == [victim]  # made while the victim is stopped
        if store().add("failed twice", 1) == NUM_RANKS - 1:
            os.kill(pids[victim], signal.SIGCONT)
    else:
        assert list(lost_by(save)) == [victim]
    for num_failed in range(4):
        try:
            save()
        except OutOfStepError:  # the victim has made one call less
            continue
        load_state_dict(path, state(), config=CONFIG)
        return num_failed
    raise AssertionError("the ranks are never in step again")


def test_a_rank_that_goes_on_saves_again(tmp_path: Path) -> None:
    assert run_ranks(NUM_RANKS, goes_on, tmp_path, limit_s=40) == [1, 2, 1]


def without_a_store(path: Path, port: int) -> str:
    rank, pids = dist.get_rank(), [0] * NUM_RANKS
    dist.all_gather_object(pids, os.getpid())
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    while Path(f"/proc/{pids[0]}/stat").read_bytes().rpartition(b") ")[2][:1] != b"T":
        time.sleep(0.01)  # the store must not answer at first, and then no more
    meeting._LEAST_ANSWER_S = STALL_S
    with pytest.raises(RankLostError) as caught:
        new_group([1, 2], stall_timeout=STALL_S)
    end(path, pids[0], NUM_RANKS - 1)
    return str(caught.value)


def test_a_first_call_does_not_wait_for_a_store_that_does_not_answer(tmp_path: Path) -> None:
    for said in run_ranks(NUM_RANKS, without_a_store, tmp_path / "ckpt", free_port(), limit_s=40, may_die=0):
        assert said.startswith("new_group([1, 2]): the store of the process group does not answer")
