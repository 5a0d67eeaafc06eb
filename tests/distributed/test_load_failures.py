# SPDX-License-Identifier: Apache-2.0
"""A load that fails on one rank fails on all, with the reason. Errors of stock DCP stay as they are."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.failing_hooks import LOAD_PLANNER_HOOKS, FailingBcpLoadPlanner, FailingLoadPlanner, Reason, Unreadable
from support.ranks import failures, run_ranks
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint import BcpReader, BcpWriter, Config, load_state_dict, save_state_dict
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidPlanError,
    KeyMismatchError,
    RankError,
    ShapeMismatchError,
)


def state(number: int) -> dict[str, Any]:
    return {"a": torch.full((40, 3), number), "b": torch.full((5,), number), "number": number}


def load(path: str, planner: DefaultLoadPlanner | None = None) -> None:
    got = state(0)
    dcp.load(got, storage_reader=BcpReader(path), planner=planner)
    assert_equal(got, state(1))


def hooks_raise(path: str, failing: Any) -> None:
    for hook in LOAD_PLANNER_HOOKS:
        for rank in (0, 1):
            if hook == "create_global_plan" and rank == 1:
                continue
            planner = failing(hook=hook, rank=rank)
            found = failures(partial(load, path, planner))
            assert {r: (type(e), str(e)) for r, e in found.items()} == {rank: (Reason, f"{hook} on rank {rank}")}
            load(path)
    for hook in ("resolve_tensor", "commit_tensor", "load_bytes"):
        planner = failing(hook=hook, rank=1, error=Unreadable("this", "that"))
        found = failures(partial(load, path, planner))
        assert list(found) == [1]
        assert isinstance(found[1], RankError)
        assert str(found[1]) == "support.failing_hooks.Unreadable: this and that"
        load(path)


class Rewriting(DefaultLoadPlanner):
    """Asks for what the checkpoint does not have, as a planner with a mistake would."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.changes = changes

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        if dist.get_rank() == 1:
            plan.items = [
                dataclasses.replace(item, **self.changes) if item.dest_index.fqn == "a" else item for item in plan.items
            ]
        return plan


def plans_that_do_not_fit(path: str) -> None:
    found = failures(lambda: load(path, Rewriting(storage_index=MetadataIndex("absent", torch.Size([0, 0]), 0))))
    assert_one(found, 1, KeyMismatchError, "'absent'")
    found = failures(lambda: load(path, Rewriting(storage_index=MetadataIndex("a", torch.Size([7, 0]), 0))))
    assert_one(found, 1, KeyMismatchError, r"'a'.*7")
    found = failures(lambda: load(path, Rewriting(storage_offsets=torch.Size([1, 0]))))
    assert_one(found, 1, ShapeMismatchError, "'a'")
    found = failures(lambda: load(path, Rewriting(lengths=torch.Size([40, 4]))))
    assert_one(found, 1, ShapeMismatchError, "'a'")
    found = failures(lambda: load(path, Rewriting(storage_offsets=torch.Size([0]), lengths=torch.Size([3]))))
    assert_one(found, 1, ShapeMismatchError, "'a'")
    load(path)


def assert_one(found: dict[int, BaseException], rank: int, kind: type[BaseException], text: str) -> None:
    assert {r: type(e) for r, e in found.items()} == {rank: kind}, found
    with pytest.raises(kind, match=text):
        raise found[rank]


def states_that_do_not_fit(path: str) -> None:
    for reader in (BcpReader(path), BcpReader(path, config=Config(planning="as given")), dcp.FileSystemReader(path)):
        found = failures(partial(dcp.load, {"missing": torch.ones(2)}, storage_reader=reader))
        assert {r: isinstance(e, RuntimeError) for r, e in found.items()} == {0: True, 1: True}
        assert all("Missing key in checkpoint state_dict: missing" in str(e) for e in found.values())
        found = failures(partial(dcp.load, {"a": torch.ones(3, 40)}, storage_reader=reader))
        assert {r: isinstance(e, ValueError) for r, e in found.items()} == {0: True, 1: True}
        assert all("for a" in str(e) for e in found.values())


def other_paths(path: str, nowhere: str) -> None:
    found = failures(lambda: load(nowhere))
    assert {r: type(e) for r, e in found.items()} == dict.fromkeys((0, 1), CheckpointNotFoundError)
    assert all(getattr(e, "path", "").startswith(nowhere) for e in found.values())
    # Only one rank does not see the checkpoint.
    for rank in (0, 1):
        found = failures(partial(load, nowhere if dist.get_rank() == rank else path))
        assert_one(found, rank, CheckpointNotFoundError, "no checkpoint there")
    load(path)


class CommitInBetween(DefaultLoadPlanner):
    """Rank 1 commits a newer save when all ranks have read the metadata; if ``when`` is "finish_plan", also planned."""

    def __init__(self, path: str, when: str) -> None:
        super().__init__()
        self.path = path
        self.when = when

    def save_now(self) -> None:
        if dist.get_rank() == 1:
            dcp.save(state(2), storage_writer=BcpWriter(self.path), no_dist=True)
        dist.barrier()

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        if self.when == "create_local_plan":
            dist.barrier()
            self.save_now()
        return plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        if self.when == "finish_plan":
            dist.barrier()
            self.save_now()
        return super().finish_plan(new_plan)


def a_commit_comes_in_between(path: str) -> None:
    for when in ("create_local_plan", "finish_plan"):
        found = failures(partial(load, path, CommitInBetween(path, when)))
        assert {r: type(e) for r, e in found.items()} == dict.fromkeys((0, 1), CheckpointChangedError), found
        # The error asks for another load.
        got = state(0)
        dcp.load(got, storage_reader=BcpReader(path))
        assert_equal(got, state(2))
        dist.barrier()


class OneRankIsLate(BcpReader):
    """Rank 1 reads the metadata after a newer commit, rank 0 before it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            metadata = super().read_metadata(*args, **kwargs)
            dcp.save(state(2), storage_writer=BcpWriter(self.path), no_dist=True)
            dist.barrier()
            return metadata
        dist.barrier()
        return super().read_metadata(*args, **kwargs)


def ranks_see_different_saves(path: str) -> None:
    found = failures(lambda: dcp.load(state(0), storage_reader=OneRankIsLate(path)))
    assert_one(found, 0, CheckpointChangedError, "newer commit")


@pytest.fixture
def path(tmp_path: Path) -> str:
    dcp.save(state(1), storage_writer=BcpWriter(tmp_path / "ckpt"))
    return str(tmp_path / "ckpt")


@pytest.mark.parametrize("failing", [FailingLoadPlanner, FailingBcpLoadPlanner])
def test_a_hook_of_the_planner_raises(path: str, failing: type[DefaultLoadPlanner]) -> None:
    run_ranks(2, hooks_raise, path, failing)


def test_plans_that_do_not_fit(path: str) -> None:
    run_ranks(2, plans_that_do_not_fit, path)


def test_states_that_do_not_fit(path: str) -> None:
    run_ranks(2, states_that_do_not_fit, path)


def test_no_checkpoint(path: str, tmp_path: Path) -> None:
    run_ranks(2, other_paths, path, str(tmp_path / "nowhere"))


def test_a_newer_commit_in_between(path: str) -> None:
    run_ranks(2, a_commit_comes_in_between, path)


def test_ranks_that_see_different_saves(path: str) -> None:
    run_ranks(2, ranks_see_different_saves, path)


def load_nothing(path: str) -> tuple[dict[int, str], list[str]]:
    """Returns what was raised on which rank, and what was logged on this rank."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    found = failures(partial(load, path))
    with pytest.raises(CheckpointNotFoundError, match=path):
        load_state_dict(path, state(0))
    logging.getLogger().removeHandler(handler)
    return {rank: type(error).__name__ for rank, error in found.items()}, lines


def test_a_wrong_path_is_one_error_on_every_rank(tmp_path: Path) -> None:
    for found, lines in run_ranks(2, load_nothing, str(tmp_path / "nothing")):
        assert found == dict.fromkeys((0, 1), "CheckpointNotFoundError")
        assert lines == []


def load_into_a_list(path: str) -> str:
    got: Any = [torch.zeros(2)] if dist.get_rank() == 1 else state(0)
    with pytest.raises(InvalidPlanError, match="a list") as refused:
        load_state_dict(path, got)
    with pytest.raises(InvalidPlanError, match="a list"):
        save_state_dict(path, got)
    return str(refused.value)


def test_a_state_that_is_no_dict_is_an_error_on_every_rank(tmp_path: Path) -> None:
    save_state_dict(tmp_path, state(1))
    assert len({*run_ranks(2, load_into_a_list, str(tmp_path))}) == 1
    got = state(0)
    load_state_dict(tmp_path, got)
    assert_equal(got, state(1))
