# SPDX-License-Identifier: Apache-2.0
"""Background saves: their threads, how they ended, and what happens to them when the process ends.

They run in daemon threads, so that this module, and not Python, decides how long the end of the process waits for them.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint.calls.watch import wait_until
from bytecheckpoint.checkpoint.tier_drains import wait_for_drains
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.journal.observers import flush
from bytecheckpoint.native import _C
from bytecheckpoint.runtime import sigterm as _sigterm
from bytecheckpoint.runtime.before_exit import before_exit
from bytecheckpoint.runtime.exit_code import end_with
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.staging.leases import is_any_saved, is_saved_in_this_thread
from bytecheckpoint.staging.save_queue import BackgroundFuture, SaveQueue, is_in_queue
from bytecheckpoint.storage.memory.connection import end_holders
from bytecheckpoint.storage.memory.peers import end_peers

__all__ = [
    "BackgroundFuture",
    "forget_frames",
    "forget_locals",
    "handle_sigterm",
    "raise_unseen",
    "shutdown",
    "submit",
    "wait_for_queue",
    "wait_for_saves",
]

T = TypeVar("T")

# `shutdown` waits for exporters as long as it is given, within these limits.
_LEAST_EXPORT_S, _MOST_EXPORT_S = 1.0, 60.0
# Once the end of the process has waited this long for a save, it logs what it waits for.
_WARN_AFTER_S = 5.0
# How long the end of the process waits for saves that were given up. They end within moments, unless storage or another
# rank does not answer.
_GIVEN_UP_WAIT_S = 5.0

_logger = logging.getLogger("bytecheckpoint")


@dataclass(eq=False)
class _Save:
    """One background save.

    Attributes:
        give_up: Makes the save fail soon, unless it is already committed.
        exit_timeout_s: See ``Config.exit_timeout_s``.
        exit_code: See ``Config.failed_save_exit_code``.
    """

    path: str
    future: BackgroundFuture[Any]
    queue: SaveQueue
    give_up: Callable[[], None]
    exit_timeout_s: float
    exit_code: int
    is_given_up: bool = False

    def is_running(self) -> bool:
        return not self.future.done()

    def is_unseen_failure(self) -> bool:
        return self.future.done() and not self.future.is_seen and self.future.peek() is not None

    def wait(self, end: float | None) -> bool:
        """Waits until ``end`` (``time.monotonic``; None: without limit), and returns whether the save has ended."""
        wait([self.future], None if end is None else max(0.0, end - time.monotonic()))
        return self.future.done()


class _Saves:
    """All background saves of one process that run, or whose failure nobody has looked at."""

    def __init__(self, *, is_ending: bool) -> None:
        self.lock = threading.RLock()  # reentrant: a signal handler may take it while its thread holds it
        self.noted: list[_Save] = []
        # When the process began to end. No thread is started after that, since nobody would wait for it.
        self.ending_since = time.monotonic() if is_ending else None
        self._queues: dict[str, SaveQueue] = {}
        self._with_threads: weakref.WeakSet[SaveQueue] = weakref.WeakSet()

    def queue(self, name: str) -> SaveQueue:
        """Returns the queue called ``name``; makes it on first use.

        It runs one save at a time, in the order of the calls. That order is the same on all ranks, so messages of
        different saves cannot mix.
        """
        with self.lock:
            if name not in self._queues:
                self._queues[name] = SaveQueue("bytecheckpoint-background" + (f"-{name}" if name else ""))
            return self._queues[name]

    def has(self, name: str) -> bool:
        """Whether a save was ever submitted to the queue called ``name``."""
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

    def exit_code(self) -> int:
        """Returns the exit code for saves that failed unseen or have not ended; 0 if none of them asks for one."""
        with self.lock:
            lost = [save for save in self.noted if save.is_running() or save.is_unseen_failure()]
        return max((save.exit_code for save in lost), default=0)

    def take_unseen(self) -> list[tuple[str, BaseException]]:
        """Returns paths and failures that nobody has looked at, the oldest first. Each is returned only once."""
        unseen = []
        with self.lock:
            for save in self.noted:
                error = save.future.peek() if save.is_unseen_failure() else None
                if error is not None:
                    unseen.append((save.path, error))
            self.noted = [save for save in self.noted if save.is_running()]
        return unseen

    def end(self, since: float) -> None:
        """Waits until all saves have ended. Gives up those that have not ended ``exit_timeout_s`` after ``since``."""
        try:
            while running := [save for save in self.running() if not save.is_given_up]:
                save, end = running[0], since + running[0].exit_timeout_s
                if not save.wait(min(end, time.monotonic() + _WARN_AFTER_S)):
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
        """Waits for the threads, until ``end`` at most. A future is done while its thread still destroys what it saved.

        When a process has ended, Python ends every thread that asks for the GIL. If C++ code runs in such a thread, the
        process aborts.
        """
        for save in self.running():
            if not save.wait(end):
                _logger.error("the save to %s has not ended, and the process does not wait for it", save.path)
        with self.lock:
            queues = list(self._with_threads)
        for queue in queues:
            queue.join(max(0.0, end - time.monotonic()))


def _saves_of_process() -> _Saves:
    global _waits_at_exit
    is_ending = not _waits_at_exit and not _wait_at_exit()
    _waits_at_exit = True
    return _Saves(is_ending=is_ending)


_waits_at_exit = False  # forked children inherit it, as they do what was registered
_saves = PerProcess(_saves_of_process)  # a forked child has none: the threads of its parent do not exist there


def _wait_at_exit() -> bool:
    """Makes the end of the process wait for saves. Returns False if the process has already begun to end."""
    atexit.register(_at_exit)
    return before_exit(_before_exit)


def submit(
    path: str,
    run: Callable[[], T],
    queue: str | None = "",
    *,
    give_up: Callable[[], None] = lambda: None,
    exit_timeout_s: float = Config.exit_timeout_s,
    exit_code: int = Config.failed_save_exit_code,
) -> BackgroundFuture[T]:
    """Runs a save in the background, after all saves that were submitted to the same queue before.

    If no thread can be started, or the process has begun to end, the save runs in the calling thread. Saves of
    different queues may run at the same time, so each queue needs process groups of its own. Raises nothing but Ctrl-C.

    Args:
        path: Path of the save, for messages.
        run: Does the save, and returns what the future gives.
        queue: Name of the queue. None: the save waits for no other.
        give_up: Makes the save fail soon. The end of the process calls it if the save has not ended after
            ``exit_timeout_s``.
        exit_timeout_s: See ``Config.exit_timeout_s``.
        exit_code: See ``Config.failed_save_exit_code``.
    """
    saves = _saves.get()
    line = SaveQueue("bytecheckpoint-save") if queue is None else saves.queue(queue)
    future: BackgroundFuture[T] = BackgroundFuture(path, line)
    caller = threading.current_thread()

    unclaimed = [True]  # whoever takes this entry out must complete the future

    def work() -> None:
        if not _takes(unclaimed):
            return
        try:
            value = run()
        except BaseException as error:
            # This frame is cut off the traceback: it still runs, so its locals cannot be cleared.
            error.__traceback__ = None if error.__traceback__ is None else error.__traceback__.tb_next
            forget_locals(error)
            future.set_exception(error)
            if not isinstance(error, Exception) and threading.current_thread() is caller:
                raise  # Ctrl-C, where the save runs in the calling thread
        else:
            future.set_result(value)
        finally:
            save.give_up = lambda: None  # the old one keeps the writer, which keeps the process group

    save = _Save(path, future, line, give_up, exit_timeout_s, exit_code)
    try:
        saves.run(save, work)
    except BaseException:  # Ctrl-C
        if _takes(unclaimed):  # else the save runs
            future.set_exception(CheckpointError(f"save({path}): interrupted before it began", path))
        raise
    return future


def _takes(unclaimed: list[bool]) -> bool:
    try:
        return unclaimed.pop()
    except IndexError:
        return False


def forget_locals(error: BaseException) -> None:
    """Clears the locals of all frames that ``error`` came through: whoever keeps the error must not keep the state.

    The traceback itself stays.
    """
    for one in _with_reasons(error):
        traceback.clear_frames(one.__traceback__)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            # Before Python 3.13 a frame keeps the locals that it was last asked for, until it is asked again.
            frame.f_locals  # noqa: B018


def forget_frames(error: BaseException) -> None:
    """Takes the traceback from ``error``, where a frame may stay whose function has the state in its closure."""
    for one in _with_reasons(error):
        one.__traceback__ = None


def _with_reasons(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, CheckpointException):  # DCP's error, which holds the failures of all ranks
            waiting += [failure for failure, _ in one.failures.values()]


def raise_unseen() -> None:
    """Raises the first failure of a background save that nobody has looked at, and logs the others. Each only once.

    Raises:
        CheckpointError: A save failed; the failure is the cause of this error.
    """
    saves = _saves.if_made()
    unseen = [] if saves is None else saves.take_unseen()
    for path, error in unseen[1:]:
        _logger.error("a background save to %s failed, too: %s", path, error)
    if unseen:
        path, error = unseen[0]
        raise CheckpointError(
            f"a background save to {path} failed, and its result was not read: {error}", path
        ) from error


def wait_for_saves(timeout_s: float | None = None) -> None:
    """Waits until no background save is under way.

    Raises:
        TimeoutError: A save is still under way after ``timeout_s`` seconds.
        CheckpointError: A hook of a background save makes this call, which would wait for that very save.
    """
    if is_in_queue() or is_saved_in_this_thread():
        raise CheckpointError(
            "shutdown(): a hook of a background save calls it, and it would wait for that same save: call it when the "
            "hook has returned"
        )
    end = None if timeout_s is None else time.monotonic() + timeout_s
    saves = _saves.if_made()
    for save in [] if saves is None else saves.running():
        if not save.wait(end):
            raise TimeoutError(f"the background save to {save.path} is still under way after {timeout_s} s")
    if not wait_until(lambda: not is_any_saved(), end):  # by DCP, which gives a future to its caller alone
        raise TimeoutError(f"a background save is still under way after {timeout_s} s")


def wait_for_queue(queue: str) -> None:
    """Waits until all saves that were submitted to a queue have ended, with or without success.

    Returns at once in the thread that runs them.
    """
    saves = _saves.if_made()
    if saves is None or not saves.has(queue):
        return
    line = saves.queue(queue)
    if not line.is_in_this_thread():
        reached = threading.Event()
        line.submit(reached.set, may_start_thread=False)
        reached.wait()


def shutdown(timeout_s: float | None = None) -> None:
    """Waits for background saves, gives the memory of staged states back, and raises a failure that nobody looked at.

    It also waits until each step of ``Tiers`` that waits for its durable copy has been tried once more, and for
    exporters (``observe``), for 60 s at most after the last save. Then nothing of this package writes to a folder any
    more.

    Local, but a save ends only when it can end on all ranks: call this on every rank, before
    ``destroy_process_group``. You may save again afterwards. When the process ends, the same happens by itself: it
    waits for each save for ``Config.exit_timeout_s`` at most, and logs a failure instead of raising it; the process
    then ends with ``Config.failed_save_exit_code``, if that is set.

    Args:
        timeout_s: Seconds to wait at most; None waits without limit.

    Raises:
        TimeoutError: Saves are still under way, and no memory was given back; or a durable copy is.
        CheckpointError: A background save failed and nobody looked at its failure, which is the cause of this error.
            Or steps could not be copied to durable storage. Or a hook of a background save calls this function.
    """
    begin = time.monotonic()
    wait_for_saves(timeout_s)
    _C.close_arena()

    def left_s() -> float | None:
        return None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begin))

    try:
        wait_for_drains(left_s())
        end_peers()
        end_holders()
    finally:
        most_s = left_s()
        if not flush(_MOST_EXPORT_S if most_s is None else max(most_s, _LEAST_EXPORT_S)):
            _logger.warning("shutdown(): an exporter is still at work, and may write")
        raise_unseen()


def _before_exit() -> None:
    """Runs when the main thread has ended. Other threads may go on, and save."""
    saves = _saves.if_made()
    if saves is None:
        return
    saves.ending_since = time.monotonic()
    saves.end(saves.ending_since)


def _at_exit() -> None:
    """Runs when all threads that Python waits for have ended, DCP's included."""
    saves = _saves.if_made()
    if saves is not None and saves.ending_since is not None:
        saves.end(saves.ending_since)
    _C.close_arena()
    exit_code = 0 if saves is None else saves.exit_code()
    try:
        raise_unseen()
    except CheckpointError as error:
        _logger.error("%s", error)
    if exit_code:
        end_with(exit_code)


def handle_sigterm(exit_timeout_s: float) -> None:
    """Makes SIGTERM wait for background saves before it does what it did before. No effect outside the main thread.

    Args:
        exit_timeout_s: Seconds that SIGTERM waits for calls that stage a state, and for saves that DCP runs in threads
            of its own.
    """

    def wait_for_all(since: float) -> None:
        def are_over() -> bool:
            saves = _saves.get()
            saves.end(since)
            # In this order: a save that begins is in `running()` before it leaves `is_any_saved()`.
            return not is_any_saved() and not saves.running()

        if not wait_until(are_over, since + exit_timeout_s):
            _logger.error("SIGTERM: a background save is still under way after %g s", exit_timeout_s)

    _sigterm.handle_sigterm(wait_for_all)
