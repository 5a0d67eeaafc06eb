# SPDX-License-Identifier: Apache-2.0
"""An error on one rank while ranks exchange plans is an error on all, and no rank waits forever."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import RanksFailed, failures, run_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from bytecheckpoint import BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.dcp import save_planner
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.planning import plan_tree as _plan_tree
from bytecheckpoint.planning.plan_cache import plan_cache
from distributed.planned_saves import GATHER, TREE, assert_loads, model, numbers, save


def disagree(path: str, config: Config) -> None:
    save(path, model(0), config)
    rank, size = dist.get_rank(), dist.get_world_size()
    bad = {"plain": numbers(3, 4) if rank == size - 1 else numbers(3, 5)}
    reasons = failures(lambda: save(path, bad, config))
    assert any(isinstance(error, InvalidPlanError) for error in reasons.values())
    assert any("'plain'" in str(error) and f"rank {size - 1}" in str(error) for error in reasons.values()), reasons
    assert_loads(path, model(0))
    save(path, model(1), config)
    assert_loads(path, model(1))


@pytest.mark.parametrize("config", [GATHER, TREE])
@pytest.mark.parametrize("num_ranks", [2, 6])
def test_ranks_that_disagree(num_ranks: int, config: Config, tmp_path: Path) -> None:
    run_ranks(num_ranks, disagree, str(tmp_path), config)


class Fails:
    """Replaces a C++ function on one rank by one that raises."""

    def __init__(self, module: Any, name: str, error: BaseException) -> None:
        self._where = (module, name, getattr(module, name))
        self._error = error

    def __enter__(self) -> None:
        setattr(*self._where[:2], self._fail)

    def __exit__(self, *_: object) -> None:
        setattr(*self._where)

    def _fail(self, *_: Any, **__: Any) -> None:
        raise self._error


def fail_within(path: str, failing: int, error: BaseException) -> None:
    """Fails at the node ``failing`` while it merges what the nodes below it sent."""
    save(path, model(0), TREE)
    state = {"other": numbers(3), **model(1)}
    name = "plan_tree" if failing == 0 else "merge_below"
    module = save_planner._C if failing == 0 else _plan_tree._C
    if dist.get_rank() == failing:
        with Fails(module, name, error):
            reasons = failures(lambda: save(path, state, TREE))
    else:
        reasons = failures(lambda: save(path, state, TREE))
    assert sorted(reasons) == list(range(dist.get_world_size())), "everybody knows"
    assert all("of this very rank" in str(reason) for reason in reasons.values()), reasons
    assert_loads(path, model(0))
    assert save(path, state, TREE).cache == "miss"
    assert_loads(path, state)


@pytest.mark.parametrize("error", [MemoryError("of this very rank"), KeyboardInterrupt("of this very rank")])
@pytest.mark.parametrize("failing", [0, 1, 5])
def test_an_error_within_the_exchange_reaches_all_ranks(failing: int, error: BaseException, tmp_path: Path) -> None:
    run_ranks(6, fail_within, str(tmp_path), failing, error)


class FailsOnce:
    """Replaces pickle in a process that has just run out of memory."""

    loads = staticmethod(pickle.loads)

    def __init__(self) -> None:
        self._failed = False

    def dumps(self, value: Any) -> bytes:
        if self._failed:
            return pickle.dumps(value)
        self._failed = True
        raise MemoryError("of this very rank")


def fail_packing(path: str, failing: int) -> None:
    save(path, model(0), TREE)
    state = {"other": numbers(3), **model(1)}
    if dist.get_rank() == failing:
        _plan_tree.pickle = FailsOnce()  # type: ignore[attr-defined]
    reasons = failures(lambda: save(path, state, TREE))
    assert any("of this very rank" in str(reason) for reason in reasons.values()), reasons
    assert_loads(path, model(0))
    save(path, state, TREE)
    assert_loads(path, state)


@pytest.mark.parametrize("failing", [0, 1, 5])
def test_a_message_that_cannot_be_packed_hangs_nobody(failing: int, tmp_path: Path) -> None:
    run_ranks(6, fail_packing, str(tmp_path), failing, limit_s=30)


def die_within(path: str, dying: int) -> None:
    if dist.get_rank() == dying:
        _plan_tree.PlanTree.exchange = die  # type: ignore[method-assign, assignment]
    try:
        save(path, model(0), TREE)
    except BaseException as error:
        Path(path, f"rank {dist.get_rank()} was told").write_text(str(error))
        raise
    raise AssertionError("nobody died")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("dying", [0, 1, 5])
def test_a_rank_that_dies_within_the_exchange_hangs_nobody(dying: int, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(6, die_within, str(tmp_path), dying, limit_s=40)
    survivors = {f"rank {rank} was told" for rank in range(6) if rank != dying}
    assert {path.name for path in tmp_path.glob("rank * was told")} == survivors


class RaisesFirst(BcpSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        raise ValueError("before any exchange")


def raise_before(path: str, config: Config) -> None:
    save(path, model(0), config)
    planner = (RaisesFirst if dist.get_rank() == 1 else BcpSavePlanner)(config=config)
    state = {"more": numbers(2), **model(1)}
    reasons = failures(lambda: dcp.save(state, storage_writer=BcpWriter(path), planner=planner))
    assert reasons
    assert_loads(path, model(0))
    save(path, model(2), config)
    assert_loads(path, model(2))


@pytest.mark.parametrize("config", [GATHER, TREE])
def test_a_rank_with_a_hook_of_its_own_hangs_nobody(config: Config, tmp_path: Path) -> None:
    run_ranks(3, raise_before, str(tmp_path), config)


class Own(BcpSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        return super().finish_plan(new_plan)


class OfSomebody(DefaultSavePlanner):
    """A planner that is none of ours."""


def another_class_on_one_rank(path: str, of_rank_1: type[Any]) -> None:
    """Rank 1 changes its planner after the first save, and the coordinator has forgotten what other ranks rely on."""
    save(path, model(0), GATHER)
    if dist.get_rank() == 0:
        plan_cache().clear()
    for turn in range(1, 5):
        planner = of_rank_1() if dist.get_rank() == 1 else BcpSavePlanner()
        dcp.save(model(turn), storage_writer=BcpWriter(path), planner=planner)
        assert_loads(path, model(turn))


@pytest.mark.parametrize("of_rank_1", [Own, OfSomebody])
def test_ranks_that_begin_to_differ_save_at_once(of_rank_1: type[Any], tmp_path: Path) -> None:
    """The coordinator asks for the plans that it lacks."""
    run_ranks(3, another_class_on_one_rank, str(tmp_path), of_rank_1)
