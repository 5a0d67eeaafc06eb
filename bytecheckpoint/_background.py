# SPDX-License-Identifier: Apache-2.0
"""Saves that run behind the back of training: their threads, what became of them, and the end of the process.

They run in daemon threads, so that it is us, and not Python, who says how long the end of the process waits for them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import _C, _sigterm
from bytecheckpoint._fork_locks import ForkSafeLock
from bytecheckpoint._save_queue import BackgroundFuture, SaveQueue, is_in_queue
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._staged import end_of_save, note_submitted
from bytecheckpoint.dcp._stays import is_any_saved, is_saved_in_this_thread
from bytecheckpoint.errors import CheckpointError

__all__ = [
    "BackgroundFuture",
    "SaveExecutor",
    "handle_sigterm",
    "raise_unseen",
    "shutdown",
    "submit",
    "wait_for_queue",
    "wait_for_saves",
]

T = TypeVar("T")

_LOOK_INTERVAL_S = 0.02
# The end of the process says what it waits for, once it has waited so long.
_PATIENCE_S = 5.0
# A save that is given up ends within moments, unless storage or another rank does not answer.
_GIVEN_UP_WAIT_S = 5.0

_logger = logging.getLogger("bytecheckpoint")


@dataclass(eq=False)
class _Save:
    """One background save.

    Attributes:
        give_up: Makes it fail soon, if it is not committed yet.
        exit_timeout_s: As of ``Config``.
    """

    path: str
    future: BackgroundFuture[Any]
    queue: SaveQueue
    give_up: Callable[[], None]
    exit_timeout_s: float
    is_given_up: bool = False

    def is_running(self) -> bool:
        return not self.future.done()

    def is_unseen_failure(self) -> bool:
        return self.future.done() and not self.future.is_seen and self.future.peek() is not None

    def wait(self, end: float | None) -> bool:
        """Whether it has ended by ``end``."""
        wait([self.future], None if end is None else max(0.0, end - time.monotonic()))
        return self.future.done()


class _Saves:
    """All background saves of one process that somebody may still ask for."""

    def __init__(self, *, is_ending: bool) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()  # one thread may come twice: in the handler of a signal
        self.noted: list[_Save] = []
        # From then on the process ends: nobody would wait for a new thread.
        self.ending_since = time.monotonic() if is_ending else None
        self._queues: dict[str, SaveQueue] = {}
        self._with_threads: weakref.WeakSet[SaveQueue] = weakref.WeakSet()

    def queue(self, name: str) -> SaveQueue:
        """One save at a time, in the order of the calls, which is the same on all ranks: their messages cannot mix."""
        with self.lock:
            if name not in self._queues:
                self._queues[name] = SaveQueue("bytecheckpoint-background" + (f"-{name}" if name else ""))
            return self._queues[name]

    def has(self, name: str) -> bool:
        """Was a save ever submitted to it?"""
        with self.lock:
            return name in self._queues

    def run(self, save: _Save, work: Callable[[], None]) -> None:
        with self.lock:
            self.noted = [other for other in self.noted if other.is_running() or other.is_unseen_failure()]
            self.noted.append(save)
            self._with_threads.add(save.queue)
        save.queue.submit(work, may_start_thread=self.ending_since is None)

    def running(self) -> list[_Save]:
        with self.lock:
            return [save for save in self.noted if save.is_running()]

    def take_unseen(self) -> list[tuple[str, BaseException]]:
        """Failures that nobody has looked at, the oldest first; each once."""
        unseen = []
        with self.lock:
            for save in self.noted:
                error = save.future.peek() if save.is_unseen_failure() else None
                if error is not None:
                    unseen.append((save.path, error))
            self.noted = [save for save in self.noted if save.is_running()]
        return unseen

    def end(self, since: float) -> None:
        """Until all have ended: each ends by itself within its ``exit_timeout_s`` from ``since``, or is given up."""
        try:
            while running := [save for save in self.running() if not save.is_given_up]:
                save, end = running[0], since + running[0].exit_timeout_s
                if not save.wait(min(end, time.monotonic() + _PATIENCE_S)):
                    left_s = max(0.0, end - time.monotonic())
                    _logger.warning("the process waits for the save to %s, for %.0f s at most", save.path, left_s)
                if not save.wait(end):
                    _logger.error("the process ends: the save to %s is given up", save.path)
                    self._give_up([save])
        except BaseException:  # Ctrl-C
            self._give_up(self.running())
            raise
        finally:
            self._join(time.monotonic() + _GIVEN_UP_WAIT_S)

    def _give_up(self, saves: list[_Save]) -> None:
        for save in saves:
            save.is_given_up = True
            save.give_up()

    def _join(self, end: float) -> None:
        """Until all threads have ended. A future is done while its thread still destroys what it saved.

        Python ends a thread that wants the GIL of a process that has ended, and what is C++ in it aborts the process.
        """
        for save in self.running():
            if not save.wait(end):
                _logger.error("the save to %s has not ended, and the process does not wait for it", save.path)
        with self.lock:
            queues = list(self._with_threads)
        for queue in queues:
            queue.join(max(0.0, end - time.monotonic()))


_lock = ForkSafeLock()
_saves: _Saves | None = None


def _of_process() -> _Saves:
    global _saves
    if _saves is None or _saves.pid != os.getpid():
        # A forked child begins anew: its parent's thread is not there.
        with _lock:
            if _saves is None:
                _saves = _Saves(is_ending=not _wait_at_exit())
            elif _saves.pid != os.getpid():
                _saves = _Saves(is_ending=False)
    return _saves


def _wait_at_exit() -> bool:
    """From now on the end of the process waits for saves. False if it has begun to end."""
    atexit.register(_at_exit)
    try:
        # As `concurrent.futures` does: what is registered with `atexit` runs when no thread can be started any more.
        threading._register_atexit(_before_exit)  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True


def _if_any() -> _Saves | None:
    """Those of this process, not of the one that it was forked from; None if none was ever begun."""
    return _saves if _saves is not None and _saves.pid == os.getpid() else None


def submit(
    path: str,
    run: Callable[[], T],
    queue: str | None = "",
    *,
    give_up: Callable[[], None] = lambda: None,
    exit_timeout_s: float = Config.exit_timeout_s,
) -> BackgroundFuture[T]:
    """Runs a save in the background, behind those that were submitted to the same queue before.

    Where no thread can be had, or the process has begun to end, it runs in the calling thread. Saves of different
    queues need groups of their own. Raises nothing but Ctrl-C.

    Args:
        path: For messages.
        queue: None: it waits for no other.
        give_up: Makes it fail soon; called at the end of the process if it has not ended after ``exit_timeout_s``.
    """
    saves = _of_process()
    line = SaveQueue("bytecheckpoint-save") if queue is None else saves.queue(queue)
    future: BackgroundFuture[T] = BackgroundFuture(path, line)
    caller = threading.current_thread()

    unclaimed = [True]  # who takes it out sees to the end of the future

    def work() -> None:
        if not _takes(unclaimed):
            return
        try:
            value = run()
        except BaseException as error:
            # Without this very frame, which is running: it cannot be cleared.
            error.__traceback__ = None if error.__traceback__ is None else error.__traceback__.tb_next
            _forget_locals(error)
            future.set_exception(error)
            if not isinstance(error, Exception) and threading.current_thread() is caller:
                raise  # Ctrl-C, where there is no thread for the save
        else:
            future.set_result(value)
        finally:
            save.give_up = lambda: None  # which keeps its writer, and that the process group

    save = _Save(path, future, line, give_up, exit_timeout_s)
    try:
        saves.run(save, work)
    except BaseException:  # Ctrl-C
        if _takes(unclaimed):  # else it runs
            future.set_exception(CheckpointError(f"save({path}): interrupted before it began", path))
        raise
    return future


def _takes(unclaimed: list[bool]) -> bool:
    try:
        return unclaimed.pop()
    except IndexError:
        return False


class SaveExecutor(Executor):
    """In the place of the executor in which DCP runs one background save.

    Args:
        path, give_up, exit_timeout_s: As of ``submit``.
        staged: The state that is saved, or a future of it.

    Attributes:
        queue: As of ``submit``.
    """

    def __init__(self, path: str, staged: Any, give_up: Callable[[], None], exit_timeout_s: float) -> None:
        self.queue: str | None = None
        self._submit = partial(submit, path, give_up=give_up, exit_timeout_s=exit_timeout_s)
        self._staged = staged

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> BackgroundFuture[T]:
        """As of any executor."""
        # Taken out when it runs: the frame of what fails keeps what its function refers to.
        taken = [(self._staged, partial(fn, *args, **kwargs))]
        note_submitted(self._staged)
        self._staged = None

        def run() -> T:
            staged, save = taken.pop()
            try:
                return save()
            finally:
                end_of_save(staged)

        return self._submit(run, self.queue)

    def give_back(self) -> None:
        """Gives the memory of the state back if the save was not submitted."""
        end_of_save(self._staged)


def _forget_locals(error: BaseException) -> None:
    """Whoever keeps an error keeps no state by it: the frames that it came through hold that. Its traceback stays."""
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            # Before Python 3.13 a frame keeps what it was last asked for, until it is asked again.
            frame.f_locals  # noqa: B018
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, CheckpointException):  # of DCP; it has those of all ranks
            waiting += [failure for failure, _ in one.failures.values()]


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
        CheckpointError: It would wait for itself.
    """
    if is_in_queue() or is_saved_in_this_thread():
        raise CheckpointError(
            "shutdown(): called in a hook of a background save, for whose end it would wait: call it when the hook has "
            "returned"
        )
    end = None if timeout_s is None else time.monotonic() + timeout_s
    saves = _if_any()
    for save in [] if saves is None else saves.running():
        if not save.wait(end):
            raise TimeoutError(f"the background save to {save.path} is still under way after {timeout_s} s")
    while is_any_saved():  # by DCP, which gives nobody but the caller a future
        if end is not None and time.monotonic() >= end:
            raise TimeoutError(f"a background save is still under way after {timeout_s} s")
        time.sleep(_LOOK_INTERVAL_S)


def wait_for_queue(queue: str) -> None:
    """Until the saves that were submitted to a queue have ended, well or not. At once in the thread that runs them."""
    saves = _if_any()
    if saves is None or not saves.has(queue):
        return
    line = saves.queue(queue)
    if not line.is_in_this_thread():
        reached = threading.Event()
        line.submit(reached.set, may_start_thread=False)
        reached.wait()


def shutdown(timeout_s: float | None = None) -> None:
    """Waits for background saves, gives the memory of staged states back, and says what failed unnoticed.

    Local, but all ranks must let their saves end: call it on every rank, before ``destroy_process_group``. Saving may
    begin anew afterwards. At the exit of the process it happens by itself, but for the exception, which is logged; the
    exit waits for each save for ``Config.exit_timeout_s`` at most.

    Args:
        timeout_s: Seconds to wait at most; None waits for as long as it takes.

    Raises:
        TimeoutError: Saves are still under way; nothing was given back.
        CheckpointError: A background save failed, and nobody looked; from what failed. Or a hook of a background save
            calls it.
    """
    wait_for_saves(timeout_s)
    _C.close_arena()
    raise_unseen()


def _before_exit() -> None:
    """The main thread has ended; others may go on, and save."""
    saves = _if_any()
    if saves is None:
        return
    saves.ending_since = time.monotonic()
    saves.end(saves.ending_since)


def _at_exit() -> None:
    """All threads have ended that Python waits for, those of DCP among them."""
    saves = _if_any()
    if saves is not None and saves.ending_since is not None:
        saves.end(saves.ending_since)
    _C.close_arena()
    try:
        raise_unseen()
    except CheckpointError as error:
        _logger.error("%s", error)


def handle_sigterm(exit_timeout_s: float) -> None:
    """From now on SIGTERM waits for background saves before it does what it did. In the main thread; else no effect.

    Args:
        exit_timeout_s: How long it waits for calls that stage a state, and for saves that DCP runs in its own threads.
    """

    def wait_for_all(since: float) -> None:
        end = since + exit_timeout_s
        while True:
            saves = _of_process()
            saves.end(since)
            # What begins is noted as running before it is no longer beginning.
            if not is_any_saved() and not saves.running():
                return
            if time.monotonic() >= end:
                _logger.error("SIGTERM: a background save is still under way after %g s", exit_timeout_s)
                return
            time.sleep(_LOOK_INTERVAL_S)

    _sigterm.handle_sigterm(wait_for_all)
