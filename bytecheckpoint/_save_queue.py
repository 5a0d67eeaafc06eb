# SPDX-License-Identifier: Apache-2.0
"""Where background saves run, one at a time, and their futures."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from bytecheckpoint.errors import CheckpointError

__all__ = ["BackgroundFuture", "SaveQueue", "is_in_queue"]

T = TypeVar("T")
V = TypeVar("V")

_logger = logging.getLogger("bytecheckpoint")


class BackgroundFuture(Future[T]):
    """The future of a save. It knows whether somebody has asked it how the save ended.

    It cannot be cancelled, since other ranks take part in the save: ``cancel`` returns False, as that of any future
    that is running. ``SaveHandle.cancel`` gives the save up.

    Args:
        path: Of the save, for messages.
        queue: Runs the save; None if it has ended.

    Attributes:
        is_seen: ``result`` or ``exception`` has told.
    """

    def __init__(self, path: str = "", queue: SaveQueue | None = None) -> None:
        super().__init__()
        self.is_seen = False
        self._path = path
        self._queue = queue
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        """As of any future."""
        return self._seen(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of any future."""
        return self._seen(super().exception, timeout)

    def _seen(self, ask: Callable[[float | None], V], timeout: float | None) -> V:
        if self._queue is not None and self._queue.is_in_this_thread() and not self.done():
            raise CheckpointError(
                f"save({self._path}): a hook of a background save waits for a save that comes behind it, or its own: "
                "it would wait for ever. Ask the future when the hook has returned",
                self._path,
            )
        try:
            told = ask(timeout)
        except BaseException:
            # What the save failed with, or that it has not ended in time, or Ctrl-C; it may have failed since.
            self.is_seen = self.is_seen or (self.done() and self._exception is sys.exc_info()[1])
            raise
        self.is_seen = True
        return told

    def peek(self) -> BaseException | None:
        """What ``exception`` will tell, of a future that is done."""
        return super().exception(0)


class SaveQueue:
    """Runs one thing at a time, in the order of submission. Its thread ends when nothing is left to run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.RLock()  # one thread may come twice: in the handler of a signal
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_running = False  # somebody takes the next one
        self._thread: threading.Thread | None = None  # the last that took what waits

    def submit(self, run: Callable[[], None], may_start_thread: bool) -> None:
        """Where no thread can be had, ``run`` has run in this one when it returns."""
        with self._lock:
            self._waiting.append(run)
            if self._is_running:
                return
        if not (may_start_thread and self._starts_thread()):
            self._run()

    def is_in_this_thread(self) -> bool:
        """Whether the caller is run by this queue."""
        return getattr(_of_thread, "queue", None) is self

    def join(self, timeout_s: float) -> None:
        """Until the last thread has ended that ran something."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _starts_thread(self) -> bool:
        thread = threading.Thread(target=self._run, args=(True,), name=self.name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:  # what Python raises where there is none
            _logger.warning("a background save runs in the calling thread: %s", error)
            return False
        return True

    def _run(self, is_own_thread: bool = False) -> None:
        with self._lock:  # by who runs, and not by who starts the thread: Ctrl-C may come between
            if self._is_running:
                return
            self._is_running = True
            if is_own_thread:
                self._thread = threading.current_thread()
        before = getattr(_of_thread, "queue", None)
        _of_thread.queue = self
        try:
            while (run := self._next()) is not None:
                run()
        except BaseException:  # Ctrl-C, where there is no thread: the next one takes what waits
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


_of_thread = threading.local()  # of threads of saves: the queue that runs them
