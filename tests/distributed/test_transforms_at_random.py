# SPDX-License-Identifier: Apache-2.0
"""Every transform, of tensors that are sharded in any way, into tensors that are sharded in another one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.campaign import Campaign
from support.drawn_transforms import Drawing, draw_spec
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint import BcpLoadPlanner, BcpReader, Config, load_state_dict, save_state_dict


def draw_placements(draw: random.Random, mesh: DeviceMesh, value: torch.Tensor) -> list[Placement]:
    if not value.dim():
        return [Replicate()] * mesh.ndim
    dims = range(value.dim())
    if mesh.ndim == 2 and draw.random() < 0.25:  # FSDP2 over tensor parallelism along the same dim
        dim = draw.choice(dims)
        return [_StridedShard(dim, split_factor=mesh.size(1)), Shard(dim)]
    return [draw.choice([Replicate(), *map(Shard, dims), *map(Shard, dims)]) for _ in range(mesh.ndim)]


def sharded(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Cuts as DTensor does, without a message: a strided axis cuts what the axes behind it have left.

    Torch's collectives take the place of a rank in its process group, which may be another than that in the mesh.
    """
    coordinate = [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
    local = whole
    for axis in sorted(range(mesh.ndim), key=lambda axis: isinstance(placements[axis], _StridedShard)):
        placement = placements[axis]
        if not isinstance(placement, Replicate):
            dim = placement.dim  # type: ignore[attr-defined]
            most = -(-local.shape[dim] // mesh.size(axis))
            begin = min(most * coordinate[axis], local.shape[dim])
            local = local.narrow(dim, begin, min(most, local.shape[dim] - begin))
    local = local.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def ascends(mesh: DeviceMesh) -> bool:
    """Whether the ranks ascend along each axis. Only then DCP saves each part where ``full_tensor()`` has it."""
    return all(bool((mesh.mesh.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim))


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


def draw_state(draw: random.Random, mesh: DeviceMesh, tensors: Mapping[str, torch.Tensor]) -> dict[str, DTensor]:
    return {name: sharded(value, mesh, draw_placements(draw, mesh, value)) for name, value in tensors.items()}


def save(draw: random.Random, path: Path, mesh: DeviceMesh, state: dict[str, DTensor]) -> str:
    if draw.random() < 0.7 or not ascends(mesh):
        save_state_dict(path, state)
        return "ours"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    return "stock"


def load(draw: random.Random, path: Path, state: dict[str, DTensor], drawing: Drawing) -> str:
    reading = draw.choice(["independent", "cooperative"])
    config = Config(shared_reading=reading)
    if draw.random() < 0.5:
        load_state_dict(path, state, spec=drawing.spec, config=config)
        return reading
    planner = BcpLoadPlanner(spec=drawing.spec)
    dcp.load(state, storage_reader=BcpReader(path, config=config), planner=planner)
    return "planner"


def run_rounds(directory: str) -> Counter[str]:
    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,)), DeviceMesh("cpu", list(reversed(range(size))))]
    if size == 4:
        meshes += [
            init_device_mesh("cpu", (2, 2)),
            DeviceMesh("cpu", [[3, 1], [2, 0]]),
            DeviceMesh("cpu", [[2, 0, 1, 3]]),
        ]
    campaign = Campaign("transforms over random meshes")

    def trial(number: int, draw: random.Random) -> None:
        path = Path(directory) / str(number)
        drawing = draw_spec(draw)
        try:
            mesh = draw.choice(meshes)
            writer = save(draw, path, mesh, draw_state(draw, mesh, drawing.stored))
            blank = {name: torch.full_like(value, 3) for name, value in drawing.wanted.items()}
            again = random.Random(draw.getrandbits(32))
            mesh = draw.choice(meshes if writer == "ours" else [*filter(ascends, meshes)])
            seed = again.getstate()
            state = draw_state(again, mesh, blank)
            reading = load(draw, path, state, drawing)
            again.setstate(seed)
            for name, wanted in draw_state(again, mesh, drawing.wanted).items():
                got, mine = state[name].to_local(), wanted.to_local()
                assert got.shape == mine.shape, name
                assert torch.equal(bits(got), bits(mine)), (name, got, mine)
        except BaseException as error:
            error.add_note(f"{drawing.spec}")
            raise
        campaign.covered.update([writer, reading, *drawing.kinds])

    campaign.run(trial, short=20, long=400)
    return campaign.covered


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_loads_what_plain_torch_makes(tmp_path: Path, num_ranks: int) -> None:
    first, *others = run_ranks(num_ranks, run_rounds, str(tmp_path), limit_s=600)
    assert all(covered == first for covered in others)
    print(dict(first))
    assert min(first[kind] for kind in ("Stack", "Unstack", "Concat", "Split", "Dequantize", "DequantizeMXFP4")) > 0
