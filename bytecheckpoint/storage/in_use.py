# SPDX-License-Identifier: Apache-2.0
"""Notes which checkpoint directories this process is reading, so that it does not delete them. Needs no torch."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.folders import folder_at

__all__ = ["Hold", "hold", "hold_directory", "reading", "unheld"]

_Key = tuple[int, int]


class Hold:
    """A note that somebody reads a directory.

    It is active until ``end``, until nobody has this object any more, or until a call ends.

    Args:
        is_running: Whether that call still runs; None if the note does not depend on a call.
    """

    def __init__(self, is_running: Callable[[], bool] | None = None) -> None:
        self._is_running = is_running
        self._ended = False

    def end(self) -> None:
        """Ends the hold: the reading is over."""
        self._ended = True

    def is_active(self) -> bool:
        """Whether the reading still goes on."""
        return not self._ended and (self._is_running is None or self._is_running())


class _Holds:
    """All holds of one process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.by_directory: dict[_Key, weakref.WeakSet[Hold]] = {}
        self.being_removed: set[_Key] = set()

    def active(self, key: _Key) -> bool:
        """Whether any hold on ``key`` is active. Removes all inactive holds. The caller has ``changed``."""
        for other, holds in list(self.by_directory.items()):
            for one in [one for one in holds if not one.is_active()]:
                holds.discard(one)
            if not holds:
                del self.by_directory[other]
        return key in self.by_directory


# A forked child starts without any: the loads of its parent are not its own, and the lock may be held for ever.
_holds = PerProcess(_Holds)


def hold(path: str | os.PathLike[str], is_running: Callable[[], bool] | None = None) -> Hold:
    """Notes that ``path`` is read from now on. If a commit mark is being removed, it waits until the mark is gone.

    The caller must keep the returned object, and must open the checkpoint only after this call.

    Args:
        path: Directory of a checkpoint.
        is_running: See ``Hold``.
    """
    return hold_directory(folder_at(path).key(), is_running)


def hold_directory(key: tuple[int, int] | None, is_running: Callable[[], bool] | None = None) -> Hold:
    """Does what ``hold`` does, for a directory given by device and inode; None if there is no directory."""
    held = Hold(is_running)
    holds = _holds.get()
    if key is not None:
        with holds.changed:
            holds.changed.wait_for(lambda: key not in holds.being_removed)
            holds.by_directory.setdefault(key, weakref.WeakSet()).add(held)
    return held


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Does what ``hold`` does, for the duration of a ``with`` block."""
    held = hold(path)
    try:
        yield
    finally:
        held.end()


@contextmanager
def unheld(key: tuple[int, int]) -> Iterator[bool]:
    """Yields whether nobody in this process reads a directory. Nobody can begin to during the ``with`` block.

    Args:
        key: Device and inode of the directory.
    """
    holds = _holds.get()
    with holds.changed:
        holds.changed.wait_for(lambda: key not in holds.being_removed)
        is_free = not holds.active(key)
        holds.being_removed.add(key)
    try:
        yield is_free
    finally:
        with holds.changed:
            holds.being_removed.discard(key)
            holds.changed.notify_all()
