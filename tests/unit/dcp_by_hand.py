# SPDX-License-Identifier: Apache-2.0
"""Does what ``dcp.save`` and ``dcp.load`` do with planner, writer and reader, for several ranks in one process.

Each rank has its own objects. These functions pickle and unpickle whatever DCP sends from rank to rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.tensors.chunks import LocalChunks

__all__ = ["PlannedSave", "load_by_hand", "plan_by_hand", "save_by_hand"]

T = TypeVar("T")

_CONFIG = Config(ring_bytes=16 << 20, io_threads=1, direct_io=False)


def sent(value: T) -> T:
    """Returns ``value`` as another rank receives it."""
    copy: T = pickle.loads(pickle.dumps(value))
    return copy


@dataclass(frozen=True)
class PlannedSave:
    """A save up to the point where each rank knows what to write.

    Attributes:
        told: The plan that the coordinator sends to each rank.
        plans: The plan that each rank makes of it.
        metadata: The metadata of the checkpoint that would be saved.
    """

    told: list[SavePlan]
    plans: list[SavePlan]
    metadata: Metadata


def plan_by_hand(states: list[dict[str, Any]], **options: Any) -> PlannedSave:
    """Plans a save of ``states``, one for each rank, and writes nothing.

    Args:
        options: Arguments of ``BcpSavePlanner``.
    """
    planners = [BcpSavePlanner(**options) for _ in states]
    local_plans = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
        local_plans.append(planner.create_local_plan())
    told, metadata = planners[0].create_global_plan([sent(plan) for plan in local_plans])
    plans = [planner.finish_plan(sent(plan)) for planner, plan in zip(planners, told, strict=True)]
    return PlannedSave(told, plans, metadata)


def cut(state: dict[str, Any], num_ranks: int) -> list[dict[str, Any]]:
    """Returns a state for each rank, which has some rows of each tensor; one with few rows is whole on all ranks."""

    def rows(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] < num_ranks:
            return tensor
        begin, end = (tensor.shape[0] * bound // num_ranks for bound in (rank, rank + 1))
        return LocalChunks(tensor.shape, [(begin, *[0] * (tensor.dim() - 1))], [tensor[begin:end]], tensor.dtype)

    return [{name: rows(tensor, rank) for name, tensor in state.items()} for rank in range(num_ranks)]


def save_by_hand(states: list[dict[str, Any]], path: Path) -> None:
    """Saves ``states``, one for each rank."""
    writers = [BcpWriter(path, sync_files=False, config=_CONFIG) for _ in states]
    planners = [BcpSavePlanner() for _ in states]
    local_plans: list[Any] = [None for _ in states]
    # A save that begins ends an earlier save of its thread, and all of these are in one thread. Only the coordinator's
    # save would lose anything by that, so it begins last.
    for rank in reversed(range(len(states))):
        storage_meta = writers[rank].storage_meta()
        planners[rank].set_up_planner(states[rank], storage_meta, rank == 0)
        writers[rank].set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        local_plans[rank] = writers[rank].prepare_local_plan(planners[rank].create_local_plan())
    told, metadata = planners[0].create_global_plan([sent(plan) for plan in local_plans])
    told = writers[0].prepare_global_plan(told)
    results = [
        sent(writer.write_data(planner.finish_plan(sent(plan)), planner).value())
        for writer, planner, plan in zip(writers, planners, told, strict=True)
    ]
    writers[0].finish(metadata, results)


def load_by_hand(
    states: list[dict[str, Any]], path: Path, look: Callable[[BcpLoadPlanner], None] | None = None
) -> None:
    """Loads into ``states``, one for each rank.

    Args:
        look: Called with the planner of each rank once the planner is set up.
    """
    readers = [BcpReader(path, config=_CONFIG) for _ in states]
    planners = [BcpLoadPlanner() for _ in states]
    local_plans = []
    for rank, (reader, planner) in enumerate(zip(readers, planners, strict=True)):
        metadata = reader.read_metadata()
        planner.set_up_planner(states[rank], metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank, use_collectives=True)
        if look is not None:
            look(planner)
        local_plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    told = readers[0].prepare_global_plan(planners[0].create_global_plan([sent(plan) for plan in local_plans]))
    for reader, planner, plan in zip(readers, planners, told, strict=True):
        reader.read_data(planner.finish_plan(sent(plan)), planner).wait()
