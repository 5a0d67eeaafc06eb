# SPDX-License-Identifier: Apache-2.0
"""``LocalFolder``: a directory of a file system."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointBusyError, StorageError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folder import Commit
from bytecheckpoint.storage.folder_files import StoredFile
from bytecheckpoint.storage.paths import as_place
from bytecheckpoint.storage.small_files import read_small_file, storage_errors, write_small_file

__all__ = ["LocalFolder"]

_T = TypeVar("_T")
_STAT_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own blocks are
# A save that failed in another process releases the path within a fraction of this time; see dcp/_save_session.py.
_BUSY_GRACE_S = 1.0


class LocalFolder:
    """A directory; see ``Folder``.

    Args:
        place: Its path, which is followed through symbolic links at each use.
    """

    has_listing = True
    keeps_journals = True
    keeps_notes = False
    commits_by_rank = True
    orders_commits = False
    is_of_one_machine = False
    lists_deep = False
    num_at_once = 1
    is_best_read_together = False
    may_read_late = False
    most_file_bytes = 0
    num_requests = 0

    def __init__(self, place: Path) -> None:
        self.place = place

    def use(
        self, config: Config | None, extension: Any = None, on_request: Callable[[int, int], None] | None = None
    ) -> None:
        """See ``Folder``: the engine opens any directory."""

    def tuned(self, config: Config) -> Config:
        return config

    def key(self, io_timeout_s: float | None = None) -> tuple[int, int] | None:
        """Returns device and inode."""
        if io_timeout_s is not None:
            from bytecheckpoint.native import _C

            return _C.directory_id(str(self.place), io_timeout_s)
        try:
            status = self.place.stat()
        except OSError:
            return None  # nothing to read, and nothing to delete
        return status.st_dev, status.st_ino

    def is_there(self) -> bool:
        with storage_errors("stat", self.place):
            return self.place.is_dir() or (_core.look_anew(str(self.place)) and self.place.is_dir())

    def is_absent(self) -> bool:
        try:
            self.place.lstat()
        except FileNotFoundError:
            return True
        return False

    def is_gone(self) -> bool:
        try:
            return not self.is_there()
        except StorageError:
            return False

    def is_removed(self) -> bool:
        return False

    def folders(self, *, follow_links: bool = False) -> list[str]:
        with storage_errors("list", self.place), self._seen(lambda: os.scandir(self.place)) as entries:
            return [e.name for e in entries if e.is_dir(follow_symlinks=False) or (follow_links and e.is_symlink())]

    def names(self) -> list[str]:
        with storage_errors("list", self.place):
            return self._seen(lambda: os.listdir(self.place))  # noqa: PTH208

    def has(self, name: str) -> bool:
        return os.path.lexists(self.place / name)

    def changed(self, name: str) -> int | None:
        try:
            return (self.place / name).stat().st_mtime_ns
        except OSError:
            return None

    def file_times(self) -> dict[str, int]:
        try:
            with os.scandir(self.place) as entries:
                return {entry.name: entry.stat().st_mtime_ns for entry in entries if entry.is_file()}
        except OSError:
            return {}

    def file(self, name: str) -> StoredFile | None:
        path = self.place / name
        with storage_errors("stat", path):
            try:
                return _of_status(name, path.stat())
            except FileNotFoundError:
                return None

    def files(self, without: Collection[str] = ()) -> list[StoredFile]:
        with storage_errors("list", self.place):
            status = self.place.stat()  # through a link, as everything that is done with the path
            if not self.place.is_dir():
                return [_of_status(self.place.name, status)]
            return [*_files_of(str(self.place), "", without)]

    def is_same(self, other: str | os.PathLike[str]) -> bool | None:
        """Compares paths, then inodes. It says False of URLs alone: hosts may have one file system at several paths."""
        if isinstance(as_place(other), str):
            return False
        if os.path.normpath(os.fspath(other)) == os.path.normpath(self.place):
            return True
        try:
            return self.place.samefile(other) or None
        except OSError:  # there is no such path here
            return None

    def sees(self, names: Collection[str]) -> bool:
        return all((self.place / name).exists() for name in names)

    def shows_late(self, io_timeout_s: float) -> bool:
        return not _core.is_local(str(self.place), io_timeout_s)

    def read_file(self, name: str, max_bytes: int) -> bytes | None:
        return read_small_file(self.place / name, max_bytes)

    def write_file(self, name: str, content: bytes) -> None:
        write_small_file(self.place / name, content)

    def remove_file(self, name: str) -> None:
        with storage_errors("remove", self.place / name):
            (self.place / name).unlink(missing_ok=True)

    def begin_commit(
        self,
        config: Config,
        *,
        save_id: str,
        rank: int | None,
        overwrite: bool,
        sync: bool,
        reserve_bytes: int,
        about: bytes = b"",
    ) -> Commit:
        from bytecheckpoint.native import _C

        give_up = time.monotonic() + _BUSY_GRACE_S
        while True:
            try:
                return _C.Commit(
                    directory=str(self.place),
                    save_id=save_id,
                    rank=rank,
                    overwrite=overwrite,
                    take_over=config.take_over,
                    sync=sync,
                    direct_io=config.direct_io,
                    reserve_bytes=reserve_bytes,
                    about=about,
                    deadline_s=config.commit_deadline_s,
                    visibility_timeout_s=config.visibility_timeout_s,
                    io_timeout_s=config.io_timeout_s,
                )
            except CheckpointBusyError:
                if time.monotonic() >= give_up:
                    raise
            time.sleep(_BUSY_GRACE_S / 10)

    def _seen(self, ask: Callable[[], _T]) -> _T:
        """Returns what ``ask`` returns; asks again where another machine may have made the folder a moment ago."""
        try:
            return ask()
        except FileNotFoundError:
            if not _core.look_anew(str(self.place)):
                raise
            return ask()


def _files_of(path: str, prefix: str, without: Collection[str] = ()) -> Iterator[StoredFile]:
    try:
        entries = os.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        if not prefix:
            raise
        return
    with entries:
        for entry in entries:
            if entry.name in without:
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files_of(entry.path, f"{prefix}{entry.name}/")
                else:
                    yield _of_status(prefix + entry.name, entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue  # it was removed meanwhile


def _of_status(name: str, status: os.stat_result) -> StoredFile:
    allocated = status.st_blocks * _STAT_BLOCK_BYTES
    return StoredFile(name, status.st_size, allocated, (status.st_dev, status.st_ino), status.st_nlink)
