# SPDX-License-Identifier: Apache-2.0
"""How long a state stays in the memory of the arena, and how the next one waits for that.

A state that ``dcp.async_save`` has staged itself is known to nobody else: it stays until the save of it has ended. DCP
says nothing when that is. What DCP begins in a thread or process of its own runs inside a call of one of its executors,
so it is that call we watch. So it is with the states of our own entry points, which say when their save has ended. Any
other state, one of a stager of the user's too, may be used again, and stays until nothing of it is left.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bytecheckpoint import _C
from bytecheckpoint._fork_locks import ForkSafeLock
from bytecheckpoint._save_queue import is_in_queue
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._calls import ASYNC_SAVE, Call, is_any_thread_in, outermost_call
from bytecheckpoint.dcp._world import World
from bytecheckpoint.errors import CheckpointError, StagingBusyError, StorageError

__all__ = ["Loan", "Stay", "is_any_saved", "is_saved_in_this_thread", "wait_for_lease"]

_EXECUTORS = (
    "torch.distributed.checkpoint._async_thread_executor",
    "torch.distributed.checkpoint._async_process_executor",
)
# Modules in which a caller of ours is while it saves a state.
_SAVES = (ASYNC_SAVE[0], "bytecheckpoint.state_dicts")
# A save that has ended is noticed by looking, or when somebody says so.
_LOOK_INTERVAL_S = 0.02
# A future of DCP resolves within the call that we watch; it returns very soon after.
_BUSY_GRACE_S = 0.25
# After that somebody is told what staging waits for.
_PATIENCE_S = 10.0
# DCP's executor begins a save at once. If no thread is seen in it for so long, the call has failed, and never will.
_BEGIN_WITHIN_S = 5.0
# How long staging waits for memory that no save uses: another thread may drop it.
_UNUSED_WAIT_S = 30.0

_logger = logging.getLogger("bytecheckpoint")


class Loan:
    """The right of one state to its memory.

    Attributes:
        is_for_one_save: Nobody but one save knows the state: it ends with that, whoever keeps its tensors.
        is_over: That has ended.
    """

    def __init__(self, lease: _C.Lease, is_for_one_save: bool) -> None:
        self.lease = lease
        self.is_for_one_save = is_for_one_save
        self.is_over = False

    def end_of_save(self) -> None:
        """A save has ended that used it, or that will never begin."""
        if self.is_for_one_save:
            self.is_over = True
            self.lease.release()


class Stay:
    """One state, in the memory that it has on loan.

    Attributes:
        begun_by: The call of ``dcp.async_save`` that it was staged for.
        is_filled_later: Devices go on copying to it when the call that stages it has returned.
        is_submitted: A save has it that says when it ends.
        world: The ranks that it is to be saved with; None if that is not known.
        idle_since: Since when nobody could be seen who would save it.
    """

    def __init__(self, loan: Loan, staged: _C.StagedTree, num_threads: int, begun_by: Call | None) -> None:
        self.loan = loan
        self.num_bytes = staged.num_bytes
        self.begun_by = begun_by
        self.is_filled_later = False
        self.is_submitted = False
        self.idle_since: float | None = None
        self._lock = ForkSafeLock()
        self._staged = staged
        self._num_threads = num_threads
        self._sent: int | None = None
        # A state that somebody keeps may be saved later, with whatever ranks.
        self.world = World.of_call() if begun_by is not None and loan.is_for_one_save else None
        if begun_by is not None or loan.is_for_one_save:
            with _lock:
                _awaited.add(self)

    def sum(self) -> None:
        """Takes the CRCs of what came from devices, unless it is done; returns when it is. Any thread."""
        with self._lock:
            self._staged.sum(self._num_threads)

    def note_save(self) -> None:
        """A save begins to use it.

        Raises:
            CheckpointError: The memory is another state's by now.
            ProcessGroupChangedError: It was staged for a save with other ranks.
        """
        if self.loan.is_over:
            raise CheckpointError(
                "a state is saved that dcp.async_save staged for another save, which has ended: its memory is the next "
                "state's. Stage it again, or stage it yourself (BcpStager().stage) to save it twice"
            )
        call = outermost_call(_EXECUTORS)
        use = _Use(call or outermost_call(_SAVES), self.loan, is_background=call is not None)
        with _lock:
            if use.call is not None and use not in _uses:
                _uses.append(use)
            if use.is_background:
                _awaited.discard(self)
        if self.world is not None and use.is_background:
            self.world.check_begin()
        self.sum()  # else what is saved first would not be checked

    def waits_for_this_thread(self) -> bool:
        """Whether the call of ``dcp.async_save`` that it was staged for goes on only when the asking thread does."""
        call = self.begun_by
        return call is not None and not self.is_submitted and call.is_of_this_thread() and call.is_running()

    def end_of_save(self) -> None:
        """The save that it was staged for has ended, or will never begin."""
        self.loan.end_of_save()
        with _lock:
            _awaited.discard(self)

    def release(self) -> None:
        """Nobody needs it any more."""
        self.loan.lease.release()
        with _lock:
            _awaited.discard(self)

    def fd_to_send(self) -> int:
        """Memory for another process, open for as long as this state lives.

        A process of DCP's executor maps the memory of the state itself, which its call keeps. Any other may look at it
        when the state is gone from here, and gets a copy.
        """
        pages = self.loan.lease.shareable_pages(self.num_bytes)
        if outermost_call(_EXECUTORS) is not None:
            return pages.fd
        if self._sent is None:
            self._sent = _copied(pages.fd, self.num_bytes)
            weakref.finalize(self, os.close, self._sent)
        return self._sent


@dataclass(frozen=True)
class _Use:
    """A save that uses a state.

    Attributes:
        is_background: DCP runs it in a thread or process of its own.
    """

    call: Call | None
    loan: Loan
    is_background: bool

    def is_running(self) -> bool:
        return self.call is not None and self.call.is_running()


def _copied(memory: int, num_bytes: int) -> int:
    """A copy of ``memory`` that another process can map."""
    copy = os.memfd_create("bytecheckpoint-staged")
    try:
        done = 0
        while done < num_bytes:
            done += os.sendfile(copy, memory, done, num_bytes - done)
    except BaseException as error:
        os.close(copy)
        if not isinstance(error, OSError):
            raise
        text = f"sendfile(staging, {num_bytes} bytes): {error.strerror} behind {done} bytes"
        raise StorageError(text, "staging", error.errno or 0) from error
    return copy


# One thread may come twice: in the handler of a signal.
_lock = ForkSafeLock(threading.RLock)
_uses: list[_Use] = []
# Staged for a save that DCP is about to begin, unless it fails before, or for one that says when it ends.
_awaited: weakref.WeakSet[Stay] = weakref.WeakSet()


# Threads that are in a call which begins a background save.
_beginning: list[threading.Thread] = []


@contextmanager
def beginning() -> Iterator[None]:
    """A background save is about to begin: what waits for saves waits for this one, too."""
    thread = threading.current_thread()
    _beginning.append(thread)
    try:
        yield
    finally:
        _beginning.remove(thread)


def is_any_saved() -> bool:
    """Is a save about to begin, or under way in the background of DCP, of a state that was staged here?"""
    if any(thread.is_alive() for thread in [*_beginning]):  # in a forked child those of the parent are not
        return True
    _end_what_is_over()
    with _lock:
        return any(use.is_background for use in _uses) or any(stay.begun_by is not None for stay in _awaited)


def is_saved_in_this_thread() -> bool:
    """Is a save of those that ``is_any_saved`` tells begun or run by this very thread, in a hook of which it asks?"""
    if threading.current_thread() in _beginning:
        return True
    _end_what_is_over()
    with _lock:
        return any(use.is_background and use.call is not None and use.call.is_of_this_thread() for use in _uses) or any(
            stay.waits_for_this_thread() for stay in _awaited
        )


def _is_any_to_end() -> bool:
    """Is a save under way, elsewhere than in this thread, that ends the stay of a state, or may be its last use?

    In a hook of a save that runs in a queue, those behind it do not count: they wait for it.
    """
    may_begin = not is_in_queue()
    with _lock:
        in_this_thread = [use.loan for use in _uses if use.call is None or use.call.is_of_this_thread()]
        return len(in_this_thread) != len(_uses) or any(
            stay.loan not in in_this_thread and not stay.waits_for_this_thread() for stay in _awaited if may_begin
        )


def _end_what_is_over() -> None:
    with _lock:
        over = [use for use in _uses if not use.is_running()]
        never_begun = [stay for stay in _awaited if _will_never_begin(stay)]
    for use in over:
        if use.is_background:
            use.loan.end_of_save()
    with _lock:  # in the end: Ctrl-C may come before
        _uses[:] = [use for use in _uses if use not in over]
    for stay in never_begun:
        stay.end_of_save()


def _will_never_begin(stay: Stay) -> bool:
    """Whether the call of ``dcp.async_save`` has failed that the state was staged for: an error keeps the state."""
    if (
        stay.begun_by is None
        or stay.is_submitted
        or stay.is_filled_later
        or stay.begun_by.is_running()
        or is_any_thread_in(_EXECUTORS)
    ):
        stay.idle_since = None
        return False
    stay.idle_since = stay.idle_since or time.monotonic()
    return time.monotonic() - stay.idle_since > _BEGIN_WITHIN_S


def wait_for_lease(num_bytes: int, config: Config, is_shareable: bool, what: str) -> _C.Lease:
    """Memory for a state of ``num_bytes`` bytes, once there is some.

    It waits for saves of other threads as long as they take: their own limits say how long storage and other ranks may
    keep them. Where there is none, it waits for ``_UNUSED_WAIT_S``.

    Args:
        what: The state is, for messages to those who wait for it.

    Raises:
        StagingBusyError: Says which states take the memory.
        StagingFullError: It does not fit.
    """
    give_up = time.monotonic() + _BUSY_GRACE_S
    num_states = 2 if config.on_staging_busy == "double_buffer" else 1
    warn = time.monotonic() + _PATIENCE_S
    unused_since: float | None = None
    while True:
        _end_what_is_over()
        lease = _C.try_lease(
            num_bytes=num_bytes,
            limit_bytes=config.staging_bytes,
            is_shareable=is_shareable,
            num_states=num_states,
            what=what,
        )
        if lease is not None:
            return lease
        if config.on_staging_busy == "raise" and time.monotonic() >= give_up:
            raise StagingBusyError(
                f"staging: a state of {num_bytes} bytes cannot be staged while the one before is saved, and "
                f'on_staging_busy="raise": {_holders()}'
            )
        if _is_any_to_end():
            unused_since = None
        elif unused_since is None:
            unused_since = time.monotonic()
            gc.collect()  # an error that nobody has any more may keep a state in a cycle
        elif time.monotonic() - unused_since > _UNUSED_WAIT_S:
            raise StagingBusyError(
                f"staging: a state of {num_bytes} bytes has waited {_UNUSED_WAIT_S:g} s for memory that an earlier "
                f"state takes, though no save of that is under way: {_holders()}. Somebody keeps it, or one of its "
                "tensors: a stager of your own, a planner that saved it, or an error. Drop it, call its release(), or "
                'allow two states with on_staging_busy="double_buffer"'
            )
        if time.monotonic() >= warn:
            warn = math.inf
            _logger.warning(
                "staging has waited %g s for memory; %s: %s",
                _PATIENCE_S,
                "a save is still under way" if unused_since is None else "a staged state is kept that no save uses",
                _holders(),
            )
        _C.wait_for_release(_LOOK_INTERVAL_S)


def _holders() -> str:
    """Which states take the memory, for messages."""
    holders = _C.lease_holders()
    return ", ".join(f"{num_bytes} bytes for {held_s:.0f} s, {what}" for num_bytes, held_s, what in holders)
