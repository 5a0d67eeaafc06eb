# SPDX-License-Identifier: Apache-2.0
"""State dicts as ``torch.save`` pickles them, of tensors whose elements are elsewhere."""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bytecheckpoint import _core
from bytecheckpoint.probes.of_torch import TORCH_FILES
from bytecheckpoint.probes.probe import find, require

__all__ = ["Storage", "pickled"]

_REBUILD_V2: Any = find("torch._utils:_rebuild_tensor_v2")
_REBUILD_V3: Any = find("torch._utils:_rebuild_tensor_v3")


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
        of_tensor: tuple[Any, ...] = (obj.storage, 0, shape, tuple(strides), False, OrderedDict())
        if _core.typed_storage(obj.storage.holds.dtype) is None:
            return _REBUILD_V3, (*of_tensor, getattr(torch, obj.storage.holds.dtype))
        return _REBUILD_V2, of_tensor


def pickled(state: Any) -> bytes:
    """Returns the pickle of a state dict for a file of torch.

    Raises:
        UnsupportedError: This torch has other names for what such a pickle contains.
    """
    require(TORCH_FILES)
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(state)
    return out.getvalue()
