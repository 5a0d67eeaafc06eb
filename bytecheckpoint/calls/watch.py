# SPDX-License-Identifier: Apache-2.0
"""The one thread that looks after calls in progress.

The hooks of DCP do not tell when a call ends: on most ranks nothing of ours runs after the last byte is written. So
somebody has to look: whether a call has ended, is stuck, or is past its deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.runtime.per_process import PerProcess

__all__ = ["LOOK_INTERVAL_S", "wait_until", "watch"]

_INTERVAL_S = 0.1
LOOK_INTERVAL_S = 0.02
"""How often a thread looks by itself that waits for the end of calls."""

_logger = logging.getLogger("bytecheckpoint")


class _Look:
    """One thing to look at, every so many seconds."""

    def __init__(self, look: Callable[[], bool], every_s: float) -> None:
        self._look, self._every_s = look, every_s
        self._last = time.monotonic()

    def goes_on(self) -> bool:
        """Looks, if it is time to. Returns whether it is to be looked at again."""
        now = time.monotonic()
        if now - self._last < self._every_s:
            return True
        self._last = now
        try:
            return self._look()
        except Exception:
            _logger.exception("a call in progress is not watched any more")
            return False


class _Watch:
    """Looks again and again. Its thread ends when there is nothing left to look at."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock(threading.RLock)  # a signal handler may save while its thread holds it
        self._looks: list[_Look] = []
        self._is_running = False

    def add(self, look: _Look) -> None:
        with self._lock:
            self._looks.append(look)
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="bytecheckpoint-calls", daemon=True).start()
        except RuntimeError:  # no thread can be started: nobody looks before the next call begins
            self._is_running = False

    def _run(self) -> None:
        while True:
            time.sleep(_INTERVAL_S)
            with self._lock:
                looks = [*self._looks]
            over = [look for look in looks if not look.goes_on()]
            with self._lock:
                self._looks = [look for look in self._looks if look not in over]
                if not self._looks:
                    self._is_running = False
                    return


_watch = PerProcess(_Watch)  # a forked child has none of the calls, and no thread


def watch(look: Callable[[], bool], every_s: float = 0.0) -> None:
    """Makes a thread call ``look`` every 0.1 s, or every ``every_s``, until it returns False. It must not block."""
    _watch.get().add(_Look(look, every_s))


def wait_until(is_so: Callable[[], bool], until: float | None = None) -> bool:
    """Waits until ``is_so`` returns True.

    Args:
        is_so: Looks whether calls have ended; asked every 20 ms.
        until: Time of ``time.monotonic`` to give up; None waits without limit.

    Returns:
        False if it was not so in time.
    """
    while not is_so():
        if until is not None and time.monotonic() >= until:
            return False
        time.sleep(LOOK_INTERVAL_S)
    return True
