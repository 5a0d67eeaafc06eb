# SPDX-License-Identifier: Apache-2.0
"""Small files that Python writes and reads: whole or not at all, and never through a link. Needs no torch.

In the place of such a file there may be anything that another user or program has put there. Only regular files are
read, replaced or removed. A FIFO is not waited for, and what a symbolic link leads to stays as it is.

Links in the path of a folder that the caller passes are followed once, when the folder is opened. What is made or
looked up in it is an entry of the open folder. It is never reached through a link, not even one that replaces the entry
later.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from bytecheckpoint.errors import StorageError
from bytecheckpoint.native import _core

__all__ = [
    "made_folder",
    "read_head",
    "read_small_file",
    "refuse_irregular",
    "replaced_by",
    "replacing",
    "storage_errors",
    "write_small_file",
]

_MOST_ATTEMPTS, _BETWEEN_ATTEMPTS_S = 5, 0.01
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_small_file(path: Path, max_bytes: int) -> bytes | None:
    """Returns the content of a file; None if there is no file.

    Raises:
        StorageError: It is not a regular file, is larger than ``max_bytes``, or cannot be read.
    """
    content = read_head(path, max_bytes + 1)
    if content is not None and len(content) > max_bytes:
        raise StorageError(f"read({path}): the file has more than {max_bytes} bytes, the most that is read", str(path))
    return content


def read_head(path: Path, max_bytes: int) -> bytes | None:
    """Returns the first bytes of a file; None if there is no file.

    Raises:
        StorageError: It is not a regular file, or cannot be read.
    """  # noqa: DOC501
    with storage_errors("read", path):
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                return None
            _check_regular("read", path, mode)
            try:
                # Something else may have replaced the file since lstat. With these flags a FIFO opens without waiting,
                # and a link is refused with ELOOP.
                descriptor = os.open(path, os.O_RDONLY | _FLAGS)
                with os.fdopen(descriptor, "rb") as file:
                    _check_regular("read", path, os.fstat(descriptor).st_mode)
                    return file.read(max_bytes)
            except OSError as error:
                # While a file is replaced, some file systems show none for a moment, or forget one that is open.
                if error.errno not in (errno.ENOENT, errno.ESTALE) or attempt == _MOST_ATTEMPTS:
                    raise
            time.sleep(_BETWEEN_ATTEMPTS_S)
    return None


def made_folder(path: Path) -> _core.Directory:
    """Opens the folder at ``path``, and makes it and its parents if they are absent.

    Raises:
        StorageError: The file system refused, or a link has replaced a folder that was just made.
    """
    with storage_errors("mkdir", path):
        at = Path(os.path.realpath(path))
        missing = []
        while not at.exists():
            missing.append(at.name)
            at = at.parent
        directory = _core.Directory(str(at))
        for name in reversed(missing):
            with suppress(FileExistsError):  # another process made it first
                os.mkdir(name, dir_fd=directory.fileno())
            directory = directory.below(name)
    return directory


def write_small_file(path: Path, content: bytes, *, sync: bool = True, sync_folder: bool = True) -> None:
    """Writes a file, in place of one that is there. A reader sees the old one, or all of the new one.

    Args:
        path: Path of the file. Its folder must exist.
        content: Its bytes.
        sync: Whether it is to survive a power cut.
        sync_folder: False leaves it to the caller to sync the folder.

    Raises:
        StorageError: See ``replacing``.
    """
    directory = _core.Directory(str(path.parent))
    # The temporary file has the same name each time, so that it replaces one that a killed process left.
    with replacing(directory, path.name, f".{path.name}.tmp", sync=sync) as file:
        file.write(content)
    if sync and sync_folder:
        directory.sync()


@contextmanager
def replacing(directory: _core.Directory, name: str, tmp_name: str, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Opens a new file to write. At the end of the ``with`` block the file is synced, and atomically replaces ``name``.

    If the block raises, ``name`` is as it was. The caller must sync the directory.

    Args:
        directory: Directory of both names.
        name: Name of the file to replace.
        tmp_name: Name of the new file until then. A file of this name that a killed process left is removed.
        sync: Whether to sync the file.

    Raises:
        StorageError: The file system refused, or something other than a regular file has one of the names.

    Yields:
        The file, open for writing bytes.
    """
    with replaced_by(directory, name, tmp_name):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
        descriptor = os.open(tmp_name, flags, 0o666, dir_fd=directory.fileno())
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(descriptor)


@contextmanager
def replaced_by(directory: _core.Directory, name: str, tmp_name: str) -> Iterator[Path]:
    """Gives a file that the ``with`` block makes the name ``name``. Arguments are those of ``replacing``.

    Raises:
        StorageError: As ``replacing`` does, and what the block raises, with the path of the folder.

    Yields:
        Path at which the block must make a file, and sync it. It leads to the open folder, whatever its name is then.
    """
    at = directory.fileno()
    open_folder = f"/proc/self/fd/{at}"
    with storage_errors("write", directory.path / name):
        refuse_irregular(directory, name)
        if refuse_irregular(directory, tmp_name):
            os.unlink(tmp_name, dir_fd=at)
        try:
            yield Path(open_folder) / tmp_name
            os.rename(tmp_name, name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException as error:
            with suppress(FileNotFoundError):
                os.unlink(tmp_name, dir_fd=at)
            if isinstance(error, StorageError) and open_folder in str(error):
                text = str(error).replace(open_folder, str(directory.path))
                raise StorageError(text, str(directory.path / name), error.errno or 0) from error
            raise


def refuse_irregular(directory: _core.Directory, name: str) -> bool:
    """Returns whether there is a file of this name, which is to be replaced or removed.

    Raises:
        StorageError: Something other than a regular file has the name.
    """
    path = directory.path / name
    with storage_errors("write", path):
        try:
            mode = os.stat(name, dir_fd=directory.fileno(), follow_symlinks=False).st_mode
        except FileNotFoundError:
            return False
    _check_regular("write", path, mode)
    return True


@contextmanager
def storage_errors(operation: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Converts an ``OSError`` of the ``with`` block to a ``StorageError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        text = f"{operation}({os.fspath(path)}): {error.strerror or error}"
        raise StorageError(text, os.fspath(path), error.errno or 0) from error


def _check_regular(operation: str, path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind, code = _KINDS.get(stat.S_IFMT(mode), ("a device", errno.EINVAL))
        raise StorageError(f"{operation}({path}): must be a regular file, but it is {kind}", str(path), code)


_KINDS = {
    stat.S_IFLNK: ("a symbolic link", errno.ELOOP),
    stat.S_IFDIR: ("a directory", errno.EISDIR),
    stat.S_IFIFO: ("a FIFO", errno.EINVAL),
    stat.S_IFSOCK: ("a socket", errno.EINVAL),
}
