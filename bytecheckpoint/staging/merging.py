# SPDX-License-Identifier: Apache-2.0
"""Merges many tensors into one row of bytes, and scatters the bytes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bytecheckpoint.compat.private_names import increment_version
from bytecheckpoint.native import _C

__all__ = ["merge", "scatter"]


def merge(
    tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None, *, alignment: int = 1, num_threads: int = 2
) -> torch.Tensor:
    """Copies the elements of all ``tensors`` into one contiguous tensor, one tensor behind the other.

    Local. Each element is copied once, whatever the strides: views, slices, transposed and expanded tensors need no
    ``contiguous()`` first. The elements of each tensor are in row-major order, and begin at the next multiple of
    ``alignment`` behind the tensor before. Bytes in between are not changed. The GIL is not held while elements are
    copied.

    Args:
        tensors: Tensors in host memory, of any shapes and strides, and of dtypes with plain elements.
        out: Contiguous uint8 tensor with one dim, of at least as many bytes as the tensors take; it must not share
            memory with them. None makes one of exactly that many bytes.
        alignment: Bytes, a power of two.
        num_threads: Number of threads that copy, at most.

    Returns:
        ``out``.

    Raises:
        InvalidPlanError: A tensor is not in host memory or has no plain elements, or ``out`` does not fit; it names
            the tensor.
        ValueError: ``alignment`` is no power of two up to 2**30, or ``num_threads`` is below 1.

    Source: the merging of many small tensors before a transfer is from ByteCheckpoint (NSDI'25).
    """
    _check(alignment, num_threads)
    tensors = list(tensors)
    if out is None:
        out = torch.empty(_C.merged_bytes(tensors, alignment), dtype=torch.uint8, device="cpu")
    _C.merge(tensors, out, alignment, num_threads)
    increment_version([out])
    return out


def scatter(merged: torch.Tensor, tensors: Sequence[torch.Tensor], *, alignment: int = 1, num_threads: int = 2) -> None:
    """Fills ``tensors`` with the elements in ``merged``: the reverse of ``merge``.

    Local. For autograd the tensors have changed in place, as by an ``out=`` of torch; no gradient passes through.

    Args:
        merged: Contiguous uint8 tensor with one dim, which ``merge`` made of tensors of the same shapes and dtypes.
        tensors: Tensors in host memory, of any strides; no two elements may share memory.
        alignment: The one that ``merge`` was given.
        num_threads: Number of threads that copy, at most.

    Raises:
        InvalidPlanError: See ``merge``; or a tensor is expanded.
        ValueError: See ``merge``.
    """
    _check(alignment, num_threads)
    tensors = list(tensors)
    _C.scatter(tensors, merged, alignment, num_threads)
    increment_version(tensors)


def _check(alignment: int, num_threads: int) -> None:
    if alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 30:
        raise ValueError(f"alignment={alignment}: must be a power of two up to 2**30")
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}: must be >= 1")
