# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or stops is an error on the others in time; it loses nothing, blocks nothing and commits nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from distributed.losing import PHASES, Loss, lose
from distributed.ranks import run_ranks

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# What differs most from one another; all others are in the long form.
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
