# SPDX-License-Identifier: Apache-2.0
"""The journal of a run: one line of JSON for each save and load, in ``.bcp/journal.jsonl`` of the folder of the run.

Lines are only appended, each with one call and under a lock of the file. A reader skips a line that is not whole.
When the file has grown to ``_ROTATE_BYTES``, it becomes ``journal.1.jsonl``, and an older one ``journal.2.jsonl``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bytecheckpoint.checkpoint.step_names import DEFAULT_PATTERN, compile_pattern, step_number
from bytecheckpoint.config import Config
from bytecheckpoint.errors import StorageError

__all__ = ["FOLDER", "append", "find_save", "place_of", "read_journal"]

FOLDER = ".bcp"
_NAME = "journal.jsonl"
_ROTATE_BYTES = 64 << 20
_MOST_OLD = 3
_LEAST_FREE_BYTES = 1 << 20  # of a disk, are left to what saves still have to write

_STEP = compile_pattern(DEFAULT_PATTERN)


def place_of(path: str, config: Config, *, is_save: bool) -> tuple[Path | None, str, int | None]:
    """Returns where the journal of a call is.

    Args:
        path: Path of the checkpoint: an absolute one, or a URL.
        config: Settings. ``journal`` is ``auto``, ``off`` or a folder.
        is_save: Whether the call is a save. A load begins no journal in the folder of a run.

    Returns:
        The folder of the journal, None if there is none; the path of the checkpoint, relative to the folder of the run
        if it is a step of a run; and the number of the step, None if it is none.
    """
    if config.journal == "off":
        return None, path, None
    run, step = _run_of(path)
    relative = path if run is None else os.path.relpath(path, run)
    if config.journal != "auto":
        return Path(config.journal), relative, step
    folder = (Path(path).parent if run is None else run) / FOLDER
    if "://" in path or not ((is_save and run is not None) or folder.is_dir()):
        return None, relative, step
    return folder, os.path.relpath(path, folder.parent), step


def _run_of(path: str) -> tuple[Path | None, int | None]:
    """Returns the folder of the run that a checkpoint is a step of, or a part of a step; and the step."""
    if "://" in path:
        return None, None
    for folder in (Path(path), Path(path).parent):
        match = _STEP.fullmatch(folder.name)
        step = None if match is None else step_number(match[1] or "")
        if step is not None:
            return folder.parent, step
    return None, None


def append(folder: Path, record: dict[str, Any]) -> None:
    """Appends a record to the journal in ``folder``, which is made if its parent exists.

    Raises:
        OSError: The file system refuses, or has less than 1 MiB left.
    """
    disk = os.statvfs(folder.parent)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < _LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    with suppress(FileExistsError):
        folder.mkdir()  # not its parents: a run that was removed meanwhile stays removed
    path = folder / _NAME
    while not _appended(path, line):
        pass


def _appended(path: Path, line: bytes) -> bool:
    """Appends a line, unless another process has moved the file away before this one had its lock."""
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            is_there = False
        size = os.fstat(file.fileno()).st_size
        if is_there and size + len(line) > _ROTATE_BYTES and size > 0:
            _rotate(path)
            is_there = False
        if not is_there:
            return False
        # A line that a process began and did not end must not swallow this one.
        file.write(line if size == 0 or _ends_line(path) else b"\n" + line)
        return True


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _rotate(path: Path) -> None:
    old = [path, *(path.with_name(f"journal.{number}.jsonl") for number in range(1, _MOST_OLD + 1))]
    for older, newer in zip(reversed(old), reversed(old[:-1]), strict=False):
        with suppress(FileNotFoundError):
            newer.replace(older)


def read_journal(run: str | os.PathLike[str], last: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Returns the records of a journal, the oldest first.

    Args:
        run: Folder of a run, or the folder of a journal that ``Config(journal=...)`` named.
        last: How many records to return at most, from the last; None returns all.

    Returns:
        The records, and how many lines were skipped because they are not whole.

    Raises:
        StorageError: A file of the journal cannot be read.
    """
    records: list[dict[str, Any]] = []
    num_skipped = 0
    for lines in _files_of(run):
        of_file = []
        for line in lines if last is None else lines[-(last - len(records)) :]:
            record = _parsed(line)
            if record is None:
                num_skipped += bool(line.strip())
            else:
                of_file.append(record)
        records = of_file + records
        if last is not None and len(records) >= last:
            break
    return records, num_skipped


def find_save(run: str | os.PathLike[str], save_id: str) -> dict[str, Any] | None:
    """Returns the record of one save; None if the journal has none. Other lines are read, but not parsed.

    Args:
        run: As for ``read_journal``.
        save_id: Id of the save, 32 hex digits.

    Raises:
        StorageError: A file of the journal cannot be read.
    """
    for lines in _files_of(run):
        for line in reversed(lines):
            record = _parsed(line) if save_id.encode() in line else None
            if record is not None and record["kind"] == "save" and record.get("save_id") == save_id:
                return record
    return None


def _files_of(run: str | os.PathLike[str]) -> Iterator[list[bytes]]:
    """Yields the lines of each file of a journal, from the newest file to the oldest."""
    folder = Path(run, FOLDER) if Path(run, FOLDER).is_dir() else Path(run)
    for name in (_NAME, *(f"journal.{number}.jsonl" for number in range(1, _MOST_OLD + 1))):
        try:
            yield (folder / name).read_bytes().splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError(f"read({folder / name}): {error.strerror}", str(folder / name)) from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line; None if it is none that this version knows."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = (
        isinstance(record, dict) and isinstance(record.get("format"), int) and record.get("kind") in ("save", "load")
    )
    return record if known else None
