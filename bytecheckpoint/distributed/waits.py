# SPDX-License-Identifier: Apache-2.0
"""Waits for work on a process group that can be ended when a rank of the group is lost.

When a connection of gloo ends, the waits on it end, too. But a wait for a message of which the socket has already sent
or received a part lasts until the timeout of the group, in C++, where nothing can end it. So on groups of
``allow_leaving`` no caller waits in C++ for longer than it wants to, and a wait that is still in C++ when a rank is
lost is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import torch.distributed as dist

from bytecheckpoint.compat.private_names import close_connections
from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.runtime.per_process import HomeProcess

__all__ = ["Collective", "Message", "allow_leaving", "leave_waits"]

# How long gloo may take to report itself how a wait that was ended has failed. A collective waits in steps of this.
_SAID_WITHIN = timedelta(seconds=1)

_LEFT = object()

# Each wait has one. It ends when something is put there: None for success, an error, or _LEFT if the waits on the group
# are left.
_Mailbox: TypeAlias = SimpleQueue[Any]


class _Ending:
    """Ends the waits on one process group."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._waiting: set[_Mailbox] = set()
        self.is_over = False

    def end(self) -> None:
        with self._lock:
            self.is_over = True
            for mailbox in self._waiting:
                mailbox.put(_LEFT)

    @contextlib.contextmanager
    def interrupts(self, mailbox: _Mailbox) -> Iterator[None]:
        with self._lock:
            self._waiting.add(mailbox)
            if self.is_over:
                mailbox.put(_LEFT)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(mailbox)


_lock = ForkSafeLock()
_endings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Ending] = weakref.WeakKeyDictionary()


def allow_leaving(group: dist.ProcessGroup) -> None:
    """Lets ``leave_waits`` end the waits on ``group``. Waits on other groups are plain waits of torch."""
    with _lock:
        _endings[group] = _Ending()


def leave_waits(group: dist.ProcessGroup | None) -> None:
    """Closes the connections of a group, if it is still there, and ends what waits on it, with a RuntimeError."""
    if group is None:
        return
    close_connections(group)
    ending = _ending_of(group)
    if ending is not None:
        ending.end()


@dataclass(frozen=True)
class Collective:
    """A collective that is under way on a process group."""

    work: dist.Work
    group: dist.ProcessGroup

    def wait(self) -> None:
        """Blocks until it is done.

        Raises:
            RuntimeError: It failed, or the waits on the group were left.
        """  # noqa: DOC501
        ending = _ending_of(self.group)
        while ending is not None and not self.work.is_completed():
            is_over = ending.is_over
            with contextlib.suppress(RuntimeError):  # either the time is up, or the error is raised again below
                self.work.wait(_SAID_WITHIN)
            if is_over and not self.work.is_completed():
                # The destructor of the group would wait for its threads, of which one is in this work. So the group is
                # kept for ever.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
                raise _left_behind()
        self.work.wait()


@dataclass(frozen=True)
class Message:
    """A message on its way between two ranks of a process group.

    ``Work.wait`` with a timeout ends the whole group when the time is up, and torch cannot tell whether a message is
    done. So another thread waits for it if the waits on the group may be left.
    """

    work: dist.Work
    group: dist.ProcessGroup

    def wait(self) -> None:
        """Blocks until it is done. Raises what ``Collective.wait`` does."""
        ending = _ending_of(self.group)
        waiter = None if ending is None else _waiter_of_thread()
        if ending is None or waiter is None:
            self.work.wait()
            return
        mailbox: _Mailbox = SimpleQueue()
        try:
            with ending.interrupts(mailbox):
                waiter.messages.put((self.work, mailbox))
                outcome = mailbox.get()
                if outcome is _LEFT:
                    outcome = mailbox.get(timeout=_SAID_WITHIN.total_seconds())
        except BaseException as error:
            _of_thread.waiter = None  # that thread may go on waiting for long
            raise _left_behind() if isinstance(error, Empty) else error from None
        if outcome is not None:
            raise outcome


class _Waiter:
    """A thread that waits for messages, one after the other, on behalf of another thread. It ends with this object."""

    def __init__(self) -> None:
        self.home = HomeProcess()
        self.messages: SimpleQueue[tuple[dist.Work, _Mailbox] | None] = SimpleQueue()
        threading.Thread(target=_wait_for, args=(self.messages,), name="bytecheckpoint-wait", daemon=True).start()

    def __del__(self) -> None:
        self.messages.put(None)


def _wait_for(messages: SimpleQueue[tuple[dist.Work, _Mailbox] | None]) -> None:
    while (message := messages.get()) is not None:
        work, mailbox = message
        try:
            work.wait()
            mailbox.put(None)
        except BaseException as error:
            mailbox.put(error)
        del message, work, mailbox  # so that nothing is kept until the next message


_of_thread = threading.local()  # `waiter`: the one of this thread


def _waiter_of_thread() -> _Waiter | None:
    """Returns the waiter of this thread. None if the interpreter is about to end, and starts no more threads."""
    waiter: _Waiter | None = getattr(_of_thread, "waiter", None)
    if waiter is None or not waiter.home.is_here():
        try:
            waiter = _of_thread.waiter = _Waiter()
        except RuntimeError:
            return None
    return waiter


def _ending_of(group: dist.ProcessGroup) -> _Ending | None:
    with _lock:
        return _endings.get(group)


def _left_behind() -> RuntimeError:
    return RuntimeError("the connections between the ranks were closed while a message was under way")
