# SPDX-License-Identifier: Apache-2.0
"""Locks that a forked child can take, even if a thread of its parent held them at the fork."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

__all__ = ["ForkSafeLock"]


class ForkSafeLock:
    """A lock for ``with``. In a forked child it is free, because a thread that held it does not exist there.

    Another thread may fork while the lock is held. So what it guards must be usable at every moment, as a list or a
    dict is between single changes.

    Args:
        make: Makes the lock; ``threading.RLock`` if a thread may take it while it holds it.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[bool]] = threading.Lock) -> None:
        self._make = make
        self._lock = make()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.__exit__(kind, error, traceback)

    def renew(self) -> None:
        """Frees the lock, whoever holds it."""
        self._lock = self._make()


_all: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_all):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
