# SPDX-License-Identifier: Apache-2.0
"""Computes the states in the golden checkpoints of stock DCP, so that one torch can write them and another check them.

The module runs under every torch from 1.13 on, and must give the same values under each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.named_values import numbers

__all__ = [
    "MESHED",
    "SHARDED",
    "Counter",
    "Tagged",
    "Version",
    "as_saved",
    "dtypes_of",
    "laid_out",
    "state_of",
]

Version = tuple[int, int]

# Dtypes, each with the first torch whose DCP can save it. Some of the dtypes themselves are older.
DTYPES: dict[str, Version] = {
    "float64": (1, 13),
    "float32": (1, 13),
    "float16": (1, 13),
    "bfloat16": (1, 13),
    "int64": (1, 13),
    "int32": (1, 13),
    "int16": (1, 13),
    "int8": (1, 13),
    "uint8": (1, 13),
    "bool": (1, 13),
    "complex64": (1, 13),
    "complex128": (1, 13),
    "complex32": (2, 3),
    "float8_e4m3fn": (2, 3),
    "float8_e4m3fnuz": (2, 3),
    "float8_e5m2": (2, 3),
    "float8_e5m2fnuz": (2, 3),
    "uint16": (2, 6),
    "uint32": (2, 6),
    "uint64": (2, 6),
    "float8_e8m0fnu": (2, 9),
    "float4_e2m1fn_x2": (2, 9),
}

OBJECTS: dict[str, Any] = {
    "step": 1234,
    "name": "stock \u00e4\U0001f600",
    "nothing": None,
    "bytes": b"\x00\xff",
    "pair": (0.125, (torch.Size([2, 3]), torch.bfloat16)),
    "flags": [True, False],
}

# Keys of the model and of the optimizer's averages, with their shape and the dim that is sharded; None is replicated.
SHARDED: dict[str, tuple[tuple[int, ...], int | None]] = {
    "layers.0.weight": ((4, 6), 0),
    "layers.0.bias": ((5,), 0),
    "layers.1.weight": ((3, 5), 1),
    "layers.1.bias": ((1, 6), 0),  # fewer rows than ranks, which DCP supports since 2.3
    "norm.weight": ((4,), None),
    "scale": ((), None),
}

MESHED = {"replicated rows": (6, 5), "rows and columns": (5, 6), "columns and rows": (7, 3)}


class Counter:
    """A Stateful object in the sense of DCP."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sums = torch.full((3,), count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.sums = state["count"], state["sums"]


class Tagged(torch.Tensor):
    """A subclass of Tensor that a user defines."""


def state_of(kind: str, version: Version, rank: int = 0) -> dict[str, Any]:
    """Returns the state dict of a kind of checkpoint, with whole tensors.

    Args:
        kind: A name of ``make_stock_golden.KINDS``.
        version: Version of the torch that writes it.
        rank: The rank whose state it is; matters only if the states of ranks differ.
    """
    if kind == "dtypes":
        return {"dtypes": {name: numbers(name, (2, 3), getattr(torch, name)) for name in dtypes_of(version)}}
    if kind == "plain":
        return _plain(version)
    if kind == "sharded":
        return _sharded(version)
    if kind == "mesh":
        return {name: numbers(name, shape) for name, shape in MESHED.items()}
    if kind == "no_collectives":
        mine = {"rank": rank, "name": f"rank {rank}", "numbers": numbers(f"rank {rank}", (2, 3))}
        return {"rows": numbers("rows", (5, 3)), "whole": numbers("whole", (4,)), "mine": mine}
    if kind == "quantized":
        return _quantized()
    if kind == "wrapper":
        from torch.testing._internal.two_tensor import TwoTensor

        two = TwoTensor(numbers("first", (2, 3)), numbers("second", (2, 3)))
        return {"wrapped": two, "plain": numbers("plain", (2,))}
    if kind in ("single", "aligned"):
        return {"single": numbers("single", (2,))}
    if kind == "subclass":
        return {"tagged": numbers("tagged", (2, 3)).as_subclass(Tagged), "plain": numbers("plain", (2,))}
    return {
        "rows": numbers("rows", (3, 4)),
        "nested": {"transposed": numbers("transposed", (3, 4), torch.bfloat16).t(), "step": 12, "none": None},
        "list": [numbers("in a list", (2,), torch.int64), {"x": 1.5}],
        "tuple": (1, "two"),
    }


def as_saved(state: dict[str, Any], version: Version) -> dict[str, Any]:
    """Returns ``state`` as its writer passed it to DCP, which did not flatten before 2.0."""
    if version >= (2, 0):
        return state
    flat: dict[str, Any] = {}
    for name, value in state.items():
        flat.update(
            {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat


def dtypes_of(version: Version) -> list[str]:
    return [name for name, since in DTYPES.items() if since <= version]


def _plain(version: Version) -> dict[str, Any]:
    tied = numbers("tied", (2, 2))
    return {
        "views": _views(),
        "tied": {"embedding": tied, "output": tied},
        "nested": {"list": [numbers("in a list", (2,)), {"x": numbers("deeper", (1,)), "n": 1}], "tuple": (1, "two")},
        "tensors in a tuple": (numbers("first", (2,)), numbers("second", (1,), torch.int16)),
        "objects": OBJECTS,
        "stateful": Counter(7).state_dict(),
    }


def _views() -> dict[str, torch.Tensor]:
    whole = numbers("whole", (4, 6))
    line = numbers("line", (6,), torch.int32)
    small = torch.arange(6.0)
    complexes = torch.complex(small, 1 - small)
    return {
        "transposed": whole.t(),
        "sliced": whole[1:3, ::2],
        "expanded": numbers("expanded", (1, 3)).expand(4, 3),
        "channels_last": numbers("images", (2, 3, 2, 2)).contiguous(memory_format=torch.channels_last),
        # These have as many elements as their storage, but do not cover all of it. DCP saves them as they are.
        "second half twice": line.as_strided((2, 3), (0, 1), 3),
        "overlapping": line.as_strided((3, 2), (1, 1)),
        "conjugate": complexes.conj(),
        "conjugate transposed": complexes.reshape(2, 3).conj().t(),
        "imaginary of conjugate": complexes.conj().imag,
        "negative": torch._neg_view(small),
        "parameter": torch.nn.Parameter(numbers("parameter", (4,))),
        "scalar": numbers("scalar", (), torch.float64),
        "empty": numbers("empty", (0, 7), torch.int16),
        "long " * 60: numbers("long", (1,)),
        # Gives the metadata numbers of four bytes and of more, which a small checkpoint otherwise lacks.
        "empty and large": torch.empty(70_000, 0, 1 << 40),
    }


def _sharded(version: Version) -> dict[str, Any]:
    state: dict[str, Any] = {
        "shards": {"rows": numbers("shard rows", (7, 3)), "columns": numbers("shard columns", (3, 7))},
        "step": 12,
    }
    # DCP knows DTensor since 2.1.
    if version >= (2, 1):
        state["model"] = {
            name: numbers(name, shape)
            for name, (shape, _) in SHARDED.items()
            if version >= (2, 3) or name != "layers.1.bias"
        }
        parameters = ["layers.0.weight", "layers.0.bias"]
        state["optimizer"] = {
            "state": {
                name: {"step": torch.tensor(3.0), "exp_avg": numbers(name + "exp_avg", SHARDED[name][0], torch.float16)}
                for name in parameters
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": parameters}],
        }
    return state


def _quantized() -> dict[str, torch.Tensor]:
    values = torch.arange(6.0).reshape(2, 3)
    scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([0, 1])
    return {
        "per tensor": torch.quantize_per_tensor(values, 0.5, 3, torch.quint8),
        "per channel": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
        "wide": torch.quantize_per_tensor(values, 0.25, 0, torch.qint32),
    }


def laid_out(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    """Returns ``state`` with its tensors distributed over all ranks of the default group. Collective."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    if kind == "sharded":
        state = {**state, "shards": dict(state["shards"])}
        workers = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
        for dim, name in enumerate(("rows", "columns")):
            value = state["shards"][name]
            spec = ChunkShardingSpec(dim=dim, placements=workers)
            state["shards"][name] = sharded = sharded_tensor.zeros(spec, *value.shape)
            for shard in sharded.local_shards():
                begin, size = shard.metadata.shard_offsets[dim], shard.metadata.shard_sizes[dim]
                shard.tensor.copy_(value.narrow(dim, begin, size))
        if "model" in state:
            state["model"] = {name: _distributed(value, SHARDED[name][1]) for name, value in state["model"].items()}
            state["optimizer"] = {
                **state["optimizer"],
                "state": {
                    name: {
                        key: value if key == "step" else _distributed(value, SHARDED[name][1])
                        for key, value in averages.items()
                    }
                    for name, averages in state["optimizer"]["state"].items()
                },
            }
    elif kind == "mesh":
        state = _meshed(state)
    elif kind == "no_collectives":
        state = {**state, "rows": _distributed(state["rows"], 0)}
    return state


def _distributed(value: torch.Tensor, dim: int | None) -> torch.Tensor:
    from torch.distributed._tensor import DeviceMesh, Replicate, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return distribute_tensor(value, mesh, [Replicate() if dim is None else Shard(dim)])


def _meshed(state: dict[str, Any]) -> dict[str, Any]:
    """Returns ``state`` on a mesh of 2 x half the ranks, or of one dim if the number of ranks is odd."""
    from torch.distributed._tensor import DeviceMesh, Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    if size % 2:
        return {name: _distributed(value, 0) for name, value in state.items()}
    mesh = DeviceMesh("cpu", torch.arange(size).reshape(2, size // 2))
    placements: Any = ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)])
    return {
        name: distribute_tensor(value, mesh, placement)
        for (name, value), placement in zip(state.items(), placements, strict=True)
    }
