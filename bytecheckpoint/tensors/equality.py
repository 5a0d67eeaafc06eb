# SPDX-License-Identifier: Apache-2.0
"""Compares two values exactly, to the last bit. Imports torch."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

__all__ = ["are_equal", "bits"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of ``tensor`` as uint8, with one row per element."""
    plain = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).reshape(plain.numel(), -1)


def are_equal(a: Any, b: Any) -> bool:
    """Returns whether two values are equal in type and value. NaN equals NaN; tensors are compared bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.layout != torch.strided:
            return are_equal(a.to_dense(), b.to_dense())
        return torch.equal(bits(a.detach()), bits(b.detach()))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(are_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(are_equal, a, b))
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    with suppress(Exception):  # an array has no truth value, and `==` of an object may raise
        if a == b:
            return True
    return _bytes_of(a) == _bytes_of(b) is not None  # arrays, and objects without `==`


def _bytes_of(value: Any) -> bytes | None:
    with suppress(Exception):
        return pickle.dumps(value)
    return None
