# SPDX-License-Identifier: Apache-2.0
"""How long a state stays in the memory of the arena, and how the next state waits for that memory.

A state that was staged for one save alone is known to nobody else, and stays until that save has ended. Our own saves
report their end, and so does the future of ``dcp.async_save`` where it is found. Otherwise the writer that gets the
state notes which call of DCP saves it, and this module looks again and again whether that call still runs. Any other
state, also one of a user's own stager, may be used again, and stays until nobody refers to it or its tensors.
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
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.calls.call import Call
from bytecheckpoint.calls.of_dcp import AsyncSaveCall, background_call, is_any_in_background
from bytecheckpoint.calls.watch import LOOK_INTERVAL_S
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError, StagingBusyError, StorageError
from bytecheckpoint.native import _C
from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.staging.save_queue import is_in_queue
from bytecheckpoint.staging.save_ranks import SaveRanks

__all__ = ["SaveLease", "StagedMemory", "is_any_saved", "is_saved_in_this_thread", "wait_for_lease"]

# DCP resolves its future inside the call that we watch, which returns very soon after. So with on_staging_busy="raise"
# the next state waits this long before staging raises.
_BUSY_GRACE_S = 0.25
# After this time staging logs what it waits for.
_WARN_AFTER_S = 10.0
# DCP's executor begins a save at once. If no thread is seen in it for this long, the call of `dcp.async_save` has
# failed, and the save will never begin.
_BEGIN_WITHIN_S = 5.0
# How long staging waits for memory that no save uses: another thread may still drop the state.
_UNUSED_WAIT_S = 30.0

_logger = logging.getLogger("bytecheckpoint")


class SaveLease:
    """The right of one state to its memory.

    Attributes:
        is_for_one_save: Whether only one save knows the state. Its lease then ends with that save, even if somebody
            keeps its tensors.
        is_over: Whether that save has ended.
    """

    def __init__(self, arena_lease: _C.Lease, is_for_one_save: bool) -> None:
        self.arena_lease = arena_lease
        self.is_for_one_save = is_for_one_save
        self.is_over = False

    def end_of_save(self) -> None:
        """Called when a save that used the state has ended, or will never begin. Ends a lease for that save alone."""
        if self.is_for_one_save:
            self.is_over = True
            self.arena_lease.release()


class StagedMemory:
    """One state, in the memory that it has leased.

    Attributes:
        begun_by: The call of ``dcp.async_save`` that the state was staged for; None if there is none.
        is_filled_later: Whether devices still copy to the memory after the call that stages the state has returned.
        is_submitted: Whether a save has the state that will report its end.
        world: The ranks that the state is to be saved with; None if they are not known.
        idle_since: Since when no thread is seen that could save the state; None while one may be.
    """

    def __init__(
        self, lease: SaveLease, staged: _C.StagedTree, num_threads: int, async_save: AsyncSaveCall | None
    ) -> None:
        self.lease = lease
        self.num_bytes = staged.num_bytes
        self.begun_by: Call | None = None if async_save is None else async_save.call
        self.is_filled_later = False
        self.is_submitted = False
        self.idle_since: float | None = None
        self._lock = ForkSafeLock()
        self._staged = staged
        self._num_threads = num_threads
        self._sent: int | None = None
        # A state that somebody keeps may be saved later, over any ranks.
        self.world = SaveRanks.of(async_save) if async_save is not None and lease.is_for_one_save else None
        if async_save is not None or lease.is_for_one_save:
            with _lock:
                _awaited.add(self)

    def checksum(self) -> None:
        """Computes the CRCs of what came from devices, unless they exist; returns when they do. Any thread."""
        with self._lock:
            self._staged.checksum(self._num_threads)

    def check(self) -> None:
        """Checks that the state may still be read. Called before somebody reads it.

        Raises:
            CheckpointError: The memory belongs to another state by now.
            ProcessGroupChangedError: DCP begins a save with other ranks than the state was staged for.
        """
        if self.lease.is_over:
            raise CheckpointError(
                "dcp.async_save staged this state for another save, which has ended, so its memory may now hold the "
                "next state. Stage it again, or stage it yourself (BcpStager().stage) to save it twice"
            )
        if self.world is not None:
            self.world.check_begin()

    def claim(self, call: Call, *, is_background: bool) -> None:
        """Keeps the state for a save until ``call`` has ended.

        Args:
            call: The call that saves.
            is_background: Whether DCP runs the save in a thread or process of its own.
        """
        use = _Use(call, self.lease, is_background)
        with _lock:
            if use not in _uses:
                _uses.append(use)
            if is_background:
                _awaited.discard(self)
        self.checksum()  # without CRCs, a change of what is saved first would go unnoticed

    def submit(self, upload: Future[Any]) -> None:
        """Keeps the state until ``upload`` is done, with which the save that it was staged for ends."""
        self.is_submitted = True
        ref = weakref.ref(self)  # somebody may keep the future, and with it the callback

        def end(_: Future[Any]) -> None:
            memory = ref()
            if memory is not None:
                memory.end_of_save()

        upload.add_done_callback(end)

    def waits_for_this_thread(self) -> bool:
        """Whether this thread is still in the ``dcp.async_save`` that staged the state: waiting here would block it."""
        call = self.begun_by
        return call is not None and not self.is_submitted and call.is_of_this_thread() and call.is_running()

    def end_of_save(self) -> None:
        """Called when the save that the state was staged for has ended, or will never begin."""
        self.lease.end_of_save()
        with _lock:
            _awaited.discard(self)

    def release(self) -> None:
        """Gives the memory back. Called when nobody needs the state any more."""
        self.lease.arena_lease.release()
        with _lock:
            _awaited.discard(self)

    def fd_to_send(self) -> int:
        """Returns a descriptor of memory that another process can map. It stays open as long as this state lives.

        A process of DCP's executor maps the memory of the state itself, which the call of DCP keeps. Any other process
        may read it after the state is gone here, so it gets a copy.
        """
        pages = self.lease.arena_lease.shareable_pages(self.num_bytes)
        if background_call() is not None:
            return pages.fd
        if self._sent is None:
            self._sent = _copied(pages.fd, self.num_bytes)
            weakref.finalize(self, os.close, self._sent)
        return self._sent


@dataclass(frozen=True)
class _Use:
    """A save that uses a state.

    Attributes:
        is_background: Whether DCP runs the save in a thread or process of its own.
    """

    call: Call
    lease: SaveLease
    is_background: bool


def _copied(memory: int, num_bytes: int) -> int:
    """Returns the descriptor of a copy of ``memory`` that another process can map."""
    copy = os.memfd_create("bytecheckpoint-staged")
    try:
        done = 0
        while done < num_bytes:
            done += os.sendfile(copy, memory, done, num_bytes - done)
    except BaseException as error:
        os.close(copy)
        if not isinstance(error, OSError):
            raise
        text = f"sendfile(staging, {num_bytes} bytes): {error.strerror} after {done} bytes"
        raise StorageError(text, "staging", error.errno or 0) from error
    return copy


# Reentrant: a signal handler may take it while its thread holds it.
_lock = ForkSafeLock(threading.RLock)
_uses: list[_Use] = []
# States staged for a save that DCP is about to begin (or that fails before it begins), or for a save that reports its
# end.
_awaited: weakref.WeakSet[StagedMemory] = weakref.WeakSet()


# Threads in a call that begins a background save.
_beginning: list[threading.Thread] = []


@contextmanager
def beginning() -> Iterator[None]:
    """Marks a ``with`` block that begins a background save: whoever waits for saves then waits for this one, too."""
    thread = threading.current_thread()
    _beginning.append(thread)
    try:
        yield
    finally:
        _beginning.remove(thread)


def is_any_saved() -> bool:
    """Whether a save of a state that was staged here is about to begin, or DCP runs one in the background."""
    if any(thread.is_alive() for thread in [*_beginning]):  # the parent's threads are dead in a forked child
        return True
    _end_what_is_over()
    with _lock:
        return any(use.is_background for use in _uses) or any(memory.begun_by is not None for memory in _awaited)


def is_saved_in_this_thread() -> bool:
    """Whether this very thread begins or runs a save that ``is_any_saved`` counts, and asks in one of its hooks."""
    if threading.current_thread() in _beginning:
        return True
    _end_what_is_over()
    with _lock:
        return any(use.is_background and use.call.is_of_this_thread() for use in _uses) or any(
            memory.waits_for_this_thread() for memory in _awaited
        )


def _is_any_to_end() -> bool:
    """Whether a save outside this thread is under way that will free memory, or may do so as the last user of a state.

    In a hook of a save that runs in a queue, the saves behind it do not count: they wait for it.
    """
    may_begin = not is_in_queue()
    with _lock:
        in_this_thread = [use.lease for use in _uses if use.call.is_of_this_thread()]
        return len(in_this_thread) != len(_uses) or any(
            memory.lease not in in_this_thread and not memory.waits_for_this_thread()
            for memory in _awaited
            if may_begin
        )


def _end_what_is_over() -> None:
    with _lock:
        over = [use for use in _uses if not use.call.is_running()]
        never_begun = [memory for memory in _awaited if _will_never_begin(memory)]
    for use in over:
        if use.is_background:
            use.lease.end_of_save()
    with _lock:  # last, because Ctrl-C may come before: the next look then ends them
        _uses[:] = [use for use in _uses if use not in over]
    for memory in never_begun:
        memory.end_of_save()


def _will_never_begin(memory: StagedMemory) -> bool:
    """Whether the ``dcp.async_save`` that the state was staged for has failed; its error still keeps the state."""
    if (
        memory.begun_by is None
        or memory.is_submitted
        or memory.is_filled_later
        or memory.begun_by.is_running()
        or is_any_in_background()
    ):
        memory.idle_since = None
        return False
    memory.idle_since = memory.idle_since or time.monotonic()
    return time.monotonic() - memory.idle_since > _BEGIN_WITHIN_S


def wait_for_lease(num_bytes: int, config: Config, is_shareable: bool, what: str) -> _C.Lease:
    """Waits until there is memory for a state of ``num_bytes`` bytes, and leases it.

    It waits for saves of other threads as long as they take: they have time limits of their own for storage and for
    other ranks. If no save uses the memory, it waits for ``_UNUSED_WAIT_S`` only.

    Args:
        num_bytes: Size of the state.
        config: Settings of staging.
        is_shareable: Whether another process is going to map the memory.
        what: What the state is, for messages to those who wait for its memory.

    Raises:
        StagingBusyError: Other states take the memory; it names them.
        StagingFullError: The state does not fit.
    """
    give_up = time.monotonic() + _BUSY_GRACE_S
    num_states = 2 if config.on_staging_busy == "double_buffer" else 1
    warn = time.monotonic() + _WARN_AFTER_S
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
            gc.collect()  # an error that nobody holds any more may keep a state in a reference cycle
        elif time.monotonic() - unused_since > _UNUSED_WAIT_S:
            raise StagingBusyError(
                f"staging: a state of {num_bytes} bytes has waited {_UNUSED_WAIT_S:g} s for memory that an earlier "
                f"state takes, though no save of that state is under way: {_holders()}. Something still holds it, or "
                "one of its tensors: a stager of your own, a planner that saved it, or an error. Drop it, call its "
                'release(), or allow two states with on_staging_busy="double_buffer"'
            )
        if time.monotonic() >= warn:
            warn = math.inf
            _logger.warning(
                "staging has waited %g s for memory; %s: %s",
                _WARN_AFTER_S,
                "a save is still under way"
                if unused_since is None
                else "something still holds a staged state that no save uses",
                _holders(),
            )
        _C.wait_for_release(LOOK_INTERVAL_S)  # or until somebody says that a save has ended


def _holders() -> str:
    """Describes the states that take the memory, for messages."""
    holders = _C.lease_holders()
    return ", ".join(f"{num_bytes} bytes for {held_s:.0f} s, {what}" for num_bytes, held_s, what in holders)
