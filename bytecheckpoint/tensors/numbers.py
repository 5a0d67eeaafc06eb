# SPDX-License-Identifier: Apache-2.0
"""Numbers that a checkpoint has where the state has a tensor without dims, such as the step of an optimizer."""

from __future__ import annotations

from typing import Any

import torch

from bytecheckpoint.tensors.chunks import LocalChunks

__all__ = ["dtype_of_number", "fill_with_number", "has_value"]


def dtype_of_number(value: object) -> str | None:
    """Returns the name of the dtype that has all values of a number's type; None for what is no number."""
    if isinstance(value, bool):
        return "bool"
    for kind, dtype in ((int, "int64"), (float, "float64"), (complex, "complex128")):
        if isinstance(value, kind):
            return dtype
    return None


def has_value(dtype: torch.dtype, value: Any) -> bool | None:
    """Returns whether a dtype has the number exactly; None if it has no number near it, or torch cannot tell."""
    try:
        nearest = torch.empty((), dtype=dtype, device="cpu").fill_(value).item()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None
    return bool(nearest == value) or (nearest != nearest and value != value)


def fill_with_number(target: torch.Tensor, value: Any) -> None:
    """Sets the only element of a tensor without dims, in place; of ``LocalChunks`` that of each of its tensors."""
    for tensor in target.tensors if isinstance(target, LocalChunks) else (target,):
        tensor.detach().fill_(value)
