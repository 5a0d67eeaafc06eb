# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of a tensor, and empty tensors to load into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bytecheckpoint.errors import UnsupportedError

__all__ = ["StoredTensor"]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint: shape, dtype, and bytes of its records, which depend on how it is cut into chunks."""

    shape: torch.Size
    dtype: torch.dtype | None
    record_bytes: int = field(compare=False)

    @classmethod
    def of(cls, dtype: str | None, shape: Sequence[int], record_bytes: int) -> StoredTensor | None:
        """Makes one of what ``Checkpoint.contents`` says of a key; None for an object, which has no dtype."""
        return None if dtype is None else cls(torch.Size(shape), getattr(torch, dtype, None), record_bytes)

    def known_dtype(self, key: str) -> torch.dtype:
        """Returns the dtype.

        Args:
            key: Key of the tensor, for the message.

        Raises:
            UnsupportedError: This torch does not have it.
        """
        if self.dtype is None:
            raise UnsupportedError(f"'{key}': stored in a dtype that this torch does not have")
        return self.dtype

    def check_size(self, key: str, path: str = "") -> None:
        """Refuses a tensor whose elements share memory in the record, as those of an expanded tensor do.

        A few stored bytes could then take any amount of memory.

        Args:
            key: Key of the tensor, for the message.
            path: Path of the checkpoint, for the error.

        Raises:
            UnsupportedError: They do, or this torch does not have the dtype.
        """
        wanted = self.shape.numel() * self.known_dtype(key).itemsize
        if wanted > self.record_bytes:
            raise UnsupportedError(
                f"'{key}': a tensor of {list(self.shape)} takes {wanted:,} bytes, but its records hold "
                f"{self.record_bytes:,} bytes; use load_state_dict, which loads it into a tensor that you pass",
                path,
            )

    def empty(self, key: str, device: torch.device | str | None = "cpu", path: str = "") -> torch.Tensor:
        """Returns an empty tensor to load the stored one into.

        Args:
            key: See ``check_size``.
            device: Device of the new tensor; None takes the default device.
            path: See ``check_size``.

        Raises:
            UnsupportedError: See ``check_size``.
        """
        self.check_size(key, path)
        return torch.empty(self.shape, dtype=self.known_dtype(key), device=device)

    def as_stored(self, key: str, value: Any, most_bytes: int, path: str = "") -> torch.Tensor:
        """Returns what to load the stored tensor into as it is: ``value`` if it fits, else an empty tensor beside it.

        Args:
            key: See ``check_size``.
            value: What the state has there.
            most_bytes: The most bytes of a new tensor, so that a checkpoint does not decide how much memory is taken.
            path: See ``check_size``.

        Raises:
            UnsupportedError: It has more bytes, or see ``check_size``.
        """
        if type(value) is torch.Tensor and (value.shape, value.dtype) == (self.shape, self.dtype):
            return value
        num_bytes = self.shape.numel() * self.known_dtype(key).itemsize
        if num_bytes > most_bytes:
            raise UnsupportedError(
                f"'{key}': stored are {num_bytes:,} bytes, to be loaded as they are; at most "
                f"LoadSpec(as_stored_bytes={most_bytes}) are taken",
                path,
            )
        return self.empty(key, value.device if isinstance(value, torch.Tensor) else "cpu", path)
