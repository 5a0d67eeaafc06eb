# SPDX-License-Identifier: Apache-2.0
"""State dicts as ``torch.save`` pickles them, of tensors whose elements are elsewhere."""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.native import _core

__all__ = ["Storage", "pickled"]


class _Described(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True)
class Storage:
    """A storage of a file, by its number, with all elements of one tensor.

    Attributes:
        number: Its number.
        holds: The tensor: dtype, shape and bytes.
    """

    number: int
    holds: _Described

    def tensor(self) -> _StoredTensor:
        """Returns what stands for the tensor in a state dict. One object that stands in two places is one tensor."""
        return _StoredTensor(self)


@dataclass(frozen=True, eq=False)
class _StoredTensor:
    storage: Storage


@dataclass(frozen=True)
class _Held:
    """What a storage in memory holds, as one tensor."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class _Pickler(pickle.Pickler):
    """As torch's pickler: a storage is a persistent id, and a tensor the call that makes it of one.

    Args:
        out: What is written to.
        first: Number of the first storage in memory.
    """

    def __init__(self, out: io.BytesIO, first: int) -> None:
        super().__init__(out, protocol=2)
        self.held: list[bytes] = []
        self._first = first
        # One for each dtype, as a file has it. It is kept, so that no other comes to lie at its address.
        self._storages: dict[tuple[int, str], tuple[torch.UntypedStorage, Storage]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Storage:
            return None
        typed = _core.typed_storage(obj.holds.dtype)
        if typed is None:
            return ("storage", torch.UntypedStorage, str(obj.number), "cpu", obj.holds.num_bytes)
        return ("storage", getattr(torch, typed), str(obj.number), "cpu", math.prod(obj.holds.shape))

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            held = obj.resolve_conj().resolve_neg()
            storage = self._storage_of(held)
            at = (held.storage_offset(), (*held.shape,), held.stride(), obj.requires_grad)
        elif type(obj) is _StoredTensor:
            storage, shape = obj.storage, obj.storage.holds.shape
            strides = [math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape))]
            at = (0, shape, (*strides,), False)
        else:
            return NotImplemented
        rebuild, rest = _rebuilding(storage.holds.dtype)
        return rebuild, (storage, *at, OrderedDict(), *rest)

    def _storage_of(self, tensor: torch.Tensor) -> Storage:
        """Returns the storage of a tensor in memory, which tensors that share it share in the file, too."""
        memory, dtype = tensor.untyped_storage(), str(tensor.dtype).removeprefix("torch.")
        key = memory.data_ptr(), dtype
        if key not in self._storages:
            holds = _Held(dtype, (memory.nbytes() // tensor.itemsize,), memory.nbytes())
            self._storages[key] = memory, Storage(self._first + len(self.held), holds)
            self.held.append(torch.empty(0, dtype=torch.uint8).set_(memory).numpy().tobytes())
        return self._storages[key][1]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what ``_rebuilding`` makes of the elements of a storage in memory."""
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized


@cache
def _rebuilding(dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Returns the function that makes a tensor of a storage, and its arguments after the sixth, as torch has them."""
    empty: Any = torch.empty(0, dtype=getattr(torch, dtype))
    reduced = empty.__reduce_ex__(2)
    if len(reduced) == 2 and isinstance(reduced[1], tuple) and reduced[1][1:6] == (0, (0,), (1,), False, OrderedDict()):
        return reduced[0], reduced[1][6:]
    raise UnsupportedError(
        f"this torch pickles a tensor of {dtype} in a way that we do not know: convert to another format"
    )


def pickled(state: Any, first: int) -> tuple[bytes, list[bytes]]:
    """Returns the pickle of a state dict for a file of torch, and the storages of its tensors that are in memory.

    Args:
        state: The state dict.
        first: The number that the first of these storages has.

    Raises:
        UnsupportedError: This torch pickles tensors in a way that we do not know.
    """
    out = io.BytesIO()
    pickler = _Pickler(out, first)
    pickler.dump(state)
    return out.getvalue(), pickler.held
