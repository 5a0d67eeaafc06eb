# SPDX-License-Identifier: Apache-2.0
"""How one rank carries out its save plan: it hands each value to the engine."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.dcp._unsafe import UnsafeObjects
from bytecheckpoint.dcp.save_planner import BcpSavePlanner, as_plain, kept_state
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.native import _C, _core
from bytecheckpoint.tensors.dtensor_pieces import refuse_pieces
from bytecheckpoint.tensors.hidden_tensors import refuse_hidden_tensors

__all__ = ["execute_plan"]

# Tensors that resolve to memory of the state dict are resolved and copied in batches of about this size.
_BATCH_BYTES = 64 << 20

# A tensor that torch.save has to store: its position in the plan, and either the tensor of the state or the archive, if
# that is already made.
_Opaque = tuple[int, torch.Tensor | io.BytesIO]


def execute_plan(job: _C.SaveJob, plan: _C.WritePlan, planner: SavePlanner, unsafe: UnsafeObjects) -> None:
    """Hands all values of ``plan`` to ``job``.

    If the hooks per item need not be called (see ``as_plain``), the values come from the state dict itself. Otherwise
    the planner resolves them.
    """
    plain = as_plain(planner) if plan.is_of_state else None
    if plain is None:
        _append_resolved(job, plan, planner, unsafe)
    else:
        _append_state(job, plan, plain, unsafe)


def _append_state(job: _C.SaveJob, plan: _C.WritePlan, planner: BcpSavePlanner, unsafe: UnsafeObjects) -> None:
    """Hands over a plan that C++ made of a state dict. The planner resolves one by one what only torch can handle."""
    opaque: list[_Opaque] = []
    for position in job.append_state(plan, planner.state_dict, _compat.current_stream):
        opaque += _append_batch(job, plan, planner, position, position + 1)
    _append_opaque(job, plan, opaque, unsafe)
    for position in range(plan.num_objects):
        fqn = plan.object_fqn(position)
        data = _core.dump_builtin(planner.state_dict[fqn])
        if data is None:
            _append_object(job, plan.object_item(position), planner, unsafe)
        else:
            job.append_bytes(fqn, data)


def _append_resolved(job: _C.SaveJob, plan: _C.WritePlan, planner: SavePlanner, unsafe: UnsafeObjects) -> None:
    """Hands over a plan as the planner resolves it. Each item is resolved as late as possible."""
    state = kept_state(planner)
    if state is not None and not plan.is_of_state:
        refuse_pieces(state)  # the boxes in the plan of DCP's planner would be wrong
    opaque: list[_Opaque] = []
    for begin, end in _batches(plan, planner):
        opaque += _append_batch(job, plan, planner, begin, end)
    _append_opaque(job, plan, opaque, unsafe)
    for position in range(plan.num_objects):
        _append_object(job, plan.object_item(position), planner, unsafe)


def _batches(plan: _C.WritePlan, planner: SavePlanner) -> Iterator[tuple[int, int]]:
    """Yields ranges of tensors that may all be resolved before one of them is used.

    A planner may resolve every item to the same memory, because DCP uses each before it asks for the next. The ranges
    of such a planner have one tensor each.
    """
    for begin, end in plan.batches(_BATCH_BYTES):
        if _are_kept(plan, planner, begin, end):
            yield begin, end
        else:
            yield from ((position, position + 1) for position in range(begin, end))


def _are_kept(plan: _C.WritePlan, planner: SavePlanner, begin: int, end: int) -> bool:
    """Returns whether a range of tensors resolves to memory of the state, which later calls of hooks do not change."""
    state = kept_state(planner)
    return state is not None and not any(
        _compat.gives_shards(state.get(plan.tensor_item(position).index.fqn)) for position in range(begin, end)
    )


def _append_batch(job: _C.SaveJob, plan: _C.WritePlan, planner: SavePlanner, begin: int, end: int) -> list[_Opaque]:
    """Hands over the plain tensors of a range. Returns those that only torch.save can store.

    The engine gets those after all plain tensors of the plan.
    """
    values = [planner.resolve_data(plan.tensor_item(position)) for position in range(begin, end)]
    opaque: list[_Opaque] = []
    for position, value in _append_values(job, plan, begin, values):
        is_kept = _are_kept(plan, planner, position, position + 1)
        opaque.append((position, value if is_kept else _archive(plan.tensor_item(position), value)))
    return opaque


def _append_values(
    job: _C.SaveJob, plan: _C.WritePlan, begin: int, values: list[Any]
) -> list[tuple[int, torch.Tensor]]:
    """Hands over plain tensors. Returns those that only torch.save can store, with their positions in the plan."""
    opaque: list[tuple[int, torch.Tensor]] = []
    for position in job.append_tensors(plan, begin, values, _compat.current_stream):
        value = values[position]
        item = plan.tensor_item(begin + position)
        if not isinstance(value, torch.Tensor):
            raise _not_storable(item, value, "not a tensor")
        if item.tensor_data is not None and value.shape != item.tensor_data.chunk.sizes:
            raise _not_storable(item, value, f"planned {[*item.tensor_data.chunk.sizes]}, got {[*value.shape]}")
        tensor = _compat.plain_tensor(value)
        if tensor is None or tensor.dtype not in _compat.PLAIN_DTYPES:
            opaque.append((begin + position, value))
        elif job.append_tensors(plan, begin + position, [tensor], _compat.current_stream):
            raise _not_storable(item, value, "its storage is smaller than its elements: its memory was freed")
    return opaque


def _append_opaque(job: _C.SaveJob, plan: _C.WritePlan, opaque: list[_Opaque], unsafe: UnsafeObjects) -> None:
    """Hands over the opaque tensors, as archives of torch.save. All plain tensors must come before them."""
    for position, value in opaque:
        item = plan.tensor_item(position)
        # `with` releases the buffer even if an error is raised: the garbage collector of some Python versions crashes
        # on a buffer that the frames of an error hold.
        with (value if isinstance(value, io.BytesIO) else _archive(item, value)).getbuffer() as archive:
            unsafe.look(item.index.fqn, archive)
            job.append_opaque(plan, position, archive)


def _archive(item: WriteItem, value: torch.Tensor) -> io.BytesIO:
    """Returns the archive that torch.save makes of a tensor that is not plain.

    Such a tensor is quantized, of a subclass, or of a dtype without arithmetic.

    Raises:
        InvalidPlanError: torch.save fails, or it would leave out tensors in attributes.
    """  # noqa: DOC501
    refuse_hidden_tensors(value, item.index.fqn)
    buffer = io.BytesIO()
    try:
        value = value.detach().cpu()
        if _compat.holds_more_than_itself(value):
            value = value.clone()
        torch.save(value, buffer)
    except Exception as error:
        raise _not_storable(item, value, f"{type(error).__name__}: {error}") from error
    return buffer


def _not_storable(item: WriteItem, value: object, why: str) -> InvalidPlanError:
    return InvalidPlanError(f"'{item.index.fqn}': a {type(value).__name__} cannot be stored as a tensor ({why})")


def _append_object(job: _C.SaveJob, item: WriteItem, planner: SavePlanner, unsafe: UnsafeObjects) -> None:
    with _resolved_bytes(item, planner) as data:  # the next object may use the same memory
        unsafe.look(item.index.fqn, data)
        job.append_bytes(item.index.fqn, data)


def _resolved_bytes(item: WriteItem, planner: SavePlanner) -> memoryview:
    try:
        data = planner.resolve_data(item)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        if "pickle" not in str(error):
            raise  # of a planner's own
        raise InvalidPlanError(
            f"'{item.index.fqn}': the object cannot be pickled: {error}; leave it out of the state, or save what its "
            "state_dict() returns"
        ) from error
    if not isinstance(data, io.BytesIO):
        raise InvalidPlanError(
            f"'{item.index.fqn}': resolve_data of the planner must return a BytesIO, got a {type(data).__name__}"
        )
    return data.getbuffer()
