# SPDX-License-Identifier: Apache-2.0
"""State dicts whose full values every rank can compute by itself, laid out over ranks in different ways."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from support.equality import local_tensors

__all__ = ["FULL_SHAPES", "OBJECTS", "full", "pointers", "state"]


class Layout(NamedTuple):
    """Placements on a flat mesh of all ranks, or on one of 2 x half the ranks."""

    flat: tuple[Placement, ...]
    square: tuple[Placement, ...] | None = None


FULL_SHAPES = {
    "rows": (64, 5),
    "uneven": (5, 3),  # 4 ranks: 2, 2, 1, 0 rows
    "few": (2, 3),  # fewer rows than ranks: empty shards
    "columns": (6, 16),
    "hybrid": (12, 7),
    "square": (9, 10),
    "whole": (3, 4),
    "scalar": (),
}

LAYOUTS = {
    "saved": {
        "rows": Layout((Shard(0),)),
        "uneven": Layout((Shard(0),)),
        "few": Layout((Shard(0),)),
        "columns": Layout((Shard(1),)),
        "hybrid": Layout((Shard(0),), (Replicate(), Shard(0))),
        "square": Layout((Shard(0),), (Shard(0), Shard(1))),
        "whole": Layout((Replicate(),)),
        "scalar": Layout((Replicate(),)),
    },
    "moved": {
        "rows": Layout((Shard(1),)),
        "uneven": Layout((Shard(1),)),
        "few": Layout((Replicate(),)),
        "columns": Layout((Shard(0),), (Shard(1), Shard(0))),
        "hybrid": Layout((Shard(1),), (Shard(0), Replicate())),
        "square": Layout((Replicate(),), (Shard(1), Shard(0))),
        "whole": Layout((Shard(0),)),
        "scalar": Layout((Replicate(),)),
    },
}

OBJECTS = {"step": 12, "betas": [0.9, 0.95], "name": "run", "table": {"y": "three", "x": (1, None)}}


def full(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a tensor whose values depend on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(-1000, 1000, shape, generator=generator).to(dtype)


def state(layout: str, *, filled: bool) -> dict[str, Any]:
    """Returns the state dict in ``layout`` ("saved", "moved", "plain"), with its values or with zeros to load into."""
    out: dict[str, Any] = {"tensors": {}, "plain": [], "objects": {}}
    for name, shape in FULL_SHAPES.items():
        value = full(name, shape) if filled else torch.zeros(shape)
        if layout != "plain":
            value = _distributed(value, LAYOUTS[layout][name])
        out["tensors"][name] = value
    shards = full("shards", (11, 4)) if filled else torch.zeros(11, 4)
    out["tensors"]["shards"] = shards if layout == "plain" else _sharded_tensor(shards)
    half = full("half", (7, 9), torch.bfloat16) if filled else torch.zeros(7, 9, dtype=torch.bfloat16)
    out["plain"] = [half.t(), full("long", (33,), torch.int64) if filled else torch.zeros(33, dtype=torch.int64)]
    out["objects"] = OBJECTS if filled else {"step": 0, "betas": [0, 0], "name": "", "table": {"y": "", "x": ""}}
    return out


def _distributed(value: torch.Tensor, layout: Layout) -> DTensor:
    size = dist.get_world_size()
    if layout.square is not None and size >= 4:
        mesh, placements = init_device_mesh("cpu", (2, size // 2)), layout.square
    else:
        mesh, placements = init_device_mesh("cpu", (size,)), layout.flat
    # Every rank has the full value, so nothing needs to be sent.
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _sharded_tensor(value: torch.Tensor) -> ShardedTensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(value.shape[0]).tensor_split(size)[rank]
    begin = int(rows[0]) if len(rows) else value.shape[0]
    local = value[begin : begin + len(rows)].clone()
    shard = LocalShard.from_tensor_and_offsets(local, [begin, 0], rank)
    return sharded_tensor.init_from_local_shards([shard], *value.shape)


def pointers(value: Any) -> list[int]:
    """Returns the addresses of all tensors in a state dict, in its order."""
    if isinstance(value, dict):
        return [pointer for item in value.values() for pointer in pointers(item)]
    if isinstance(value, list):
        return [pointer for item in value for pointer in pointers(item)]
    if isinstance(value, torch.Tensor | ShardedTensor):
        return [part.data_ptr() for part in local_tensors(value)]
    return []
