# SPDX-License-Identifier: Apache-2.0
"""Statistics of tensors that are read in pieces. Imports torch."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["Statistics", "in_float64"]

_INTEGERS = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32}
)


def in_float64(tensor: torch.Tensor) -> torch.Tensor | None:
    """Converts a tensor to float64, or a complex one to complex128. Returns None if torch cannot convert its dtype."""
    try:
        if tensor.is_quantized:
            return tensor.dequantize().to(torch.float64)
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError):
        return None


class Statistics:
    """Statistics of all pieces together: extremes, mean and deviation of finite elements, and counts of the others.

    For complex numbers they are those of the absolute values. ``std`` is that of a sample, as in ``torch.std``.
    Extremes of integers are exact; everything else is computed in float64.
    """

    def __init__(self) -> None:
        self.num_elements = 0
        self.has_values = True
        self._num_nan = self._num_inf = self._num_zero = 0
        self._num_finite = 0
        self._mean = self._squares = 0.0
        self._min: int | float | None = None
        self._max: int | float | None = None

    def add(self, tensor: torch.Tensor) -> None:
        self.num_elements += tensor.numel()
        values = in_float64(tensor)
        if values is None:
            self.has_values = False
        if not self.has_values or values is None or values.numel() == 0:
            return
        is_nan = torch.isnan(values)
        is_inf = torch.isinf(values) & ~is_nan
        self._num_nan += int(is_nan.sum())
        self._num_inf += int(is_inf.sum())
        self._num_zero += int((values == 0).sum())
        finite = values[~(is_nan | is_inf)]
        if finite.is_complex():
            finite = finite.abs()
        if finite.numel() == 0:
            return
        self._join(finite)
        low, high = _extremes(tensor, finite)
        self._min = low if self._min is None else min(self._min, low)
        self._max = high if self._max is None else max(self._max, high)

    def _join(self, finite: torch.Tensor) -> None:
        """Combines mean and squared deviations of a piece with those of the pieces before it.

        Source: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances.
        """
        count, mean = finite.numel(), float(finite.mean())
        squares = float(((finite - mean) ** 2).sum())
        total = self._num_finite + count
        away = mean - self._mean
        self._squares += squares + away * away * self._num_finite * count / total
        self._mean += away * count / total
        self._num_finite = total

    def as_dict(self) -> dict[str, Any]:
        """Returns the statistics as they are printed; None for what is not known."""
        if not self.has_values:
            return dict.fromkeys(("min", "max", "mean", "std", "nan", "inf", "zeros"))
        some = self._num_finite > 0
        return {
            "min": self._min,
            "max": self._max,
            "mean": self._mean if some else None,
            "std": math.sqrt(self._squares / (self._num_finite - 1)) if self._num_finite > 1 else None,
            "nan": self._num_nan,
            "inf": self._num_inf,
            "zeros": self._num_zero,
        }


def _extremes(tensor: torch.Tensor, finite: torch.Tensor) -> tuple[int | float, int | float]:
    if tensor.dtype == torch.uint64:
        # torch cannot compare uint64. With the highest bit flipped, the values have the same order as int64.
        turned = tensor.contiguous().view(torch.int64) ^ torch.iinfo(torch.int64).min
        return int(turned.min()) + (1 << 63), int(turned.max()) + (1 << 63)
    if tensor.dtype in _INTEGERS:
        exact = tensor.to(torch.int64)
        return int(exact.min()), int(exact.max())
    return float(finite.min()), float(finite.max())
