# SPDX-License-Identifier: Apache-2.0
"""The context of one call of DCP: its ranks, its planner, and whether it still runs.

DCP tells its hooks next to nothing about the call that they run in. Our own entry points and ``register()`` know the
call, and state it with ``explicit_call`` for as long as it runs. In a bare ``dcp.save`` or ``dcp.load`` the first hook
finds the call among the local variables of DCP's own function, and hands it on. If neither works (hooks are called by
hand, or the probes fail with this torch), nothing is known, and only DCP itself sends anything between ranks: the
default group is no substitute, because the call may use another group.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageWriter

from bytecheckpoint.calls.call import Call, StatedCall
from bytecheckpoint.calls.of_dcp import LOAD_FLOW, SAVE_FLOW, FlowCall, cell_of
from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.safe_exchange import send_failures_safely
from bytecheckpoint.distributed.channel import Peers
from bytecheckpoint.distributed.groups import monitor_of
from bytecheckpoint.distributed.liveness import LivenessMonitor, OnLoss
from bytecheckpoint.errors import CheckpointChangedError, RankLostError
from bytecheckpoint.journal.failed_calls import note_failure
from bytecheckpoint.journal.failures import CallFailure
from bytecheckpoint.probes.of_torch import EXCHANGE, GROUPS, READING_TOGETHER
from bytecheckpoint.probes.probe import holds
from bytecheckpoint.staging.staged_state import StagingTime, claim_of_call

__all__ = ["CallContext", "explicit_call"]

# DCP's own method, as it was when this module was imported. It cannot fail.
_FINISH_PLAN = DefaultLoadPlanner.finish_plan


class CallContext:
    """What one rank knows about the DCP call, a save or a load, in which its hooks run.

    It refers to the group and the planner weakly, so it does not keep them alive.

    Attributes:
        call: The call, which tells when it has ended; None if the call is not known.
        size: Number of ranks; 0 if it is not known.
        staging: When the state of the save was staged; None if it was not, or is not known here.
        as_given: Why the call keeps the planner that it has, and was given none of ours; "" if it has one of ours, or
            nobody asked.
        use_collectives: Whether the ranks of a save commit together; None in a load, and if it is not known.
        save_id: Id of the save, once it has begun; else "".
        is_committed: Whether this rank has committed the save.
        is_held: Whether this rank has heard that the coordinator has taken the right to commit.
        lets_dcp_choose_ranks: Whether a bare ``dcp.save`` was called without ``no_dist=True``; False if that is not
            known.
    """

    def __init__(self, call: Call | None = None) -> None:
        self.call = call
        self.size = 0
        self.use_collectives: bool | None = None
        self.staging: StagingTime | None = None
        self.as_given = ""
        self.save_id = ""
        self.is_committed = self.is_held = False
        self.lets_dcp_choose_ranks = False
        self._is_in_background = False
        self._rank = self._coordinator = 0
        self._group: Callable[[], dist.ProcessGroup | None] = _nothing
        self._is_default_group = False
        self._planner: Callable[[], Any] = _nothing
        self._storage: Callable[[], Any] = _nothing
        self._global_step: Callable[[], Any] = _nothing
        self._is_taken = False
        self._began_at = time.time()
        self._is_failure_noted = False
        self._end_save: Callable[[], Callable[[], None] | None] = _nothing

    @classmethod
    def of_save(cls, asking: object, plan: Callable[[dict[str, Any]], str] | None = None) -> CallContext:
        """Returns the context of the save in which a hook of ``asking`` runs.

        Args:
            asking: Writer or planner of the save. A writer must ask only once in a save. If the state of the save was
                staged, the memory of the state then stays until the save has ended.
            plan: Of a writer. May give the save another planner, if its call was found in a frame: it gets the
                variables of the call, and returns what ``as_given`` is to say.
        """
        return cls._of_hook(asking, SAVE_FLOW, "storage_writer", plan)

    @classmethod
    def of_load(cls, asking: object, plan: Callable[[dict[str, Any]], str] | None = None) -> CallContext:
        """Returns the context of the load in which a hook of ``asking`` runs.

        Args:
            asking: Reader of the load. It must ask only once in a load.
            plan: See ``of_save``.
        """
        return cls._of_hook(asking, LOAD_FLOW, "storage_reader", plan)

    @classmethod
    def _of_hook(
        cls, asking: object, flow: tuple[str, str], storage: str, plan: Callable[[dict[str, Any]], str] | None
    ) -> CallContext:
        said = _explicit.get()
        if said is not None and said._is_of(asking):
            return said
        found: CallContext | None = getattr(_found, "context", None)
        _found.context = None
        if found is not None and found.is_running() and found.planner is asking:
            return found
        around = FlowCall.of_thread(flow)
        context = cls(around.call)
        context.lets_dcp_choose_ranks = around.lets_dcp_choose_ranks
        context._is_in_background = around.background is not None
        if plan is not None and flow == SAVE_FLOW:
            context.staging = claim_of_call(around)
        if around.call is not None:
            send_failures_safely(around.variables)
            context.as_given = plan(around.variables) if plan else ""
            context._fill(around.variables.get(storage), around.variables, knows_ranks=holds(EXCHANGE))
            if context.is_with(asking):
                _found.context = context
        return context

    def __reduce__(self) -> tuple[Any, ...]:
        return CallContext, ()  # a copy of a planner is in no call

    def _fill(self, storage: object, arguments: Mapping[str, Any], *, knows_ranks: bool) -> None:
        self._storage, self._planner = _weakly(storage), _weakly(arguments.get("planner"))
        self._global_step = _weakly(arguments.get("global_step"))
        self.use_collectives = arguments.get("use_collectives")
        if not knows_ranks or not holds(GROUPS):
            return
        given: dist.ProcessGroup | None = arguments.get("process_group")
        group = None if arguments.get("no_dist") or not dist.is_available() else given or dist.group.WORLD
        if group is None:
            self.size = 1
        elif not _compat.is_fake(group):
            self.size, self._rank = group.size(), group.rank()
            self._coordinator = arguments.get("coordinator_rank", 0)
            self._group, self._is_default_group = weakref.ref(group), given is None

    def _is_of(self, asking: object) -> bool:
        """Returns whether a hook of ``asking`` runs in this call.

        A writer or reader gets True only once: if it asks again, it runs in another call, for example in a bare
        ``dcp.save`` that a hook of the first save makes.
        """
        if self.call is None or not self.call.is_of_this_thread():
            return False
        if self._planner() is asking:
            return True
        is_first = self._storage() is asking and not self._is_taken
        self._is_taken = self._is_taken or is_first
        return is_first

    def is_running(self) -> bool:
        """Returns whether this thread is still in the call; False if the call is not known."""
        return self.call is not None and self.call.is_of_this_thread() and self.call.is_running()

    @property
    def is_explicit(self) -> bool:
        """Whether ``explicit_call`` stated the call, rather than that it was found in a frame."""
        return isinstance(self.call, StatedCall)

    @property
    def is_in_background(self) -> bool:
        """Whether training goes on beside the call: its state was staged, or DCP runs it in a thread or process."""
        return self.staging is not None or self._is_in_background

    def is_with(self, storage: object) -> bool:
        """Returns whether ``storage`` is the very writer or reader that was passed to DCP."""
        return self._storage() is storage

    @property
    def planner(self) -> Any:
        """The planner of the call; None if it is not known, or no longer exists."""
        return self._planner()

    @property
    def peers(self) -> Peers | None:
        """The ranks of the call, which can exchange messages.

        None if they are not known, if there is only one, or if each rank saves on its own.
        """
        group = self._group()
        if self.size < 2 or self.use_collectives is False or group is None:
            return None
        return Peers(None if self._is_default_group else group, self._rank, self.size, self._coordinator)

    def rank_or(self, said: Mapping[str, Any]) -> int:
        """Returns the number of this rank in the call.

        Args:
            said: Keyword arguments of a hook; their ``rank`` is used where ``peers`` is None, else 0. Older versions
                of DCP do not pass it, nor does an override of the hook that takes no keyword arguments.
        """
        return said.get("rank", 0) if self.peers is None else self._rank

    def is_over_its_group(self) -> bool:
        """Returns whether the call still uses the group with which it began; True if the group is not known.

        A call without a group of its own uses whatever is the default group at each moment.
        """
        if self._group is _nothing:
            return True
        group = self._group()
        return group is not None and (not self._is_default_group or group is dist.group.WORLD)

    def all_ranks_read(self, reader: object) -> bool:
        """Returns whether it is certain that all ranks reach ``reader.read_data`` if this one does.

        Between DCP's planning and ``read_data`` only ``finish_plan`` of the planner runs, and whatever wraps the
        reader. If either raised on one rank, the others would wait for that rank in vain. So ``finish_plan`` must be
        DCP's own, and nothing may wrap the reader.
        """
        finish = getattr(getattr(self.planner, "finish_plan", None), "__func__", None)
        is_own = finish is _FINISH_PLAN and self.is_with(reader)
        return is_own and self.peers is not None and holds(READING_TOGETHER)

    def watch_ranks(self, trace: CallTrace, on_loss: OnLoss | None = None) -> LivenessMonitor | None:
        """Makes the loss of a rank end the call, if its ranks have a liveness monitor, which is returned.

        Args:
            trace: Trace of the call; it can then say what ranks on other machines are doing.
            on_loss: See ``LivenessMonitor.note_call``.
        """
        peers = self.peers
        monitor = None if peers is None else monitor_of(peers.group)
        if monitor is not None and self.call is not None:
            trace.ask_elsewhere(monitor.doing, monitor.places)
            monitor.note_call(self.call, on_loss)
        return monitor

    def note_failure(self, error: BaseException, storage: Any) -> None:
        """Notes in the journal that ``error`` ends this call, on its coordinator, unless it was noted.

        A load that finds a newer commit begins again, so that is no failure.
        """
        kind = "save" if isinstance(storage, StorageWriter) else "load"
        self.note_end(error, storage.checkpoint_id, storage.config, kind)

    def note_end(self, error: BaseException, path: str | os.PathLike[str], config: Config, kind: str = "save") -> None:
        """Does what ``note_failure`` does, wherever it is known how the call has ended.

        Args:
            error: Why.
            path: Path of the checkpoint.
            config: Settings of the call.
            kind: ``save`` or ``load``.
        """
        if self._is_failure_noted or not self._is_to_note(error):
            return
        if self.is_committed:
            error.add_note(f"save({path}): the checkpoint was committed before")
        failure = CallFailure.by(
            error, kind=kind, path=path, rank=self._rank, began_at=self._began_at, save_id=self.save_id
        )
        if self.is_committed:
            failure = dataclasses.replace(failure, message=f"it is committed; after that: {failure.message}")
        if failure.error_type != CheckpointChangedError.__name__:
            self._is_failure_noted = True
            note_failure(failure, config, error)

    def _is_to_note(self, error: BaseException) -> bool:
        """Whether this rank notes a failure: the coordinator does.

        If that is lost before it has the right to commit, the first of those that are left does; else the right, which
        some rank takes away from it, tells.
        """
        if self._rank == self._coordinator or not isinstance(error, RankLostError) or self.is_held:
            return self._rank == self._coordinator
        left = {*range(self.size)} - error.ranks.keys()
        return self._coordinator in error.ranks and self._rank == min(left, default=None)

    @property
    def is_failure_noted(self) -> bool:
        """Whether ``note_failure`` was called."""
        return self._is_failure_noted

    def ends_with(self, end: Callable[[], None]) -> None:
        """Notes the method that undoes the save of this call, if the call fails where none of our hooks hears of it."""
        self._end_save = weakref.WeakMethod(end)

    def planned_metadata(self) -> Metadata | None:
        """Returns the metadata that the planner of the save made for all ranks; None if they are not found."""
        step = self._global_step()
        if step is None:  # nobody has looked for DCP's own function yet
            planned = FlowCall.of_thread(SAVE_FLOW).variables.get("global_metadata")
        else:
            cell = cell_of(step, "global_metadata")
            planned = None if cell is None else cell.cell_contents
        return planned if isinstance(planned, Metadata) else None


def _nothing() -> None:
    """A weak reference to nothing: stands for what is not known."""


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return _nothing if value is None else weakref.ref(value)
    except TypeError:  # a class whose `__slots__` allow no weak references
        return lambda: value


_explicit: ContextVar[CallContext | None] = ContextVar("bytecheckpoint_call", default=None)
# The context that the last hook of a writer or reader in this thread found. The next hook is one of the call's planner.
_found = threading.local()


@contextmanager
def explicit_call(
    storage: Any, staging: StagingTime | None = None, is_in_background: bool = False, **arguments: Any
) -> Iterator[None]:
    """States the context of a ``with`` block that runs DCP's flow of hooks. The call ends with the block.

    Args:
        storage: Writer or reader of the call.
        staging: When the state of the save was staged; None if it was not.
        is_in_background: Whether DCP runs the call in a thread or process of its own.
        arguments: Arguments of DCP's flow. Those that are left out have the defaults of the flow.
    """  # noqa: DOC501
    call = StatedCall()
    context = CallContext(call)
    context.staging, context._is_in_background = staging, is_in_background
    context._fill(storage, {"use_collectives": True, **arguments}, knows_ranks=True)
    token = _explicit.set(context)
    try:
        yield
    except (Exception, CheckpointException) as error:
        if context._is_taken:  # a hook of ours has begun the call
            end = context._end_save()
            if end is not None:
                end()  # now: when the call has raised, nothing of it may write or remove files any more
            context.note_failure(error, storage)
        raise
    finally:
        _explicit.reset(token)
        call.end()
