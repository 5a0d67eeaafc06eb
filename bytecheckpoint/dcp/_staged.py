# SPDX-License-Identifier: Apache-2.0
"""States in the memory of the arena: how they get there, and how they go to another process."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from bytecheckpoint import _C
from bytecheckpoint.config import Config
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp._calls import (
    ASYNC_SAVE,
    call_in,
    is_called_from,
    line_of_caller,
    local_of_call,
    outermost_call,
)
from bytecheckpoint.dcp._sharded import ApartShardedTensor
from bytecheckpoint.dcp._stays import Loan, Stay, beginning, wait_for_lease
from bytecheckpoint.dcp._switching import quick_switches
from bytecheckpoint.dcp._world import World
from bytecheckpoint.errors import DeviceError, InvalidPlanError
from bytecheckpoint.probes.of_torch import STAGING
from bytecheckpoint.probes.probe import require

__all__ = ["StagedState", "end_of_save", "note_submitted", "stage_state"]

# The modules in which a state is staged.
_STAGING = (__name__, "bytecheckpoint.dcp.stager", "bytecheckpoint.dcp.writer", "bytecheckpoint.registration")
# How often a thread looks whether a call of another one has ended.
_LOOK_INTERVAL_S = 0.02

_logger = logging.getLogger("bytecheckpoint")


def note_submitted(staged: Any) -> None:
    """What a stager gave goes to a save that will call ``end_of_save``: its memory is kept until then."""
    if isinstance(staged, StagedState):
        staged._stay.is_submitted = True
    elif isinstance(staged, Future):
        staged.add_done_callback(lambda done: None if _has_failed(done) else note_submitted(done.result()))


def end_of_save(staged: Any) -> None:
    """DCP is done with what a stager gave it, a state or a future of one. Ends the stay if it was for this save alone.

    No effect on a state that somebody else may use again, nor on anything else.
    """
    if isinstance(staged, StagedState):
        staged._stay.end_of_save()
    elif isinstance(staged, Future):
        staged.add_done_callback(lambda done: None if _has_failed(done) else end_of_save(done.result()))


def _has_failed(done: Future[Any]) -> bool:
    return done.cancelled() or done.exception() is not None


class StagedState(dict[str, Any]):
    """A state dict whose tensors are in the memory of the arena.

    It can be used as any other. If ``dcp.async_save`` staged it, that memory is the next state's once its save has
    ended.
    """

    def __init__(self, tree: dict[str, Any], stay: Stay) -> None:
        super().__init__(tree)
        self._stay = stay

    def items(self) -> Any:
        """As of any dict; here a save begins to use it."""
        self._stay.note_save()
        return super().items()

    def release(self) -> None:
        """Gives the memory to the next state: nobody may look at these tensors any more. Any thread."""
        self._stay.release()

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
        lease = stay.loan.lease
        tree, tensors = _C.take_apart(dict(dict.items(self)), lease, stay.num_bytes, _StandIn, _apart)
        return _receive, (DupFd(stay.fd_to_send()), stay.num_bytes, lease.sums(), tree, tensors, stay.world)


class _ReceivedState(dict[str, Any]):
    """A state in the process in which DCP saves it."""

    def __init__(self, tree: dict[str, Any], world: World) -> None:
        super().__init__(tree)
        self._world = world

    def items(self) -> Any:
        """As of any dict; here a save begins to use it."""
        self._world.check_process()
        return super().items()


class _StandIn:
    """Stands, itself, where a tensor was."""


class _ApartParts:
    """What a tensor says that is marked as parts of another one, without the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        _C.copy_marks(tensor, self)


class _ApartDTensor:
    """A DTensor without its local tensor."""

    def __init__(self, dtensor: DTensor) -> None:
        self.spec = dtensor._spec
        self.requires_grad = dtensor.requires_grad


def _apart(value: torch.Tensor | ShardedTensor) -> _ApartParts | _ApartDTensor | ApartShardedTensor:
    if isinstance(value, ShardedTensor):
        return ApartShardedTensor(value)
    return _ApartDTensor(value) if isinstance(value, DTensor) else _ApartParts(value)


def _joined(value: Any, next_tensor: Callable[[], torch.Tensor]) -> Any:
    if isinstance(value, ApartShardedTensor):
        return value.join()
    if type(value) is _ApartDTensor:
        return _compat.new_dtensor(next_tensor(), value.spec, value.requires_grad)
    if type(value) is _ApartParts:
        tensor = next_tensor()
        _C.copy_marks(value, tensor)
        return tensor
    return value


def _receive(
    dup: Any, num_bytes: int, sums: bytes, tree: dict[str, Any], tensors: bytes, world: World | None
) -> dict[str, Any]:
    fd = dup.detach()
    try:
        pages = _C.receive_pages(fd, num_bytes, sums)
    finally:
        os.close(fd)
    state: dict[str, Any] = _C.put_together(tree, tensors, pages, _StandIn, _joined)
    return state if world is None else _ReceivedState(state, world)


def stage_state(
    state_dict: dict[str, Any],
    config: Config,
    *,
    is_shareable: bool,
    overlap: bool = False,
    is_for_one_save: bool = False,
    path: str | None = None,
) -> Future[StagedState]:
    """A copy of ``state_dict`` in host memory that later changes to it do not reach.

    Host tensors and objects are copied when it returns; tensors on devices when the future is done.

    Args:
        state_dict: As DCP takes it; tensors on any device.
        config: What the arena may take, and what to do while it is taken.
        is_shareable: Another process is going to get it.
        overlap: Return while devices still copy. Else the future is done.
        is_for_one_save: The caller releases the state when the save of it has ended, and gives it to nobody else. So it
            is where ``dcp.async_save`` itself stages, without being said.

    Raises:
        StagingFullError: It does not fit; nothing was copied.
        StagingBusyError: States of saves under way take the arena, and ``on_staging_busy="raise"``; or a state takes it
            that is kept, and that no save uses. It names them.
        InvalidPlanError: A value cannot be copied; names the key.
        DeviceError: A device refused; without ``overlap`` always here, else maybe as the failure of the future.
        UnsupportedError: This torch is built otherwise.
    """
    require(STAGING)
    if config.handle_sigterm:
        from bytecheckpoint import _background  # which asks here what it has to wait for

        _background.handle_sigterm(config.exit_timeout_s)
    with quick_switches(), beginning():
        return _stage(state_dict, config, is_shareable, overlap, is_for_one_save, path)


def _stage(
    state_dict: dict[str, Any],
    config: Config,
    is_shareable: bool,
    overlap: bool,
    is_for_one_save: bool,
    path: str | None,
) -> Future[StagedState]:
    memo: dict[int, Any] = {}

    def copy_other(value: Any, key: str) -> Any:
        try:
            return _compat.host_copy(value, memo)
        except Exception as error:
            kind = type(value).__name__
            raise InvalidPlanError(f"staging '{key}': a {kind} cannot be copied: {error}") from error

    staged = _C.StagedTree(dict(state_dict), copy_other, _compat.like_dtensor)
    path = path or _path_of_call()
    what = f"staged at {line_of_caller()}" + (f" for the save to {path}" if path else "")
    lease = wait_for_lease(staged.num_bytes, config, is_shareable, what)
    stay: Stay | None = None
    try:
        begun_by = call_in(*ASYNC_SAVE)
        # A stager of the user's, around ours, may keep the state and use it again.
        is_dcps = begun_by is not None and is_called_from(ASYNC_SAVE[0], passing=_STAGING)
        stay = Stay(Loan(lease, is_for_one_save or is_dcps), staged, config.staging_threads, begun_by)
        future: Future[StagedState] = Future()
        future.set_running_or_notify_cancel()  # and can no longer be cancelled
        has_devices = bool(staged.devices)
        staged.fill(
            lease, config.staging_threads, {device: _compat.current_stream(device) for device in staged.devices}
        )
        _note_slow_copies(staged.slow_because)
        if has_devices and overlap and _complete_in_thread(staged, stay, future):
            return future
        staged.wait()
        stay.sum()
        future.set_result(StagedState(staged.tree, stay))
    except BaseException:
        staged.give_up()  # it must not be written to any more when it is the next state's
        lease.release()
        if stay is not None:
            stay.release()
        raise
    return future


def _path_of_call() -> str | None:
    """Where the call of ``dcp.async_save`` saves to that this thread is in."""
    writer = local_of_call(*ASYNC_SAVE, "storage_writer")
    path = local_of_call(*ASYNC_SAVE, "checkpoint_id") or getattr(writer, "checkpoint_id", None)
    return None if path is None else str(path)


def _complete_in_thread(staged: _C.StagedTree, stay: Stay, future: Future[StagedState]) -> bool:
    """False if no thread can be had."""

    def complete() -> None:
        try:
            staged.wait()
            state = StagedState(staged.tree, stay)
        except BaseException as error:
            staged.give_up()
            stay.release()
            # DCP looks once whether the future is done; what is done by then has succeeded, as it sees it.
            while stay.begun_by is not None and stay.begun_by.is_running():
                time.sleep(_LOOK_INTERVAL_S)
            # DCP passes on nothing but an Exception.
            future.set_exception(error if isinstance(error, Exception) else DeviceError(f"staging: {error!r}"))
            return
        stay.is_filled_later = False
        future.set_result(state)
        # Behind the end of staging, for which training may wait; a save waits for this.
        stay.sum()

    stay.is_filled_later = True
    # No daemon: the process does not end while a device writes to its memory.
    try:
        threading.Thread(target=complete, name="bytecheckpoint-staging").start()
    except RuntimeError:
        stay.is_filled_later = False
        return False
    return True


_has_noted_slow_copies = False


def _note_slow_copies(reason: str) -> None:
    global _has_noted_slow_copies
    if reason and not _has_noted_slow_copies:
        _has_noted_slow_copies = True
        _logger.warning("staging: host memory cannot be page-locked, so copies from devices are slow: %s", reason)
