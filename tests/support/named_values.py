# SPDX-License-Identifier: Apache-2.0
"""Tensors whose values follow from a name. They are the same under every torch from 1.13 on."""

from __future__ import annotations

import torch

__all__ = ["numbers"]


def numbers(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a tensor whose bytes follow from the name alone. In a floating dtype some elements are NaN."""
    elements = 1
    for size in shape:
        elements *= size
    itemsize = torch.empty((), dtype=dtype).element_size()  # dtype.itemsize needs torch 2.1
    seed = sum(name.encode())
    values = (torch.arange(elements * itemsize) * 37 + seed) % (2 if dtype == torch.bool else 256)
    return values.to(torch.uint8).view(dtype).reshape(shape)
