# SPDX-License-Identifier: Apache-2.0
"""Ranks end in every way at every stage of a background save. The save commits everything or nothing."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ending_ranks import EndingRanks

from bytecheckpoint import load_state_dict, register, verify
from distributed.worlds import LIMIT_S, STAGES, Hold, full, save

IS_LONG = os.environ.get("BCP_LONG") == "1"
# Python takes seconds to end after torch was imported.
SOME = STAGES if IS_LONG else STAGES[::3]

# How the script ends, on all ranks or only on the last one.
ENDS = ("returns", "destroys", "exits", "raises", "last raises", "all vanish", "last vanishes")


def save_and_end(rank: int, num_ranks: int, store: str, path: Path, how: str, stage: tuple[int, str], end: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    if how == "registered":
        register()
    save(how, path, 1).result(LIMIT_S)
    is_last = rank == num_ranks - 1
    hold = Hold(*stage)
    hold.patch()  # until the end of the process
    future = save(how, path, 2)
    future.add_done_callback(lambda _: print("committed" if future.exception() is None else "failed", flush=True))
    assert hold.arrived.wait(LIMIT_S)
    if end == "all vanish" or (end == "last vanishes" and is_last):
        os._exit(7)
    if end == "last vanishes":
        hold.go_on.set()
        future.exception(LIMIT_S)
        os._exit(0)
    if end == "destroys":
        dist.destroy_process_group()
    # When the save continues, the script has ended.
    threading.Timer(0.2, hold.go_on.set).start()
    if end == "exits":
        sys.exit(3)
    if end == "raises" or (end == "last raises" and is_last):
        raise RuntimeError("of the script")


def number_at(path: Path, num_ranks: int) -> int:
    """Returns the number that was saved. All of the checkpoint must come from one save."""
    got: dict[str, Any] = {"model": {"weight": torch.zeros(8, 4)}, "of_rank": dict.fromkeys(map(str, range(num_ranks)))}
    load_state_dict(path, got, no_dist=True)
    assert not verify(path).problems
    numbers = {*got["of_rank"].values()}
    assert len(numbers) == 1
    number: int = numbers.pop()
    assert torch.equal(got["model"]["weight"], full(number))
    return number


@pytest.mark.parametrize("how", ["own", "registered"])
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_ranks(tmp_path: Path, ending_ranks: EndingRanks, end: str, how: str) -> None:
    num_ranks = 2
    for number, stage in enumerate(STAGES if "vanish" in end else SOME):
        path = tmp_path / f"ckpt-{number}"
        ended = ending_ranks.run(
            num_ranks, save_and_end, num_ranks, tmp_path / f"store-{number}", path, how, stage, end
        )
        of_ranks = [(of_rank.code, of_rank.said) for of_rank in ended]
        assert all(code is not None for code, _ in of_ranks), of_ranks
        found = number_at(path, num_ranks)
        if "vanish" in end:
            assert found == 2 or not any("committed" in said for _, said in of_ranks), of_ranks
        else:
            assert found == 2, of_ranks
            wanted = {"exits": [3, 3], "raises": [1, 1], "last raises": [0, 1]}.get(end, [0, 0])
            assert [code for code, _ in of_ranks] == wanted, of_ranks
            assert all("committed" in said for _, said in of_ranks), of_ranks


def test_the_end_of_one_of_four(tmp_path: Path, ending_ranks: EndingRanks) -> None:
    for number, (stage, end) in enumerate(itertools.product(SOME, ("destroys", "last vanishes"))):
        path = tmp_path / f"ckpt-{number}"
        ended = ending_ranks.run(4, save_and_end, 4, tmp_path / f"store-{number}", path, "own", stage, end)
        assert all(of_rank.code is not None for of_rank in ended), ended
        found = number_at(path, 4)
        assert found == 2 or (end == "last vanishes" and not any("committed" in of_rank.said for of_rank in ended))
