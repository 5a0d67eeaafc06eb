# SPDX-License-Identifier: Apache-2.0
"""Saves that run behind the back of training: their threads, what became of them, and the end of the process."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

from bytecheckpoint import _C
from bytecheckpoint.dcp._staged import is_any_saved
from bytecheckpoint.errors import CheckpointError

__all__ = [
    "BackgroundFuture",
    "handle_sigterm",
    "note_save",
    "raise_unseen",
    "shutdown",
    "submit",
    "wait_for_queue",
    "wait_for_saves",
]

T = TypeVar("T")

_LOOK_INTERVAL_S = 0.02

_logger = logging.getLogger("bytecheckpoint")


class BackgroundFuture(Future[T]):
    """A future that knows whether somebody has asked it how it ended.

    Attributes:
        is_seen: ``result`` or ``exception`` has told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_seen = False

    def result(self, timeout: float | None = None) -> T:
        """As of any future."""
        try:
            return super().result(timeout)
        finally:
            self.is_seen = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of any future."""
        try:
            return super().exception(timeout)
        finally:
            self.is_seen = self.done()

    def peek(self) -> BaseException | None:
        """What ``exception`` will tell, of a future that is done."""
        return super().exception(0)


class _Saves:
    """All background saves of one process that somebody may still ask for."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.noted: list[tuple[str, BackgroundFuture[Any]]] = []
        self._executors: dict[str, ThreadPoolExecutor] = {}

    def executor(self, queue: str) -> ThreadPoolExecutor:
        """One save at a time, in the order of the calls, which is the same on all ranks: their messages cannot mix."""
        with self.lock:
            if queue not in self._executors:
                name = "bytecheckpoint-background" + (f"-{queue}" if queue else "")
                self._executors[queue] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
            return self._executors[queue]

    def has(self, queue: str) -> bool:
        """Was a save ever submitted to it?"""
        with self.lock:
            return queue in self._executors

    def note(self, path: str, future: BackgroundFuture[Any]) -> None:
        with self.lock:
            self.noted = [(p, f) for p, f in self.noted if not f.done() or (f.peek() is not None and not f.is_seen)]
            self.noted.append((path, future))

    def running(self) -> list[BackgroundFuture[Any]]:
        with self.lock:
            return [future for _, future in self.noted if not future.done()]

    def take_unseen(self) -> list[tuple[str, BaseException]]:
        """Failures that nobody has looked at, the oldest first; each once."""
        unseen = []
        with self.lock:
            for path, future in self.noted:
                error = future.peek() if future.done() and not future.is_seen else None
                if error is not None:
                    unseen.append((path, error))
            self.noted = [(p, f) for p, f in self.noted if not f.done()]
        return unseen


_lock = threading.Lock()
_saves: _Saves | None = None
_of_thread = threading.local()  # of threads of saves: the queue whose save they run


def _of_process() -> _Saves:
    global _saves
    if _saves is None or _saves.pid != os.getpid():
        # A forked child begins anew: its parent's thread is not there.
        with _lock:
            if _saves is None:
                atexit.register(_at_exit)
            if _saves is None or _saves.pid != os.getpid():
                _saves = _Saves()
    return _saves


def _if_any() -> _Saves | None:
    """Those of this process, not of the one that it was forked from; None if none was ever begun."""
    return _saves if _saves is not None and _saves.pid == os.getpid() else None


def submit(path: str, run: Callable[[], T], queue: str = "") -> BackgroundFuture[T]:
    """Runs a save in the background, behind those that were submitted to the same queue before.

    The process does not end before it has. Saves of different queues need groups of their own.
    """
    future: BackgroundFuture[T] = BackgroundFuture()

    def work() -> None:
        _of_thread.queue = queue
        try:
            value = run()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(value)

    saves = _of_process()
    saves.note(path, future)
    saves.executor(queue).submit(work)
    return future


def note_save(path: str, future: Future[T]) -> BackgroundFuture[T]:
    """A future in the place of one of DCP's, for a save that DCP runs."""
    ours: BackgroundFuture[T] = BackgroundFuture()

    def pass_on(theirs: Future[T]) -> None:
        error = theirs.exception()
        if error is not None:
            ours.set_exception(error)
        else:
            ours.set_result(theirs.result())

    _of_process().note(path, ours)
    future.add_done_callback(pass_on)
    return ours


def raise_unseen() -> None:
    """Raises the failure of an earlier save that nobody has looked at; once.

    Raises:
        CheckpointError: From what failed.
    """
    saves = _if_any()
    unseen = [] if saves is None else saves.take_unseen()
    for path, error in unseen[1:]:
        _logger.error("a background save to %s failed, too: %s", path, error)
    if unseen:
        path, error = unseen[0]
        raise CheckpointError(f"a background save to {path} failed, and nobody looked: {error}", path) from error


def wait_for_saves(timeout_s: float | None = None) -> None:
    """Until no background save is under way.

    Raises:
        TimeoutError: After ``timeout_s`` seconds.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    saves = _if_any()
    for future in [] if saves is None else saves.running():
        done = threading.Event()
        future.add_done_callback(lambda _, done=done: done.set())  # type: ignore[misc]
        if not done.wait(None if end is None else max(0.0, end - time.monotonic())):
            raise TimeoutError(f"a background save is still under way after {timeout_s} s")
    while is_any_saved():  # by DCP, which gives nobody but the caller a future
        if end is not None and time.monotonic() >= end:
            raise TimeoutError(f"a background save is still under way after {timeout_s} s")
        time.sleep(_LOOK_INTERVAL_S)


def wait_for_queue(queue: str) -> None:
    """Until the saves that were submitted to a queue have ended, well or not. At once in the thread that runs them."""
    saves = _if_any()
    if saves is not None and saves.has(queue) and getattr(_of_thread, "queue", None) != queue:
        saves.executor(queue).submit(lambda: None).result()


def shutdown(timeout_s: float | None = None) -> None:
    """Waits for background saves, gives the memory of staged states back, and says what failed unnoticed.

    Local, but all ranks must let their saves end: call it on every rank, before ``destroy_process_group``. Saving may
    begin anew afterwards. At the exit of the process it happens by itself, but for the exception, which is logged.

    Args:
        timeout_s: Seconds to wait at most; None waits for as long as it takes.

    Raises:
        TimeoutError: Saves are still under way; nothing was given back.
        CheckpointError: A background save failed, and nobody looked; from what failed.
    """
    wait_for_saves(timeout_s)
    _C.close_arena()
    raise_unseen()


def _at_exit() -> None:
    try:
        shutdown()
    except CheckpointError as error:
        _logger.error("%s", error)


def handle_sigterm() -> None:
    """From now on SIGTERM waits for background saves before it does what it did. In the main thread; else no effect."""
    if threading.current_thread() is not threading.main_thread():
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_IGN or before is None or getattr(before, "is_bytecheckpoint", False):
        return

    def wait_and_end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        _logger.warning("SIGTERM: waiting for background saves")
        wait_for_saves()
        if callable(before):
            before(number, frame)
        else:
            os.kill(os.getpid(), number)

    wait_and_end.is_bytecheckpoint = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, wait_and_end)
