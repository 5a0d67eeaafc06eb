# SPDX-License-Identifier: Apache-2.0
"""Ends of the objects that were opened last, so that trailers and tables need no request of their own."""

from __future__ import annotations

import threading
from collections import OrderedDict

__all__ = ["ObjectEnds"]

_MOST_ENDS = 64


class ObjectEnds:
    """Where each end begins, and its bytes. Thread-safe; the oldest are forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tails: OrderedDict[tuple[str, str, str], tuple[int, memoryview]] = OrderedDict()

    def put(self, key: tuple[str, str, str], begin: int, tail: memoryview) -> None:
        """Keeps the end of an object, which begins at ``begin``, under its URL, name and version."""
        with self._lock:
            self._tails.pop(key, None)
            self._tails[key] = begin, tail
            while len(self._tails) > _MOST_ENDS:
                self._tails.popitem(last=False)

    def find(self, key: tuple[str, str, str]) -> tuple[int, memoryview | None]:
        """Returns what was kept; without a tail if nothing was, or no more."""
        with self._lock:
            return self._tails.get(key, (0, None))
