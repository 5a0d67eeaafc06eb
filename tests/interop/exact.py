# SPDX-License-Identifier: Apache-2.0
"""Comparing state dicts byte for byte, and blanks of them to load into; and what DCP says of them."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

__all__ = ["assert_equal", "blank", "raw", "settled", "without_strides"]

T = TypeVar("T")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return tensor.reshape(-1).view(torch.uint8)


def settled(value: Any) -> Any:
    """The same with tensors that are no views: what a load into plain memory must give."""
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().contiguous()
    if isinstance(value, dict):
        return type(value)((key, settled(item)) for key, item in value.items())
    # Not subclasses: torch.Size takes numbers alone.
    return type(value)(settled(item) for item in value) if type(value) in (list, tuple) else value


def without_strides(described: T) -> T:
    """Metadata, a plan or a part of them, as we describe tensors: without what torch 2.15 notes of the strides of one
    rank's tensor. Nothing of DCP reads it, and older torch refuses metadata that have it."""
    if isinstance(described, TensorProperties):
        if hasattr(described, "strides"):
            described.strides = None
    elif isinstance(described, dict):
        without_strides([*described.values()])
    elif isinstance(described, list | tuple):
        for part in described:
            without_strides(part)
    elif dataclasses.is_dataclass(described):
        without_strides([*vars(described).values()])  # one from an older pickle lacks newer fields
    return described


def blank(value: Any) -> Any:
    """The same keys with zeros in place of tensors, and with None for what is no tensor.

    A quantized tensor keeps its scales: stock copies the integers alone, whatever the scales they land on.
    """
    if isinstance(value, torch.Tensor):
        if value.is_quantized:
            return _blank_quantized(value)
        return torch.zeros(value.numel() * value.itemsize, dtype=torch.uint8).view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else None


def _blank_quantized(value: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(value.shape)
    if value.qscheme() == torch.per_tensor_affine:
        return torch.quantize_per_tensor(zeros, value.q_scale(), value.q_zero_point(), value.dtype)
    scales, points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    return torch.quantize_per_channel(zeros, scales, points, value.q_per_channel_axis(), value.dtype)


def assert_equal(got: Any, wanted: Any, key: str = "") -> None:
    assert type(got) is type(wanted), f"{key}: {got!r}"
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype, key
        assert got.shape == wanted.shape, key
        # As bytes: some are NaN, and some dtypes have no comparison.
        assert torch.equal(raw(got), raw(wanted)), f"{key}: {got} for {wanted}"
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted), key
        for name in wanted:
            assert_equal(got[name], wanted[name], f"{key}.{name}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), key
        for position, item in enumerate(wanted):
            assert_equal(got[position], item, f"{key}.{position}")
    else:
        assert got == wanted, f"{key}: {got!r} for {wanted!r}"
