# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of a run take on disk, and what for. Needs no torch."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from errno import ELOOP, ENOENT, ENOTDIR
from typing import Any

from bytecheckpoint.checkpoint.checkpoint_usage import CheckpointUsage, KeyUsage, usage_of
from bytecheckpoint.checkpoint.retention import Retention
from bytecheckpoint.config import Config
from bytecheckpoint.contents.wrong_path import explaining
from bytecheckpoint.errors import CheckpointNotFoundError, StorageError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folder_files import StoredFile
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.paths import Place, as_place, location_to_read, name_of
from bytecheckpoint.storage.step_folder import step_paths

__all__ = ["DiskUsage", "Freed", "disk_usage", "freed_by"]

# Opening a checkpoint waits for storage, which may be far away.
_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Freed:
    """What rules of retention would remove.

    Attributes:
        removed: Paths of the folders that would go.
        num_bytes: Length of their files.
        allocated_bytes: What the disk would get back: files that something else names, too, stay.
    """

    removed: list[str]
    num_bytes: int
    allocated_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain data."""
        return {"removed": self.removed, "bytes": self.num_bytes, "allocated_bytes": self.allocated_bytes}


@dataclass(frozen=True, kw_only=True)
class DiskUsage:
    """What a checkpoint, or all steps of a run, take on disk.

    Attributes:
        path: The folder, file or URL.
        is_run: Whether it is a run folder.
        checkpoints: The steps, sorted by step; or the one checkpoint.
        beside_files: Number of files of the run folder that are in no step.
        beside_bytes: Their length.
        beside_allocated_bytes: What they take on disk.
    """

    path: str
    is_run: bool
    checkpoints: list[CheckpointUsage]
    beside_files: int = 0
    beside_bytes: int = 0
    beside_allocated_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Length of all files of all checkpoints, each name counted."""
        return sum(each.num_bytes for each in self.checkpoints)

    @property
    def allocated_bytes(self) -> int:
        """What all checkpoints take on disk; a file with several names counts once."""
        return _allocated(file for each in self.checkpoints for file in each.files)

    @property
    def shared_bytes(self) -> int:
        """What hard links save: the difference to one file for each name."""
        return sum(each.allocated_bytes for each in self.checkpoints) - self.allocated_bytes

    @property
    def num_findings(self) -> int:
        """Number of files that no checkpoint names, and of faults."""
        return sum(len(each.unreferenced) + len(each.problems) for each in self.checkpoints)

    def by_key(self) -> list[tuple[KeyUsage, int]]:
        """Returns what is stored under each first part of a key, in each dtype, in all checkpoints together.

        Beside each stands what the newest checkpoint that could be read has of it, in bytes.
        """
        found: dict[tuple[str, str | None], KeyUsage] = {}
        newest = next((each.rows for each in reversed(self.checkpoints) if each.rows), [])
        of_newest = {(row.key, row.dtype): row.num_bytes for row in newest}
        for row in (row for each in self.checkpoints for row in each.rows):
            before = found.get((row.key, row.dtype))
            found[row.key, row.dtype] = row if before is None else before + row
        return [(found[key], of_newest.get(key, 0)) for key in sorted(found, key=lambda key: (key[0], key[1] or ""))]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data: fields, sums, and the rows of ``by_key``."""
        return {
            "path": self.path,
            "kind": "run" if self.is_run else "checkpoint",
            "findings": self.num_findings,
            "bytes": self.num_bytes,
            "allocated_bytes": self.allocated_bytes,
            "shared_bytes": self.shared_bytes,
            "beside": {
                "files": self.beside_files,
                "bytes": self.beside_bytes,
                "allocated_bytes": self.beside_allocated_bytes,
            },
            "keys": [{**row.to_dict(), "newest_bytes": newest} for row, newest in self.by_key()],
            "checkpoints": [each.to_dict() for each in self.checkpoints],
        }


def disk_usage(
    path: str | os.PathLike[str],
    *,
    depth: int = 1,
    pattern: str | None = None,
    config: Config | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> DiskUsage:
    """Finds out what the checkpoints of a run, or one checkpoint, take on disk, and what for.

    Local. It lists folders, and reads the commit mark of each checkpoint once, and no data; of safetensors and files of
    ``torch.save`` it reads the headers. It takes no lock and changes nothing. What a save does meanwhile may be counted
    or not.

    Args:
        path: A checkpoint, a step folder of ``bytecheckpoint.save``, or a run folder; or the URL of one.
        depth: By how many of the names in a key, which dots separate, to count. A part of a step folder, such as
            ``model``, is one of them.
        pattern: Pattern of the names of step folders; see ``scan_steps``.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
        progress: Function that is called with the number of steps done and of all steps.

    Raises:
        CheckpointNotFoundError: There is nothing of a checkpoint.
        ConfigError: See ``scan_steps``.
        StorageError: The folder cannot be listed. A checkpoint that cannot be read is a problem of that checkpoint.
    """
    config = config or Config.from_env()
    place = known(location_to_read(path), config)
    steps = _steps_in(place, pattern)
    listed = _steps_of_listing(place, steps) if steps and folder_at(place).lists_deep else {}
    steps = [step for step in steps if not listed or listed[step[1]]]  # a store lists what a removal left a mark of
    if not steps:
        files = _files_there(place)
        found = usage_of(place, None, files, depth=depth, config=config)
        if files == [] or found.is_bare:
            with explaining(place):  # its error says what is there instead
                _core.Checkpoint.open(str(place))
            raise CheckpointNotFoundError(f"open({place}): there is nothing of a checkpoint", str(place))
        return DiskUsage(path=str(place), is_run=False, checkpoints=[found])

    def look(step: tuple[int, str]) -> CheckpointUsage:
        where = as_place(step[1])
        return usage_of(where, step[0], listed.get(step[1]), depth=depth, config=config)

    checkpoints: list[CheckpointUsage] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for each in pool.map(look, steps):
                checkpoints.append(each)
                if progress is not None:
                    progress(len(checkpoints), len(steps))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    beside = listed[""] if listed else folder_at(place).files({name_of(step) for _, step in steps})
    return DiskUsage(
        path=str(place),
        is_run=True,
        checkpoints=checkpoints,
        beside_files=len(beside),
        beside_bytes=sum(file.num_bytes for file in beside),
        beside_allocated_bytes=_allocated(beside),
    )


def freed_by(retention: Retention, usage: DiskUsage) -> Freed:
    """Returns what a prune would remove now, and what that would free on disk.

    Args:
        retention: The rules, for the run folder that ``usage`` is of.
        usage: What the run takes.
    """
    report = retention.prune(dry_run=True)
    going = {*report.removed, *report.swept}
    files = [file for each in usage.checkpoints if each.path in going for file in each.files]
    names = Counter(file.inode for file in files if file.inode is not None)
    freed = [file for file in files if file.inode is None or names[file.inode] >= file.num_links]
    return Freed(
        removed=sorted(going),
        num_bytes=sum(file.num_bytes for file in files),
        allocated_bytes=_allocated(freed),
    )


def _allocated(files: Iterable[StoredFile]) -> int:
    of_inode: dict[object, int] = {}
    alone = 0
    for file in files:
        if file.num_links > 1:
            of_inode[file.inode] = file.allocated_bytes
        else:
            alone += file.allocated_bytes
    return alone + sum(of_inode.values())


def _files_there(place: Place) -> list[StoredFile] | None:
    """Returns the files at or below a place, none if nothing is there; None if that cannot be said."""
    try:
        return folder_at(place).files()
    except StorageError as error:
        return [] if error.errno in (ENOENT, ENOTDIR, ELOOP) else None


def _steps_in(place: Place, pattern: str | None) -> list[tuple[int, str]]:
    """Returns the steps of a run folder; none for anything else, a checkpoint with a folder `10` in it, too."""
    folder = folder_at(place)
    if folder.is_gone() or not folder.has_listing or folder.has(".metadata"):
        return []
    return step_paths(place, pattern)


def _steps_of_listing(place: Place, steps: list[tuple[int, str]]) -> dict[str, list[StoredFile]]:
    """Lists all of a run at once. Returns the files of each step, and under "" those beside them."""
    found: dict[str, list[StoredFile]] = {"": [], **{step: [] for _, step in steps}}
    for file in folder_at(place).files():
        first, _, rest = file.name.partition("/")
        step = f"{place}/{first}"
        if step in found and rest:
            found[step].append(dataclasses.replace(file, name=rest))
        else:
            found[""].append(file)
    return found
