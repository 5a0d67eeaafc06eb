# SPDX-License-Identifier: Apache-2.0
"""Whether the machine has the memory that an object needs: asked before, as a machine without any ends processes."""

from __future__ import annotations

import errno
import threading

from bytecheckpoint import native

__all__ = ["Promises", "require_memory"]

_SPARE_BYTES = 256 << 20  # of the machine, are left to what else it does


def require_memory(num_bytes: int, there: int = 0, promised: int = 0) -> None:
    """Raises if the machine has not so much memory left. What it does not tell is taken as enough.

    Args:
        num_bytes: Bytes that are needed.
        there: Bytes of these that are there already, in a file that is written over.
        promised: Bytes that are available now, but not to the caller.

    Raises:
        OSError: It has less (ENOMEM); says how much.
    """
    left, missing = native._core.available_memory_bytes(), max(0, num_bytes - there)
    if missing and 0 <= left < missing + promised + _SPARE_BYTES:
        others = f", {promised:,} are promised to others" if promised else ""
        raise OSError(
            errno.ENOMEM,
            f"{missing:,} bytes are needed{others}, and {_SPARE_BYTES:,} for what else the machine does, but {left:,} "
            "are available",
        )


class Promises:
    """Bytes of the machine that were promised and have not been taken yet. Thread-safe.

    Without it, processes that ask at the same time would be promised the same memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self._num_bytes

    def take(self, num_bytes: int, there: int) -> int:
        """Promises memory.

        Args:
            num_bytes: See ``require_memory``.
            there: See there.

        Returns:
            The bytes that the caller gives back: when it has taken them from the machine, or needs them no more.

        Raises:
            OSError: The machine has not so much (ENOMEM).
        """
        with self._lock:
            require_memory(num_bytes, there, self._num_bytes)
            missing = max(0, num_bytes - there)
            self._num_bytes += missing
            return missing

    def give_back(self, num_bytes: int) -> None:
        """Takes a promise back, or a part of it."""
        with self._lock:
            self._num_bytes -= num_bytes
