# SPDX-License-Identifier: Apache-2.0
"""Tensors of which a process holds any number of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["LocalChunks", "Spread"]


@dataclass(frozen=True)
class Spread:
    """How a tensor, flat and row-major, is cut over ranks.

    Attributes:
        cuts: From 0 to the number of elements; elements [cuts[i], cuts[i + 1]) are on ``ranks[i]``.
        ranks: Of the default group.
    """

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]


class LocalChunks(torch.Tensor):
    """A tensor of which this process holds some boxes, or none, each as a tensor of its own.

    A value for a state dict that is saved or loaded: ours and DCP's own planners ask it what is held, and load into its
    tensors in place. Its ``shape`` and ``dtype`` are those of the whole tensor. It computes nothing.

    Args:
        shape: Of the whole tensor.
        offsets: Of each box, in elements: one number a dim.
        tensors: The boxes, all of ``dtype``, on any device. Shared, not copied.
        dtype: Of the whole tensor.
        spread: Of a tensor that is cut anywhere, with no regard to its dims: where. Its boxes then make up the run of
            elements that this rank has, in their order.

    Attributes:
        offsets: As tuples, in their order: so plans have them.
        tensors: In the order of ``offsets``.
        spread: As given.

    Raises:
        ValueError: A box is outside of the tensor, or of another dtype.
    """

    offsets: tuple[tuple[int, ...], ...]
    tensors: tuple[torch.Tensor, ...]
    spread: Spread | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        offsets: Sequence[Sequence[int]],
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype,
        spread: Spread | None = None,
    ) -> LocalChunks:
        device = tensors[0].device if tensors else torch.device("cpu")
        make_wrapper: Any = torch.Tensor._make_wrapper_subclass
        self: LocalChunks = make_wrapper(cls, torch.Size(shape), dtype=dtype, device=device)
        boxes = sorted(zip(map(tuple, offsets), tensors, strict=True), key=lambda box: box[0])
        self.offsets = tuple(at for at, _ in boxes)
        self.tensors = tuple(tensor for _, tensor in boxes)
        self.spread = spread
        for at, tensor in zip(self.offsets, self.tensors, strict=True):
            ends = [begin + size for begin, size in zip(at, tensor.shape, strict=False)]
            is_inside = all(begin >= 0 and end <= size for begin, end, size in zip(at, ends, shape, strict=False))
            if not is_inside or not len(at) == tensor.ndim == len(shape) or tensor.dtype != dtype:
                raise ValueError(
                    f"LocalChunks of {[*shape]}, {dtype}: a box of {[*tensor.shape]} at {[*at]}, {tensor.dtype}"
                )
        return self

    def of_same_boxes(self, tensors: Sequence[torch.Tensor]) -> LocalChunks:
        """The same boxes, with other tensors."""
        return LocalChunks(self.shape, self.offsets, tensors, self.dtype, self.spread)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        boxes = ", ".join(
            f"{[*tensor.shape]} at {[*at]}" for at, tensor in zip(self.offsets, self.tensors, strict=True)
        )
        return f"LocalChunks({[*self.shape]}, {self.dtype}: {boxes or 'nothing'})"

    # DCP's protocol for values that know what is held of them.

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(at), tensor.shape)
            for at, tensor in zip(self.offsets, self.tensors, strict=True)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for at, tensor in zip(self.offsets, self.tensors, strict=True):
            if index.offset is None or tuple(index.offset) == at:
                return tensor
        raise ValueError(f"'{index.fqn}': no box at {index.offset} is held in {self!r}")

    # Copies of it, and nothing else that tensors can do.

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalChunks:
        return self.of_same_boxes([tensor.detach().clone() for tensor in self.tensors])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return LocalChunks, (tuple(self.shape), self.offsets, self.tensors, self.dtype, self.spread)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten: Any = torch.ops.aten
        value = args[0] if args else None
        if isinstance(value, LocalChunks):
            if func is aten.detach.default:
                return value.of_same_boxes([tensor.detach() for tensor in value.tensors])
            if func is aten.clone.default:
                return value.of_same_boxes([tensor.clone() for tensor in value.tensors])
            if func is aten._to_copy.default:
                copies = [func(tensor, **kwargs) for tensor in value.tensors]
                dtype = kwargs.get("dtype") or value.dtype
                return LocalChunks(value.shape, value.offsets, copies, dtype, value.spread)
        return _refuse(func)


def _refuse(func: object) -> NoReturn:
    raise TypeError(f"{func}: a LocalChunks only holds boxes of a tensor for a checkpoint; compute with its `tensors`")
