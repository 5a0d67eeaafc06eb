# SPDX-License-Identifier: Apache-2.0
"""What a tensor subclass says of itself besides its tensors, as values of JSON that can be stored and compared."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
from typing import Any

import torch

__all__ = ["NotPlainError", "difference", "plain_context"]

_AS_THEY_ARE = (type(None), bool, int, float, str)
_AS_TEXT = (torch.dtype, torch.layout, torch.memory_format)


class NotPlainError(Exception):
    """A value cannot be said in values of JSON."""


def plain_context(value: Any) -> Any:
    """Returns what ``__tensor_flatten__`` gives as the context, in values of JSON.

    It describes the context and cannot make it again: a load has a tensor of the class already. Devices are left out,
    because a tensor may be loaded on another one. Enums, classes and functions are named; of dataclasses and named
    tuples their fields are listed with the name of the class.

    Raises:
        NotPlainError: Something in it is of another type, such as a tensor, a lambda or an object.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain_context(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": kind.__qualname__, "fields": fields}
    if kind in (list, tuple, torch.Size):
        return [plain_context(each) for each in value]
    names = getattr(kind, "__match_args__", None) if isinstance(value, tuple) else None
    if names is not None:  # a named tuple
        return {"class": kind.__qualname__, "fields": {name: plain_context(getattr(value, name)) for name in names}}
    if kind is dict and all(type(key) is str for key in value):
        return {key: plain_context(each) for key, each in value.items()}
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and "<" not in value.__qualname__:
        return value.__qualname__
    raise NotPlainError(kind.__qualname__)


def difference(stored: Any, own: str) -> str | None:
    """Compares the description of a stored tensor, which may be anything, with that of the one to fill.

    Returns:
        The first difference, for a message; None if there is none. Sizes may differ where both are those of the tensor,
        such as the number of rows that this rank holds.
    """
    try:
        described = json.loads(stored)
    except (TypeError, ValueError, RecursionError) as error:
        return f"its description cannot be read: {error}"
    return _difference_of_classes(described, json.loads(own))


def _difference_of_classes(stored: Any, own: dict[str, Any]) -> str | None:
    if not isinstance(stored, dict):
        return f"its description is a {type(stored).__name__}"
    if stored.get("class") != own["class"]:
        return f"stored is a {stored.get('class')}, to be loaded into a {own['class']}"
    if _sorted(stored.get("parts")) != _sorted(own.get("parts")):
        return f"stored are the parts {stored.get('parts')}, the tensor to fill has {own.get('parts')}"
    found = _difference(stored.get("context"), own["context"], (stored.get("shape"), own["shape"]), "context")
    if found is not None:
        return found
    below = stored.get("inner")
    for name, inner in own["inner"].items():
        found = _difference_of_classes(below.get(name) if isinstance(below, dict) else None, inner)
        if found is not None:
            return f"{name}: {found}"
    return None


def _sorted(names: Any) -> Any:
    return sorted(map(str, names)) if isinstance(names, list) else names


def _difference(stored: Any, own: Any, shapes: tuple[Any, Any], where: str) -> str | None:
    if isinstance(own, dict) and isinstance(stored, dict) and stored.keys() == own.keys():
        each = (_difference(stored[name], own[name], shapes, f"{where}.{name}") for name in own)
    elif isinstance(own, list) and isinstance(stored, list) and len(stored) == len(own):
        pairs = [*zip(stored, own, strict=True)]
        if _are_sizes(stored, own, shapes):
            pairs = [pair for pair, sizes in zip(pairs, zip(*shapes, strict=True), strict=True) if pair != sizes]
        each = (_difference(a, b, shapes, where) for a, b in pairs)
    else:
        is_same = type(stored) is type(own) and (stored == own or (stored != stored and own != own))
        return None if is_same else f"{where}: stored is {stored!r}, the tensor to fill has {own!r}"
    return next((found for found in each if found is not None), None)


def _are_sizes(stored: list[Any], own: list[Any], shapes: tuple[Any, Any]) -> bool:
    """Whether both are a number for each dim."""
    lists = (stored, own, *shapes)
    are_ints = all(isinstance(each, list) and all(type(size) is int for size in each) for each in lists)
    return are_ints and len({*map(len, lists)}) == 1
