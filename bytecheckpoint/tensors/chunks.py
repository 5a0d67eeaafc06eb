# SPDX-License-Identifier: Apache-2.0
"""``LocalChunks``: a tensor of which a process holds any number of boxes."""

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
    """How the elements of a tensor, in row-major order, are divided over ranks.

    Attributes:
        cuts: Positions from 0 to the number of elements. Elements [cuts[i], cuts[i + 1]) are on ``ranks[i]``.
        ranks: Ranks of the default group.
    """

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]


class LocalChunks(torch.Tensor):
    """A tensor of which this process holds some boxes, or none, each as a tensor of its own.

    Use it as a value of a state dict that is saved or loaded. DCP's own planners and ours ask it which boxes it holds,
    and a load fills its tensors in place. Its ``shape`` and ``dtype`` are those of the whole tensor. It supports no
    computation.

    Args:
        shape: Shape of the whole tensor.
        offsets: Offsets of each box in the whole tensor, in elements, one number per dim.
        tensors: One tensor per box, each of ``dtype``, on any device. They are shared, not copied.
        dtype: Dtype of the whole tensor.
        spread: Where the tensor is cut, if it is cut at any element and not along its dims. The boxes, in their order,
            are then the run of elements that this rank has.
        must_agree: Whether other ranks hold copies of these boxes that nobody keeps equal. A save compares them, and is
            refused if they differ.
        ranks: Ranks of the default group that hold the tensor together. If ranks beside these hold copies, all boxes
            are saved from the same ranks. None takes those of ``spread``.

    Attributes:
        offsets: Offsets of each box as a tuple, sorted, as plans have them.
        tensors: Tensors of the boxes, in the order of ``offsets``.
        spread: ``spread`` as it was passed.
        must_agree: ``must_agree`` as it was passed.
        ranks: ``ranks`` as it was passed, or those of ``spread``; None if they are not known.

    Raises:
        ValueError: A box lies outside of the tensor, or has another dtype or number of dims.
    """

    offsets: tuple[tuple[int, ...], ...]
    tensors: tuple[torch.Tensor, ...]
    spread: Spread | None
    must_agree: bool
    ranks: tuple[int, ...] | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        offsets: Sequence[Sequence[int]],
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype,
        spread: Spread | None = None,
        must_agree: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> LocalChunks:
        device = tensors[0].device if tensors else torch.device("cpu")
        make_wrapper: Any = torch.Tensor._make_wrapper_subclass
        self: LocalChunks = make_wrapper(cls, torch.Size(shape), dtype=dtype, device=device)
        boxes = sorted(zip(map(tuple, offsets), tensors, strict=True), key=lambda box: box[0])
        self.offsets = tuple(at for at, _ in boxes)
        self.tensors = tuple(tensor for _, tensor in boxes)
        self.spread = spread
        self.must_agree = must_agree
        of_spread = None if spread is None else spread.ranks
        self.ranks = of_spread if ranks is None else tuple(ranks)
        for at, tensor in zip(self.offsets, self.tensors, strict=True):
            ends = [begin + size for begin, size in zip(at, tensor.shape, strict=False)]
            is_inside = all(begin >= 0 and end <= size for begin, end, size in zip(at, ends, shape, strict=False))
            if not is_inside or not len(at) == tensor.ndim == len(shape) or tensor.dtype != dtype:
                raise ValueError(
                    f"LocalChunks of {[*shape]}, {dtype}: a box of {[*tensor.shape]} at {[*at]}, {tensor.dtype}, "
                    "does not fit into it"
                )
        return self

    def of_same_boxes(self, tensors: Sequence[torch.Tensor]) -> LocalChunks:
        """Returns a ``LocalChunks`` of the same boxes with other tensors, in the order of ``offsets``."""
        return LocalChunks(self.shape, self.offsets, tensors, self.dtype, self.spread, self.must_agree, self.ranks)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        boxes = ", ".join(
            f"{[*tensor.shape]} at {[*at]}" for at, tensor in zip(self.offsets, self.tensors, strict=True)
        )
        return f"LocalChunks({[*self.shape]}, {self.dtype}: {boxes or 'nothing'})"

    # DCP's protocol for values that know which parts of them this rank holds.

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
        if index.index is not None and self.offsets[index.index : index.index + 1] == (index.offset,):
            return self.tensors[index.index]  # an empty box may begin where another one does
        found = [tensor for at, tensor in zip(self.offsets, self.tensors, strict=True) if index.offset in (None, at)]
        if found:
            return next((tensor for tensor in found if tensor.numel()), found[0])
        raise ValueError(f"'{index.fqn}': no box at {index.offset} is held in {self!r}")

    # Copying is the only tensor operation that it supports.

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalChunks:
        return self.of_same_boxes([tensor.detach().clone() for tensor in self.tensors])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        how = self.spread, self.must_agree, self.ranks
        return LocalChunks, (tuple(self.shape), self.offsets, self.tensors, self.dtype, *how)

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
                return LocalChunks(
                    value.shape, value.offsets, copies, dtype, value.spread, value.must_agree, value.ranks
                )
        return _refuse(func)


def _refuse(func: object) -> NoReturn:
    raise TypeError(f"{func}: a LocalChunks only holds boxes of a tensor for a checkpoint; compute with its `tensors`")
