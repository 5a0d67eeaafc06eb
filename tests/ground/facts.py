# SPDX-License-Identifier: Apache-2.0
"""Measures what a file system does, without our package: each function runs on one of the machines."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = [
    "LIMIT_S",
    "direct_io",
    "hold_lock",
    "is_locked",
    "late",
    "links",
    "no_replace",
    "read_entry",
    "replace",
    "watch",
    "write",
]

LIMIT_S = 32.0
"""For so long the other machine is watched: longer than NFS believes that a name is not there."""

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_BLOCK = 4096


def write(path: Path, text: str) -> None:
    """Writes a file and syncs it."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def late(change: Callable[[Path, str], None], path: Path, text: str, wait_s: float) -> float:
    """Makes a change some seconds from now. Returns when it was made."""
    time.sleep(wait_s)
    change(path, text)
    return time.time()


def replace(path: Path, text: str) -> None:
    """Renames a new file over the file."""
    new = path.with_name(f"{path.name}.new")
    write(new, text)
    new.replace(path)


def read_entry(path: Path, is_listed: bool) -> str:
    """Returns what the plainest calls read: the file, or whether a listing names it; or an errno's name."""
    try:
        if is_listed:
            return "listed" if path in path.parent.iterdir() else "ENOENT"
        return path.read_text()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def watch(path: Path, wanted: str, is_listed: bool = False) -> list[tuple[float, str]]:
    """Reads until that gives ``wanted``, or the limit has passed. Returns each change of what was read, and when."""
    begin = time.time()
    seen: list[tuple[float, str]] = []
    while not seen or seen[-1][1] != wanted:
        if (now := time.time()) > begin + LIMIT_S:
            break
        got = read_entry(path, is_listed)
        seen += [] if seen and seen[-1][1] == got else [(now, got)]
        time.sleep(0.02)
    return seen


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def hold_lock(path: Path) -> None:
    """Takes the lock, and stops until it is killed."""
    with _locked(path):
        os.kill(os.getpid(), signal.SIGSTOP)


def is_locked(path: Path) -> bool:
    try:
        with _locked(path):
            return False
    except FileNotFoundError:  # its folder is seen late
        return False
    except BlockingIOError:
        return True


def _refusal(calls: Callable[[], None]) -> str:
    """Returns the name of the errno that the calls fail with, or "yes"."""
    try:
        calls()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "yes"


def links(path: Path) -> str:
    write(path, "linked")
    return _refusal(lambda: os.link(path, path.with_name(f"{path.name}.linked")))


def no_replace(path: Path) -> str:
    """Returns whether a rename that replaces nothing works, and refuses where there is something."""
    libc = ctypes.CDLL(None, use_errno=True)

    def rename(old: Path, new: Path) -> None:
        if libc.renameat2(_AT_FDCWD, bytes(old), _AT_FDCWD, bytes(new), _RENAME_NOREPLACE):
            raise OSError(ctypes.get_errno(), "renameat2")

    there = path.with_name("there")
    write(path, "renamed")
    said = _refusal(lambda: rename(path, there))
    if said == "yes":
        write(path, "again")
        return "yes" if _refusal(lambda: rename(path, there)) == "EEXIST" else "replaces"
    return said


def direct_io(path: Path) -> str:
    """Returns whether whole blocks can be written and read with O_DIRECT, or what fails, and how."""
    with mmap.mmap(-1, _BLOCK) as memory:
        memory.write(b"d" * _BLOCK)
        steps: list[tuple[str, int, Callable[[int], None]]] = [
            ("write", os.O_RDWR | os.O_CREAT, lambda fd: _expect(os.pwrite(fd, memory, 0))),
            ("fsync", os.O_RDWR, os.fsync),
            ("read", os.O_RDONLY, lambda fd: _expect(os.preadv(fd, [memory], 0))),
        ]
        for name, flags, call in steps:

            def one(flags: int = flags, call: Callable[[int], None] = call) -> None:
                fd = os.open(path, flags | os.O_DIRECT)
                try:
                    call(fd)
                finally:
                    os.close(fd)

            if (said := _refusal(one)) != "yes":
                return f"{name}: {said}"
    return "yes"


def _expect(num_bytes: int) -> None:
    if num_bytes != _BLOCK:
        raise OSError(errno.EIO, f"{num_bytes} of {_BLOCK} bytes")
