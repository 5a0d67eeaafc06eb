# SPDX-License-Identifier: Apache-2.0
"""Many tensors as one row of bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bytecheckpoint import _C
from bytecheckpoint.dcp._compat import increment_version

__all__ = ["merge", "scatter"]


def merge(
    tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None, *, alignment: int = 1, num_threads: int = 2
) -> torch.Tensor:
    """Copies the elements of all ``tensors`` into one contiguous tensor, one tensor behind the other.

    Local. Each element is copied once, whatever the strides: views, slices, transposed and expanded tensors need no
    ``contiguous()`` before. The elements of a tensor stand in row-major order, and begin at the next multiple of
    ``alignment`` behind those of the tensor before; bytes between are left alone.

    Args:
        tensors: Any shapes, strides and dtypes of plain elements; in host memory.
        out: uint8, contiguous, one dim, as many bytes as the tensors take or more; not the memory of one of them. None
            makes one of as many as they take.
        alignment: Bytes, a power of two.
        num_threads: That copy, at most.

    Returns:
        ``out``. The GIL is not held while elements are copied.

    Raises:
        InvalidPlanError: A tensor is not in host memory or not of plain elements, or ``out`` does not fit; names it.
        ValueError: ``alignment`` or ``num_threads`` is no such number.

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
    """The reverse of ``merge``: fills ``tensors`` with the elements that stand in ``merged``.

    Local. As an ``out=`` of torch it counts as a change of the tensors, but autograd does not see through it.

    Args:
        merged: uint8, contiguous, one dim, as ``merge`` has made it of tensors of the same shapes and dtypes.
        tensors: Any strides; in host memory, none of which two elements share.
        alignment: As for ``merge``.
        num_threads: That copy, at most.

    Raises:
        InvalidPlanError: As for ``merge``, or a tensor is expanded.
        ValueError: As for ``merge``.
    """
    _check(alignment, num_threads)
    tensors = list(tensors)
    _C.scatter(tensors, merged, alignment, num_threads)
    increment_version(tensors)


def _check(alignment: int, num_threads: int) -> None:
    if alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 30:
        raise ValueError(f"alignment={alignment}: a power of two up to 2**30 wanted")
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}: at least 1 wanted")
