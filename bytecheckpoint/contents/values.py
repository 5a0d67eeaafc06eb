# SPDX-License-Identifier: Apache-2.0
"""Reads values of a checkpoint, a few megabytes at a time. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import Chunk, Contents, Item, Part, open_contents
from bytecheckpoint.contents.damaged_keys import naming_keys
from bytecheckpoint.contents.safe_objects import load_plain_data, plain_object
from bytecheckpoint.errors import ShapeMismatchError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _C

__all__ = ["Box", "Values", "intersection", "open_values", "pieces"]

# Elements that are processed at a time. As float64, with intermediate results, they take some hundred megabytes.
_PIECE_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins in each dim, and its shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the box that is in both; None if there is none."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = (
        min(of_a + a_size, of_b + b_size)
        for of_a, a_size, of_b, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def pieces(box: Box, most_elements: int = _PIECE_ELEMENTS) -> Iterator[Box]:
    """Cuts ``box`` into boxes of at most ``most_elements`` elements, in row-major order. An empty box gives none."""
    if box.numel <= most_elements:
        if box.numel > 0:
            yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    step = max(1, most_elements // (box.numel // box.sizes[dim]))
    for begin in range(0, box.sizes[dim], step):
        size = min(step, box.sizes[dim] - begin)
        offsets = (*box.offsets[:dim], box.offsets[dim] + begin, *box.offsets[dim + 1 :])
        yield from pieces(Box(offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :])), most_elements)


def open_values(path: str, config: Config, spec: LoadSpec | None = None) -> tuple[Contents, list[Values]]:
    """Opens a checkpoint, or what ``spec`` takes of it. Returns its contents and the values of each of its parts."""
    contents = open_contents(path, config=config, with_chunks=True, kind=_C.Checkpoint, spec=spec)
    return contents, [Values(part, config) for part in contents.parts]


class Values:
    """The values of the items of one part.

    They are checked as in a load: the checksums of our blocks are compared, and no code of the checkpoint is run.

    Attributes:
        part: The part.
        bytes_read: Bytes of records that were read so far.
    """

    def __init__(self, part: Part, config: Config) -> None:
        assert isinstance(part.checkpoint, _C.Checkpoint)
        self.part = part
        self.bytes_read = 0
        self._checkpoint = part.checkpoint
        self._path = part.path
        self._config = config
        self._opaque: tuple[str, tuple[int, ...], torch.Tensor] | None = None

    def read(self, item: Item, chunk: Chunk, box: Box) -> torch.Tensor:
        """Reads ``box`` of the tensor, which must be inside ``chunk``."""
        within = tuple(of_box - of_chunk for of_box, of_chunk in zip(box.offsets, chunk.offsets, strict=True))
        if self._opaque is not None and self._opaque[:2] == (item.name, chunk.offsets):
            return _compat.narrow(self._opaque[2], within, box.sizes)
        read = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(item.name, torch.Size(chunk.offsets)),
            dest_offsets=torch.Size(within),
            storage_index=MetadataIndex(item.name, torch.Size(chunk.offsets)),
            storage_offsets=torch.Size(within),
            lengths=torch.Size(box.sizes),
        )
        job = self._job(read)
        dtype = job.stored_dtype(0)
        if dtype:
            tensor = torch.empty(box.sizes, dtype=getattr(torch, dtype), device="cpu")
            job.add_tensors(0, [tensor])
            self._run(job)
            self.bytes_read += tensor.nbytes
            return tensor
        archive = bytearray(job.archive_bytes(0))
        job.add_archive(0, archive)
        self._run(job)
        self.bytes_read += len(archive)
        value = load_plain_data(item.name, archive, self._config)
        if not isinstance(value, torch.Tensor) or value.shape != chunk.sizes:
            raise ShapeMismatchError(
                f"'{item.name}': must be a tensor of {list(chunk.sizes)}, but the record holds a {type(value).__name__}"
            )
        # Such a record can only be read whole. Keep it, because the caller may ask for it piece by piece.
        self._opaque = (item.name, chunk.offsets, value.detach())
        return _compat.narrow(value.detach(), within, box.sizes)

    def _run(self, job: _C.LoadJob) -> None:
        with naming_keys(self._checkpoint):
            job.run()

    def read_across(self, item: Item, box: Box) -> tuple[torch.Tensor, int]:
        """Reads ``box`` of the tensor from all chunks that overlap it. Returns it, and how many elements are stored.

        Elements that no chunk has are 0, or uninitialised if no chunk has any.
        """
        assert item.chunks is not None
        found: list[tuple[Box, torch.Tensor]] = []
        for chunk in item.chunks:
            common = intersection(Box(chunk.offsets, chunk.sizes), box)
            if common is not None:
                found.append((common, self.read(item, chunk, common)))
        if len(found) == 1 and found[0][0] == box:
            return found[0][1], box.numel
        if not found:
            return torch.empty(box.sizes, dtype=_plain_dtype(item)), 0
        first = found[0][1]
        whole = torch.zeros(box.sizes, dtype=torch.float64 if first.is_quantized else first.dtype)
        for common, tensor in found:
            within = [of_part - of_box for of_part, of_box in zip(common.offsets, box.offsets, strict=True)]
            _compat.narrow(whole, within, common.sizes).copy_(tensor.dequantize() if tensor.is_quantized else tensor)
        return whole, sum(common.numel for common, _ in found)

    def record(self, item: Item) -> bytearray:
        """Reads the bytes of an object."""
        job = self._job(
            ReadItem(
                type=LoadItemType.BYTE_IO,
                dest_index=MetadataIndex(item.name),
                dest_offsets=torch.Size((0,)),
                storage_index=MetadataIndex(item.name),
                storage_offsets=torch.Size((0,)),
                lengths=torch.Size((0,)),
            )
        )
        buffer = bytearray(job.object_bytes(0))
        job.add_object(0, buffer)
        job.run()
        self.bytes_read += len(buffer)
        return buffer

    def object(self, item: Item, record: bytearray) -> Any:
        """Unpickles ``record`` under the rules of a load."""
        return plain_object(item.name, record, self._config)

    def _job(self, item: ReadItem) -> _C.LoadJob:
        config = self._config
        return _C.LoadJob(
            self._checkpoint,
            _C.ReadPlan(self._checkpoint, [item]),
            directory=self._path,
            rank=self.part.rank,
            direct_io=config.direct_io,
            verify=config.verify,
            num_io_threads=config.load_io_threads or config.io_threads,
            ring_bytes=config.ring_bytes,
            io_timeout_s=config.io_timeout_s,
            current_stream=_compat.current_stream,
        )


def _plain_dtype(item: Item) -> torch.dtype:
    dtype = getattr(torch, item.dtype or "", torch.uint8)
    return dtype if isinstance(dtype, torch.dtype) and dtype in _compat.PLAIN_DTYPES else torch.uint8
