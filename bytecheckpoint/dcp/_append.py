# SPDX-License-Identifier: Apache-2.0
"""One rank's writing of one plan: what becomes of each value on its way into the engine."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from bytecheckpoint import _C, _core
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp.save_planner import BcpSavePlanner, as_plain
from bytecheckpoint.errors import InvalidPlanError

__all__ = ["append_plan"]

# Tensors are resolved and copied in batches of about this size: a planner that makes new tensors as it resolves
# (casts, gathers) never has more of them alive.
_BATCH_BYTES = 64 << 20


def append_plan(job: _C.SaveJob, plan: _C.WritePlan, planner: SavePlanner) -> None:
    """All that ``plan`` says: from the state dict itself where nobody would miss the calls per item."""
    plain = as_plain(planner) if plan.is_of_state else None
    if plain is None:
        _append_resolved(job, plan, planner)
    else:
        _append_state(job, plan, plain)


def _append_state(job: _C.SaveJob, plan: _C.WritePlan, planner: BcpSavePlanner) -> None:
    """All of a plan that C++ made of a state dict; what only torch can handle is resolved one by one."""
    opaque: list[tuple[int, torch.Tensor]] = []
    for position in job.append_state(plan, planner.state_dict):
        opaque += _append_values(job, plan, position, [planner.resolve_data(plan.tensor_item(position))])
    _append_opaque(job, plan, opaque)
    for position in range(plan.num_objects):
        fqn = plan.object_fqn(position)
        data: bytes | memoryview | None = _core.dump_builtin(planner.state_dict[fqn])
        job.append_bytes(fqn, _resolved_bytes(plan.object_item(position), planner) if data is None else data)


def _append_resolved(job: _C.SaveJob, plan: _C.WritePlan, planner: SavePlanner) -> None:
    """All of a plan as the planner resolves it, item by item and as late as possible."""
    opaque: list[tuple[int, torch.Tensor]] = []
    for begin, end in plan.batches(_BATCH_BYTES):
        values = [planner.resolve_data(plan.tensor_item(position)) for position in range(begin, end)]
        opaque += _append_values(job, plan, begin, values)
    _append_opaque(job, plan, opaque)
    for position in range(plan.num_objects):
        item = plan.object_item(position)
        job.append_bytes(item.index.fqn, _resolved_bytes(item, planner))


def _append_values(
    job: _C.SaveJob, plan: _C.WritePlan, begin: int, values: list[Any]
) -> list[tuple[int, torch.Tensor]]:
    """Plain tensors as they are; returns those that only torch.save can take, with their positions in the plan."""
    opaque: list[tuple[int, torch.Tensor]] = []
    for position in job.append_tensors(plan, begin, values):
        value = values[position]
        item = plan.tensor_item(begin + position)
        if not isinstance(value, torch.Tensor):
            raise _not_storable(item, value, "not a tensor")
        if item.tensor_data is not None and value.shape != item.tensor_data.chunk.sizes:
            raise _not_storable(item, value, f"planned {[*item.tensor_data.chunk.sizes]}, got {[*value.shape]}")
        tensor = _compat.plain_tensor(value)
        if tensor is None or tensor.dtype not in _compat.PLAIN_DTYPES:
            opaque.append((begin + position, value))
        elif job.append_tensors(plan, begin + position, [tensor]):
            raise _not_storable(item, value, "its storage holds less than its elements: it was freed")
    return opaque


def _append_opaque(job: _C.SaveJob, plan: _C.WritePlan, opaque: list[tuple[int, torch.Tensor]]) -> None:
    """Behind all plain ones."""
    for position, value in opaque:
        job.append_opaque(plan, position, _archive(plan.tensor_item(position), value))


def _archive(item: WriteItem, value: torch.Tensor) -> memoryview:
    """What torch.save makes of a tensor that is not plain: quantized, of a subclass, of a dtype without arithmetic."""
    buffer = io.BytesIO()
    try:
        value = value.detach().cpu()
        if _compat.holds_more_than_itself(value):
            value = value.clone()
        torch.save(value, buffer)
    except Exception as error:
        raise _not_storable(item, value, f"{type(error).__name__}: {error}") from error
    return buffer.getbuffer()


def _not_storable(item: WriteItem, value: object, why: str) -> InvalidPlanError:
    return InvalidPlanError(f"'{item.index.fqn}': a {type(value).__name__} cannot be stored as a tensor ({why})")


def _resolved_bytes(item: WriteItem, planner: SavePlanner) -> memoryview:
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise InvalidPlanError(f"'{item.index.fqn}': the planner resolved bytes to a {type(data).__name__}")
    return data.getbuffer()
