# SPDX-License-Identifier: Apache-2.0
"""If a rank dies or stops, the others raise an error in time, and nothing is lost, blocked or committed."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from bytecheckpoint import Config, async_save_state_dict, save_state_dict
from bytecheckpoint.errors import RankLostError
from distributed.losing import PHASES, Loss, lose, store

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# The cases that differ most from one another. The long form has all others.
SHORT = [
    (2, Loss("own", "before_finish", 0, STOP)),
    (4, Loss("own", "within_write", 2, KILL)),
    (4, Loss("dcp", "before_finish", 0, KILL)),
    (2, Loss("dcp", "before_plan", 1, STOP)),
    (4, Loss("own_async", "within_write", 1, STOP)),
    (2, Loss("own_async", "before_call", 0, STOP)),
    (2, Loss("dcp", "within_read", 1, KILL)),
]


def matrix() -> list[tuple[int, Loss]]:
    losses = []
    for entry in ("own", "own_async", "dcp", "dcp_async"):
        for phase in PHASES:
            if phase == "within_read" and entry.endswith("async"):
                continue
            for ranks in (2, 4):
                victims = (0,) if phase == "before_finish" else (0, ranks - 1)
                losses += [(ranks, Loss(entry, phase, v, by)) for v in victims for by in (KILL, STOP)]
    return losses


@pytest.mark.parametrize(("ranks", "loss"), SHORT, ids=str)
def test_a_rank_is_lost(tmp_path: Path, ranks: int, loss: Loss) -> None:
    run_ranks(ranks, lose, tmp_path, loss, limit_s=60, may_die=loss.victim)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "loss"), matrix(), ids=str)
def test_a_rank_is_lost_anywhere(tmp_path: Path, ranks: int, loss: Loss) -> None:
    run_ranks(ranks, lose, tmp_path, loss, limit_s=120, may_die=loss.victim)


class Stopping(DefaultSavePlanner):
    """Stops the process of one rank in the middle of a save."""

    def __init__(self, victim: int) -> None:
        super().__init__()
        self.victim = victim

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == self.victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().resolve_data(write_item)


def stop_in_a_later_call(path: Path, entry: str, victim: int) -> None:
    of_ranks = {str(dist.get_rank()): torch.ones(1000)}
    sooner = Config(stall_timeout_s=2)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if entry == "save":
        save_state_dict(path, of_ranks)  # with the default of 60 s
        with pytest.raises(RankLostError, match=f"rank {victim} stopped: nothing was heard from it for more than 2 s"):
            save_state_dict(path, of_ranks, planner=Stopping(victim), config=sooner)
    else:
        async_save_state_dict(path, of_ranks).committed.result()
        handle = async_save_state_dict(path, of_ranks, planner=Stopping(victim), config=sooner)
        with pytest.raises(RankLostError, match=f"rank {victim} stopped: nothing was heard from it for more than 2 s"):
            handle.committed.result()
    survivors = [rank for rank in range(len(pids)) if rank != victim]
    store().set(f"noticed {dist.get_rank()}", "")
    store().wait([f"noticed {rank}" for rank in survivors])
    if dist.get_rank() == survivors[0]:
        os.kill(pids[victim], signal.SIGKILL)  # else the test would wait for it


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("entry", ["save", "async_save"])
def test_a_later_call_may_wait_for_less_long(tmp_path: Path, entry: str, victim: int) -> None:
    run_ranks(3, stop_in_a_later_call, tmp_path, entry, victim, limit_s=40, may_die=victim)
