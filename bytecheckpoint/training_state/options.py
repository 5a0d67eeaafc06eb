# SPDX-License-Identifier: Apache-2.0
"""Values of optimizers: how options are compared, and in which form an optimizer has what is loaded."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from bytecheckpoint.tensors.equality import are_equal

__all__ = ["as_before", "is_same"]


def is_same(a: Any, b: Any) -> bool:
    """Whether two options are equal. Numbers are compared by value, so 1 equals 1.0, and NaN equals NaN."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if are_equal(a, b):
        return True
    with suppress(Exception):  # an array has no truth value
        return bool(a == b)
    return False


def as_before(current: Any, value: Any) -> Any:
    """Converts a value to the form that the optimizer has now: a number in a tensor, or a plain number.

    A tensor is filled in place, because a captured CUDA graph reads it at its address.
    """
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        return current.copy_(value)
    if isinstance(current, torch.Tensor) and isinstance(value, (int, float)) and current.numel() == 1:
        return current.fill_(value)
    is_number = isinstance(current, (int, float)) and not isinstance(current, bool)
    if is_number and isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value
