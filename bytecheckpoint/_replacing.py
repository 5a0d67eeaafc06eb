# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of another package's own for as long as anybody in the process wants it there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bytecheckpoint._fork_locks import ForkSafeLock

__all__ = ["Replacing"]


class Replacing:
    """One replacement, wanted until it is taken back, by any number of blocks of any threads, or both. Thread-safe.

    Args:
        begin: Puts it there, unless it is there. What it raises is raised, and then nobody wants it.
        end: Puts everything back.
    """

    def __init__(self, begin: Callable[..., None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._lock = ForkSafeLock(threading.RLock)
        self._stays = False
        self._num_blocks = 0

    def stay(self, **settings: Any) -> None:
        """It is wanted until ``take_back``."""
        with self._lock:
            self._begin(**settings)
            self._stays = True

    def take_back(self) -> None:
        """It is wanted by open blocks alone."""
        with self._lock:
            self._stays = False
            self._end_unless_wanted()

    @contextmanager
    def block(self, **settings: Any) -> Iterator[None]:
        """It is wanted in a ``with`` block."""
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
        if not self._stays and not self._num_blocks:
            self._end()
