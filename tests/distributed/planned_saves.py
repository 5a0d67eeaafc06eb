# SPDX-License-Identifier: Apache-2.0
"""Makes states, saves them with plans that ranks exchange, and loads them with stock DCP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bytecheckpoint import BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.report import PlanReport

__all__ = ["GATHER", "TREE", "assert_loads", "blank", "model", "numbers", "save"]

TREE = Config(tree_topo_threshold=1, tree_topo_fan_out=2)
GATHER = Config()


def numbers(*shape: int, begin: float = 0.0) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + begin


def model(begin: float = 0.0, placement: Any = None, **more: Any) -> dict[str, Any]:
    """Returns sharded and replicated tensors, and what only this rank has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    return {
        "sharded": distribute_tensor(numbers(10, 8, begin=begin), mesh, [placement or Shard(0)]),
        "replicated": distribute_tensor(numbers(6, 5, begin=begin), mesh, [Replicate()]),
        "plain": numbers(300, 200, begin=begin),
        "nested": {f"of rank {rank}": numbers(3, begin=begin + rank), "step": int(begin)},
        **more,
    }


def save(path: str, state: dict[str, Any], config: Config, **settings: Any) -> PlanReport:
    planner = BcpSavePlanner(config=config, **settings)
    dcp.save(state, storage_writer=BcpWriter(path), planner=planner)
    return planner.last_plan


def blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: blank(v) for key, v in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def assert_loads(path: str, wanted: dict[str, Any]) -> None:
    """Asserts that stock DCP loads every value as it was saved."""
    got = blank(wanted)
    dcp.load(got, storage_reader=dcp.FileSystemReader(path))
    assert_equal(got, wanted)
    dist.barrier()
