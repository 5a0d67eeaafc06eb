# SPDX-License-Identifier: Apache-2.0
"""Compares the values of two checkpoints, a few megabytes at a time. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bytecheckpoint.cli.statistics import in_float64
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import Item
from bytecheckpoint.contents.values import Box, open_values, pieces
from bytecheckpoint.errors import UnsafeObjectError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.tensors.equality import are_equal, bits

__all__ = ["Comparison", "Tolerance"]


@dataclass(frozen=True)
class Tolerance:
    """By how much values of floating-point tensors may differ, as in ``torch.isclose`` with ``equal_nan``.

    Attributes:
        relative: Part of the value of the second checkpoint.
        absolute: Added to that.
    """

    relative: float = 0.0
    absolute: float = 0.0


class Comparison:
    """Compares two checkpoints.

    Args:
        a: Path of the first checkpoint.
        b: Path of the second checkpoint.
        config: Settings.
        spec_a: What to take of the first checkpoint; None takes all of it.
        spec_b: What to take of the second checkpoint.
        tolerance: By how much values may differ; None compares every bit.

    Attributes:
        a: Contents of the first checkpoint, from its metadata.
        b: Contents of the second checkpoint, from its metadata.
    """

    def __init__(
        self,
        a: str,
        b: str,
        config: Config,
        spec_a: LoadSpec | None = None,
        spec_b: LoadSpec | None = None,
        tolerance: Tolerance | None = None,
    ) -> None:
        self._tolerance = tolerance
        self.a, of_a = open_values(a, config, spec_a)
        self.b, of_b = open_values(b, config, spec_b)
        self._a = {(values.part.component, values.part.rank): values for values in of_a}
        self._b = {(values.part.component, values.part.rank): values for values in of_b}

    @property
    def bytes_read(self) -> int:
        return sum(values.bytes_read for values in (*self._a.values(), *self._b.values()))

    def tensors(self, a: Item, b: Item, tell: Callable[[], None], dtype: str | None = None) -> dict[str, Any] | None:
        """Compares two tensors of one shape and dtype.

        Args:
            a: The tensor in the first checkpoint.
            b: The tensor in the second checkpoint.
            tell: Called after each read, to update a progress bar.
            dtype: Dtype to which the first one is converted before; None compares it as it is.

        Returns:
            None if the tensors are equal. Otherwise a dict. ``elements``: how many were compared. ``different``: how
            many of them differ bit by bit, or by more than the tolerance. ``max_abs_difference``: the largest
            difference among these, without NaN. ``nan_in_one``: how many are NaN in only one tensor. ``only_in_one``:
            how many are stored in only one.
        """
        out: dict[str, Any] = {
            "elements": 0,
            "different": 0,
            "max_abs_difference": None,
            "nan_in_one": 0,
            "only_in_one": 0,
        }
        both = 0
        for chunk in a.chunks or ():
            for box in pieces(Box(chunk.offsets, chunk.sizes)):
                other, num_stored = self._b[b.component, b.rank].read_across(b, box)
                tell()
                if num_stored < box.numel:
                    # `b` lacks elements of this piece: count them, and compare nothing of the piece.
                    out["only_in_one"] += box.numel - num_stored
                    both += num_stored
                    continue
                both += box.numel
                out["elements"] += box.numel
                one = self._a[a.component, a.rank].read(a, chunk, box)
                _compare(one if dtype is None else one.to(getattr(torch, dtype)), other, out, self._tolerance)
                tell()
        stored_in_b = sum(chunk.numel for chunk in b.chunks or ())
        out["only_in_one"] += max(stored_in_b - both, 0)
        return out if out["different"] or out["only_in_one"] else None

    def objects(self, a: Item, b: Item) -> dict[str, Any] | None:
        """Returns None if two objects are equal; otherwise a dict, with a ``reason`` if they could not be compared."""
        of_a, of_b = self._a[a.component, a.rank], self._b[b.component, b.rank]
        in_a, in_b = of_a.record(a), of_b.record(b)
        if in_a == in_b:
            return None
        try:
            if are_equal(of_a.object(a, in_a), of_b.object(b, in_b)):
                return None
        except UnsafeObjectError:
            return {"reason": "their bytes differ, and their values are not plain data that could be compared"}
        return {}


def _compare(a: torch.Tensor, b: torch.Tensor, out: dict[str, Any], tolerance: Tolerance | None) -> None:
    if a.is_quantized != b.is_quantized:  # one of them was joined from several chunks
        a, b = (each.dequantize().to(torch.float64) if each.is_quantized else each for each in (a, b))
    is_alike = not a.is_quantized or _compat.quantization(a) == _compat.quantization(b)
    bits_a, bits_b = bits(a), bits(b)
    if is_alike and torch.equal(bits_a, bits_b):
        return
    differs = (bits_a != bits_b).any(dim=1) if is_alike else torch.ones(a.numel(), dtype=torch.bool)
    values_a, values_b = in_float64(a), in_float64(b)
    if tolerance is not None and values_a is not None and values_b is not None and _has_fractions(a):
        differs &= ~torch.isclose(
            values_a.reshape(-1), values_b.reshape(-1), tolerance.relative, tolerance.absolute, equal_nan=True
        )
    out["different"] += int(differs.sum())
    if values_a is None or values_b is None:
        return
    values_a, values_b = values_a.reshape(-1)[differs], values_b.reshape(-1)[differs]
    nan_a, nan_b = torch.isnan(values_a), torch.isnan(values_b)
    out["nan_in_one"] += int((nan_a ^ nan_b).sum())
    away = (values_a - values_b).abs()
    away = away[~torch.isnan(away)]
    if away.numel():
        out["max_abs_difference"] = max(out["max_abs_difference"] or 0.0, float(away.max()))


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized
