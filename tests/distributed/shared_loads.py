# SPDX-License-Identifier: Apache-2.0
"""States, planners and readers for loads in which all ranks want the same bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.pretended_hosts import pretend_host
from torch.distributed.checkpoint import DefaultLoadPlanner

from bytecheckpoint import BcpReader, Config

__all__ = ["COOPERATIVE", "OwnFinish", "Wrapper", "on_machines_of", "replicated", "values"]

COOPERATIVE = Config(shared_reading="cooperative")


def values(name: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(name)
    return torch.randint(-(1 << 30), 1 << 30, shape, generator=generator, dtype=torch.int32)


SHAPES = [(1024, 1024), (333, 4097), (7,), (2048, 1500), (1,), (600, 600)]


def replicated(*, filled: bool) -> dict[str, Any]:
    """Returns the same tensors on every rank, as with DDP; 24 MiB."""
    return {f"t{i}": values(i, s) if filled else torch.zeros(s, dtype=torch.int32) for i, s in enumerate(SHAPES)}


def on_machines_of(num_ranks: int) -> None:
    """Makes so many neighbouring ranks believe that they share a machine with one another, and with no other rank."""
    pretend_host(f"node{dist.get_rank() // num_ranks}")


class OwnFinish(DefaultLoadPlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        return super().finish_plan(new_plan)


class Wrapper(BcpReader):
    """A reader that might fail on one rank before all ranks have come to the exchange."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        return super().read_data(plan, planner)
