# SPDX-License-Identifier: Apache-2.0
"""A state dict for tests of planners, and how to compare what was loaded."""

from __future__ import annotations

import collections
from typing import Any

import torch

__all__ = ["assert_equal", "bits", "blank", "more", "state"]


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
    """Beside plain tensors: views, other dtypes, tensors that only torch.save can take, objects of all kinds."""
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


def blank(value: Any) -> Any:
    """The same structure with other values, tensors laid out alike."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(blank(value.detach()))
    if isinstance(value, torch.Tensor) and value.is_quantized:
        return torch.quantize_per_tensor(torch.zeros(value.shape), value.q_scale(), value.q_zero_point(), value.dtype)
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return type(value)((key, blank(v)) for key, v in value.items())
    if isinstance(value, list) and any(isinstance(v, (torch.Tensor, dict, list)) for v in value):
        return [blank(v) for v in value]
    return None


def assert_equal(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert bits(got) == bits(wanted)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            assert_equal(got[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for g, w in zip(got, wanted, strict=True):
            assert_equal(g, w)
    else:
        assert got == wanted


def bits(tensor: torch.Tensor) -> list[int]:
    """The elements as bytes: equal for equal elements of any dtype."""
    tensor = tensor.detach()
    tensor = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
    flat: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return flat
