# SPDX-License-Identifier: Apache-2.0
"""Whatever a hook raises on any rank, our entry points raise an error on all ranks, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.failing_hooks import (
    LOAD_PLANNER_HOOKS,
    SAVE_PLANNER_HOOKS,
    FailingBcpLoadPlanner,
    FailingBcpSavePlanner,
    Unpicklable,
    Unreadable,
    Unspeakable,
)
from support.ranks import failures, run_ranks

from bytecheckpoint import BcpSavePlanner, BcpWriter, load_state_dict, save, save_state_dict
from bytecheckpoint.errors import CheckpointError, ConfigError, RankError, SaveFailedError

ODD: list[tuple[Callable[[], BaseException], str]] = [
    (lambda: Unreadable("this", "that"), "support.failing_hooks.Unreadable: this and that"),
    (lambda: Unpicklable("why"), "support.failing_hooks.Unpicklable: why"),
    (lambda: Unspeakable("why"), "__str__ raises ValueError"),
    (lambda: ValueError("x" * (4 << 20)), "(cut: 4194304 characters)"),
]
IS_LONG = os.environ.get("BCP_LONG") == "1"
ON_COORDINATOR = ("create_global_plan", "broken_metadata")


def state(number: int) -> dict[str, Any]:
    shared = {f"of_rank_{rank}": torch.full((50,), number) for rank in range(2)}
    return {"shared": shared, "number": number, "own": {str(dist.get_rank()): number}}


def load(path: Path, **arguments: Any) -> None:
    got = state(0)
    load_state_dict(path, got, **arguments)
    assert_equal(got, state(1))


def raised(function: Callable[[], object]) -> CheckpointError:
    try:
        function()
    except CheckpointError as error:
        return error
    raise AssertionError("nothing was raised")


def reason_of(error: CheckpointError, rank: int) -> BaseException:
    if isinstance(error, SaveFailedError):
        assert list(error.reasons) == [rank]
        return error.reasons[rank]
    return error


def odd_ones(hook: str, rank: int) -> list[tuple[Callable[[], BaseException], str]]:
    """Returns all odd errors; in the short form one of them, which differs between hooks and ranks."""
    hooks = (*SAVE_PLANNER_HOOKS, *LOAD_PLANNER_HOOKS)
    return ODD if IS_LONG else [ODD[(hooks.index(hook) + 2 * rank) % len(ODD)]]


def odd_errors(path: Path) -> None:
    save_state_dict(path, state(1))
    for hook in SAVE_PLANNER_HOOKS:
        for rank in (0, 1):
            if hook == "broken_metadata" or (hook in ON_COORDINATOR and rank == 1):
                continue
            for make, text in odd_ones(hook, rank):
                planner = FailingBcpSavePlanner(hook=hook, rank=rank, error=make())
                error = raised(partial(save_state_dict, path, state(2), planner=planner))
                assert text in str(error), (hook, rank)
                assert isinstance(reason_of(error, rank), RankError), (hook, rank)
    load(path)
    for hook in LOAD_PLANNER_HOOKS:
        for rank in (0, 1):
            if hook in ON_COORDINATOR and rank == 1:
                continue
            for make, text in odd_ones(hook, rank):
                planner = FailingBcpLoadPlanner(hook=hook, rank=rank, error=make())
                error = raised(partial(load, path, planner=planner))
                assert text in str(error), (hook, rank)
                assert isinstance(reason_of(error, rank), RankError), (hook, rank)
    load(path)


def test_errors_that_do_not_travel(tmp_path: Path) -> None:
    run_ranks(2, odd_errors, tmp_path / "ckpt")


def two_errors(path: Path) -> None:
    save_state_dict(path, state(1))
    rank = dist.get_rank()
    mine: BaseException = ValueError("of the first") if rank == 0 else KeyError("of the second")
    for hook in ("create_local_plan", "finish_plan", "resolve_data"):
        planner = FailingBcpSavePlanner(hook=hook, rank=rank, error=mine)
        error = raised(partial(save_state_dict, path, state(2), planner=planner))
        assert isinstance(error, SaveFailedError)
        assert {r: type(e) for r, e in error.reasons.items()} == {0: ValueError, 1: KeyError}, (hook, error)
        assert "rank 0: ValueError: of the first" in str(error)
        assert "rank 1: KeyError: 'of the second'" in str(error)
    load(path)


def test_two_ranks_with_different_errors(tmp_path: Path) -> None:
    run_ranks(2, two_errors, tmp_path / "ckpt")


def other_paths(root: Path) -> None:
    rank = dist.get_rank()
    save_state_dict(root / "step_1", state(1))
    before = sorted((root / "step_1").iterdir())
    dist.barrier()
    # First rank 1 is a step ahead. Then each rank works in a directory of its own, so relative paths differ.
    own = root / f"of rank {rank}"
    (own / "there").mkdir(parents=True)
    os.chdir(own)
    same = {"weight": torch.ones(4), "step": 2}  # replicated: one rank writes all of it
    for path in (root / f"step_{1 + rank}", Path("new"), Path("there")):
        paths = [path if path.is_absolute() else root / f"of rank {other}" / path for other in range(2)]
        paths = [root / f"step_{1 + other}" for other in range(2)] if path.is_absolute() else paths
        text = f"the path is '{paths[0]}' on rank 0, and '{paths[1]}' on rank 1, and these are different places"
        for values in (state(2), same):
            error = raised(partial(save_state_dict, path, values))
            assert isinstance(error, ConfigError), repr(error)
            assert text in str(error), error
            dist.barrier()
        found = failures(partial(dcp.save, state(2), storage_writer=BcpWriter(path), planner=BcpSavePlanner()))
        assert text in str(found[0])
        dist.barrier()
    error = raised(partial(save, "parts", {"model": torch.nn.Linear(1, 1)}, "ddp"))
    text = f"the path is '{root}/of rank 0/parts/model' on rank 0, and '{root}/of rank 1/parts/model' on rank 1"
    assert text in str(error)
    assert not [*own.glob("**/.metadata*")]
    assert sorted((root / "step_1").iterdir()) == before
    load(root / "step_1")
    save_state_dict(root / "step_2", state(1))
    error = raised(partial(load, root / f"step_{1 + rank}"))
    assert isinstance(error, ConfigError), repr(error)
    assert f"the path is '{root}/step_1' on rank 0, and '{root}/step_2' on rank 1, and these are different" in str(
        error
    )


def other_names(root: Path) -> None:
    """Each rank names the same directory in its own way."""
    rank = dist.get_rank()
    if rank == 0:
        (root / "run").mkdir()
        (root / "link").symlink_to(root / "run")
    dist.barrier()
    os.chdir(root / "run" if rank else root)
    for of_zero, of_one in (
        ("run/a", "a"),
        (root / "run" / "b", f"{root}/run//b/"),
        (f"{root}/run/c", f"{root}/link/c"),
        (f"file://{root}/run/d", root / "run" / ".." / "run" / "d"),
    ):
        path: Any = of_one if rank else of_zero
        save_state_dict(path, state(1))
        dcp.save(state(1), storage_writer=BcpWriter(path))
        save_state_dict(path, {"weight": torch.ones(4)})
        save_state_dict(path, state(1))
        load(path)
        dist.barrier()
    save(f"{root}/link/parts" if rank else root / "run" / "parts", {"model": torch.nn.Linear(1, 1)}, "ddp")


def test_names_of_one_place(tmp_path: Path) -> None:
    run_ranks(2, other_names, tmp_path)


def test_paths_that_are_not_the_same(tmp_path: Path) -> None:
    run_ranks(2, other_paths, tmp_path)


def other_keys_and_values(path: Path) -> None:
    rank = dist.get_rank()
    save_state_dict(path, {"both": torch.ones(5), "step": 7 + rank, f"of_rank_{rank}": torch.full((3,), rank)})
    got = {"step": 0, "both": torch.zeros(5), "of_rank_0": torch.full((3,), 9), "of_rank_1": torch.full((3,), 9)}
    load_state_dict(path, got)
    # As with DCP, the keys of all ranks are saved. If all ranks have an object, the coordinator's is saved.
    assert_equal(
        got,
        {"step": 7, "both": torch.ones(5), "of_rank_0": torch.full((3,), 0), "of_rank_1": torch.full((3,), 1)},
    )


def test_keys_and_values_that_are_not_the_same(tmp_path: Path) -> None:
    run_ranks(2, other_keys_and_values, tmp_path / "ckpt")
