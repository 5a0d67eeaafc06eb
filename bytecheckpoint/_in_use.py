# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint directories this process is reading, so that it does not delete them meanwhile. Needs no torch."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Hold", "hold", "hold_directory", "reading", "unheld"]

_Key = tuple[int, int]


class Hold:
    """That somebody reads a directory: until ``end``, until nobody has this object any more, or until a call ends.

    Args:
        is_running: Of the call; None if only ``end`` tells.
    """

    def __init__(self, is_running: Callable[[], bool] | None = None) -> None:
        self._is_running = is_running
        self._ended = False

    def end(self) -> None:
        """The reading is over."""
        self._ended = True

    def is_active(self) -> bool:
        """Does it still go on?"""
        return not self._ended and (self._is_running is None or self._is_running())


class _Holds:
    """All of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.by_directory: dict[_Key, weakref.WeakSet[Hold]] = {}

    def active(self, key: _Key) -> bool:
        """Does any go on at ``key``? Forgets, of all directories, those that do not. The caller has the lock."""
        for other, holds in list(self.by_directory.items()):
            for one in [one for one in holds if not one.is_active()]:
                holds.discard(one)
            if not holds:
                del self.by_directory[other]
        return key in self.by_directory


_holds = _Holds()


def _of_process() -> _Holds:
    """A forked child begins anew: its parent's loads are not its own, and the lock may be held for ever."""
    global _holds
    if _holds.pid != os.getpid():
        _holds = _Holds()
    return _holds


def _key_of(path: str | os.PathLike[str]) -> _Key | None:
    try:
        status = os.stat(path)  # noqa: PTH116  # of what a symbolic link leads to
    except OSError:
        return None  # nothing to read, and nothing to delete
    return status.st_dev, status.st_ino


def hold(path: str | os.PathLike[str], is_running: Callable[[], bool] | None = None) -> Hold:
    """Says that ``path`` is read from now on. Waits while a commit mark is being removed: then it is gone.

    The caller keeps what is returned, and opens the checkpoint after it has it.
    """
    return hold_directory(_key_of(path), is_running)


def hold_directory(key: tuple[int, int] | None, is_running: Callable[[], bool] | None = None) -> Hold:
    """The same for a directory of which the caller knows device and inode; None if there is none."""
    held = Hold(is_running)
    holds = _of_process()
    if key is not None:
        with holds.lock:
            holds.by_directory.setdefault(key, weakref.WeakSet()).add(held)
    return held


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """The same for the time of a ``with`` block."""
    held = hold(path)
    try:
        yield
    finally:
        held.end()


@contextmanager
def unheld(key: tuple[int, int]) -> Iterator[bool]:
    """Says whether nobody reads a directory, and keeps it so for the time of the ``with`` block.

    Args:
        key: Its device and inode.
    """
    holds = _of_process()
    with holds.lock:
        yield not holds.active(key)
