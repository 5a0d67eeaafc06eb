# SPDX-License-Identifier: Apache-2.0
"""The files of journals: where they lie, and how lines get into them. Needs no torch.

    RUN/step_100/.bcp/journal.jsonl        of the saves to this folder, and of steps that were removed since
    RUN/step_100/model/.bcp/journal.jsonl  of the saves of a part
    RUN/.bcp/journal.jsonl                 only if somebody asked for it; older versions wrote there

Lines are only appended, each with one call and under a lock of the file. When a file has grown to ``_ROTATE_BYTES``, it
becomes ``journal.1.jsonl``, and an older one ``journal.2.jsonl``, up to ``_MOST_OLD``. What is older is dropped.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.names import RECORDS, is_mark, save_of_tmp
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.storage.step_names import is_step_name

__all__ = [
    "FOLDER",
    "append",
    "carried_bytes",
    "carry_lines",
    "holds_checkpoint",
    "journal_folders",
    "journal_paths",
    "save_folders",
]

FOLDER = RECORDS

_NAME = "journal.jsonl"
_HALF = ".journal.new"
_ROTATE_BYTES = 64 << 20
_MOST_OLD = 3
_LEAST_FREE_BYTES = 1 << 20  # of a disk, are left to what saves still have to write


def append(folder: Path, line: bytes) -> None:
    """Appends a line to the journal in ``folder``, which is made if its parent exists.

    Raises:
        OSError: The file system refuses, or has less than 1 MiB left.
    """
    disk = os.statvfs(folder.parent)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < _LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    with suppress(FileExistsError):
        folder.mkdir()  # not its parents: a run that was removed meanwhile stays removed
    path = folder / _NAME
    with _locked(path) as file:
        if _size(file) and _size(file) + len(line) > _ROTATE_BYTES:
            _make_room(path)
            with path.open("ab", buffering=0) as new:  # whoever waits for the lock of the old file sees that it moved
                new.write(line)
            return
        _write(file, line)


def journal_paths(folder: Path) -> list[Path]:
    """Returns the files that the journal in ``folder`` may have, the newest first."""
    return [folder / _NAME, *(folder / f"journal.{number}.jsonl" for number in range(1, _MOST_OLD + 1))]


def journal_folders(run: Path) -> list[Path]:
    """Returns the folders that may hold a journal of a run: its own, those of its steps, and those of parts of these.

    Args:
        run: Folder of a run; or a checkpoint; or a folder that ``Config(journal=...)`` named.

    Raises:
        StorageError: The folder cannot be listed.
    """
    found = [run] if any(path.exists() for path in journal_paths(run)) else []
    if not run.is_dir():
        return found
    return [*found, *(folder / FOLDER for folder in save_folders(run) if (folder / FOLDER).is_dir())]


def save_folders(run: Path) -> Iterator[Path]:
    """Yields the folders to which saves of a run may have been: itself, its steps, and parts of these.

    Raises:
        StorageError: The folder cannot be listed.
    """
    yield run
    for name in sorted(folder_at(run).folders()):
        parts: list[str] = []
        with _if_there():  # a save that fails, or a prune, may remove it meanwhile
            # A folder of another name may be a run of its own, whose journal is not of this one.
            if name == FOLDER or not (is_step_name(name) or holds_checkpoint(run / name)):
                continue
            parts = sorted(folder_at(run / name).folders())
        yield run / name
        yield from (run / name / part for part in parts if part != FOLDER)


@contextmanager
def _if_there() -> Iterator[None]:
    """Ends the ``with`` block where a folder has gone."""
    try:
        yield
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise


def holds_checkpoint(folder: Path) -> bool:
    """Whether there is a commit mark, or what a save has left, in a folder, or a commit mark in a part of it."""
    names = folder_at(folder).names()
    is_own = any(is_mark(name) or save_of_tmp(name) is not None for name in names)
    return is_own or any(folder_at(folder / part).has(".metadata") for part in PARTS)


def carry_lines(run: int, removed: Iterable[str], into: str) -> list[str]:
    """Moves the lines of steps that are about to be removed into the journal of a step that stays.

    A crash leaves no line out: it may leave some twice, which readers see. Folders that have turned into links are not
    followed.

    Args:
        run: Descriptor of the folder of the run.
        removed: Names of the steps in it, the oldest first.
        into: Name of a step.

    Returns:
        What failed. Those lines are lost when their step is removed.
    """
    failures = []
    for name in reversed([*removed]):  # each one's lines go before those that are there
        try:
            with _beneath(_path_of(run), name) as step, _beneath(_path_of(run), into) as target:
                parts = [part for part in sorted(folder_at(step).folders()) if (step / part / FOLDER).is_dir()]
                if (step / FOLDER).is_dir():
                    _carry(step, target)
                for part in parts:
                    with _beneath(step, part) as folder:
                        _carry(folder, target)
        except OSError as error:
            if error.errno != errno.ENOENT:  # else another prune has removed it
                failures.append(f"the journal of {name} is not kept: {error.strerror or error}")
    return failures


def carried_bytes(folder: Path) -> int:
    """Returns how many bytes ``carry_lines`` takes away from a folder with a checkpoint or a part of one."""
    found = (path.lstat().st_size for path in journal_paths(folder / FOLDER) if path.exists())
    return sum(found)


def _path_of(directory: int) -> Path:
    """Returns a path that leads to an open folder, whatever has its name by now."""
    return Path(f"/proc/self/fd/{directory}")


@contextmanager
def _beneath(folder: Path, name: str) -> Iterator[Path]:
    """Opens a folder in another one, but no link, and yields a path that leads to it."""
    directory = os.open(folder / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _path_of(directory)
    finally:
        os.close(directory)


def _carry(folder: Path, step: Path) -> None:
    """Moves the files of a journal from the folder of a checkpoint into another one."""
    with _beneath(folder, FOLDER) as source:
        if not any(path.exists() for path in journal_paths(source)):
            return
        with suppress(FileExistsError):
            (step / FOLDER).mkdir()
        with _beneath(step, FOLDER) as into:
            _carry_files(source, into)


def _carry_files(source: Path, into: Path) -> None:
    newest, *older = journal_paths(source)
    target, *slots = journal_paths(into)
    with _locked(target) as file:
        if newest.exists():
            with _appended(newest) as lines:
                try:
                    # No wait: another prune may hold it, and wait for the lock that is held here.
                    fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
                if _size(lines) + _size(file) <= _ROTATE_BYTES:
                    # The file of many lines takes the place of the one with few. So little is written, however long
                    # the run is, and nothing that a full disk would refuse.
                    if _size(file):
                        _write(lines, target.read_bytes())
                    _move(newest, target)
                else:
                    _make_room(slots[0])
                    _move(newest, slots[0])
        for path in older:
            free = [slot for slot in slots if not slot.exists()]
            if path.exists() and free:
                _move(path, free[0])


def _locked(path: Path) -> IO[bytes]:
    """Opens a file to append to, and locks it until it is closed. Makes it if it is absent."""
    while True:
        file = _appended(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        file.close()  # another process has moved the file away before this one had its lock


def _appended(path: Path) -> IO[bytes]:
    """Opens a file to append to, and makes it if it is absent. A link is refused, and a pipe that nobody reads."""
    special = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags | special, 0o666))


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _write(file: IO[bytes], lines: bytes) -> None:
    """Appends lines. One that a process began and did not end must not swallow the first of them."""
    size = _size(file)
    with Path(f"/proc/self/fd/{file.fileno()}").open("rb") as same:
        same.seek(max(size - 1, 0))
        is_torn = same.read(1) not in (b"", b"\n")
    file.write(b"\n" + lines if is_torn else lines)


def _make_room(path: Path) -> None:
    """Gives a file of a journal, and those that are older, the name of the next older one."""
    folder = path.parent
    names = journal_paths(folder)
    names = names[names.index(path) :]
    for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
        with suppress(FileNotFoundError):
            newer.replace(older)


def _move(source: Path, target: Path) -> None:
    """Moves a file, also to another file system: the folder of a step may be a mount."""
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        half = target.with_name(_HALF)
        shutil.copyfile(source, half)
        half.replace(target)
        source.unlink()
