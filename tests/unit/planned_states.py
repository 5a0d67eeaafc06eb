# SPDX-License-Identifier: Apache-2.0
"""State dicts for tests of planners."""

from __future__ import annotations

import collections
from typing import Any

import torch

__all__ = ["more", "state"]


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model": {
            "w": torch.randn(7, 5, generator=generator),
            "b": torch.nn.Parameter(torch.randn(5, generator=generator)),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "t": torch.randn(6, 4, generator=generator).t(),
            "layers": [torch.arange(3), {"deep": torch.arange(4.0)}, 7],
        },
        "optimizer": collections.OrderedDict(step=11, lrs=[0.1, 0.2], name="adam", betas=(0.9, 0.99)),
        "epoch": 3,
    }


def more() -> dict[str, Any]:
    """Returns ``state()`` plus views, other dtypes, tensors that only torch.save can store, objects of all kinds."""
    value = state()
    value["views"] = {
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "expanded": torch.ones(1).expand(4, 3),
        "quantized": torch.quantize_per_tensor(torch.arange(6.0), 0.5, 3, torch.quint8),
        "grad": torch.ones(2, requires_grad=True),
        "float8": torch.ones(5).to(torch.float8_e4m3fn),
    }
    value["objects"] = {
        "none": None,
        "big": 1 << 80,
        "bytes": b"\0x",
        "set": {1, 2},
        "nested": [{"a": (1, [2])}],
        "": 1,
    }
    return value
