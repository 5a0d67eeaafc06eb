# SPDX-License-Identifier: Apache-2.0
"""What makers with torch use: gloo ranks, fixed values, and full tensors put together from shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

__all__ = ["Shard", "assembled", "numbers", "run", "write_expected"]

# Name, shape of the whole, offsets, and the elements of a shard.
Shard = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]

_PORT = 29741


def run(num_ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Runs ``function(*args)`` on ``num_ranks`` gloo ranks, each a process of its own."""
    torch.multiprocessing.spawn(_rank, (num_ranks, function, args), num_ranks)


def _rank(rank: int, num_ranks: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_PORT), WORLD_SIZE=str(num_ranks))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks))
    torch.manual_seed(1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    function(*args)
    dist.barrier()
    dist.destroy_process_group()


def numbers(*shape: int, start: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns numbers that go up by a half; bfloat16 has the first of them exactly."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) / 2 + start).reshape(shape).to(dtype)


def assembled(local: list[Shard]) -> dict[str, torch.Tensor]:
    """Puts the shards of all ranks together. Collective. Shards must cover tensors, and agree where they overlap."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    full: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for name, shape, offsets, data in (shard for shards in gathered for shard in shards):
        whole = full.setdefault(name, torch.zeros(shape, dtype=data.dtype))
        seen = covered.setdefault(name, torch.zeros(shape, dtype=torch.bool))
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, data.shape, strict=True))
        assert torch.equal(whole[box][seen[box]], data[seen[box]]), f"shards of {name} differ"
        whole[box] = data
        seen[box] = True
    for name, seen in covered.items():
        assert bool(seen.all()), f"shards do not cover {name}"
    return full


def write_expected(folder: Path, tensors: dict[str, torch.Tensor], objects: Any = None) -> None:
    """Writes ``expected.pt`` and, if there are objects, ``expected.json`` into ``folder``."""
    torch.save({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "expected.pt")
    if objects is not None:
        (folder / "expected.json").write_text(json.dumps(objects, indent=1, sort_keys=True) + "\n")
