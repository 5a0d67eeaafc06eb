# SPDX-License-Identifier: Apache-2.0
"""What one checkpoint, or one step folder, takes on disk, and what for. Needs no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folder_files import StoredFile, files_by_folder
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.journal_files import FOLDER
from bytecheckpoint.storage.names import is_data, is_mark, rank_of_mark
from bytecheckpoint.storage.paths import Place, as_place, below, parent_of

__all__ = ["CheckpointUsage", "KeyUsage", "usage_of"]

_TMP = re.compile(r"(__\d+)?\.metadata(\.[0-9a-f]{32})?\.tmp")  # of our saves, and of stock DCP's
_MARK = ".metadata"


@dataclass(frozen=True)
class KeyUsage:
    """What is stored under some keys, in one dtype.

    Attributes:
        key: The first names of the keys.
        dtype: Name of the dtype; None for objects.
        num_items: Number of tensors or objects.
        num_bytes: Bytes of elements; of objects, and tensors that are not plain, bytes of records.
    """

    key: str
    dtype: str | None
    num_items: int
    num_bytes: int

    def __add__(self, other: KeyUsage) -> KeyUsage:
        num_items, num_bytes = self.num_items + other.num_items, self.num_bytes + other.num_bytes
        return dataclasses.replace(self, num_items=num_items, num_bytes=num_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain data."""
        return {"key": self.key, "dtype": self.dtype, "items": self.num_items, "bytes": self.num_bytes}


@dataclass
class CheckpointUsage:
    """What a checkpoint, or a step folder with everything in it, takes on disk.

    ``num_bytes`` is the sum of the rows, the overhead, and the bytes of unreferenced, unfinished, unread and other
    files.

    Attributes:
        path: The folder, file or URL.
        step: Number of the step; None if that was not asked.
        formats: Formats of what is in it: ``bytecheckpoint``, ``dcp``, ``safetensors``, ...
        files: The files.
        rows: What is stored under which keys.
        headers: Bytes of headers and trailers of our data files.
        block_tables: Bytes of the checksums of our data files.
        archives: Bytes around the elements in the records of data files, and whatever else another writer has there.
        padding: Bytes between the records of our data files.
        metadata: Bytes of commit marks.
        records: Bytes of journals and traces of saves.
        unreferenced: Data files that no commit mark names, and which no save writes, as far as that is seen.
        unreferenced_bytes: Their bytes.
        unfinished_bytes: Bytes of data files of a save that is under way, or has died, and of its tmps.
        unread_bytes: Bytes of the data files of commit marks that could not be read, or do not fit them.
        other_bytes: Bytes of files that are not of a checkpoint.
        problems: What could not be read, or is not as the metadata say.
    """

    path: str
    step: int | None
    formats: list[str] = field(default_factory=list)
    files: list[StoredFile] = field(default_factory=list, repr=False)
    rows: list[KeyUsage] = field(default_factory=list)
    headers: int = 0
    block_tables: int = 0
    archives: int = 0
    padding: int = 0
    metadata: int = 0
    records: int = 0
    unreferenced: list[str] = field(default_factory=list)
    unreferenced_bytes: int = 0
    unfinished_bytes: int = 0
    unread_bytes: int = 0
    other_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Length of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def allocated_bytes(self) -> int:
        """What they take on disk."""
        return sum(file.allocated_bytes for file in self.files)

    @property
    def linked_bytes(self) -> int:
        """What those of them take on disk that have other names, too."""
        return sum(file.allocated_bytes for file in self.files if file.num_links > 1)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of the checkpoint that are neither elements nor objects."""
        return self.headers + self.block_tables + self.archives + self.padding + self.metadata + self.records

    @property
    def is_bare(self) -> bool:
        """Whether nothing of a checkpoint is there."""
        return not (self.formats or self.problems or self.unreferenced or self.unfinished_bytes or self.metadata)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, and sums, as plain data; of the files only their number."""
        fields = ("unreferenced", "unreferenced_bytes", "unfinished_bytes", "unread_bytes", "other_bytes", "problems")
        parts = ("headers", "block_tables", "archives", "padding", "metadata", "records")
        return {
            "path": self.path,
            "step": self.step,
            "formats": self.formats,
            "files": len(self.files),
            "bytes": self.num_bytes,
            "allocated_bytes": self.allocated_bytes,
            "linked_bytes": self.linked_bytes,
            "keys": [row.to_dict() for row in self.rows],
            "overhead": {"bytes": self.overhead_bytes, **{name: getattr(self, name) for name in parts}},
            **{name: getattr(self, name) for name in fields},
        }


def usage_of(
    place: Place, step: int | None, files: list[StoredFile] | None, *, depth: int, config: Config
) -> CheckpointUsage:
    """Finds out what a checkpoint takes. What cannot be read is a problem in the result.

    Args:
        place: The folder or file. A URL must be known.
        step: Number of the step.
        files: Its files, if they are known. They are listed again if they are not as the metadata say: a save may have
            committed since.
        depth: By how many names of a key to count.
        config: ``accept_rewritten_metadata`` is used.
    """
    for _ in range(2):
        look = _Look(CheckpointUsage(str(place), step), place, depth, config)
        try:
            look.at(folder_at(place).files() if files is None else files)
        except CheckpointError as error:  # it cannot be listed
            look.usage.problems.append(str(error))
            break
        if not (look.usage.problems or look.usage.unreferenced):
            break
        files = None
    return look.usage


class _Look:
    """One look at the files of a checkpoint."""

    def __init__(self, usage: CheckpointUsage, place: Place, depth: int, config: Config) -> None:
        self.usage = usage
        self._place = place
        self._depth = depth
        self._config = config
        self._is_listed = folder_at(place).has_listing

    def at(self, files: list[StoredFile]) -> None:
        usage = self.usage
        usage.files = files
        by_folder = files_by_folder(files)
        has_marks = any(is_mark(file.name) for file in files)
        for folder in by_folder if files else [""]:
            if FOLDER in folder.split("/"):
                usage.records += sum(file.num_bytes for file in by_folder[folder])
                continue
            here = {file.name[len(folder) + 1 if folder else 0 :]: file for file in by_folder.get(folder, ())}
            marks = [name for name in here if is_mark(name)]
            has_model = any(name.endswith(".safetensors") for name in here) or (not folder and not has_marks)
            named: set[str] = set()
            for mark in marks or ([_MARK] if has_model else []):
                named |= self._count(folder, here, mark, is_needed=bool(marks))
            usage.metadata += sum(here[mark].num_bytes for mark in marks)
            self._count_others(folder, here, named | {*marks})
        rows: dict[tuple[str, str | None], KeyUsage] = {}
        for row in usage.rows:
            before = rows.get((row.key, row.dtype))
            rows[row.key, row.dtype] = row if before is None else before + row
        usage.rows = [*rows.values()]

    def _count(self, folder: str, here: dict[str, StoredFile], mark: str, *, is_needed: bool) -> set[str]:
        """Counts what a commit mark, or a folder with a model, names. Returns the names of these files."""
        usage = self.usage
        at = below(self._place, *filter(None, folder.split("/")))
        try:
            checkpoint = _core.Checkpoint.open(
                str(at), rank=rank_of_mark(mark), accept_rewritten=self._config.accept_rewritten_metadata
            )
        except CheckpointError as error:
            if is_needed or not isinstance(error, CheckpointNotFoundError):
                usage.problems.append(str(error))
            named = {name for name in here if is_data(name)} if is_needed else set()
            usage.unread_bytes += sum(here[name].num_bytes for name in named)
            return named
        is_ours = checkpoint.foreign is None
        sizes = {name: num_bytes for name, num_bytes, *_ in checkpoint.files()}
        found = self._found(checkpoint.data_directory(str(at)), at, here, sizes)
        usage.formats = sorted({*usage.formats, checkpoint.format})
        faults = [f"{name}: there is no such file, but the metadata name it" for name in sizes if name not in found]
        if is_ours:
            faults += [
                f"{name}: the file has {file.num_bytes:,} bytes, but the metadata say {sizes[name]:,}"
                for name, file in found.items()
                if file.num_bytes != sizes[name]
            ]
        usage.problems += [f"{folder}/{fault}" if folder else fault for fault in faults]
        num_bytes = sum(file.num_bytes for file in found.values())
        if faults:
            usage.unread_bytes += num_bytes
            return {*sizes}
        prefix = [*filter(None, folder.split("/"))]
        rows, headers, tables, archives, padding = checkpoint.disk_usage(max(self._depth - len(prefix), 0))
        for key, dtype, num_items, of_row in rows:
            names = ".".join([*prefix[: self._depth], *filter(None, [key])])
            usage.rows.append(KeyUsage(names, dtype, num_items, of_row))
        usage.headers += headers
        usage.block_tables += tables
        usage.padding += padding
        # The metadata of others do not say how long their files are.
        usage.archives += archives if is_ours else max(num_bytes - sum(row[3] for row in rows), 0)
        return {*sizes}

    def _found(
        self, directory: str, at: Place, here: dict[str, StoredFile], names: Iterable[str]
    ) -> dict[str, StoredFile]:
        """Returns those of the named files that are there. Adds those that are not below the folder to its files."""
        found: dict[str, StoredFile] = {}
        is_elsewhere = directory != str(at)  # links of a cache lead there, or the path is that of a file
        place = as_place(directory)
        is_parent = is_elsewhere and place == parent_of(at)
        for name in names:
            file = here.get(name) if not is_elsewhere or is_parent else None
            if file is None and (is_elsewhere or not self._is_listed):
                file = folder_at(place).file(name)
                if file is not None:
                    self.usage.files.append(file)
            if file is not None:
                found[name] = file
        return found

    def _count_others(self, folder: str, here: dict[str, StoredFile], known: set[str]) -> None:
        """Counts files that no commit mark names."""
        usage = self.usage
        strays = {name: file for name, file in here.items() if name not in known and is_data(name)}
        tmps = {name for name in here if _TMP.fullmatch(name)}
        usage.unfinished_bytes += sum(here[name].num_bytes for name in tmps)
        usage.other_bytes += sum(
            file.num_bytes
            for name, file in here.items()
            if name not in known and name not in strays and name not in tmps
        )
        if not strays:
            return
        at = below(self._place, *filter(None, folder.split("/")))
        # A save may be writing them, or have committed since they were listed. This looks at tmps and locks.
        unreferenced, _ = _core.find_unreferenced(str(at))
        left = [strays[name] for name in strays if name in {*unreferenced}]
        usage.unreferenced += [file.name for file in left]
        usage.unreferenced_bytes += sum(file.num_bytes for file in left)
        usage.unfinished_bytes += sum(file.num_bytes for file in strays.values()) - sum(file.num_bytes for file in left)
