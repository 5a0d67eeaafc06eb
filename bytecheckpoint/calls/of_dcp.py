# SPDX-License-Identifier: Apache-2.0
"""Finds the calls of DCP that a thread is in, and their arguments.

``register()`` cannot replace these functions, because callers have imported them long before. So their arguments are
read from the local variables of their frames. If they are not found there, a state is staged as if the caller kept it:
its memory is not reused when the save ends.
"""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bytecheckpoint.calls.frames import Found, FoundCall, Function, find_calls, is_any_thread_in, is_called_by

__all__ = [
    "LOAD_FLOW",
    "SAVE_FLOW",
    "AsyncSaveCall",
    "DcpSave",
    "FlowCall",
    "background_call",
    "cell_of",
    "is_any_in_background",
    "is_called_by_async_save",
]

_SAVER = "torch.distributed.checkpoint.state_dict_saver"
SAVE_FLOW = (_SAVER, "_save_state_dict")
"""The function in which DCP runs the hooks of a save."""
LOAD_FLOW = ("torch.distributed.checkpoint.state_dict_loader", "_load_state_dict")
"""The function in which DCP runs the hooks of a load."""
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

    call: FoundCall
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
        found = find_calls(_ASYNC_SAVE)
        if not found.calls:
            return None
        variables = found.variables[_ASYNC_SAVE]
        return cls(
            found.calls[_ASYNC_SAVE],
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

    call: FoundCall
    group: dist.ProcessGroup | None
    state: Any

    @classmethod
    def of_thread(cls) -> DcpSave | None:
        """Returns the innermost call of ``dcp.save`` that this thread is in; None if it is in none."""
        return cls._of(find_calls(_SAVE))

    @classmethod
    def _of(cls, found: Found) -> DcpSave | None:
        if _SAVE not in found.calls:
            return None
        variables = found.variables[_SAVE]
        group = None if variables.get("no_dist") else variables.get("process_group") or dist.group.WORLD
        return cls(found.calls[_SAVE], group, variables.get("state_dict"))


@dataclass(frozen=True)
class FlowCall:
    """The calls around a hook of ours, as one look at the frames of its thread finds them.

    Do not keep it: it keeps the process group and the state alive.

    Attributes:
        call: The call of DCP's function that runs the hooks; None if the thread is in none.
        variables: Its local variables; none if there is no call.
        save: The call of ``dcp.save`` around it; None if there is none.
        background: The call in which DCP saves in the background in this thread; None if the thread is in none.
        lets_dcp_choose_ranks: Whether ``dcp.save`` was called without ``no_dist=True``; False if that is not known.
    """

    call: FoundCall | None
    variables: dict[str, Any]
    save: DcpSave | None
    background: FoundCall | None
    lets_dcp_choose_ranks: bool

    @classmethod
    def of_thread(cls, flow: Function) -> FlowCall:
        """Looks for ``SAVE_FLOW`` or ``LOAD_FLOW`` and for what is around it."""
        found = find_calls(flow, _SAVE, _SAVE_AS_CALLED, outermost=_EXECUTORS)
        given = found.variables.get(_SAVE_AS_CALLED, {}).get("kwargs")
        return cls(
            found.calls.get(flow),
            found.variables.get(flow, {}),
            DcpSave._of(found),
            found.outermost,
            isinstance(given, dict) and not given.get("no_dist"),
        )


def background_call() -> FoundCall | None:
    """Returns the call in which DCP saves in the background in this thread; None if the thread is in none."""
    return find_calls(outermost=_EXECUTORS).outermost


def is_any_in_background() -> bool:
    """Returns whether DCP saves in the background in any thread of this process."""
    return is_any_thread_in(_EXECUTORS)


def is_called_by_async_save() -> bool:
    """Returns whether the caller of this function was called by ``dcp.async_save`` itself."""
    return is_called_by(*_ASYNC_SAVE, depth=3)


def cell_of(function: Any, name: str) -> CellType | None:
    """Returns the variable ``name`` that a function within a function of DCP shares; None if it shares none."""
    inside = inspect.unwrap(function) if callable(function) else None
    if not isinstance(inside, FunctionType) or name not in inside.__code__.co_freevars:
        return None
    return (inside.__closure__ or ())[inside.__code__.co_freevars.index(name)]
