# SPDX-License-Identifier: Apache-2.0
"""What belongs to one process. A forked child has copies of all objects, and must not take these for its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = ["HomeProcess", "PerProcess"]

T = TypeVar("T")


class HomeProcess:
    """The process in which this object was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_here(self) -> bool:
        """Whether this is that process. False in its forked children."""
        return self._pid == os.getpid()


class PerProcess(Generic[T]):
    """One object per process, made at its first use. A forked child makes one of its own.

    Args:
        make: Makes the object. Never called by two threads at once.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = ForkSafeLock(threading.RLock)
        self._made: tuple[HomeProcess, T] | None = None

    def get(self) -> T:
        """Returns the object of this process; makes it on first use."""
        made = self._made
        if made is None or not made[0].is_here():
            with self._lock:
                made = self._made
                if made is None or not made[0].is_here():
                    made = self._made = (HomeProcess(), self._make())
        return made[1]

    def if_made(self) -> T | None:
        """Returns the object of this process; None if this process has not made one."""
        made = self._made
        return made[1] if made is not None and made[0].is_here() else None
