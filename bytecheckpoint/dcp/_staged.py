# SPDX-License-Identifier: Apache-2.0
"""States in the memory of the arena: how they get there, how long they stay, and how they go to another process.

A state stays until the save of it has ended, and DCP says nothing when that is. What DCP begins in a thread or process
of its own runs inside a call of one of its executors, so it is that call we watch. A state that is used in another way
stays until nothing of it is left.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
import time
import weakref
from concurrent.futures import Future
from multiprocessing.reduction import DupFd
from typing import Any

from torch.distributed.tensor import DTensor

from bytecheckpoint import _C
from bytecheckpoint.config import Config
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp._calls import ASYNC_SAVE, Call, call_in, outermost_call
from bytecheckpoint.dcp._switching import quick_switches
from bytecheckpoint.errors import DeviceError, InvalidPlanError, StagingBusyError

__all__ = ["StagedState", "is_any_saved", "stage_state"]

_EXECUTORS = (
    "torch.distributed.checkpoint._async_thread_executor",
    "torch.distributed.checkpoint._async_process_executor",
)
# A save that has ended is noticed by looking, or when somebody says so.
_LOOK_INTERVAL_S = 0.02
# A future of DCP resolves within the call that we watch; it returns very soon after.
_BUSY_GRACE_S = 0.25
# After that somebody is told what staging waits for.
_PATIENCE_S = 10.0

_logger = logging.getLogger("bytecheckpoint")


class _Stay:
    """The right of one state to its memory."""

    def __init__(self, lease: _C.Lease, staged: _C.StagedTree, num_threads: int) -> None:
        self.lease = lease
        self.num_bytes = staged.num_bytes
        self._is_watched = False
        self._lock = threading.Lock()
        self._staged = staged
        self._num_threads = num_threads

    def sum(self) -> None:
        """Takes the CRCs of what came from devices, unless it is done; returns when it is. Any thread."""
        with self._lock:
            self._staged.sum(self._num_threads)

    def note_save(self) -> None:
        """A save begins to use it: it ends with that, if it can be watched, whoever keeps its tensors."""
        save = None if self._is_watched else outermost_call(_EXECUTORS)
        if save is not None:
            self._is_watched = True
            with _lock:
                _watched.append((save, self.lease))
                _awaited.discard(self)
        self.sum()  # else what is saved first would not be checked


_lock = threading.Lock()
_watched: list[tuple[Call, _C.Lease]] = []
# Staged for a save that DCP is about to begin, unless it fails before.
_awaited: weakref.WeakSet[_Stay] = weakref.WeakSet()


def is_any_saved() -> bool:
    """Is a save under way that DCP runs in the background, of a state that was staged here?"""
    with _lock:
        return len(_awaited) != 0 or any(save.is_running() for save, _ in _watched)


def _end_stays_that_are_over() -> None:
    with _lock:
        over = [lease for save, lease in _watched if not save.is_running()]
        _watched[:] = [(save, lease) for save, lease in _watched if lease not in over]
    for lease in over:
        lease.release()


class StagedState(dict[str, Any]):
    """A state dict whose tensors are in the memory of the arena.

    It can be used as any other. Once its save has ended that memory is the next state's.
    """

    def __init__(self, tree: dict[str, Any], stay: _Stay) -> None:
        super().__init__(tree)
        self._stay = stay

    def items(self) -> Any:
        """As of any dict; here a save begins to use it."""
        self._stay.note_save()
        return super().items()

    def release(self) -> None:
        """Gives the memory to the next state: nobody may look at these tensors any more. Any thread."""
        self._stay.lease.release()

    def wait_for_sums(self) -> None:
        """Until whoever reads these tensors sees whether they have changed. A save waits for it before it begins."""
        self._stay.sum()

    def __del__(self) -> None:
        # What the stay has, the tensors, goes after what is in here: one by one, and not while others wait for the GIL.
        self.clear()

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in dict.items(self)}

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process of this job: as memory that both map. No tensor is pickled; mostly none is copied."""
        self._stay.note_save()
        if outermost_call(("multiprocessing.reduction",)) is None:
            return dict, (dict(dict.items(self)),)  # to a file, say
        stay = self._stay
        tree, tensors = _C.take_apart(dict(dict.items(self)), stay.lease, stay.num_bytes, _StandIn, _ApartDTensor.of)
        pages = stay.lease.shareable_pages(stay.num_bytes)
        return _receive, (DupFd(pages.fd), stay.num_bytes, stay.lease.sums(), tree, tensors)


class _StandIn:
    """Stands, itself, where a tensor was."""


class _ApartDTensor:
    """A DTensor without its local tensor."""

    def __init__(self, spec: Any, requires_grad: bool) -> None:
        self._spec = spec
        self._requires_grad = requires_grad

    @classmethod
    def of(cls, dtensor: DTensor) -> _ApartDTensor:
        return cls(dtensor._spec, dtensor.requires_grad)

    @staticmethod
    def join(value: Any, next_tensor: Any) -> Any:
        if type(value) is not _ApartDTensor:
            return value
        return _compat.new_dtensor(next_tensor(), value._spec, value._requires_grad)


def _receive(dup: Any, num_bytes: int, sums: bytes, tree: dict[str, Any], tensors: bytes) -> dict[str, Any]:
    fd = dup.detach()
    try:
        pages = _C.receive_pages(fd, num_bytes, sums)
    finally:
        os.close(fd)
    state: dict[str, Any] = _C.put_together(tree, tensors, pages, _StandIn, _ApartDTensor.join)
    return state


def stage_state(
    state_dict: dict[str, Any], config: Config, *, is_shareable: bool, overlap: bool = False
) -> Future[StagedState]:
    """A copy of ``state_dict`` in host memory that later changes to it do not reach.

    Host tensors and objects are copied when it returns; tensors on devices when the future is done.

    Args:
        state_dict: As DCP takes it; tensors on any device.
        config: What the arena may take, and what to do while it is taken.
        is_shareable: Another process is going to get it.
        overlap: Return while devices still copy. Else the future is done.

    Raises:
        StagingFullError: It does not fit; nothing was copied.
        StagingBusyError: States of saves under way take the arena, and ``on_staging_busy="raise"``.
        InvalidPlanError: A value cannot be copied; names the key.
        DeviceError: A device refused; without ``overlap`` always here, else maybe as the failure of the future.
    """
    if config.handle_sigterm:
        from bytecheckpoint import _background  # which asks here what it has to wait for

        _background.handle_sigterm()
    with quick_switches():
        return _stage(state_dict, config, is_shareable, overlap)


def _stage(state_dict: dict[str, Any], config: Config, is_shareable: bool, overlap: bool) -> Future[StagedState]:
    memo: dict[int, Any] = {}

    def copy_other(value: Any, key: str) -> Any:
        try:
            return _compat.host_copy(value, memo)
        except Exception as error:
            kind = type(value).__name__
            raise InvalidPlanError(f"staging '{key}': a {kind} cannot be copied: {error}") from error

    staged = _C.StagedTree(dict(state_dict), copy_other, _compat.like_dtensor)
    lease = _wait_for_lease(staged.num_bytes, config, is_shareable)
    stay = _Stay(lease, staged, config.staging_threads)
    if call_in(*ASYNC_SAVE) is not None:
        with _lock:
            _awaited.add(stay)
    future: Future[StagedState] = Future()
    has_devices = bool(staged.devices)
    try:
        staged.fill(
            lease, config.staging_threads, {device: _compat.current_stream(device) for device in staged.devices}
        )
        _note_slow_copies(staged.slow_because)
        if has_devices and overlap:
            _complete_in_thread(staged, stay, future)
            return future
        staged.wait()
        stay.sum()
    except BaseException:
        staged.give_up()  # it must not be written to any more when it is the next state's
        lease.release()
        raise
    future.set_result(StagedState(staged.tree, stay))
    return future


def _complete_in_thread(staged: _C.StagedTree, stay: _Stay, future: Future[StagedState]) -> None:
    # DCP looks once whether the future is done; what is done by then has succeeded, as it sees it.
    begun_by = call_in(*ASYNC_SAVE)

    def complete() -> None:
        try:
            staged.wait()
            state = StagedState(staged.tree, stay)
        except BaseException as error:
            staged.give_up()
            stay.lease.release()
            while begun_by is not None and begun_by.is_running():
                time.sleep(_LOOK_INTERVAL_S)
            # DCP passes on nothing but an Exception.
            future.set_exception(error if isinstance(error, Exception) else DeviceError(f"staging: {error!r}"))
            return
        future.set_result(state)
        # Behind the end of staging, for which training may wait; a save waits for this.
        stay.sum()

    # No daemon: the process does not end while a device writes to its memory.
    threading.Thread(target=complete, name="bytecheckpoint-staging").start()


_has_noted_slow_copies = False


def _note_slow_copies(reason: str) -> None:
    global _has_noted_slow_copies
    if reason and not _has_noted_slow_copies:
        _has_noted_slow_copies = True
        _logger.warning("staging: host memory cannot be page-locked, so copies from devices are slow: %s", reason)


def _wait_for_lease(num_bytes: int, config: Config, is_shareable: bool) -> _C.Lease:
    give_up = time.monotonic() + _BUSY_GRACE_S
    num_states = 2 if config.on_staging_busy == "double_buffer" else 1
    warn = time.monotonic() + _PATIENCE_S
    while True:
        _end_stays_that_are_over()
        lease = _C.try_lease(
            num_bytes=num_bytes,
            limit_bytes=config.staging_bytes,
            is_shareable=is_shareable,
            num_states=num_states,
        )
        if lease is not None:
            return lease
        if config.on_staging_busy == "raise" and time.monotonic() >= give_up:
            raise StagingBusyError(
                f"staging: a state of {num_bytes} bytes cannot be staged while the one before is saved, and "
                'on_staging_busy="raise"'
            )
        if time.monotonic() >= warn:
            warn = math.inf
            _logger.warning(
                "staging has waited %g s for memory; %s",
                _PATIENCE_S,
                "a save is still under way" if _watched else "somebody keeps a staged state that no save uses",
            )
        _C.wait_for_release(_LOOK_INTERVAL_S)
