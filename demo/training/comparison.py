# SPDX-License-Identifier: Apache-2.0
"""Exact comparison of two state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Comparison:
    """Counts what was compared, and lists every place where the two sides differ."""

    num_tensors: int = 0
    tensor_bytes: int = 0
    num_values: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        compared = f"{self.num_tensors} tensors ({self.tensor_bytes / 1e6:.1f} MB) and {self.num_values} other values"
        if self.equal:
            return f"{compared} are equal"
        shown = "; ".join(self.differences[:3])
        return f"of {compared}, {len(self.differences)} differ: {shown}"


def compare(wanted: Any, got: Any) -> Comparison:
    """Compares two trees of dicts, lists and tuples: structure, types, every value, every element of every tensor."""
    result = Comparison()
    _compare_node("", wanted, got, result)
    return result


def _compare_node(path: str, wanted: Any, got: Any, result: Comparison) -> None:
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        for key in sorted(wanted.keys() | got.keys(), key=str):
            child = f"{path}.{key}" if path else str(key)
            if key not in got:
                result.differences.append(f"{child} is missing")
            elif key not in wanted:
                result.differences.append(f"{child} is unexpected")
            else:
                _compare_node(child, wanted[key], got[key], result)
    elif isinstance(wanted, (list, tuple)) and type(wanted) is type(got) and len(wanted) == len(got):
        for index, pair in enumerate(zip(wanted, got, strict=True)):
            _compare_node(f"{path}[{index}]", *pair, result)
    elif isinstance(wanted, torch.Tensor) and isinstance(got, torch.Tensor):
        _compare_tensor(path, wanted, got, result)
    else:
        result.num_values += 1
        if type(wanted) is not type(got) or wanted != got:
            result.differences.append(f"{path}: wanted {wanted!r}, got {got!r}"[:200])


def _compare_tensor(path: str, wanted: torch.Tensor, got: torch.Tensor, result: Comparison) -> None:
    result.num_tensors += 1
    result.tensor_bytes += wanted.numel() * wanted.element_size()
    if wanted.dtype != got.dtype or wanted.shape != got.shape:
        wanted_kind, got_kind = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (wanted, got))
        result.differences.append(f"{path}: wanted {wanted_kind}, got {got_kind}")
    elif not torch.equal(wanted, got):
        num_different = int((wanted != got).sum())
        result.differences.append(f"{path}: {num_different} of {wanted.numel()} elements differ")


def blank_copy(node: Any) -> Any:
    """Copies a tree with the same keys, shapes and types but none of its values, to load into and then compare.

    The copy keeps placements of DTensors. Floating-point tensors become NaN, so an element that nobody loaded differs.
    """
    if isinstance(node, torch.Tensor):
        empty = torch.zeros_like(node)
        return empty.fill_(float("nan")) if node.is_floating_point() else empty
    if isinstance(node, Mapping):
        return {key: blank_copy(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(blank_copy(value) for value in node)
    return None if node is None else type(node)()
