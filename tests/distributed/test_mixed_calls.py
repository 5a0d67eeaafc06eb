# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet in different calls, since one has skipped a call, end on all ranks with an error that says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn

import bytecheckpoint
from bytecheckpoint import Config, latest, load_state_dict, resume, save_state_dict
from bytecheckpoint.errors import OutOfStepError, RankLostError

STALL_S = 4.0
CONFIG = Config(stall_timeout_s=STALL_S)


def calls(run: Path) -> dict[str, Callable[[], Any]]:
    own = f"w{dist.get_rank()}"
    return {
        "save": lambda: save_state_dict(run / "step_2", {own: torch.ones(10)}, config=CONFIG),
        "load": lambda: load_state_dict(run / "step_1", {"step": 0}, config=CONFIG),
        "latest": lambda: latest(run, process_group=dist.group.WORLD, config=CONFIG),
        "resume": lambda: resume(run, {"step": 0}, config=CONFIG),
        "live save": lambda: bytecheckpoint.save(run, {"model": nn.Linear(2, 2)}, "ddp", global_steps=2, config=CONFIG),
        "live load": lambda: bytecheckpoint.load(run / "step_1", {"model": nn.Linear(2, 2)}, "ddp", config=CONFIG),
    }


def meet(run: Path, of_ranks: tuple[str, ...]) -> tuple[str, str, float]:
    save_state_dict(run / "step_1", {f"w{dist.get_rank()}": torch.ones(10), "step": 1}, config=CONFIG)
    begin = time.monotonic()
    try:
        calls(run)[of_ranks[dist.get_rank()]]()
    except (OutOfStepError, RankLostError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


@pytest.mark.parametrize(
    "of_ranks",
    [
        ("save", "load"),
        ("load", "save"),
        ("live save", "live load"),
        ("latest", "resume"),
        ("live load", "latest"),
        ("load", "load", "save"),
    ],
    ids="-".join,
)
def test_what_meets_is_compared(tmp_path: Path, of_ranks: tuple[str, ...]) -> None:
    for kind, text, _ in run_ranks(len(of_ranks), meet, tmp_path, of_ranks):
        assert kind == "OutOfStepError"
        assert "the ranks are in different calls" in text
        assert "one may have skipped a call" in text
    assert not (tmp_path / "step_2").exists()


@pytest.mark.parametrize(
    "of_ranks",
    [
        ("save", "latest"),
        ("latest", "save"),
        ("save", "live save"),
        ("live load", "load"),
        ("save", "save", "latest"),
        ("latest", "latest", "load"),
    ],
    ids="-".join,
)
def test_what_does_not_meet_ends_after_half_of_the_stall_timeout(tmp_path: Path, of_ranks: tuple[str, ...]) -> None:
    """They exchange nothing that fits, and each waits for the other."""
    last = len(of_ranks) - 1
    for kind, text, seconds in run_ranks(len(of_ranks), meet, tmp_path, of_ranks):
        assert kind == "RankLostError"
        assert f"rank {last} waits in " in text
        assert "all ranks must make the same calls in the same order" in text
        assert STALL_S / 2 <= seconds < 4 * STALL_S


def wait_long(run: Path) -> int:
    """One rank is slow within a save, and between the steps of a load."""
    rank, waits_s = dist.get_rank(), 1.5 * STALL_S

    class Slow:
        def __init__(self) -> None:
            self.step = 0

        def state_dict(self) -> dict[str, int]:
            time.sleep(waits_s * (rank == 1))
            return {"step": self.step + 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            time.sleep(waits_s * (rank == 0))
            self.step = state["step"]

    slow = Slow()
    save_state_dict(run / "step_1", {"slow": slow, "w": torch.ones(10)}, config=CONFIG)
    load_state_dict(run / "step_1", {"slow": slow, "w": torch.zeros(10)}, config=CONFIG)
    return slow.step


def test_ranks_that_are_slow_are_not_taken_for_ranks_in_other_calls(tmp_path: Path) -> None:
    assert run_ranks(2, wait_long, tmp_path) == [1, 1]
