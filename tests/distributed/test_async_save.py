# SPDX-License-Identifier: Apache-2.0
"""``dcp.async_save`` on several ranks works with our writer and our stager, in a thread and in a process."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal, local_tensors
from support.failing_hooks import FailingBcpSavePlanner, FailingSavePlanner
from support.ranks import failures, run_ranks
from support.sharded_states import state
from support.training import Training
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from bytecheckpoint import BcpReader, BcpSavePlanner, BcpStager, BcpWriter, Config, registered
from bytecheckpoint.errors import CorruptCheckpointError, SaveFailedError

HOWS = ("writer", "stager", "registered")
# If staging memory is not freed, the next save fails because of this, instead of waiting.
RAISES = Config(on_staging_busy="raise")
LIMIT_S = 120.0


def save_async(how: str, values: dict[str, Any], path: str, **arguments: Any) -> Future[Any]:
    """Begins a save, and returns its future.

    Args:
        how: ``writer``: our writer; ``stager``: DCP's writer with our stager; ``registered``: after ``register``.
    """
    if how == "registered":
        with registered(config=RAISES):
            future: Any = dcp.async_save(values, checkpoint_id=path, **arguments)
    elif how == "writer":
        future = dcp.async_save(values, storage_writer=BcpWriter(path, config=RAISES), **arguments)
    else:
        writer = dcp.FileSystemWriter(path)
        future = dcp.async_save(values, storage_writer=writer, async_stager=BcpStager(config=RAISES), **arguments)
    assert isinstance(future, Future)
    return future


def zero(value: Any) -> None:
    """Sets all tensors to zero in place, and empties all dicts and lists."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            zero(item)
        value.clear()
    elif isinstance(value, torch.Tensor) or hasattr(value, "local_shards"):
        for part in local_tensors(value):
            part.detach().zero_()


def assert_loads(path: str, group: Any = None) -> None:
    for reader in (BcpReader(path), dcp.FileSystemReader(path)):
        for layout in ("saved", "moved"):
            got = state(layout, filled=False)
            dcp.load(got, storage_reader=reader, process_group=group)
            assert_equal(got, state(layout, filled=True))


@contextmanager
def own_group() -> Iterator[Any]:
    """Makes a group for saves, while training uses the default one."""
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)


def save_all_kinds_of_tensors(path: str) -> None:
    with own_group() as group:
        for how in (*HOWS, *HOWS):  # twice: the second time into used memory
            values = state("saved", filled=True)
            values["objects"] = copy.deepcopy(values["objects"])
            future = save_async(how, values, f"{path}/{how}", process_group=group)
            zero(values)
            future.result(LIMIT_S)
    for how in HOWS:
        assert_loads(f"{path}/{how}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensors_change_as_soon_as_it_returns(tmp_path: Path, ranks: int) -> None:
    run_ranks(ranks, save_all_kinds_of_tensors, str(tmp_path))


def train_while_saving(path: str) -> None:
    training = Training(seed=1)
    training.step(2)
    wanted = {}
    with own_group() as group:
        for how in HOWS:
            values = training.state()
            assert all(isinstance(value, DTensor) for value in values["model"].values())
            wanted[how] = copy.deepcopy(training.full_state())  # some of it is the optimizer's own
            future = save_async(how, values, f"{path}/{how}", process_group=group)
            training.step(2)
            future.result(LIMIT_S)
    for how, full in wanted.items():
        for reader in (BcpReader(f"{path}/{how}"), dcp.FileSystemReader(f"{path}/{how}")):
            again = Training(seed=2)
            values = again.state()
            dcp.load(values, storage_reader=reader)
            again.load_state(values)
            assert_equal(again.full_state(), full)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_trains_on(tmp_path: Path, ranks: int) -> None:
    run_ranks(ranks, train_while_saving, str(tmp_path))


def train_on_the_group_of_the_job(path: str) -> None:
    training = Training(seed=1)
    training.step(2)
    futures, wanted = [], []
    with registered():
        for number in range(3):
            wanted.append(copy.deepcopy(training.full_state()))
            future: Any = dcp.async_save(training.state(), checkpoint_id=f"{path}/{number}")
            training.step(2)  # over the same group that DCP saves over
            futures.append(future)
        for future in futures:
            future.result(LIMIT_S)
    for number, full in enumerate(wanted):
        again = Training(seed=2)
        values = again.state()
        dcp.load(values, storage_reader=BcpReader(f"{path}/{number}"))
        again.load_state(values)
        assert_equal(again.full_state(), full)


@pytest.mark.parametrize("ranks", [2, 4])
def test_after_register_training_goes_on_over_the_default_group(tmp_path: Path, ranks: int) -> None:
    run_ranks(ranks, train_on_the_group_of_the_job, str(tmp_path))


def numbered(number: int) -> dict[str, Any]:
    """Returns a state in which each rank has something to write."""
    shared = {f"of_rank_{rank}": torch.full((500,), number) for rank in range(dist.get_world_size())}
    return {"shared": shared, "number": number, "rank": {str(dist.get_rank()): number}}


def loads_numbered(path: str, number: int) -> None:
    got = numbered(0)
    dcp.load(got, storage_reader=BcpReader(path))
    assert_equal(got, numbered(number))


def fail_and_save_again(path: str, how: str) -> None:
    kept = []
    with own_group() as group:
        save_async(how, numbered(1), path, process_group=group).result(LIMIT_S)
        for hook, rank in itertools.product(("create_local_plan", "resolve_data"), (0, 1)):
            for failing in (FailingSavePlanner, FailingBcpSavePlanner):
                planner = failing(hook=hook, rank=rank)
                kept.append(save_async(how, numbered(2), path, process_group=group, planner=planner))
                error = kept[-1].exception(LIMIT_S)
                assert isinstance(error, CheckpointException)
                assert f"{hook} on rank {rank}" in str(error)
                if how != "stager":
                    loads_numbered(path, 1)
        save_async(how, numbered(3), path, process_group=group).result(LIMIT_S)
        loads_numbered(path, 3)


@pytest.mark.parametrize("how", HOWS)
def test_a_rank_that_fails_fails_all(tmp_path: Path, how: str) -> None:
    run_ranks(2, fail_and_save_again, str(tmp_path), how)


def keep_planner(path: str, how: str) -> None:
    planner = BcpSavePlanner()
    with own_group() as group:
        for number in range(3):
            save_async(how, numbered(number), path, process_group=group, planner=planner).result(LIMIT_S)
            loads_numbered(path, number)


@pytest.mark.parametrize("how", HOWS)
def test_one_planner_for_all_saves(tmp_path: Path, how: str) -> None:
    run_ranks(2, keep_planner, str(tmp_path), how)


def damage_a_part(path: str, row: int) -> None:
    """Changes a staged tensor before it is written. Both ranks have the tensor, and each writes some of its rows."""
    staged: Any = BcpStager(config=RAISES).stage({"whole": torch.ones(1000, 700), "step": 1})
    dcp.save(staged, storage_writer=BcpWriter(path), planner=BcpSavePlanner())
    staged["whole"][row, 3] = 2.0
    found = failures(lambda: dcp.save(staged, storage_writer=BcpWriter(path), planner=BcpSavePlanner()))
    failed = found[0]
    assert isinstance(failed, SaveFailedError)
    reasons = list(failed.reasons.values())
    assert reasons
    assert all(isinstance(reason, CorruptCheckpointError) and "whole" in str(reason) for reason in reasons)
    got = {"whole": torch.zeros(1000, 700), "step": 0}
    dcp.load(got, storage_reader=BcpReader(path))
    assert torch.equal(got["whole"], torch.ones(1000, 700))  # type: ignore[arg-type]


@pytest.mark.parametrize("row", [0, 499, 999])
def test_staged_bytes_that_change_are_found_in_a_part(tmp_path: Path, row: int) -> None:
    run_ranks(2, damage_a_part, str(tmp_path), row)


def save_in_a_process(path: str) -> None:
    # The processes that save meet at this address. A launcher would set it, but ranks of tests have none.
    os.environ["MASTER_ADDR"] = "localhost"
    kind = AsyncCheckpointerType.PROCESS
    for step, how in enumerate((*HOWS, *HOWS)):
        values, tied = state("saved", filled=True), torch.full((300,), float(step))
        values["objects"] = copy.deepcopy(values["objects"])
        values["tied"] = {"in": tied, "out": tied, "empty": torch.empty(0, 3), "leaf": torch.nn.Parameter(tied + 1)}
        future = save_async(how, values, f"{path}/{step}", async_checkpointer_type=kind)
        zero(values)
        tied.zero_()
        future.result(LIMIT_S)
    for step in range(2 * len(HOWS)):
        assert_loads(f"{path}/{step}")
        got = {"tied": {name: torch.zeros(300) for name in ("in", "out", "leaf")}}
        dcp.load(got, storage_reader=BcpReader(f"{path}/{step}"))
        assert {name: set(value.tolist()) for name, value in got["tied"].items()} == {
            "in": {step},
            "out": {step},
            "leaf": {step + 1},
        }
    failing = FailingSavePlanner(hook="create_local_plan", rank=1)
    failed = save_async("writer", numbered(1), path, async_checkpointer_type=kind, planner=failing)
    error = failed.exception(LIMIT_S)
    assert isinstance(error, CheckpointException)
    assert "create_local_plan on rank 1" in str(error)
    save_async("writer", numbered(2), path, async_checkpointer_type=kind).result(LIMIT_S)
    loads_numbered(path, 2)
    save_async("writer", numbered(3), path).result(LIMIT_S)
    loads_numbered(path, 3)
    _async_process_executor._CHECKPOINT_PROCESS = None  # ends it


def test_in_a_process(tmp_path: Path) -> None:
    run_ranks(2, save_in_a_process, str(tmp_path), limit_s=250.0)
