# SPDX-License-Identifier: Apache-2.0
"""Copies ShardedTensors, prepares them for another process, and flattens them. Uses no process group."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard

__all__ = ["ApartShardedTensor", "copy_sharded", "flatten_sharded"]


def copy_sharded(sharded: ShardedTensor, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> ShardedTensor:
    """Returns a ShardedTensor like ``sharded`` with copies of its shards. torch's own copies refuse strided shards."""
    shards = []
    for shard in sharded.local_shards():
        tensor, metadata = copy_tensor(shard.tensor), copy.deepcopy(shard.metadata)
        if metadata.placement is not None and metadata.placement.device() != tensor.device:
            metadata.placement = None  # its placement must not name another device than the tensor's
        shards.append(Shard(tensor, metadata))
    group = sharded._process_group
    return _new_sharded(sharded.sharding_spec(), copy.deepcopy(sharded.metadata()), shards, group)


class ApartShardedTensor:
    """A ShardedTensor without its process group, for pickling: torch looks for the group wherever it is unpickled."""

    def __init__(self, sharded: ShardedTensor) -> None:
        self._spec = sharded.sharding_spec()
        self._metadata = sharded.metadata()
        self._shards = [(_apart(shard.tensor), shard.metadata) for shard in sharded.local_shards()]

    def join(self) -> ShardedTensor:
        """Returns the ShardedTensor. It has no process group, so only planners can use it."""
        shards = [
            Shard(tensor.join() if isinstance(tensor, ApartShardedTensor) else tensor, _without_placement(metadata))
            for tensor, metadata in self._shards
        ]
        return _new_sharded(self._spec, self._metadata, shards)


def _apart(tensor: torch.Tensor) -> torch.Tensor | ApartShardedTensor:
    return ApartShardedTensor(tensor) if isinstance(tensor, ShardedTensor) else tensor


def flatten_sharded(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a flat state whose ShardedTensors are flattened as DCP does it, and have no empty shards.

    FSDP over tensor parallelism makes shards that are ShardedTensors themselves. Such a shard is replaced by its own
    shards. A ShardedTensor of which this rank holds nothing is left out of the state.

    Empty shards are left out, because one may begin where another shard does, and DCP then takes one for the other.
    ``ChunkShardingSpec`` may also place them outside of the tensor, which DCP refuses.
    """
    out = {}
    for fqn, value in flat.items():
        if isinstance(value, ShardedTensor):
            value = _flattened(value)
        if value is not _NOT_HERE:
            out[fqn] = value
    return out


_NOT_HERE = object()


def _flattened(sharded: ShardedTensor) -> Any:
    metadata = sharded.metadata()
    is_empty = math.prod(metadata.size) == 0
    shards = [
        inner
        for shard in sharded.local_shards()
        for inner in _inner_shards(shard)
        if is_empty or math.prod(inner.metadata.shard_sizes) > 0
    ]
    if not shards:
        return _NOT_HERE
    if len(shards) == len(sharded.local_shards()) and all(map(lambda a, b: a is b, shards, sharded.local_shards())):
        return sharded
    here = dataclasses.replace(metadata, shards_metadata=[shard.metadata for shard in shards])
    return _new_sharded(sharded.sharding_spec(), here, shards)


def _inner_shards(shard: Shard) -> list[Shard]:
    if not isinstance(shard.tensor, ShardedTensor):
        return [shard]
    begin = shard.metadata.shard_offsets
    return [
        Shard(inner.tensor, _without_placement(inner.metadata, begin))
        for of_inner in shard.tensor.local_shards()
        for inner in _inner_shards(of_inner)
    ]


def _without_placement(metadata: ShardMetadata, begin: Sequence[int] | None = None) -> ShardMetadata:
    offsets = metadata.shard_offsets
    if begin is not None:
        offsets = [of_outer + of_inner for of_outer, of_inner in zip(begin, offsets, strict=True)]
    return ShardMetadata(list(offsets), list(metadata.shard_sizes))


def _new_sharded(spec: Any, metadata: ShardedTensorMetadata, shards: list[Shard], group: Any = None) -> ShardedTensor:
    """Makes a ShardedTensor as torch does, but without its checks between shards, which need a process group."""
    properties = metadata.tensor_properties
    sharded: Any = ShardedTensor.__new__(
        ShardedTensor,
        spec,
        metadata.size,
        dtype=properties.dtype,
        layout=properties.layout,
        pin_memory=False,
        requires_grad=properties.requires_grad,
    )
    sharded._metadata, sharded._local_shards = metadata, shards
    sharded._process_group, sharded._init_rrefs = group, False
    made: ShardedTensor = sharded
    return made
