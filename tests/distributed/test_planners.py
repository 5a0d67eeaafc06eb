# SPDX-License-Identifier: Apache-2.0
"""Planners of users work with our writer and reader as with the stock ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import run_ranks
from support.sharded_states import full
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bytecheckpoint import BcpReader, BcpWriter
from distributed.planners import OURS, STOCK, Planners

SHAPES = {"a": (9, 4), "b": (5,), "c": (3, 3, 3), "d": (1,), "e": (7, 2)}


def tensors(dtype: torch.dtype = torch.float32, *, filled: bool = True) -> dict[str, Any]:
    return {key: (full(key, shape) if filled else torch.zeros(shape)).to(dtype) for key, shape in SHAPES.items()}


def sharded(*, filled: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        key: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
        for key, value in tensors(filled=filled).items()
    }


def rename(path: str, planners: Planners) -> None:
    dcp.save({**tensors(), "n": 5}, storage_writer=BcpWriter(path), planner=planners.RenamePlanner())
    assert set(BcpReader(path).read_metadata().state_dict_metadata) == {"foo_" + key for key in (*SHAPES, "n")}
    for reader in (BcpReader(path), dcp.FileSystemReader(path)):
        got = {**tensors(filled=False), "n": 0}
        dcp.load(got, storage_reader=reader, planner=planners.RenameLoadPlanner())
        assert_equal(got, {**tensors(), "n": 5})


def halve(path: str, planners: Planners) -> None:
    state = {**tensors(), "n": 5, "sharded": sharded(filled=True)}
    dcp.save(state, storage_writer=BcpWriter(path), planner=planners.FP16Planner())
    entry = BcpReader(path).read_metadata().state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.properties.dtype == torch.float16
    for reader in (BcpReader(path), dcp.FileSystemReader(path)):
        # It loads into tensors of the stored dtype, and converts for others.
        for dtype in (torch.float16, torch.float64):
            got = {**tensors(dtype, filled=False), "n": 0, "sharded": sharded(filled=False)}
            before = {key: got[key].data_ptr() for key in SHAPES}
            dcp.load(got, storage_reader=reader, planner=planners.load())
            assert_equal(got, {**tensors(dtype), "n": 5, "sharded": sharded(filled=True)})
            assert {key: got[key].data_ptr() for key in SHAPES} == before


def resolve_to_another_dtype(path: str, planners: Planners) -> None:
    dcp.save({**tensors(), "n": 5}, storage_writer=BcpWriter(path), planner=planners.OtherDtypePlanner())
    for reader in (BcpReader(path), dcp.FileSystemReader(path)):
        for dtype in (torch.float32, torch.float64):
            got = {**tensors(dtype, filled=False), "n": 0}
            dcp.load(got, storage_reader=reader, planner=planners.load())
            assert_equal(got, {**tensors(dtype), "n": 5})


def balance(path: str, planners: Planners) -> int:
    writer = BcpWriter(path)
    dcp.save({**tensors(), "n": 5}, storage_writer=writer, planner=planners.DDPLoadBalancingPlanner())
    for reader in (BcpReader(path), dcp.FileSystemReader(path)):
        got = {**tensors(filled=False), "n": 0}
        dcp.load(got, storage_reader=reader, planner=planners.load())
        assert_equal(got, {**tensors(), "n": 5})
    assert writer.last_report is not None
    return writer.last_report.num_records


def extra_data(rank: int) -> Any:
    return {"rank": rank, 7: (1.5, None, True, False, b"\0\xff", "\u00e4\U0001f600", [-1, 2**40, -(2**40), ()], {})}


def save_extra_data(path: str, planners: Planners) -> None:
    planner = planners.SaveExtraDataPlanner(extra_data(dist.get_rank()))
    metadata = dcp.save(tensors(), storage_writer=BcpWriter(path), planner=planner)
    wanted = [extra_data(rank) for rank in range(dist.get_world_size())]
    for read in (metadata, BcpReader(path).read_metadata(), dcp.FileSystemReader(path).read_metadata()):
        assert read.planner_data == wanted
        assert repr(read.planner_data) == repr(wanted)  # because True == 1 and 1 == 1.0


def materialize(path: str, planners: Planners) -> None:
    dcp.save(sharded(filled=True), storage_writer=BcpWriter(path))
    for reader in (BcpReader(path), dcp.FileSystemReader(path)):
        planner = planners.MetaModelMaterialize()
        dcp.load(
            {key: torch.empty(shape, device="meta") for key, shape in SHAPES.items()},
            storage_reader=reader,
            planner=planner,
        )
        assert_equal(planner.state_dict, tensors())


def all_planners(root: str, planners: Planners) -> int:
    rename(f"{root}/rename", planners)
    halve(f"{root}/halve", planners)
    resolve_to_another_dtype(f"{root}/resolve", planners)
    save_extra_data(f"{root}/extra", planners)
    materialize(f"{root}/materialize", planners)
    return balance(f"{root}/balance", planners)


@pytest.mark.parametrize("planners", [STOCK, OURS], ids=["stock", "ours"])
def test_planners_of_the_docstrings(tmp_path: Path, planners: Planners) -> None:
    assert run_ranks(2, all_planners, str(tmp_path), planners) == [3, 3]
    assert run_ranks(4, balance, str(tmp_path / "four"), planners) == [2, 2, 1, 1]
