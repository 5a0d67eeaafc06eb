# SPDX-License-Identifier: Apache-2.0
"""Compares state dicts byte for byte, makes blank ones to load into, and takes strides out of DCP's metadata."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.tensor import DTensor

from bytecheckpoint import BcpReader

__all__ = ["assert_equal", "assert_loads", "blank", "local_tensors", "raw", "settled", "sorted_keys", "without_strides"]

T = TypeVar("T")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the elements."""
    tensor = tensor.detach()
    tensor = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
    # A copy: a tensor of one element counts as contiguous whatever its strides, and then has no view as bytes.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def settled(value: Any) -> Any:
    """Returns the same value with tensors in plain host memory, as a load into such memory must give it."""
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().contiguous().cpu()
    if isinstance(value, dict):
        return type(value)((key, settled(item)) for key, item in value.items())
    # Not for subclasses: torch.Size accepts only numbers.
    return type(value)(settled(item) for item in value) if type(value) in (list, tuple) else value


def sorted_keys(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the dict with its outermost keys sorted, for comparisons in which their order does not matter."""
    return {key: value[key] for key in sorted(value)}


def without_strides(described: T) -> T:
    """Removes the strides from metadata, a plan or a part of them, and returns it.

    torch 2.15 notes the strides of one rank's tensor. We do not: nothing in DCP reads them, and older torch refuses
    metadata that have them.
    """
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
    """Returns the same structure with zeros in place of tensors, and None in place of values without tensors.

    A quantized tensor keeps its scales: stock DCP copies only the integers, whatever the scales of the target.
    """
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(blank(value.detach()))
    if isinstance(value, torch.Tensor):
        if value.is_quantized:
            return _blank_quantized(value)
        return torch.zeros(value.numel() * value.itemsize, dtype=torch.uint8).view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return type(value)((key, blank(item)) for key, item in value.items())
    if isinstance(value, list) and any(isinstance(item, torch.Tensor | dict | list) for item in value):
        return [blank(item) for item in value]
    return None


def _blank_quantized(value: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(value.shape)
    if value.qscheme() == torch.per_tensor_affine:
        return torch.quantize_per_tensor(zeros, value.q_scale(), value.q_zero_point(), value.dtype)
    scales, points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    return torch.quantize_per_channel(zeros, scales, points, value.q_per_channel_axis(), value.dtype)


def local_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """Returns the plain tensors that hold this rank's part of a tensor of any kind."""
    if isinstance(value, DTensor):
        return [value.to_local()]
    if isinstance(value, ShardedTensor):
        return [tensor for shard in value.local_shards() for tensor in local_tensors(shard.tensor)]
    return [value]


def assert_equal(got: Any, wanted: Any, key: str = "") -> None:
    """Asserts equal types, order of keys, dtypes, shapes and bytes.

    It compares bytes, because some elements are NaN and some dtypes have no comparison. It compares this rank's part of
    a sharded tensor.
    """
    assert type(got) is type(wanted), f"{key}: {type(got)} for {type(wanted)}"
    if isinstance(wanted, torch.Tensor):
        for mine, theirs in zip(local_tensors(got), local_tensors(wanted), strict=True):
            assert mine.dtype == theirs.dtype, key
            assert mine.shape == theirs.shape, key
            assert torch.equal(raw(mine), raw(theirs)), f"{key}: {mine} for {theirs}"
    elif isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(got, wanted, key, strict=True)
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


def assert_loads(path: Path, wanted: dict[str, Any]) -> None:
    """Asserts that this process alone loads every value as it was saved, with our reader and with stock DCP's."""
    for reader in (BcpReader(path), dcp.FileSystemReader(path)):
        got = blank(wanted)
        dcp.load(got, storage_reader=reader, no_dist=True)
        assert_equal(settled(got), settled(wanted))
