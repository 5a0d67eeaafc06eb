# SPDX-License-Identifier: Apache-2.0
"""Futures of the durable copies of what was saved to ``Tiers``, in whatever process they are made."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from bytecheckpoint.checkpoint.steps import look_at_step
from bytecheckpoint.checkpoint.tier_drains import drain_of
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.runtime.before_exit import before_exit
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.paths import Place, as_place, below, name_of, parent_of
from bytecheckpoint.storage.save_ids import begin_of_save
from bytecheckpoint.storage.step_folder import step_paths
from bytecheckpoint.storage.tiers import tiers_of

__all__ = ["when_durable"]

_FIRST_LOOK_S, _MOST_BETWEEN_LOOKS_S = 0.2, 15.0
_STOPS_WITHIN_S = 5.0


def when_durable(path: str) -> Future[str] | None:
    """Returns a future of the durable copy of a step that is committed near by now; None if its place is not in tiers.

    Its result is the path or URL of the copy. It fails with a ``CheckpointError`` if the step is left out: it was not
    its turn, newer ones waited, or a newer one is there. The future cannot be cancelled.

    Args:
        path: The step near by, or a part of one.
    """
    found = tiers_of(path)
    if found is None or not found[0].durable:
        return None
    tiers, rest = found
    future: Future[str] = Future()
    future.set_running_or_notify_cancel()
    if len(tiers.disks) == 1:
        future.set_result(path)
        return future
    folder = look_at_step(0, path)
    if folder is None or not folder.save_ids:
        future.set_exception(CheckpointError(f"{path}: it is not there any more", path))
        return future
    _waits.get().add(_Wait(path, below(tiers.disks[-1], *rest.split("/")), folder.save_ids, future))
    return future


@dataclass(eq=False)
class _Wait:
    """A save whose durable copy somebody waits for.

    Attributes:
        path: The step near by.
        copy: Where the copy will be.
        save_ids: Ids of the save.
        future: Future of the copy.
        older: Steps in durable storage that are known to be older.
    """

    path: str
    copy: Place
    save_ids: tuple[str, ...]
    future: Future[str]
    older: set[str] = field(default_factory=set)

    def is_over(self) -> bool:
        """Looks, and completes the future if it can."""
        try:
            why = self._left_out()
        except CheckpointError:  # the durable place does not answer: nobody knows yet
            return False
        except Exception as error:
            self.future.set_exception(error)
            return True
        if why is None:
            return False
        if why:
            self.future.set_exception(CheckpointError(f"{self.path} is not copied to {self.copy}: {why}", self.path))
        else:
            self.future.set_result(str(self.copy))
        return True

    def _left_out(self) -> str | None:
        """Returns why the step is left out, "" if its copy is there, None if it is not known yet."""
        own = drain_of(self.path)
        why = "" if own is None else own[0].left_out.get(name_of(as_place(self.path)), "")
        there = look_at_step(0, str(self.copy))
        if there is not None and there.save_ids == self.save_ids and there.is_complete:
            return ""
        began = max(map(begin_of_save, self.save_ids))
        if not why and there is not None and min(map(begin_of_save, there.save_ids), default=0) > began:
            return "a later save to its folder was copied"
        if why or own is not None:
            return why or None
        for step, path in step_paths(parent_of(self.copy)):
            if path in self.older or not began:
                continue
            other = look_at_step(step, path)
            if other is None or not other.is_complete:
                continue
            if min(map(begin_of_save, other.save_ids), default=0) > began:
                return f"{name_of(as_place(path))} is there, which was saved later"
            self.older.add(path)
        return None


class _Waits:
    """The waits of one process, and the thread that looks for them."""

    def __init__(self) -> None:
        self._waits: list[_Wait] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        before_exit(_end)

    def add(self, wait: _Wait) -> None:
        with self._lock:
            self._waits.append(wait)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bytecheckpoint-durable", daemon=True)
                self._thread.start()

    def end(self, timeout_s: float) -> None:
        self._end.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        between_s = _FIRST_LOOK_S
        while not self._end.is_set():
            with self._lock:
                waits = [*self._waits]
            over = {id(wait) for wait in waits if wait.is_over()}
            with self._lock:
                self._waits = [wait for wait in self._waits if id(wait) not in over]
                if not self._waits:
                    self._thread = None
                    return
                is_new = len(self._waits) > len(waits) - len(over)
            between_s = _FIRST_LOOK_S if is_new or over else min(1.5 * between_s, _MOST_BETWEEN_LOOKS_S)
            self._end.wait(between_s)


_waits = PerProcess(_Waits)


def _end() -> None:
    waits = _waits.if_made()
    if waits is not None:
        waits.end(_STOPS_WITHIN_S)
