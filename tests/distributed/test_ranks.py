# SPDX-License-Identifier: Apache-2.0
"""The launcher of ranks reports every failure. If it lost one, tests that use it would pass wrongly."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist
from support.ranks import RanksFailed, run_ranks


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this is rank 1")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_ever() -> None:
    signal.pause()


def test_each_rank_returns_its_value() -> None:
    assert run_ranks(3, rank_and_size) == [(0, 3), (1, 3), (2, 3)]


def test_what_a_rank_raises_is_told() -> None:
    with pytest.raises(RanksFailed, match="ValueError: this is rank 1"):
        run_ranks(2, raise_on_rank_1, limit_s=20)


def test_a_rank_that_dies_is_told() -> None:
    with pytest.raises(RanksFailed, match="rank 1 did not end, or died"):
        run_ranks(2, die_on_rank_1, limit_s=20)


def test_ranks_that_hang_are_killed_and_say_where() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 did not end.*in wait_for_ever"):
        run_ranks(2, wait_for_ever, limit_s=8)
