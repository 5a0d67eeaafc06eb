# SPDX-License-Identifier: Apache-2.0
"""Replaces parts of another package for as long as anybody in the process wants that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = ["Replacing"]


class Replacing:
    """One replacement. It lasts from ``install`` to ``uninstall``, and while any ``block`` is open.

    Thread-safe; any number of blocks of any threads may be open.

    Args:
        begin: Makes the replacement, unless it is already made. If it raises, the call counts for nothing and raises
            the same.
        end: Puts everything back.
    """

    def __init__(self, begin: Callable[..., None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._lock = ForkSafeLock(threading.RLock)
        self._is_installed = False
        self._num_blocks = 0

    def install(self, **settings: Any) -> None:
        """Makes the replacement until ``uninstall``."""
        with self._lock:
            self._begin(**settings)
            self._is_installed = True

    def uninstall(self) -> None:
        """Ends what ``install`` began. The replacement ends unless a block is open."""
        with self._lock:
            self._is_installed = False
            self._end_unless_wanted()

    @contextmanager
    def block(self, **settings: Any) -> Iterator[None]:
        """Makes the replacement for a ``with`` block."""
        with self._lock:
            self._begin(**settings)
            self._num_blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_blocks -= 1
                self._end_unless_wanted()

    def _end_unless_wanted(self) -> None:
        if not self._is_installed and not self._num_blocks:
            self._end()
