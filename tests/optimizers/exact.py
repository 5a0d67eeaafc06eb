# SPDX-License-Identifier: Apache-2.0
"""A description of training state that must be equal, and where two of them differ first."""

from __future__ import annotations

from typing import Any

import torch
from support.equality import raw
from torch.distributed.tensor import DTensor

__all__ = ["described", "difference"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def described(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Returns all that must be equal of a value: classes, dtypes, shapes, strides, placements and bytes.

    It shares no memory with the value, so it stays as it is when training goes on.
    """
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)  # NaN is equal to NaN, and 1 is not 1.0
    if id(value) in within:
        return "a cycle"
    within = (*within, id(value))
    if isinstance(value, dict):
        return {_key(key): described(each, within) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return {"class": type(value).__name__, **{str(n): described(each, within) for n, each in enumerate(value)}}
    if isinstance(value, torch.Generator):
        return {"class": "Generator", "state": described(value.get_state())}
    if callable(value) or not hasattr(value, "__dict__"):
        return type(value).__name__, getattr(value, "__qualname__", repr(value))
    return {"class": type(value).__name__, **described(vars(value), within)}


def _key(key: Any) -> str:
    return key if isinstance(key, str) else f"{type(key).__name__} {key}"


def _of_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    about: dict[str, Any] = {"class": type(tensor).__name__, "dtype": str(tensor.dtype), "shape": (*tensor.shape,)}
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        placed = {"mesh": str(tensor.device_mesh), "placements": str(tensor.placements)}
        return {**about, **placed, "local": _of_tensor(tensor.to_local())}
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        return {**about, "context": str(context), **{name: _of_tensor(getattr(tensor, name)) for name in names}}
    if tensor.layout != torch.strided:
        return {**about, "layout": str(tensor.layout), "elements": str(tensor.to_dense().tolist())}
    # The stride of a dim of one element, or of no elements, says nothing about the memory.
    counting = tensor.numel() > 0
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if counting and size > 1)
    return {**about, "strides": strides, "elements": raw(tensor).numpy().tobytes()}


def difference(got: Any, wanted: Any, path: str = "") -> str:
    """Returns where two descriptions differ first, and how; an empty text if they are equal."""
    if isinstance(got, dict) and isinstance(wanted, dict):
        for key in wanted.keys() - got.keys():
            return f"{path}.{key} is missing"
        for key in got.keys() - wanted.keys():
            return f"{path}.{key} is too much"
        return next((text for key in wanted if (text := difference(got[key], wanted[key], f"{path}.{key}"))), "")
    if got == wanted:
        return ""
    if isinstance(got, bytes):
        return f"{path} has other values"
    return f"{path} is {_short(got)} and was {_short(wanted)}"


def _short(described_value: Any) -> str:
    text = f"a {described_value.get('class', 'dict')}" if isinstance(described_value, dict) else str(described_value)
    return text[:80]
