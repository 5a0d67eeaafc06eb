# SPDX-License-Identifier: Apache-2.0
"""Files that Python writes and reads: whole or not at all, and never through a link. Needs no torch.

What stands in the place of such a file may be anything that another user or program has put there. Only regular files
are read, written over or removed; a FIFO is not waited for, and what a symbolic link leads to stays as it is.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bytecheckpoint.errors import StorageError

__all__ = ["read_small_file", "refuse_irregular", "replacing", "storage_errors"]

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_small_file(path: Path, max_bytes: int) -> bytes | None:
    """What is in a file; None if there is none.

    Raises:
        StorageError: It is no regular file, is larger than ``max_bytes``, or cannot be read.
    """
    with storage_errors("read", path):
        if not refuse_irregular(path, "read"):
            return None
        try:
            # What has come since: a FIFO is opened at once, a link (ELOOP) not at all.
            descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            _check_regular("read", path, os.fstat(descriptor).st_mode)
            content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise StorageError(f"read({path}): {max_bytes} bytes at most wanted, it has more", str(path))
    return content


@contextmanager
def replacing(path: Path, tmp_name: str) -> Iterator[IO[bytes]]:
    """A new file to write; at the end of the ``with`` block it is synced, and takes the place of ``path`` at once.

    If the block raises, ``path`` is as it was. The caller syncs the directory.

    Args:
        tmp_name: Beside ``path``, of the new file until then. What a killed process left under it is removed.

    Raises:
        StorageError: The file system refused; or what is at ``path`` or at ``tmp_name`` is no regular file.
    """
    tmp = path.with_name(tmp_name)
    with storage_errors("write", path):
        refuse_irregular(path)
        if refuse_irregular(tmp):
            tmp.unlink()
        descriptor = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            tmp.rename(path)
        except BaseException:
            tmp.unlink(missing_ok=True)
            raise


def refuse_irregular(path: Path, operation: str = "write") -> bool:
    """Whether a file is at ``path``.

    Raises:
        StorageError: Something else is.
    """
    with storage_errors(operation, path):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return False
        _check_regular(operation, path, mode)
    return True


@contextmanager
def storage_errors(operation: str, path: Path) -> Iterator[None]:
    """Turns an ``OSError`` of the ``with`` block into a ``StorageError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        text = f"{operation}({path}): {error.strerror or error}"
        raise StorageError(text, str(path), error.errno or 0) from error


def _check_regular(operation: str, path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind, code = _KINDS.get(stat.S_IFMT(mode), ("a device", errno.EINVAL))
        raise StorageError(f"{operation}({path}): a regular file wanted, it is {kind}", str(path), code)


_KINDS = {
    stat.S_IFLNK: ("a symbolic link", errno.ELOOP),
    stat.S_IFDIR: ("a directory", errno.EISDIR),
    stat.S_IFIFO: ("a FIFO", errno.EINVAL),
    stat.S_IFSOCK: ("a socket", errno.EINVAL),
}
