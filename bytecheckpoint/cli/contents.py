# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint, or a step folder of several, says that it holds; needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytecheckpoint import _core
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointNotFoundError, StorageError
from bytecheckpoint.parts import inspect_step
from bytecheckpoint.wrong_path import explaining

if TYPE_CHECKING:
    from bytecheckpoint import _C

__all__ = ["Chunk", "Contents", "Item", "Key", "Part", "components_in", "open_contents"]

Key = tuple[str, int | None, str]

_RANK_METADATA = re.compile(r"__(\d{1,10})\.metadata")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, or an object, and where it is stored.

    Attributes:
        file: Name in the directory; None if the metadata do not say where.
        offset: Of the record in the file.
        num_bytes: Of the record.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None
    offset: int
    num_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Item:
    """A tensor or an object.

    Attributes:
        component: Of a step folder of ``bytecheckpoint.save``, the part that it is in; else "".
        rank: That saved it without collectives; None of a checkpoint of all ranks.
        dtype: None of an object.
        num_bytes: Of all elements of the tensor, stored or not; of what is not plain elements, of its records.
        chunks: None if they were not asked for.
        is_partial: It was saved in part on purpose.
    """

    component: str
    rank: int | None
    name: str
    dtype: str | None
    shape: tuple[int, ...]
    num_bytes: int
    num_chunks: int
    chunks: tuple[Chunk, ...] | None = field(default=None, repr=False)
    is_partial: bool = False

    @property
    def kind(self) -> str:
        return "object" if self.dtype is None else "tensor"

    @property
    def key(self) -> Key:
        """Of this item among all of its contents."""
        return self.component, self.rank, self.name


@dataclass(frozen=True)
class Part:
    """What one commit mark says.

    Attributes:
        path: Of the directory that it is in.
        component: As of ``Item``.
        rank: Whose part it is; None of a checkpoint of all ranks.
        checkpoint: It, opened.
        items: By name, in the order of its UTF-8 bytes.
    """

    path: str
    component: str
    rank: int | None
    checkpoint: _core.Checkpoint | _C.Checkpoint
    items: dict[str, Item]

    @property
    def is_foreign(self) -> bool:
        return self.checkpoint.foreign is not None


@dataclass(frozen=True)
class Contents:
    """A checkpoint: one part, or one a rank that saved without collectives; or all components of a step folder."""

    path: str
    parts: tuple[Part, ...]

    @property
    def items(self) -> Iterator[Item]:
        return (item for part in self.parts for item in part.items.values())

    @property
    def save_ids(self) -> list[str]:
        return [part.checkpoint.save_id for part in self.parts if not part.is_foreign]

    @property
    def num_files(self) -> int:
        return sum(len(part.checkpoint.files()) for part in self.parts)


def open_contents(
    path: str, *, config: Config, with_chunks: bool = False, kind: type[_core.Checkpoint] | type[_C.Checkpoint]
) -> Contents:
    """Reads the commit mark of a checkpoint, or those of its ranks, or those of the parts of a step folder.

    Args:
        kind: Of the extension module that will be asked for more.

    Raises:
        CheckpointNotFoundError: None of these is there; says what is.
        CorruptCheckpointError, FormatVersionError, UnsupportedError, StorageError
    """

    def parts_of(directory: str, component: str) -> tuple[Part, ...]:
        try:
            return (_part(directory, component, None, config, with_chunks, kind),)
        except CheckpointNotFoundError:
            ranks = _ranks_in(directory)
            if not ranks:
                raise
        return tuple(_part(directory, component, rank, config, with_chunks, kind) for rank in ranks)

    with explaining(path):
        try:
            return Contents(path, parts_of(path, ""))
        except CheckpointNotFoundError:
            components = components_in(path)
            if not components:
                raise
        return Contents(path, tuple(part for name in components for part in parts_of(str(Path(path, name)), name)))


def components_in(path: str) -> list[str]:
    """The parts in a step folder of ``bytecheckpoint.save``, the model first; none of anything else."""
    try:
        return list(inspect_step(path)["components"])[::-1]
    except StorageError:
        return []  # there is no such folder


def _ranks_in(path: str) -> list[int]:
    try:
        names = [entry.name for entry in Path(path).iterdir()]
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _RANK_METADATA.fullmatch(name)) is not None)


def _part(path: str, component: str, rank: int | None, config: Config, with_chunks: bool, kind: Any) -> Part:
    checkpoint = kind.open(path, rank=rank, accept_rewritten=config.accept_rewritten_metadata)
    contents = checkpoint.contents()
    chunks: list[Any] = checkpoint.chunks() if with_chunks else [None] * len(contents)
    items = {}
    for (name, dtype, shape, itemsize, record_bytes, num_chunks, is_partial), of_item in zip(
        contents, chunks, strict=True
    ):
        num_bytes = itemsize * math.prod(shape) if itemsize else record_bytes
        made = None if of_item is None else tuple(Chunk(*chunk) for chunk in of_item)
        items[name] = Item(component, rank, name, dtype, shape, num_bytes, num_chunks, made, is_partial)
    return Part(path, component, rank, checkpoint, items)
