# SPDX-License-Identifier: Apache-2.0
"""Queues that run background saves one at a time, and the futures of the saves."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.runtime.gil_interval import quick_switches

__all__ = ["BackgroundFuture", "SaveQueue", "is_in_queue"]

T = TypeVar("T")
V = TypeVar("V")

_logger = logging.getLogger("bytecheckpoint")


class BackgroundFuture(Future[T]):
    """The future of a save. It knows whether somebody has asked it how the save ended.

    It cannot be cancelled, because other ranks take part in the save: ``cancel`` returns False, as for any running
    future. Use ``SaveHandle.cancel`` to give the save up.

    Args:
        path: Path of the save, for messages.
        queue: The queue that runs the save; None if the save has already ended.

    Attributes:
        is_seen: Whether ``result`` or ``exception`` has already told the caller how the save ended.
    """

    def __init__(self, path: str = "", queue: SaveQueue | None = None) -> None:
        super().__init__()
        self.is_seen = False
        self._path = path
        self._queue = queue
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        """Returns the result, as any future does.

        Raises:
            CheckpointError: A hook that runs in the queue of this save calls it, and would wait for ever.
        """
        return self._seen(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the failure or None, as any future does. Raises the same ``CheckpointError`` as ``result``."""
        return self._seen(super().exception, timeout)

    def _seen(self, ask: Callable[[float | None], V], timeout: float | None) -> V:
        if self._queue is not None and self._queue.is_in_this_thread() and not self.done():
            raise CheckpointError(
                f"save({self._path}): a hook of a background save waits for its own save, or for a later one of the "
                "same queue: it would wait for ever. Ask the future when the hook has returned",
                self._path,
            )
        try:
            outcome = ask(timeout)
        except BaseException:
            # The failure of the save, a timeout or Ctrl-C. Only the first tells how the save ended, though the save may
            # have failed since.
            self.is_seen = self.is_seen or (self.done() and self._exception is sys.exc_info()[1])
            raise
        self.is_seen = True
        return outcome

    def peek(self) -> BaseException | None:
        """Returns what ``exception`` would, without setting ``is_seen``. The future must be done."""
        return super().exception(0)


class SaveQueue:
    """Runs one function at a time, in the order of submission. Its thread ends when nothing is left to run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.RLock()  # reentrant: a signal handler may take it while its thread holds it
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_running = False  # whether a thread is going to take the next function
        self._thread: threading.Thread | None = None  # the last thread that was started to run functions

    def submit(self, run: Callable[[], None], may_start_thread: bool) -> None:
        """Runs ``run`` after all that was submitted before.

        If no thread runs the queue and none may or can be started, ``run`` has run in this thread when this returns.
        """
        with self._lock:
            self._waiting.append(run)
            if self._is_running:
                return
        if not (may_start_thread and self._starts_thread()):
            self._run()

    def is_in_this_thread(self) -> bool:
        """Whether this queue runs the caller."""
        return getattr(_of_thread, "queue", None) is self

    def join(self, timeout_s: float) -> None:
        """Waits until the last thread of the queue has ended, for ``timeout_s`` at most."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _starts_thread(self) -> bool:
        thread = threading.Thread(target=self._run, args=(True,), name=self.name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:  # what Python raises if it cannot start one
            _logger.warning("no thread can be started, so a background save runs in the calling thread: %s", error)
            return False
        return True

    def _run(self, is_own_thread: bool = False) -> None:
        with self._lock:  # set by who runs, and not by who starts the thread: Ctrl-C may come in between
            if self._is_running:
                return
            self._is_running = True
            if is_own_thread:
                self._thread = threading.current_thread()
        before = getattr(_of_thread, "queue", None)
        _of_thread.queue = self
        try:
            with quick_switches():
                while (run := self._next()) is not None:
                    run()
                    del run  # destroys what was saved now, while `join` waits for this thread
        except BaseException:  # Ctrl-C in a calling thread: the next `submit` runs what still waits
            self._is_running = False
            raise
        finally:
            _of_thread.queue = before

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._is_running = False
            return None


def is_in_queue() -> bool:
    """Whether any queue runs the caller."""
    return getattr(_of_thread, "queue", None) is not None


_of_thread = threading.local()  # `queue`: the one that runs the thread
