# SPDX-License-Identifier: Apache-2.0
"""Two processes save to one path at once. At most one commits; a second one is refused before it writes anything."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import failures, run_ranks
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from bytecheckpoint import BcpReader, BcpWriter, Config
from bytecheckpoint.errors import CheckpointBusyError, CheckpointSupersededError


class Meeting(DefaultSavePlanner):
    """Stops in the middle of a save, lets the other rank act, and continues."""

    met = False

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if not self.met:
            self.met = True
            dist.barrier()  # the other rank begins
            dist.barrier()  # the other rank is done
        return super().resolve_data(write_item)


def state(number: int) -> dict[str, Any]:
    return {"a": torch.full((1000,), number), "number": number}


def save(path: str, number: int, planner: DefaultSavePlanner | None = None, **config: Any) -> None:
    writer = BcpWriter(path, config=Config(**config))
    dcp.save(state(number), storage_writer=writer, planner=planner, no_dist=True)


def load(path: str, number: int) -> None:
    got = state(0)
    dcp.load(got, storage_reader=BcpReader(path), no_dist=True)
    assert_equal(got, state(number))


def names(path: str) -> set[str]:
    return {entry.name for entry in Path(path).iterdir() if entry.is_file()}


def the_second_is_refused(path: str) -> None:
    if dist.get_rank() == 0:
        save(path, 1)
        save(path, 2, Meeting())
    else:
        dist.barrier()
        before = names(path)
        found = failures(lambda: save(path, 3))
        assert {r: type(e) for r, e in found.items()} == {0: CheckpointBusyError}
        assert "another save is under way" in str(found[0])
        assert names(path) == before, "something was written"
        load(path, 1)
        dist.barrier()
    dist.barrier()
    load(path, 2)
    dist.barrier()
    for rank in (0, 1):
        if dist.get_rank() == rank:
            save(path, 4 + rank)
        dist.barrier()
        load(path, 4 + rank)
        dist.barrier()
    assert len(names(path)) == 2


def the_second_takes_over(path: str) -> None:
    if dist.get_rank() == 0:
        found = failures(lambda: save(path, 2, Meeting()))
        assert {r: type(e) for r, e in found.items()} == {0: CheckpointSupersededError}
    else:
        dist.barrier()
        save(path, 3, take_over=True)
        load(path, 3)
        dist.barrier()
    dist.barrier()
    load(path, 3)
    dist.barrier()
    if dist.get_rank() == 0:
        save(path, 4)
        assert len(names(path)) == 2, "files of the save that was taken over were left"
    dist.barrier()
    load(path, 4)


def unordered_saves(path: str) -> int:
    rank, commits, last = dist.get_rank(), 0, -1
    for turn in range(25):
        number = 10 * turn + rank
        dist.barrier()
        try:
            save(path, number)
            commits, last = commits + 1, number
        except BaseException as error:
            found = failures(partial(raise_, error))
            assert {type(e) for e in found.values()} <= {CheckpointBusyError, CheckpointSupersededError}, found
        numbers: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(numbers, last)
        if max(numbers) >= 0:
            got = state(0)
            dcp.load(got, storage_reader=BcpReader(path), no_dist=True)
            assert got["number"] in numbers
            assert_equal(got, state(got["number"]))
        dist.barrier()
    return commits


def raise_(error: BaseException) -> None:
    raise error


def deadline_passes(path: str) -> None:
    save(path, 1)
    found = failures(lambda: save(path, 2, commit_deadline_s=0.0))
    assert {type(e) for e in found.values()} == {CheckpointSupersededError}
    load(path, 1)
    save(path, 3)
    load(path, 3)
    assert len(names(path)) == 2


def test_the_second_is_refused(tmp_path: Path) -> None:
    run_ranks(2, the_second_is_refused, str(tmp_path / "ckpt"))


def test_the_second_takes_over(tmp_path: Path) -> None:
    run_ranks(2, the_second_takes_over, str(tmp_path / "ckpt"))


def test_whoever_comes_first(tmp_path: Path) -> None:
    assert sum(run_ranks(2, unordered_saves, str(tmp_path / "ckpt"))) > 0


def test_a_save_after_its_deadline(tmp_path: Path) -> None:
    deadline_passes(str(tmp_path / "ckpt"))
