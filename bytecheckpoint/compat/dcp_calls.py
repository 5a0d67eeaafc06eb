# SPDX-License-Identifier: Apache-2.0
"""Finds the calls of ``dcp.save`` and ``dcp.async_save`` that a thread is in, and their arguments.

``register()`` cannot replace these functions, because callers have imported them long before. So their arguments are
read from the local variables of their frames. If they are not found there, a state is staged as if the caller kept it:
its memory is not reused when the save ends.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bytecheckpoint.compat.frames import Call, find_call, is_any_thread_in, is_called_by, outermost_call

__all__ = [
    "AsyncSaveCall",
    "DcpSave",
    "background_call",
    "is_any_in_background",
    "is_called_by_async_save",
    "lets_dcp_choose_ranks",
]

# Each of the following pairs names a module and a function.
_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_ASYNC_SAVE = (_SAVER, "async_save")  # the functions inside it count, too
_SAVE = (_SAVER, "save")
# The wrapper of `save`. Its variables are the arguments as they were passed: `save` itself replaces `no_dist`.
_SAVE_AS_CALLED = ("torch.distributed.checkpoint.utils", "inner_func")
# While DCP saves in the background, a thread is in a function of one of these modules.
_EXECUTORS = (
    "torch.distributed.checkpoint._async_thread_executor",
    "torch.distributed.checkpoint._async_process_executor",
)


@dataclass(frozen=True)
class AsyncSaveCall:
    """The arguments and variables of a running call of ``dcp.async_save``.

    Do not keep it: it keeps the process group alive.

    Attributes:
        call: The call itself.
        group: ``process_group`` as it was passed.
        no_dist: True if the rank saves alone.
        path: Directory of the checkpoint; None if it is not known.
        checkpoint_id: ``checkpoint_id`` as it was passed.
        storage_writer: ``storage_writer`` as it was passed.
        planner: ``planner`` as it was passed.
        stager: Stager of the call.
        is_for_process: True if a separate process saves.
        staged: Result of the stager, a state or a future of one; None before the stager has returned.
        upload: Future of the save; None before the save was submitted.
    """

    call: Call
    group: dist.ProcessGroup | None
    no_dist: bool
    checkpoint_id: Any
    storage_writer: Any
    planner: Any
    stager: Any
    is_for_process: bool
    staged: Any
    upload: Future[Any] | None

    @classmethod
    def of_thread(cls) -> AsyncSaveCall | None:
        """Returns the innermost call of ``dcp.async_save`` that this thread is in; None if it is in none."""
        call, variables = find_call(*_ASYNC_SAVE)
        if call is None:
            return None
        return cls(
            call,
            variables.get("process_group"),
            bool(variables.get("no_dist")),
            variables.get("checkpoint_id"),
            variables.get("storage_writer"),
            variables.get("planner"),
            variables.get("async_stager"),
            variables.get("async_checkpointer_type") == AsyncCheckpointerType.PROCESS,
            variables.get("staging_future_or_state_dict"),
            variables.get("upload_future"),
        )

    @property
    def path(self) -> str | None:
        path = self.checkpoint_id or getattr(self.storage_writer, "checkpoint_id", None)
        return None if path is None else str(path)


@dataclass(frozen=True)
class DcpSave:
    """The arguments of a running call of ``dcp.save``.

    Do not keep it: it keeps the process group and the state alive.

    Attributes:
        call: The call itself.
        group: Process group of the save; None if the rank saves alone.
        state: ``state_dict`` as it was passed.
    """

    call: Call
    group: dist.ProcessGroup | None
    state: Any

    @classmethod
    def of_thread(cls) -> DcpSave | None:
        """Returns the innermost call of ``dcp.save`` that this thread is in; None if it is in none."""
        call, variables = find_call(*_SAVE)
        if call is None:
            return None
        group = None if variables.get("no_dist") else variables.get("process_group") or dist.group.WORLD
        return cls(call, group, variables.get("state_dict"))


def background_call() -> Call | None:
    """Returns the call in which DCP saves in the background in this thread; None if the thread is in none."""
    return outermost_call(_EXECUTORS)


def is_any_in_background() -> bool:
    """Returns whether DCP saves in the background in any thread of this process."""
    return is_any_thread_in(_EXECUTORS)


def is_called_by_async_save() -> bool:
    """Returns whether the caller of this function was called by ``dcp.async_save`` itself."""
    return is_called_by(*_ASYNC_SAVE, depth=3)


def lets_dcp_choose_ranks() -> bool:
    """Returns whether this thread is in a call of ``dcp.save`` that was not passed ``no_dist=True``.

    False also if that cannot be found out.
    """
    call, variables = find_call(*_SAVE_AS_CALLED)
    given = variables.get("kwargs")
    return call is not None and isinstance(given, dict) and not given.get("no_dist")
