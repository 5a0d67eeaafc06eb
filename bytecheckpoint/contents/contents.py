# SPDX-License-Identifier: Apache-2.0
"""The contents of a checkpoint, or of all parts of a step folder, from their metadata. Needs no torch."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bytecheckpoint.config import Config
from bytecheckpoint.contents.opening import open_checkpoint, viewed
from bytecheckpoint.contents.wrong_path import explaining
from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError, StorageError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.parts import inspect_step
from bytecheckpoint.storage.paths import below

if TYPE_CHECKING:
    from bytecheckpoint.native import _C

__all__ = ["Chunk", "Contents", "Item", "Key", "Part", "components_in", "open_contents", "place_text"]

Key = tuple[str, int | None, str]

_RANK_METADATA = re.compile(r"__(\d{1,10})\.metadata")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, or an object, and where it is stored.

    Attributes:
        offsets: Where the box begins in each dim of the tensor.
        sizes: Shape of the box.
        file: Name of the file in the directory; None if the metadata do not say where.
        offset: Offset of the record in the file.
        num_bytes: Bytes of the record.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None
    offset: int
    num_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain data."""
        return {
            "offsets": list(self.offsets),
            "sizes": list(self.sizes),
            "file": self.file,
            "offset": self.offset,
            "bytes": self.num_bytes,
        }


@dataclass(frozen=True)
class Item:
    """A tensor or an object.

    Attributes:
        component: Part that it is in, in a step folder of ``bytecheckpoint.save``; otherwise "".
        rank: Rank that saved it without collectives; None in a checkpoint of all ranks.
        name: Its key.
        dtype: Name of the dtype; None for an object.
        shape: Shape of the tensor.
        num_bytes: Bytes of all elements of the tensor, stored or not. If it is not stored as plain elements, bytes of
            its records.
        num_chunks: Number of chunks.
        chunks: The chunks; None if they were not asked for.
        is_partial: Whether it was saved in part on purpose.
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

    def to_dict(self) -> dict[str, Any]:
        """Returns what it is as plain data, without its chunks."""
        return {
            "name": self.name,
            "part": self.component or None,
            "rank": self.rank,
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": None if self.dtype is None else list(self.shape),
            "bytes": self.num_bytes,
        }

    @property
    def key(self) -> Key:
        """Key of this item among all items of its contents."""
        return self.component, self.rank, self.name


@dataclass(frozen=True)
class Part:
    """What one commit mark says.

    Attributes:
        path: Directory of the commit mark.
        component: See ``Item``.
        rank: Rank whose part it is; None for a checkpoint of all ranks.
        checkpoint: The opened commit mark.
        items: Items by name, in the order of the names' UTF-8 bytes.
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
    """A checkpoint: one part, or one for each rank that saved without collectives; or all parts of a step folder."""

    path: str
    parts: tuple[Part, ...]

    @property
    def items(self) -> Iterator[Item]:
        return (item for part in self.parts for item in part.items.values())

    @property
    def save_ids(self) -> list[str]:
        return [part.checkpoint.save_id for part in self.parts if not part.is_foreign]

    @property
    def format(self) -> str:
        """Format of the parts: ``bytecheckpoint`` if any part is ours."""
        formats = {part.checkpoint.format for part in self.parts}
        return "bytecheckpoint" if len(formats) > 1 else formats.pop()

    @property
    def num_files(self) -> int:
        return sum(len(part.checkpoint.files()) for part in self.parts)


def place_text(component: str, rank: int | None) -> str:
    """Returns the prefix for a key of one part of a step folder, or of one rank that saved without collectives."""
    return (f"{component}: " if component else "") + ("" if rank is None else f"rank {rank}: ")


def open_contents(
    path: str,
    *,
    config: Config,
    with_chunks: bool = False,
    kind: type[_core.Checkpoint] | type[_C.Checkpoint],
    spec: LoadSpec | None = None,
) -> Contents:
    """Reads the commit mark of a checkpoint, or those of its ranks, or those of the parts of a step folder.

    Args:
        path: Directory of a checkpoint, or a step folder.
        config: Settings; ``accept_rewritten_metadata`` is used.
        with_chunks: Whether to read chunks, too.
        kind: Class ``Checkpoint`` of the extension module that will do further work with the checkpoint.
        spec: What to take of it, under which names; None takes all of it.

    Raises:
        CheckpointNotFoundError: There is none of these. The message says what is there.
        CheckpointError: A commit mark cannot be read (``CorruptCheckpointError``, ``FormatVersionError``,
            ``UnsupportedError``, ``StorageError``).
        ConfigError: ``spec`` does not fit the checkpoint, or there are several parts.
    """

    def parts_of(directory: str, component: str) -> tuple[Part, ...]:
        try:
            return (_part(directory, component, None, config, with_chunks, kind),)
        except CheckpointNotFoundError:
            ranks = _ranks_in(directory)
            if not ranks:
                raise
        return tuple(_part(directory, component, rank, config, with_chunks, kind) for rank in ranks)

    folder_at(path).use(config, sys.modules[kind.__module__])  # of the parts, too
    with explaining(path):
        try:
            parts = parts_of(path, "")
        except CheckpointNotFoundError:
            components = components_in(path)
            if not components:
                raise
            parts = tuple(part for name in components for part in parts_of(str(below(path, name)), name))
    if spec is None:
        return Contents(path, parts)
    if len(parts) > 1:
        raise ConfigError(f"{path} has several parts: pass the path of one, to say what to take of it")
    checkpoint: Any = viewed(parts[0].checkpoint, spec).wanted
    items = _items(checkpoint, parts[0].component, parts[0].rank, with_chunks)
    return Contents(path, (dataclasses.replace(parts[0], checkpoint=checkpoint, items=items),))


def components_in(path: str) -> list[str]:
    """Returns the parts in a step folder of ``bytecheckpoint.save``, the model first; none for any other folder."""
    try:
        return list(inspect_step(path)["components"])[::-1]
    except StorageError:
        return []  # there is no such folder


def _ranks_in(path: str) -> list[int]:
    try:
        names = folder_at(path).names()
    except StorageError:
        return []
    return sorted(int(found[1]) for name in names if (found := _RANK_METADATA.fullmatch(name)) is not None)


def _part(path: str, component: str, rank: int | None, config: Config, with_chunks: bool, kind: Any) -> Part:
    checkpoint = open_checkpoint(path, config, kind=kind, rank=rank, is_known=True, explain=False).stored
    return Part(path, component, rank, checkpoint, _items(checkpoint, component, rank, with_chunks))


def _items(checkpoint: Any, component: str, rank: int | None, with_chunks: bool) -> dict[str, Item]:
    contents = checkpoint.contents()
    chunks: list[Any] = checkpoint.chunks() if with_chunks else [None] * len(contents)
    items = {}
    for (name, dtype, shape, itemsize, record_bytes, num_chunks, is_partial), of_item in zip(
        contents, chunks, strict=True
    ):
        num_bytes = itemsize * math.prod(shape) if itemsize else record_bytes
        made = None if of_item is None else tuple(Chunk(*chunk) for chunk in of_item)
        items[name] = Item(component, rank, name, dtype, shape, num_bytes, num_chunks, made, is_partial)
    return items
