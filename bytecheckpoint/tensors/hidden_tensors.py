# SPDX-License-Identifier: Apache-2.0
"""Tensors of subclasses that keep other tensors in attributes which neither torch.save nor DCP sees.

``Params4bit`` of bitsandbytes is such a Parameter: its elements are codes, and ``quant_state`` has their scales. Its
``detach()``, which every save calls, is a plain tensor of the codes, and ``copy_`` fills the codes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bytecheckpoint.errors import InvalidPlanError

__all__ = ["refuse_hidden_tensors"]

_MOST_DEPTH = 4  # of objects within objects


def refuse_hidden_tensors(value: object, key: str) -> None:
    """Refuses a tensor of a subclass, of which only the elements would be saved or loaded, and not the rest.

    Plain tensors, Parameters and classes of torch may have any attributes. So may subclasses that describe themselves
    by ``__tensor_flatten__``, or handle operators themselves: what torch.save writes of them has the attributes.

    Args:
        value: Any value of a state dict.
        key: Its key.

    Raises:
        InvalidPlanError: An attribute holds tensors. The message names it.
    """
    if type(value) is DTensor:
        with torch.no_grad():
            value = value.to_local()
    kind: Any = type(value)
    if not isinstance(value, torch.Tensor) or kind.__module__.partition(".")[0] in ("torch", "bytecheckpoint"):
        return
    dispatch = getattr(kind.__torch_dispatch__, "__func__", kind.__torch_dispatch__)
    plain_dispatch = getattr(torch.Tensor.__torch_dispatch__, "__func__", torch.Tensor.__torch_dispatch__)
    if hasattr(kind, "__tensor_flatten__") or dispatch is not plain_dispatch:
        return
    names = [name for name, each in vars(value).items() if _holds_tensors(each, _MOST_DEPTH, {id(value)})]
    if not {*names} <= {*vars(value.detach())}:
        raise InvalidPlanError(
            f"'{key}': a {kind.__name__} keeps tensors in {', '.join(map(repr, names))}, and only its own elements "
            "would be saved and loaded: give each of these tensors a key, as state_dict() of the module may do "
            "for you, or pass tensor.data if the elements are all that you want"
        )


def _holds_tensors(value: Any, depth: int, seen: set[int]) -> bool:
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        return True
    if depth == 0 or id(value) in seen or isinstance(value, torch.nn.Module | type):
        return False  # a module is no part of a parameter, but where it belongs
    seen.add(id(value))
    return any(_holds_tensors(each, depth - 1, seen) for each in _within(value))


def _within(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif not callable(value):
        yield from getattr(value, "__dict__", {}).values()
