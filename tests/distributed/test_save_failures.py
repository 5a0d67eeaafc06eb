# SPDX-License-Identifier: Apache-2.0
"""A save that fails on one rank fails on all, with the reason; it loses nothing and blocks nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.failing_hooks import (
    SAVE_PLANNER_HOOKS,
    WRITER_HOOKS,
    FailingBcpSavePlanner,
    FailingSavePlanner,
    FailingWriter,
    Reason,
    Unreadable,
)
from support.ranks import failures, run_ranks
from torch.distributed.checkpoint import DefaultSavePlanner

from bytecheckpoint import BcpReader, BcpWriter
from bytecheckpoint.errors import InvalidPlanError, RankError, SaveFailedError

# Only the coordinator runs these.
ON_COORDINATOR = {"create_global_plan", "broken_metadata", "prepare_global_plan", "finish", "after_finish"}
# We make one error of the coordinator from what these raise. What other hooks raise, DCP hands to all ranks unchanged.
THROUGH_FINISH = {"resolve_data"}


def state(number: int) -> dict[str, Any]:
    """Returns a state in which each rank has something to write."""
    shared = {f"of_rank_{rank}": torch.full((50,), number) for rank in range(2)}
    return {"shared": shared, "number": number, "rank": {str(dist.get_rank()): number}}


def load(path: str, number: int, **arguments: Any) -> None:
    got = {"shared": {f"of_rank_{rank}": torch.zeros(50, dtype=torch.int64) for rank in range(2)}, "number": 0}
    dcp.load(got, storage_reader=BcpReader(path), **arguments)
    assert_equal(got, {key: value for key, value in state(number).items() if key != "rank"})


class Scene:
    """Ranks 0 and 1 save as a group; rank 2 is another process that wants the same path."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.number = 1
        self.group = dist.new_group([0, 1])
        self.saves = dist.get_rank() < 2
        self.save(BcpWriter(path))

    def save(self, writer: BcpWriter, planner: DefaultSavePlanner | None = None) -> None:
        if self.saves:
            dcp.save(state(self.number), storage_writer=writer, planner=planner, process_group=self.group)
        dist.barrier()

    def fail(self, writer: BcpWriter, planner: DefaultSavePlanner) -> dict[int, BaseException]:
        found = {}
        if self.saves:
            values = state(-1)  # not those that are saved there
            found = failures(lambda: dcp.save(values, storage_writer=writer, planner=planner, process_group=self.group))
        dist.barrier()
        return found

    def nothing_is_lost_or_blocked(self, writer: BcpWriter, *, committed: bool = False) -> None:
        """Asserts that the old checkpoint loads, and another process and then the same ranks can save at once.

        The ranks save with ``writer``, and then with a new writer.
        """
        load(self.path, -1 if committed else self.number, no_dist=True)
        dist.barrier()
        self.number += 1
        if not self.saves:
            dcp.save(state(self.number), storage_writer=BcpWriter(self.path), no_dist=True)
        dist.barrier()
        load(self.path, self.number, no_dist=True)
        dist.barrier()
        for again in (writer, BcpWriter(self.path)):
            self.number += 1
            self.save(again)
            load(self.path, self.number, no_dist=True)
            dist.barrier()
        metadata = BcpReader(self.path).read_metadata()
        files = {info.relative_path for info in metadata.storage_data.values()}
        there = {entry.name for entry in Path(self.path).iterdir() if entry.name != ".bcp"}
        assert there == files | {".metadata"}, "a failed save left files"
        dist.barrier()


def planner_raises(path: str, hook: str, rank: int, failing: Any) -> None:
    scene = Scene(path)
    for keep_alive in (True, False):
        writer = BcpWriter(path)
        found = scene.fail(writer, failing(hook=hook, rank=rank))
        if scene.saves:
            assert_reason(found, hook, rank)
        if not keep_alive:
            del writer
            writer = BcpWriter(path)
        scene.nothing_is_lost_or_blocked(writer)


def writer_raises(path: str, hook: str, rank: int) -> None:
    scene = Scene(path)
    for keep_alive in (True, False):
        failing = FailingWriter(path, hook=hook, rank=rank)
        found = scene.fail(failing, DefaultSavePlanner())
        if scene.saves:
            assert_reason(found, hook, rank)
        writer: BcpWriter = failing
        if keep_alive:
            failing.hook = "none"
        else:
            del failing
            writer = BcpWriter(path)
        # Nothing undoes a commit.
        scene.nothing_is_lost_or_blocked(writer, committed=hook == "after_finish")


def assert_reason(found: dict[int, BaseException], hook: str, rank: int) -> None:
    reason: BaseException | None
    if hook == "broken_metadata":
        assert list(found) == [0]
        assert isinstance(found[0], InvalidPlanError)
        assert "nobody writes this" in str(found[0])
        return
    if hook in THROUGH_FINISH:
        assert list(found) == [0]
        failed = found[0]
        assert isinstance(failed, SaveFailedError)
        assert list(failed.reasons) == [rank]
        reason = failed.reasons[rank]
        assert f"rank {rank}: Reason: {hook} on rank {rank}" in str(failed)
    else:
        assert list(found) == [rank]
        reason = found[rank]
    assert isinstance(reason, Reason)
    assert str(reason) == f"{hook} on rank {rank}"


def raise_what_does_not_travel(path: str) -> None:
    scene = Scene(path)
    writer = BcpWriter(path)
    for rank in (0, 1):
        planner = FailingSavePlanner(hook="resolve_data", rank=rank, error=Unreadable("this", "that"))
        found = scene.fail(writer, planner)
        if scene.saves:
            failed = found[0]
            assert isinstance(failed, SaveFailedError)
            assert isinstance(failed.reasons[rank], RankError)
            assert str(failed.reasons[rank]) == "support.failing_hooks.Unreadable: this and that"
        scene.nothing_is_lost_or_blocked(writer)


def interrupt(path: str) -> None:
    scene = Scene(path)
    writer = BcpWriter(path)
    for rank in (0, 1):
        error = KeyboardInterrupt()
        found = scene.fail(writer, FailingSavePlanner(hook="resolve_data", rank=rank, error=error))
        if scene.saves:
            failed = found[0]
            assert isinstance(failed, SaveFailedError)
            assert {r: type(e) for r, e in failed.reasons.items()} == {rank: KeyboardInterrupt}
        scene.nothing_is_lost_or_blocked(writer)


def cases(hooks: tuple[str, ...]) -> list[tuple[str, int]]:
    return [(hook, rank) for hook in hooks for rank in (0, 1) if rank == 0 or hook not in ON_COORDINATOR]


@pytest.mark.parametrize("failing", [FailingSavePlanner, FailingBcpSavePlanner])
@pytest.mark.parametrize(("hook", "rank"), cases(SAVE_PLANNER_HOOKS))
def test_a_hook_of_the_planner_raises(tmp_path: Path, hook: str, rank: int, failing: type[DefaultSavePlanner]) -> None:
    run_ranks(3, planner_raises, str(tmp_path / "ckpt"), hook, rank, failing, limit_s=30)


@pytest.mark.parametrize(("hook", "rank"), cases(WRITER_HOOKS))
def test_a_hook_of_the_writer_raises(tmp_path: Path, hook: str, rank: int) -> None:
    run_ranks(3, writer_raises, str(tmp_path / "ckpt"), hook, rank, limit_s=30)


def test_an_exception_that_cannot_be_unpickled(tmp_path: Path) -> None:
    run_ranks(3, raise_what_does_not_travel, str(tmp_path / "ckpt"), limit_s=30)


def test_an_interrupt(tmp_path: Path) -> None:
    run_ranks(3, interrupt, str(tmp_path / "ckpt"), limit_s=30)
