# SPDX-License-Identifier: Apache-2.0
"""States in the memory of the arena: how they are staged, and how they are sent to another process."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from bytecheckpoint.calls.call import StatedCall
from bytecheckpoint.calls.frames import line_of_caller
from bytecheckpoint.calls.of_dcp import AsyncSaveCall, FlowCall
from bytecheckpoint.calls.watch import wait_until
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.errors import DeviceError, InvalidPlanError
from bytecheckpoint.native import _C
from bytecheckpoint.probes.of_torch import STAGING
from bytecheckpoint.probes.probe import require
from bytecheckpoint.runtime.gil_interval import quick_switches
from bytecheckpoint.staging.background import handle_sigterm
from bytecheckpoint.staging.content_hash import load_content_hash
from bytecheckpoint.staging.leases import SaveLease, StagedMemory, beginning, wait_for_lease
from bytecheckpoint.staging.save_ranks import SaveRanks
from bytecheckpoint.tensors.hidden_tensors import refuse_hidden_tensors
from bytecheckpoint.tensors.sharded import ApartShardedTensor
from bytecheckpoint.tensors.side_values import warn_of_side_values
from bytecheckpoint.tensors.subclass_parts import nested_parts

__all__ = [
    "StagedState",
    "StagingTime",
    "claim_of_call",
    "claimed",
    "end_of_save",
    "note_submitted",
    "note_upload",
    "stage_state",
    "staging_of",
]

_logger = logging.getLogger("bytecheckpoint")


def note_submitted(staged: Any) -> None:
    """Notes that what a stager returned goes to a save that will call ``end_of_save``; its memory stays until then."""
    if isinstance(staged, StagedState):
        staged._memory.is_submitted = True
    elif isinstance(staged, Future):
        staged.add_done_callback(lambda done: None if _has_failed(done) else note_submitted(done.result()))


def note_upload() -> None:
    """Keeps what the ``dcp.async_save`` of this thread has staged until the future of that save is done.

    A state that is not for this save alone stays longer. Does not wait for copies that still run.
    """
    call = AsyncSaveCall.of_thread()
    if call is not None and isinstance(call.staged, StagedState) and call.upload is not None:
        call.staged._memory.submit(call.upload)


def claim_of_call(call: FlowCall) -> StagingTime | None:
    """Keeps the state that DCP saves in ``call``, if it was staged, until that call has ended.

    Returns:
        When the state was staged; None if it was not.
    """
    if call.save is None:
        return None
    if isinstance(call.save.state, StagedState):
        is_background = call.background is not None
        call.save.state._memory.claim(call.background or call.save.call, is_background=is_background)
    return staging_of(call.save.state)


@dataclass(frozen=True)
class StagingTime:
    """When a state was staged, while training waited: nanoseconds of ``time.monotonic_ns``."""

    begin_ns: int
    end_ns: int

    @property
    def blocked_s(self) -> float:
        """Seconds from the beginning to the end."""
        return (self.end_ns - self.begin_ns) / 1e9


def staging_of(state: object) -> StagingTime | None:
    """Returns when ``state`` was staged; None if it was not."""
    return state.staging if isinstance(state, (StagedState, _ReceivedState)) else None


@contextmanager
def claimed(state: object) -> Iterator[None]:
    """Keeps ``state``, if it was staged, until the end of a ``with`` block that saves it."""
    call = StatedCall()
    if isinstance(state, StagedState):
        state._memory.claim(call, is_background=False)
    try:
        yield
    finally:
        call.end()


def end_of_save(staged: Any) -> None:
    """Called when DCP is done with what a stager returned: a state or a future of one.

    Gives the memory back if the state was for this save alone. No effect on a state that somebody else may use again,
    nor on anything else.
    """
    if isinstance(staged, StagedState):
        staged._memory.end_of_save()
    elif isinstance(staged, Future):
        staged.add_done_callback(lambda done: None if _has_failed(done) else end_of_save(done.result()))


def _has_failed(done: Future[Any]) -> bool:
    return done.cancelled() or done.exception() is not None


class StagedState(dict[str, Any]):
    """A state dict whose tensors are in the memory of the arena.

    Use it like any other state dict. If ``dcp.async_save`` staged it, its memory goes to the next state once its save
    has ended.
    """

    def __init__(self, tree: dict[str, Any], memory: StagedMemory, staging: StagingTime) -> None:
        super().__init__(tree)
        self._memory = memory
        self.staging = staging

    def items(self) -> Any:
        """Returns the items, as any dict does. DCP calls this when it begins to save a state.

        Raises:
            CheckpointError: The memory belongs to the next state.
            ProcessGroupChangedError: DCP saves with other ranks than the state was staged for.
        """
        self._memory.check()
        return super().items()

    def release(self) -> None:
        """Gives the memory to the next state: nobody may use these tensors any more. Any thread."""
        self._memory.release()

    def wait_for_checksums(self) -> None:
        """Waits for the CRCs of all tensors, by which readers notice if the memory has changed. Saves wait for them."""
        self._memory.checksum()

    def __del__(self) -> None:
        # The dict lets go of the tensors first. So `_memory` frees them, one by one, and pauses for threads that wait
        # for the GIL.
        self.clear()

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in dict.items(self)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles a plain dict, for a file for example. See ``_send`` for pickling to another process of this job."""
        self._memory.check()
        return dict, (dict(dict.items(self)),)


def _send(state: StagedState) -> tuple[Any, ...]:
    """Sends a state to another process of this job, as memory that both map. Pickles no tensor, mostly copies none."""
    memory = state._memory
    memory.check()
    memory.checksum()  # the other process checks what it saves
    lease = memory.lease.arena_lease
    tree, tensors = _C.take_apart(dict(dict.items(state)), lease, memory.num_bytes, _StandIn, _apart)
    fd = DupFd(memory.fd_to_send())
    return _receive, (fd, memory.num_bytes, lease.checksums(), tree, tensors, memory.world, state.staging)


ForkingPickler.register(StagedState, _send)


class _ReceivedState(dict[str, Any]):
    """A state that was sent to the process in which DCP saves it."""

    def __init__(self, tree: dict[str, Any], world: SaveRanks, staging: StagingTime) -> None:
        super().__init__(tree)
        self._world = world
        self.staging = staging

    def items(self) -> Any:
        """Returns the items, as any dict does. Checks the ranks first, because a save begins with this call.

        Raises:
            ProcessGroupChangedError: DCP made the process for other ranks.
        """
        self._world.check_process()
        return super().items()


class _StandIn:
    """The class itself takes the place of each tensor."""


class _ApartParts:
    """The marks of a tensor that is marked as parts of another one, without the tensor."""

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
    dup: Any,
    num_bytes: int,
    checksums: bytes,
    tree: dict[str, Any],
    tensors: bytes,
    world: SaveRanks | None,
    staging: StagingTime,
) -> dict[str, Any]:
    fd = dup.detach()
    try:
        pages = _C.receive_pages(fd, num_bytes, checksums)
    finally:
        os.close(fd)
    state: dict[str, Any] = _C.put_together(tree, tensors, pages, _StandIn, _joined)
    return state if world is None else _ReceivedState(state, world, staging)


def stage_state(
    state_dict: dict[str, Any],
    config: Config,
    *,
    is_shareable: bool,
    overlap: bool = False,
    is_for_one_save: bool = False,
    async_save: AsyncSaveCall | None = None,
    path: str | None = None,
    in_parts: Callable[[str], bool] | None = None,
) -> Future[StagedState]:
    """Copies ``state_dict`` to host memory, where later changes of it do not reach the copy.

    Host tensors and objects are copied when this returns; tensors on devices are copied when the future is done.

    Args:
        state_dict: A state dict as DCP takes it, with tensors on any device.
        config: Says how much the arena may take, and what to do while it is taken.
        is_shareable: Whether another process is going to get the state.
        overlap: Whether to return while devices still copy. Otherwise the future is already done.
        is_for_one_save: Whether only one save gets the state. It is then released when that save has ended, even if
            somebody keeps it.
        async_save: The call of ``dcp.async_save`` that stages the state; None if there is none.
        path: Where the state will be saved, for messages; None takes the path of ``async_save``.
        in_parts: Whether the tensor of a key, if it is of a subclass, is staged by its parts, in a dict; None: none is.

    Returns:
        A future of the copy.

    Raises:
        StagingFullError: The state does not fit; nothing was copied.
        StagingBusyError: Saves under way use the arena, and ``on_staging_busy="raise"``; or somebody keeps a state in
            it that no save uses. It names the states.
        InvalidPlanError: A value cannot be copied; it names the key.
        DeviceError: A device refused. With ``overlap`` the future may fail with it instead.
        UnsupportedError: This torch lacks something that staging relies on.
    """
    begin_ns = time.monotonic_ns()
    require(STAGING)
    if config.handle_sigterm:
        handle_sigterm(config.exit_timeout_s)
    with quick_switches(), beginning():
        return _stage(state_dict, config, is_shareable, overlap, is_for_one_save, async_save, path, in_parts, begin_ns)


def _stage(
    state_dict: dict[str, Any],
    config: Config,
    is_shareable: bool,
    overlap: bool,
    is_for_one_save: bool,
    async_save: AsyncSaveCall | None,
    path: str | None,
    in_parts: Callable[[str], bool] | None,
    begin_ns: int,
) -> Future[StagedState]:
    warn_of_side_values(state_dict)
    memo: dict[int, Any] = {}

    def copy_other(value: Any, key: str) -> Any:
        refuse_hidden_tensors(value, key)
        try:
            return _compat.host_copy(value, memo)
        except Exception as error:
            kind = type(value).__name__
            raise InvalidPlanError(f"staging '{key}': a {kind} cannot be copied: {error}") from error

    def parts(value: Any, key: str) -> dict[str, Any] | None:
        return nested_parts(value, key) if in_parts is not None and in_parts(key) else None

    parts_of = None if in_parts is None else parts
    staged = _C.StagedTree(dict(state_dict), copy_other, _compat.like_dtensor, parts_of)
    path = path or (None if async_save is None else async_save.path)
    what = f"staged at {line_of_caller()}" + (f" for the save to {path}" if path else "")
    lease = wait_for_lease(staged.num_bytes, config, is_shareable, what)
    memory: StagedMemory | None = None
    try:
        memory = StagedMemory(SaveLease(lease, is_for_one_save), staged, config.staging_threads, async_save)
        future: Future[StagedState] = Future()
        future.set_running_or_notify_cancel()  # so that nobody can cancel it
        has_devices = bool(staged.devices)
        if config.link_unchanged:
            load_content_hash()
        streams = {device: _compat.current_stream(device) for device in staged.devices}
        staged.fill(lease, config.staging_threads, streams, has_hashes=config.link_unchanged)
        _note_slow_copies(staged.slow_because)
        if has_devices and overlap and _complete_in_thread(staged, memory, future, begin_ns):
            return future
        staged.wait()
        memory.checksum()
        future.set_result(StagedState(staged.tree, memory, StagingTime(begin_ns, time.monotonic_ns())))
    except BaseException:
        staged.give_up()  # devices must not write to the memory any more when the next state has it
        lease.release()
        if memory is not None:
            memory.release()
        raise
    return future


def _complete_in_thread(
    staged: _C.StagedTree, memory: StagedMemory, future: Future[StagedState], begin_ns: int
) -> bool:
    """Completes ``future`` in a thread of its own. Returns False if no thread can be started."""
    staging = StagingTime(begin_ns, time.monotonic_ns())

    def complete() -> None:
        try:
            staged.wait()
            state = StagedState(staged.tree, memory, staging)
        except BaseException as error:
            staged.give_up()
            memory.release()
            # DCP looks once whether the future is done, and takes a future that is done for a success. So this waits
            # until that call of DCP has ended. DCP passes on nothing but an Exception.
            begun_by = memory.begun_by
            wait_until(lambda: begun_by is None or not begun_by.is_running())
            future.set_exception(error if isinstance(error, Exception) else DeviceError(f"staging: {error!r}"))
            return
        memory.is_filled_later = False
        future.set_result(state)
        # After the future, because training may wait for that; only a save waits for the CRCs.
        memory.checksum()

    memory.is_filled_later = True
    # Not a daemon thread: the process must not end while a device writes to its memory.
    try:
        threading.Thread(target=complete, name="bytecheckpoint-staging").start()
    except RuntimeError:
        memory.is_filled_later = False
        return False
    return True


_has_noted_slow_copies = False


def _note_slow_copies(reason: str) -> None:
    global _has_noted_slow_copies
    if reason and not _has_noted_slow_copies:
        _has_noted_slow_copies = True
        _logger.warning("staging: host memory cannot be page-locked, so copies from devices are slow: %s", reason)
