# SPDX-License-Identifier: Apache-2.0
"""The liveness monitors of this process: closed at its end, and forgotten in forked children."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = ["Closing", "note"]

_FAREWELL_S = 1.0


class Closing(Protocol):
    """A monitor, as far as its end is concerned."""

    def close(self, timeout_s: float = 0.0) -> None:
        """Says farewell and ends the thread; waits for that for ``timeout_s`` at most."""
        ...

    def forget_in_child(self) -> None:
        """Closes the connections in a forked child."""
        ...


_alive: weakref.WeakSet[Closing] | None = None
_noting = ForkSafeLock()


def note(monitor: Closing) -> None:
    """Lists ``monitor``, so that it is closed at the end of the process, and forgotten in forked children."""
    global _alive
    with _noting:
        if _alive is None:
            _alive = weakref.WeakSet()
            atexit.register(_at_exit)
            os.register_at_fork(after_in_child=_in_child)
        _alive.add(monitor)


def _at_exit() -> None:
    for monitor in list(_alive or ()):
        monitor.close(_FAREWELL_S)


def _in_child() -> None:
    for monitor in list(_alive or ()):
        monitor.forget_in_child()
    if _alive is not None:
        _alive.clear()
