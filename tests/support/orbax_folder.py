# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints as Orbax does without OCDBT, in zarr 2, for sizes that no golden one has."""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import torch

__all__ = ["packed", "write_orbax"]

_DTYPES = {torch.float32: "<f4", torch.int64: "<i8", torch.bfloat16: "bfloat16"}


def packed(content: bytes) -> bytes:
    """Packs by zstd's library, as zarr's writers do."""
    zstd = ctypes.CDLL("libzstd.so.1")
    zstd.ZSTD_compress.restype = ctypes.c_size_t
    zstd.ZSTD_compressBound.restype = ctypes.c_size_t
    room = ctypes.create_string_buffer(zstd.ZSTD_compressBound(ctypes.c_size_t(len(content))))
    size = zstd.ZSTD_compress(room, ctypes.c_size_t(len(room)), content, ctypes.c_size_t(len(content)), 1)
    return room.raw[:size]


def write_orbax(folder: Path, tensors: Mapping[str, torch.Tensor], chunk: tuple[int, ...] = ()) -> Path:
    """Writes a dict of arrays, cut into chunks; the last ones of a dim stick out, and have -1 there.

    Args:
        folder: Which it makes.
        tensors: Of dtypes that Orbax and torch have.
        chunk: Sizes of chunks; of a tensor with other dims, its own.
    """
    leaves = {}
    for name, tensor in tensors.items():
        sizes = chunk if len(chunk) == tensor.dim() else tuple(tensor.shape)
        (folder / name).mkdir(parents=True)
        described = {"chunks": sizes, "compressor": {"id": "zstd", "level": 1}, "dtype": _DTYPES[tensor.dtype]}
        described |= {"shape": tuple(tensor.shape), "order": "C", "fill_value": None, "filters": None}
        (folder / name / ".zarray").write_text(json.dumps(described))
        for position in itertools.product(
            *(range(-(-size // of)) for size, of in zip(tensor.shape, sizes, strict=True))
        ):
            part = tensor[tuple(slice(at * of, (at + 1) * of) for at, of in zip(position, sizes, strict=True))]
            whole = torch.full(sizes, -1, dtype=tensor.dtype)
            whole[tuple(slice(size) for size in part.shape)] = part
            content = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
            (folder / name / (".".join(map(str, position)) or "0")).write_bytes(packed(content))
        keys = [{"key": name, "key_type": 2}]
        value = {"value_type": "jax.Array", "skip_deserialize": False}
        leaves[str((name,))] = {"key_metadata": keys, "value_metadata": value}
    flags = {"use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": leaves, **flags}))
    return folder
