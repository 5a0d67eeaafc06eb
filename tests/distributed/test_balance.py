# SPDX-License-Identifier: Apache-2.0
"""All ranks that hold the same tensors share the writing of them, and the checkpoint loads anywhere."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import run_ranks
from support.sharded_states import full
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter
from bytecheckpoint.errors import CheckpointChangedError

MOST_OVER_MEAN = 1.02


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a small llama, or of a state in which one tensor is half of the bytes."""
    if kind == "skewed":
        return {"huge": (512, 2048), **{f"t{i}": (1 << i, 512) for i in range(11)}}
    layer = {"q": (256, 256), "k": (64, 256), "v": (64, 256), "o": (256, 256), "norm": (256,)}
    layer |= {"up": (688, 256), "gate": (688, 256), "down": (256, 688)}
    layers = {f"layers.{i}.{name}": shape for i in range(4) for name, shape in layer.items()}
    return {"embed": (2000, 256), **layers, "norm": (256,), "head": (2000, 256)}


def state(kind: str, mesh_shape: tuple[int, ...] | None, *, filled: bool) -> dict[str, Any]:
    """Returns plain replicas without a mesh, or replicas of shards over a mesh of two dims."""
    tensors = {name: full(name, shape) if filled else torch.zeros(shape) for name, shape in shapes(kind).items()}
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        tensors = {
            name: distribute_tensor(value, mesh, [Replicate(), Shard(0)], src_data_rank=None)
            for name, value in tensors.items()
        }
    return {"model": tensors, "step": 3 if filled else 0}


def save(path: str, kind: str, mesh_shape: tuple[int, ...] | None, lowest: bool) -> int:
    writer = BcpWriter(path)
    planner = BcpSavePlanner(dedup_save_to_lowest_rank=lowest)
    dcp.save(state(kind, mesh_shape, filled=True), storage_writer=writer, planner=planner)
    assert writer.last_report is not None
    return writer.last_report.bytes_written


def load(path: str, kind: str) -> None:
    for reader, planner in ((BcpReader(path), BcpLoadPlanner()), (dcp.FileSystemReader(path), None)):
        got = state(kind, None, filled=False)
        dcp.load(got, storage_reader=reader, planner=planner)
        assert_equal(got, state(kind, None, filled=True))
    if dist.get_world_size() == 2:  # and into shards
        got = state(kind, (1, 2), filled=False)
        dcp.load(got, storage_reader=dcp.FileSystemReader(path))
        assert_equal(got, state(kind, (1, 2), filled=True))


@pytest.mark.parametrize("kind", ["llama", "skewed"])
@pytest.mark.parametrize(
    ("num_ranks", "mesh_shape"), [(2, (2, 1)), (4, (4, 1)), (8, (8, 1)), (4, (2, 2)), (8, (2, 4))], ids=str
)
def test_replicas_share_the_writing(
    tmp_path: Path, kind: str, num_ranks: int, mesh_shape: tuple[int, ...] | None
) -> None:
    written = run_ranks(num_ranks, save, str(tmp_path), kind, mesh_shape, False)
    # A fixed part of each file is not data: header, trailer, and what surrounds each record.
    assert max(written) / (sum(written) / num_ranks) < MOST_OVER_MEAN
    run_ranks(2, load, str(tmp_path), kind)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_plain_tensors_are_divided_among_the_ranks_whole(tmp_path: Path, num_ranks: int) -> None:
    written = run_ranks(num_ranks, save, str(tmp_path), "llama", None, False)
    largest = 2000 * 256 * 4
    assert max(written) - min(written) <= largest
    metadata = BcpReader(tmp_path).read_metadata()
    chunks = [len(item.chunks) for item in metadata.state_dict_metadata.values() if hasattr(item, "chunks")]
    assert chunks == [1] * len(shapes("llama"))
    run_ranks(2, load, str(tmp_path), "llama")


def test_the_lowest_rank_writes_all_if_asked(tmp_path: Path) -> None:
    written = run_ranks(3, save, str(tmp_path), "llama", None, True)
    assert written[0] > 0
    assert written[1:] == [0, 0]
    run_ranks(2, load, str(tmp_path), "llama")


def test_the_same_state_is_split_alike_every_time(tmp_path: Path) -> None:
    plans = []
    for name in ("a", "b"):
        run_ranks(4, save, str(tmp_path / name), "skewed", (4, 1), False)
        metadata = BcpReader(tmp_path / name).read_metadata()
        # Names of files are random, but begin with the rank.
        assert metadata.storage_data is not None
        plans.append([(index, info.relative_path.split("_")[2]) for index, info in metadata.storage_data.items()])
    assert plans[0] == plans[1]


def look_at_what_a_save_returns(path: str) -> int:
    metadata = dcp.save(state("llama", None, filled=True), storage_writer=BcpWriter(path), planner=BcpSavePlanner())
    num_bytes = len(pickle.dumps(metadata))
    again = pickle.loads(pickle.dumps(metadata))
    read = BcpReader(path).read_metadata()
    read.storage_meta.load_id = None  # type: ignore[union-attr]  # each load has its own
    dist.barrier()
    assert metadata == read
    assert again.state_dict_metadata == read.state_dict_metadata
    assert again.planner_data == read.planner_data
    late = dcp.save(state("llama", None, filled=True), storage_writer=BcpWriter(path), planner=BcpSavePlanner())
    late = pickle.loads(pickle.dumps(late))
    dcp.save({"other": 1}, storage_writer=BcpWriter(path), planner=BcpSavePlanner())
    with pytest.raises(CheckpointChangedError, match=r"were not read yet, and the path now holds save"):
        _ = late.state_dict_metadata
    assert late.version == read.version
    return num_bytes


def test_metadata_travel_as_a_place(tmp_path: Path) -> None:
    assert max(run_ranks(2, look_at_what_a_save_returns, str(tmp_path))) < 1000
