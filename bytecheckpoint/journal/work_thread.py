# SPDX-License-Identifier: Apache-2.0
"""A thread that does pieces of work one after the other. It ends when nothing is left to do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = ["WorkThread"]

# A process that asks for work faster than it can be done loses what is beyond this.
_MOST_WAITING = 1000


class WorkThread:
    """Does what it is given in the order in which it is given.

    Args:
        name: Name of the thread.
        on_error: Is called in the thread with what a piece of work raised.
    """

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        self._name, self._on_error = name, on_error
        self._lock = ForkSafeLock()
        self._work: deque[Callable[[], None]] = deque()  # the first is under way
        self._thread: threading.Thread | None = None
        self._is_late = False

    def submit(self, work: Callable[[], None]) -> None:
        """Has ``work`` done. Returns at once; where no thread can be started, when it is done."""
        with self._lock:
            if len(self._work) >= _MOST_WAITING:
                return
            self._work.append(work)
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the process has no room for a thread, or is at its end
            self._run()

    def run(self, work: Callable[[], None], timeout_s: float) -> bool:
        """Has ``work`` done, and waits for that for ``timeout_s`` at most. Returns whether it is done.

        Once a piece of work was not done in time, nobody waits until all is done that was asked for.
        """
        done = threading.Event()

        def work_and_tell() -> None:
            try:
                work()
            finally:
                done.set()

        self.submit(work_and_tell)
        is_done = done.wait(0.0 if self._is_late else timeout_s)
        self._is_late = self._is_late or not is_done
        return is_done

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is left to do. Returns whether that is so."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            with suppress(RuntimeError):  # it could not be started, and its caller does the work
                thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                self._work[0]()
            except Exception as error:
                self._on_error(error)
            with self._lock:
                self._work.popleft()
                if not self._work:
                    self._thread, self._is_late = None, False
                    return
