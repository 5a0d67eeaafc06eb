# SPDX-License-Identifier: Apache-2.0
"""How the tensors that an optimizer keeps for a parameter lie: as DTensors or plain, and in which order of dims.

DCP stores elements by their place in the whole tensor, so a checkpoint says neither. A load makes a tensor as the
parameter is, if it has the parameter's shape, and else a plain one in row-major order. A ``Layout`` is recorded for
each tensor that would come back otherwise than it was: kernels sum in the order of memory, and a step of an optimizer
fails with a plain tensor beside DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.errors import InvalidPlanError

__all__ = ["LAYOUTS", "Layout", "layouts_of", "parsed_layouts", "recorded_layouts"]

LAYOUTS = "layouts"  # the field of the description of the part

_FIELDS = ("axes", "order", "keys")
_SAME = "="  # sharded over an axis of the mesh as the parameter is
_OTHER = "other"  # on another mesh than the parameter, or sharded in a way that has no name here


@dataclass(frozen=True)
class Layout:
    """How a tensor lies.

    Attributes:
        axes: For each axis of the parameter's mesh how the parameter is placed on it, and how the tensor is. Empty for
            a plain tensor.
        order: Dims of the local tensor, that with the largest stride first; empty if they ascend.
    """

    axes: tuple[tuple[str, str], ...] = ()
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, parameter: torch.Tensor) -> Layout:
        """Returns the layout of a tensor that is kept for ``parameter``."""
        if not isinstance(tensor, DTensor):
            return cls(order=_order_of(tensor))
        order = _order_of(_local(tensor))
        if not isinstance(parameter, DTensor) or tensor.device_mesh != parameter.device_mesh:
            return cls(((_OTHER, _OTHER),), order)
        placed = zip(parameter.placements, tensor.placements, strict=True)
        return cls(tuple((_name_of(of), _SAME if its == of else _name_of(its)) for of, its in placed), order)

    def made(
        self, before: Any, parameter: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device | None
    ) -> torch.Tensor:
        """Returns a tensor of this layout: ``before`` if it is one, else a new one of zeros.

        On another mesh than that of the save, the new one is placed on each axis as it was on an axis on which the
        parameter was placed alike, and is replicated on others. If the parameter is no DTensor now, it is plain.

        Args:
            before: What the optimizer has in its place.
            parameter: The parameter as it is now.
            shape: Shape of the whole tensor.
            dtype: Its dtype.
            device: Device of a plain tensor; None takes the default device.

        Raises:
            InvalidPlanError: It was on another mesh than the parameter, and ``before`` is no tensor of this shape.
        """
        if isinstance(before, torch.Tensor) and before.shape == shape:
            local = _local(before) if isinstance(before, DTensor) else before
            is_kind = isinstance(before, DTensor) == (bool(self.axes) and isinstance(parameter, DTensor))
            if self._is_on_other_mesh or (is_kind and _order_of(local) == self.order):
                return before
        if not self.axes or not isinstance(parameter, DTensor):
            return _zeros(shape, self.order, dtype, device)
        if self._is_on_other_mesh:
            raise InvalidPlanError(
                f"a DTensor of {[*shape]} was on another mesh than its parameter, which only the optimizer can make: "
                "let it make its state before the load, by a step with lr=0 and gradients of zeros"
            )
        mesh, placements = parameter.device_mesh, self._placements(parameter)
        like = empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
        local = _zeros(_local(like).shape, self.order, dtype, _local(parameter).device)
        strides = _zeros(shape, self.order, dtype, torch.device("meta")).stride()
        spec = DTensor.from_local(_local(like), mesh, placements, run_check=False, shape=shape, stride=strides)
        return _compat.like_dtensor(spec, local)

    @property
    def _is_on_other_mesh(self) -> bool:
        return any(_OTHER in axis for axis in self.axes)

    def _placements(self, parameter: DTensor) -> list[Any]:
        placed = [*parameter.placements]
        kinds = [_name_of(each) for each in placed]
        by_kind = dict(self.axes)
        is_alike = kinds == [of for of, _ in self.axes]
        names = (
            [its for _, its in self.axes] if is_alike else [by_kind.get(kind, _name_of(Replicate())) for kind in kinds]
        )
        return [of if name == _SAME else _placement_of(name) for of, name in zip(placed, names, strict=True)]


def layouts_of(key: str, value: Any, parameter: torch.Tensor) -> Iterator[tuple[str, Layout]]:
    """Yields the layout of each tensor in a state of a parameter that a load would make otherwise, by its key.

    Args:
        key: Key of the state.
        value: The state: a tensor, or lists and dicts with tensors.
        parameter: The parameter.
    """
    if isinstance(value, Mapping | list):
        for step, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from layouts_of(f"{key}.{step}", inner, parameter)
        return
    local = _local(value) if type(value) is DTensor else value
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
        return  # no tensor, or one that is loaded into what the optimizer has
    layout = Layout.of(value, parameter)
    is_like_parameter = value.shape == parameter.shape and not (value.ndim == 0 and key.endswith(".step"))
    if layout != (Layout.of(parameter, parameter) if is_like_parameter else Layout()):
        yield key, layout


def recorded_layouts(layouts: Mapping[str, Layout]) -> list[dict[str, Any]]:
    """Returns layouts in values of JSON: each layout once, with the keys of all tensors that have it."""
    keys: dict[Layout, list[str]] = {}
    for key, layout in layouts.items():
        keys.setdefault(layout, []).append(key)
    return [
        {"axes": [[*axis] for axis in layout.axes], "order": [*layout.order], "keys": of_layout}
        for layout, of_layout in keys.items()
    ]


def parsed_layouts(recorded: Any) -> dict[str, Layout]:
    """Returns what ``recorded_layouts`` recorded, by key. Anybody may have written it: what is none is left out."""
    layouts: dict[str, Layout] = {}
    for each in recorded if isinstance(recorded, list) else ():
        if not isinstance(each, dict) or not all(
            isinstance(each.get(name), list) for name in ("axes", "order", "keys")
        ):
            continue
        axes, order = each["axes"], each["order"]
        are_axes = all(isinstance(axis, list) and len(axis) == 2 and all(map(_is_text, axis)) for axis in axes)
        if are_axes and all(type(dim) is int for dim in order) and sorted(order) == [*range(len(order))]:
            layout = Layout(tuple((of, its) for of, its in axes), tuple(order))
            layouts.update((key, layout) for key in each["keys"] if isinstance(key, str))
    return layouts


def _local(dtensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return dtensor.to_local()


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the dims, that with the largest stride first; empty if they ascend, or if elements share memory."""
    if tensor.is_contiguous() or 0 in tensor.stride():
        return ()
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return () if order == tuple(range(tensor.ndim)) else order


def _zeros(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    if len(order) != len(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    in_order = torch.zeros([shape[dim] for dim in order], dtype=dtype, device=device)
    return in_order.permute([order.index(dim) for dim in range(len(order))])


def _name_of(placement: Any) -> str:
    if placement.is_replicate():
        return "replicate"
    return f"shard {placement.dim}" if type(placement) is Shard or hasattr(placement, "split_factor") else _OTHER


def _placement_of(name: str) -> Any:
    kind, _, dim = name.partition(" ")
    return Shard(int(dim)) if kind == "shard" and dim.isdecimal() else Replicate()
