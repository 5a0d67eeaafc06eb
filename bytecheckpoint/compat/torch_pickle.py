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


class _Pickler(pickle.Pickler):
    """As torch's pickler: a storage is a persistent id, and a tensor the call that makes it of one."""

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Storage:
            return None
        typed = _core.typed_storage(obj.holds.dtype)
        if typed is None:
            return ("storage", torch.UntypedStorage, str(obj.number), "cpu", obj.holds.num_bytes)
        return ("storage", getattr(torch, typed), str(obj.number), "cpu", math.prod(obj.holds.shape))

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not _StoredTensor:
            return NotImplemented
        shape = obj.storage.holds.shape
        strides = [math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape))]
        rebuild, rest = _rebuilding(obj.storage.holds.dtype)
        return rebuild, (obj.storage, 0, shape, tuple(strides), False, OrderedDict(), *rest)


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


def pickled(state: Any) -> bytes:
    """Returns the pickle of a state dict for a file of torch.

    Raises:
        UnsupportedError: This torch pickles tensors in a way that we do not know.
    """
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(state)
    return out.getvalue()
