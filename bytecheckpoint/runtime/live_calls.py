# SPDX-License-Identifier: Apache-2.0
"""The saves and loads of this process under way: a thread notes when one has ended, and says where one is stuck.

The hooks of DCP do not tell when a call ends: on most ranks nothing of ours runs after the last byte is written.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.runtime.per_process import PerProcess

if TYPE_CHECKING:
    from bytecheckpoint import _C

__all__ = ["Running", "watch"]

_LOOK_INTERVAL_S = 0.5

_logger = logging.getLogger("bytecheckpoint")


class Running(Protocol):
    """A call that tells whether it still runs."""

    def is_running(self) -> bool:
        """Returns whether the call still runs."""
        ...


class _Watched:
    """One call.

    Attributes:
        title: The call in words, for messages: kind, path and rank.
    """

    def __init__(self, spans: _C.Trace, call: Running, title: str, stall_timeout_s: float) -> None:
        self._spans = weakref.ref(spans)
        self._call = call
        self._title = title
        self._stall_timeout_s = stall_timeout_s
        self._seen = ("", 0)
        self._moved = self._said = time.monotonic()

    def look(self) -> bool:
        """Looks at the call once. Returns whether it still runs."""
        spans = self._spans()
        if spans is None:
            return False
        if not self._call.is_running():
            spans.leave()
            return False
        now, seen = time.monotonic(), (spans.phase, spans.bytes_done)
        if seen != self._seen:
            self._seen, self._moved, self._said = seen, now, now
        elif now - self._said >= self._stall_timeout_s:
            self._said = now
            phase, done = seen
            of_bytes = f", {done:,} of {spans.bytes_expected:,} bytes done" if spans.bytes_expected else ""
            _logger.warning(
                "%s: no progress for %.0f s, in phase %s for %.0f s%s",
                *(self._title, now - self._moved, phase, (time.monotonic_ns() - spans.since_ns) / 1e9, of_bytes),
            )
        return True


class _Watch:
    """The thread that looks. It ends when no call is left."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._calls: list[_Watched] = []
        self._is_running = False

    def add(self, watched: _Watched) -> None:
        with self._lock:
            self._calls.append(watched)
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="bytecheckpoint-live", daemon=True).start()
        except RuntimeError:  # no thread can be started: nobody looks
            self._is_running = False

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_INTERVAL_S)
            with self._lock:
                calls = list(self._calls)
            over = [watched for watched in calls if not watched.look()]
            with self._lock:
                self._calls = [watched for watched in self._calls if watched not in over]
                if not self._calls:
                    self._is_running = False
                    return


_watch = PerProcess(_Watch)  # a forked child has none of the calls, and no thread


def watch(spans: _C.Trace, call: Running, title: str, stall_timeout_s: float) -> None:
    """Watches a call until it ends: then its page says so to other processes.

    A call without progress for ``stall_timeout_s`` is logged as a warning, with its phase, and again after as long.

    Args:
        spans: Trace of the call.
        call: Tells whether the call still runs.
        title: The call in words, for messages.
        stall_timeout_s: Seconds.
    """
    _watch.get().add(_Watched(spans, call, title, stall_timeout_s))
