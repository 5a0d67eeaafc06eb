# SPDX-License-Identifier: Apache-2.0
"""Copies the steps that this process commits to the near place of ``Tiers`` on to the durable one, in a thread.

A step that waits is pinned near by, and so is the one under way: what is pinned is the backlog. So a process that is
started again goes on with what an earlier one has left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from dataclasses import replace

from bytecheckpoint.checkpoint.commit_order import commit_order
from bytecheckpoint.checkpoint.drain_records import note_copied, note_dropped, note_failed
from bytecheckpoint.checkpoint.draining import copy_step
from bytecheckpoint.checkpoint.keeping import WAITS, drains_of, note_drain
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, UnsupportedError
from bytecheckpoint.listing import listed
from bytecheckpoint.runtime.before_exit import before_exit
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.parts import PARTS, step_and_part
from bytecheckpoint.storage.paths import Place, as_place, below, name_of, parent_of
from bytecheckpoint.storage.step_folder import step_paths
from bytecheckpoint.storage.tiers import Tiers, tiers_of

__all__ = ["TierDrain", "drain_of", "go_on", "note_tier_commit", "note_tier_file", "wait_for_drains"]

_NICENESS = 19
_FIRST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
_STOPS_WITHIN_S = 5.0

_logger = logging.getLogger("bytecheckpoint")


class _StoppedError(CheckpointError):
    """The process ends; a later one begins the step anew."""


class TierDrain:
    """Copies the steps of one run, oldest first, in a thread that is there as long as steps wait.

    Args:
        tiers: How to copy.
        near: Folder of the steps.
        durable: Where they go.

    Attributes:
        left_out: Why steps are not copied, by their names: it was not their turn, newer ones waited, or they were
            removed.
        changed: Is notified whenever a step has been copied, dropped, or has failed.
    """

    def __init__(self, tiers: Tiers, near: Place, durable: Place) -> None:
        self.left_out: dict[str, str] = {}
        self.changed = threading.Condition()
        self._tiers, self._near, self._durable = tiers, near, durable
        self._config = replace(tiers.config or Config.from_env(), niceness=_NICENESS)
        self._num_saves = 0
        self._failures: dict[str, str] = {}
        self._current = ""  # the step under way
        self._has_new_files: set[str] = set()  # steps in which a file was written behind their commit
        self._looking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._may_retry, self._is_asked, self._is_stopped = True, False, False

    def note_save(self, path: str) -> None:
        """Notes that a step is committed, and copies it if it is its turn. Returns when it is pinned."""
        with self.changed:
            self._num_saves += 1
            name, every = name_of(as_place(path)), self._tiers.durable_every
            if self._num_saves % every:
                self.left_out[name] = f"durable_every={every} takes another save"
                self.changed.notify_all()
                return
            self.left_out.pop(name, None)
        try:
            note_drain(path, WAITS)
            self._waiting()
        except CheckpointError as error:  # the save is committed all the same
            _logger.warning("Tiers(%s): %s is not copied to %s: %s", self._near, name, self._durable, error)
        self.start()

    def note_file(self, path: str) -> None:
        """Notes that a file was written in a step behind its commit, and copies that, unless the step is left out."""
        with self.changed:
            self._has_new_files.add(path)
        self.start()

    def start(self) -> None:
        """Copies what waits, unless that is under way."""
        with self.changed:
            self._may_retry, self._is_asked, self._is_stopped = True, True, False
            self.changed.notify_all()  # a retry need not wait longer
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="bytecheckpoint-drain", daemon=True)
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:  # the process ends, and a later one goes on
                self._thread = None

    def wait(self, end: float | None) -> bool:
        """Waits until each step that waits has been tried once more. Returns False at ``end`` (``time.monotonic``)."""
        with self.changed:
            self._may_retry = False
            self.changed.notify_all()
            timeout_s = None if end is None else max(0.0, end - time.monotonic())
            return self.changed.wait_for(lambda: self._thread is None, timeout_s)

    def stop(self) -> None:
        """Makes the thread end soon. What waits stays pinned."""
        with self.changed:
            self._is_stopped = True
            self.changed.notify_all()

    @property
    def exit_timeout_s(self) -> float:
        """Seconds for which the end of the process waits for it."""
        return self._config.exit_timeout_s

    def take_failures(self) -> dict[str, str]:
        """Returns why steps are not copied, by their folders. Each is returned once."""
        with self.changed:
            failures, self._failures = self._failures, {}
        return failures

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        retry_s = _FIRST_RETRY_S
        tried: set[str] = set()  # without success
        try:
            while (path := self._next(tried)) is not None:
                if not path:
                    self._sleep(retry_s)
                    retry_s = min(2 * retry_s, _MOST_RETRY_S)
                    tried.clear()
                    continue
                self._current = path
                if self._is_done(path):
                    retry_s = _FIRST_RETRY_S
                else:
                    tried.add(path)
                self._current = ""
        finally:
            with self.changed:
                self._thread = None
                self.changed.notify_all()

    def _sleep(self, seconds: float) -> None:
        """Waits before what has failed is tried again, unless something changes."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_asked or not self._may_retry or self._is_stopped, seconds)

    def _next(self, tried: set[str]) -> str | None:
        """Returns the step to copy next; "" if all that wait were tried. None ends the thread."""
        while True:
            with self.changed:
                self._is_asked = False
            waiting: list[str] = []
            try:
                self._pin_with_new_files()
                waiting = self._waiting()
            except CheckpointError as error:  # near storage that refuses
                _logger.warning("Tiers(%s): %s", self._near, error)
            paths = [path for path in waiting if path not in tried]
            with self.changed:
                if self._is_stopped or not (paths or self._is_asked or (waiting and self._may_retry)):
                    self._thread = None  # with the lock: whoever comes now starts another
                    self.changed.notify_all()
                    return None
                if paths or not self._is_asked:
                    return paths[0] if paths else ""

    def _pin_with_new_files(self) -> None:
        """Has steps wait again that got new files. The thread does it alone: it also unpins what is copied."""
        with self.changed:
            paths, self._has_new_files = self._has_new_files, set()
            paths = {path for path in paths if name_of(as_place(path)) not in self.left_out}
        for path in paths:
            if not folder_at(as_place(path)).is_gone():
                note_drain(path, WAITS)

    def _waiting(self) -> list[str]:
        """Returns the steps that wait, and the one under way, the oldest first. Drops those that are too many."""
        with self._looking:
            if folder_at(self._near).is_gone():
                return []
            steps = step_paths(self._near)
            pinned = drains_of([path for _, path in steps])
            waiting = [path for _, path in commit_order(self._near, steps).by_time if path in pinned][::-1]
            most = self._tiers.most_waiting + (self._current not in waiting)  # or with the one that is copied next
            others = [path for path in waiting if path != self._current]
            dropped = others[:-most]
            for path in dropped:
                note_drain(path, "")
                self._drop(path, f"{len(waiting) - len(dropped)} newer steps wait")
            return [path for path in waiting if path not in dropped]

    def _drop(self, path: str, why: str) -> None:
        name = name_of(as_place(path))
        note_dropped(path, self._durable, why, self._config)
        _logger.warning("Tiers(%s): %s is dropped, and not copied to %s: %s", self._near, name, self._durable, why)
        with self.changed:
            self._failures.pop(path, None)
            self.left_out[name] = why
            self.changed.notify_all()

    def _is_done(self, path: str) -> bool:
        """Copies a step. Returns False if it is to be tried again."""
        begun_at = time.time()

        def go_on(done: int, total: int) -> None:
            if self._is_stopped:
                raise _StoppedError(f"drain({path}): the process ends")

        try:
            copied = copy_step(path, self._near, self._durable, self._tiers.drain_bytes_per_s, self._config, go_on)
        except _StoppedError:
            return False
        except Exception as error:
            return self._is_hopeless(path, error, begun_at)
        _logger.info("Tiers(%s): %s", self._near, copied.summary())
        note_copied(path, copied, begun_at, self._config)
        with self.changed:
            self._failures.pop(path, None)
            self.changed.notify_all()
        return True

    def _is_hopeless(self, path: str, error: Exception, begun_at: float) -> bool:
        """Notes why a step was not copied. Returns whether another try would not help; then it no longer waits."""
        with contextlib.suppress(CheckpointError):
            is_gone = folder_at(as_place(path)).is_gone()
            if is_gone or isinstance(error, CorruptCheckpointError | UnsupportedError):
                if not is_gone:
                    note_drain(path, "")
                self._drop(path, "it was removed while it waited" if is_gone else str(error))
                return True
        with self.changed:
            why = str(error) if isinstance(error, CheckpointError) else repr(error)
            is_new, self._failures[path] = self._failures.get(path) != why, why
            self.changed.notify_all()
        if is_new:
            _logger.warning("Tiers(%s): %s; it is tried again", self._near, why)
            note_failed(path, self._durable, why, begun_at, self._config)
        return False


class _Drains:
    """The drains of one process, by the folders of their runs."""

    def __init__(self) -> None:
        self.by_run: dict[str, TierDrain] = {}
        self.lock = threading.Lock()
        before_exit(_end)

    def of(self, path: str) -> tuple[TierDrain, str] | None:
        found = tiers_of(path)
        if found is None or len(found[0].disks) < 2 or found[0].drain != "thread":
            return None
        tiers, rest = found
        near, durable = (step_and_part(below(place, *rest.split("/")))[0] for place in tiers.disks)
        run = parent_of(near)
        with self.lock:
            drain = self.by_run.get(str(run))
            if drain is None:
                drain = self.by_run[str(run)] = TierDrain(tiers, run, parent_of(durable))
        return drain, str(near)


_drains = PerProcess(_Drains)


def drain_of(path: str) -> tuple[TierDrain, str] | None:
    """Returns the drain of the run that a path is in, and the folder of the step; None if there is none.

    Args:
        path: A step near by, or a part of one.
    """
    return None if tiers_of(path) is None else _drains.get().of(path)


def note_tier_commit(path: str) -> None:
    """Has a checkpoint copied that this process has just committed, if it is in ``Tiers``. A thread copies."""
    found = drain_of(path)
    if found is not None and step_and_part(as_place(path))[1] in ("", PARTS[-1]):  # the model is committed last
        drain, step = found
        drain.note_save(step)


def note_tier_file(step: str) -> None:
    """Has a file copied that was written in a committed step of ``Tiers``. A thread copies."""
    found = drain_of(step)
    if found is not None:
        found[0].note_file(found[1])


def go_on(path: str) -> None:
    """Copies what an earlier process has left, where this one has loaded a step of ``Tiers``. Returns at once.

    Args:
        path: The step, or a part of one, in any of the places.
    """
    found = tiers_of(path, anywhere=True)
    drain = None if found is None else drain_of(str(below(found[0].place, *found[1].split("/"))))
    if drain is not None:
        drain[0].start()


def wait_for_drains(timeout_s: float | None = None) -> None:
    """Waits until nothing is copied any more: each step that waits is tried once more.

    Raises:
        TimeoutError: A step is still being copied.
        CheckpointError: Steps could not be copied. They stay pinned, and the next process that uses the tiers goes on.
    """
    drains, failures = _drains.if_made(), dict[str, str]()
    end = None if timeout_s is None else time.monotonic() + timeout_s
    for run, drain in [] if drains is None else [*drains.by_run.items()]:
        if not drain.wait(end):
            raise TimeoutError(f"a step of {run} is still being copied to durable storage")
        failures.update(drain.take_failures())
    if failures:
        raise CheckpointError(
            f"shutdown(): {listed([*failures])} {'is' if len(failures) == 1 else 'are'} near by, and not in durable "
            f"storage: {next(iter(failures.values()))}"
        )


def _end() -> None:
    """Ends all drains with the process. What was not copied stays pinned.

    After an error the job is about to be started again, and then goes on with what waits.
    """
    drains = _drains.if_made()
    for run, drain in [] if drains is None else [*drains.by_run.items()]:
        if not hasattr(sys, "last_value") and drain.wait(time.monotonic() + drain.exit_timeout_s):
            continue
        drain.stop()
        if not drain.wait(time.monotonic() + _STOPS_WITHIN_S):
            _logger.error("the process does not wait for a copy of %s that does not end", run)
