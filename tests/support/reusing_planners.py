# SPDX-License-Identifier: Apache-2.0
"""Planners that return the same memory for every item, and overwrite it as soon as DCP's contract allows."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

__all__ = ["LOAD_HOOKS", "SAVE_HOOKS", "reusing"]

if TYPE_CHECKING:
    _Save, _Load = DefaultSavePlanner, DefaultLoadPlanner
else:
    _Save = _Load = object

_POISON = 0xCC


class _Scratch:
    """One buffer for tensors, one for each kind of quantized tensor, one for bytes, one list for objects."""

    def __init__(self) -> None:
        self._bytes = torch.zeros(1 << 16, dtype=torch.uint8)
        self._quantized: dict[Any, torch.Tensor] = {}
        self._file = io.BytesIO()
        self._list: list[Any] = []

    def poison(self) -> None:
        self._bytes.fill_(_POISON)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a poisoned tensor of the same shape and dtype, in the reused memory."""
        self.poison()
        num_bytes = tensor.numel() * tensor.element_size()
        return self._bytes[:num_bytes].view(tensor.dtype).view(tensor.shape)

    def copy(self, value: Any) -> Any:
        """Returns the same value in the reused memory."""
        if isinstance(value, io.BytesIO):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(value.getbuffer())
            return self._file
        if not isinstance(value, torch.Tensor):
            self._list[:] = value
            return self._list
        if value.is_quantized:
            kind = value.shape, value.dtype
            return self._quantized.setdefault(kind, value.clone()).copy_(value)
        return self.like(value).copy_(value.detach())


class _Reusing:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scratch = _Scratch()
        self.calls: list[tuple[str, MetadataIndex, tuple[int, ...]]] = []

    def note(self, name: str, item: ReadItem) -> None:
        self.calls.append((name, item.dest_index, tuple(item.dest_offsets)))


class _ResolveData(_Reusing, _Save):
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        resolved: torch.Tensor | io.BytesIO = self.scratch.copy(super().resolve_data(write_item))
        return resolved


class _TransformObject(_Reusing, _Save):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return self.scratch.copy(super().transform_object(write_item, object))


class _LookupObject(_Reusing, _Save):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.scratch.copy(super().lookup_object(index))


class _Committing(_Reusing, _Load):
    """Copies what was read into the tensor of the state. A subclass says which hook returns the reused memory."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.note("resolve_tensor", read_item)
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.note("commit_tensor", read_item)
        whole = DefaultLoadPlanner.lookup_tensor(self, read_item.dest_index)
        DefaultLoadPlanner.transform_tensor(self, read_item, whole).detach().copy_(tensor)
        self.scratch.poison()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.note("load_bytes", read_item)
        super().load_bytes(read_item, value)
        value.getbuffer()[:] = bytes([_POISON]) * len(value.getbuffer())

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        self.note("resolve_bytes", read_item)
        return super().resolve_bytes(read_item)


class _ResolveTensor(_Committing):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.scratch.like(super().resolve_tensor(read_item))


class _TransformTensor(_Committing):
    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        return self.scratch.like(super().transform_tensor(read_item, tensor))


class _LookupTensor(_Committing):
    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.scratch.like(super().lookup_tensor(index))


# By the hook that returns the reused memory: the class in which it does.
SAVE_HOOKS = {"resolve_data": _ResolveData, "transform_object": _TransformObject, "lookup_object": _LookupObject}
LOAD_HOOKS = {"resolve_tensor": _ResolveTensor, "transform_tensor": _TransformTensor, "lookup_tensor": _LookupTensor}


def reusing(hook: str, base: type) -> Any:
    """Returns a planner over ``base`` whose ``hook`` returns the same memory for every item."""
    return type(hook, ({**SAVE_HOOKS, **LOAD_HOOKS}[hook], base), {})()
