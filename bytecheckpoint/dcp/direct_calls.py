# SPDX-License-Identifier: Apache-2.0
"""Saves and loads of our own entry points.

They run DCP's flow of hooks, but not DCP's entry points, and raise typed errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from bytecheckpoint.config import Config
from bytecheckpoint.dcp._group_flow import load_state, save_state
from bytecheckpoint.dcp.call_context import explicit_call
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.memory_first import save_by_tiers
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.dcp.repeated_loads import load_until_unchanged
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.dcp.stateful import QuickStateful
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.distributed.agreement import all_together
from bytecheckpoint.distributed.call_order import CallOrder, in_turn
from bytecheckpoint.distributed.groups import calling, exchanging
from bytecheckpoint.distributed.mixed_calls import CallKind
from bytecheckpoint.errors import CheckpointError, LoadFailedError, SaveCancelledError, SaveFailedError, texts_of_ranks
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.report import LoadReport, SaveReport
from bytecheckpoint.staging.staged_state import StagingTime, staging_of

__all__ = ["fail_load", "fail_save", "failing_planner", "run_load", "run_save", "save_over_group", "with_states"]


def with_states(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``state_dict`` with each Stateful value at the top replaced by its state, as DCP does."""
    state = {}
    for key, value in state_dict.items():
        stateful: Any = value
        state[key] = stateful.state_dict() if isinstance(value, QuickStateful) else value
    return state


def run_save(
    state: dict[str, Any],
    writer: BcpWriter,
    planner: SavePlanner | None,
    group: dist.ProcessGroup | None,
    turn: CallOrder | None,
    staging: StagingTime | None = None,
    only: str = "",
) -> SaveReport:
    """Runs a whole save in this thread. Collective over ``group``.

    Args:
        state: State dict to save.
        writer: Writer of the save.
        planner: Planner of the save; None takes a ``BcpSavePlanner``.
        group: Group that ``own_group`` returned; None saves this rank alone.
        turn: Number of this call among the calls over the group; None if calls are not counted.
        staging: When the state was staged, if it was.
        only: ``memory`` or ``disk`` for that part of a save that goes to both; see ``save_by_tiers``.

    Returns:
        The report of this rank: of the save to the disk, if it goes there.

    Raises:
        CheckpointError: The save failed, on any rank. If the reason is an exception that ends the process, such as
            KeyboardInterrupt, that is raised instead.
    """

    def save(writer: BcpWriter) -> SaveReport:
        try:
            _save_flow(
                turn,
                staging,
                state_dict=state,
                storage_writer=writer,
                process_group=group,
                no_dist=group is None,
                planner=BcpSavePlanner(config=writer.config) if planner is None else planner,
            )
        except CheckpointException as exception:
            raise _typed(exception) from exception
        assert writer.last_report is not None
        return writer.last_report

    return cast(SaveReport, save_by_tiers(writer, save, group, only))  # None, if that part of a save is not in memory


def save_over_group(
    group: dist.ProcessGroup,
    staged: Any,
    *,
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: StorageWriter,
    planner: SavePlanner,
    turn: CallOrder | None,
    use_collectives: bool = True,
) -> Metadata:
    """Saves as DCP's executor does in its thread, but over a group of our own. Collective over ``group``.

    Args:
        group: Group of the ranks that save.
        staged: Staged state, or a future of it. If staging failed, this rank fails the save on all ranks.
        checkpoint_id: ``checkpoint_id`` of ``async_save``. The writer is directed to it, unless it is None.
        storage_writer: Writer of the save.
        planner: Planner of the save.
        turn: Number of this call among the calls over the group; None if calls are not counted.
        use_collectives: False if each rank saves on its own.
    """
    if checkpoint_id is not None:
        storage_writer.reset(checkpoint_id)
    state: dict[str, Any] = {}
    staging: StagingTime | None = None
    try:
        staged = staged.result() if isinstance(staged, Future) else staged
        state, staging = with_states(staged), staging_of(staged)
    except Exception as error:  # the other ranks come to this save and get the error there
        planner = failing_planner(error)

    def save(writer: StorageWriter) -> Metadata:
        return _save_flow(
            turn,
            staging,
            state_dict=state,
            storage_writer=writer,
            process_group=group,
            planner=planner,
            use_collectives=use_collectives,
        )

    if not isinstance(storage_writer, BcpWriter):
        return save(storage_writer)
    return cast(Metadata, save_by_tiers(storage_writer, save, group if use_collectives else None))


def _save_flow(turn: CallOrder | None, staging: StagingTime | None, **arguments: Any) -> Metadata:
    writer, group = arguments["storage_writer"], arguments["process_group"]
    path = str(getattr(writer, "checkpoint_id", ""))
    # The call is the outermost, and so notes a failure as the caller gets it.
    with (
        explicit_call(writer, staging, **arguments),
        in_turn(turn, "save", path),
        calling(group, "save", path, CallKind.SAVE),
    ):
        return save_state(**arguments)


def _load_flow(**arguments: Any) -> None:
    with explicit_call(arguments["storage_reader"], **arguments):
        load_state(**arguments)


def failing_planner(error: BaseException) -> SavePlanner:
    """Returns a planner for a rank that cannot take part in a save. The save then fails on all ranks with ``error``."""
    return _Failing(error)


def fail_save(
    writer: BcpWriter, error: BaseException, group: dist.ProcessGroup | None, turn: CallOrder | None
) -> SaveReport:
    """Runs this rank's part of a save in which it cannot take part. The save fails on all ranks with ``error``."""
    return run_save({}, writer, failing_planner(error), group, turn)


def run_load(
    state: dict[str, Any],
    reader: BcpReader,
    planner: LoadPlanner | None,
    group: dist.ProcessGroup | None,
    turn: CallOrder | None,
    spec: LoadSpec | None = None,
    make_planner: Callable[[], BcpLoadPlanner] | None = None,
    finish: Callable[[], None] | None = None,
) -> LoadReport:
    """Runs a whole load in this thread, as ``run_save`` runs a save. Collective over ``group``.

    If ``planner`` is None, it takes a ``BcpLoadPlanner`` with ``spec``, and begins again if a newer commit replaces the
    checkpoint. Without a spec, casts that may lose values are refused.

    Args:
        state: State dict.
        reader: Reader of the load.
        planner: Planner of the caller.
        group: Group of the ranks that load.
        turn: See ``run_save``.
        spec: What to load.
        make_planner: Makes the planner of each try; None takes a ``BcpLoadPlanner``.
        finish: Called on each rank when all is loaded; what it raises fails the load on all ranks.

    Raises:
        CheckpointError: The load failed, on any rank.
    """  # noqa: DOC501
    path = str(reader.checkpoint_id)

    def own_planner() -> BcpLoadPlanner:
        planner = BcpLoadPlanner(spec=spec) if make_planner is None else make_planner()
        planner.refuses_lossy_casts = True
        return planner

    def load() -> None:
        with in_turn(turn, "load", path), calling(group, "load", path, CallKind.UNKNOWN):
            states: dict[str, Any] = {}
            failing: LoadPlanner | None = None
            try:
                # In the order in which DCP asks for states; keys of several types have only that of their texts.
                states = with_states(dict(sorted(state.items(), key=lambda item: str(item[0]))))
            except BaseException as error:  # the other ranks come to this load and get the error there
                failing = _FailingLoad(error)
            with exchanging(group, CallKind.LOAD):
                _load_flow(
                    state_dict=states,
                    storage_reader=reader,
                    planner=failing or planner or own_planner(),
                    process_group=group,
                    no_dist=group is None,
                )

            def put_back() -> None:
                _put_back(state, states)
                if finish is not None:
                    finish()

            all_together(group, "load", path, put_back)

    try:
        if planner is None:
            load_until_unchanged(load, reader)
        else:
            load()  # the caller's planner may not be usable a second time
    except CheckpointException as exception:
        raise _typed(exception, LoadFailedError) from exception
    assert reader.last_report is not None
    return reader.last_report


def fail_load(
    reader: BcpReader, error: Exception, group: dist.ProcessGroup | None, turn: CallOrder | None
) -> LoadReport:
    """Runs this rank's part of a load in which it cannot take part. The load fails on all ranks with ``error``."""
    return run_load({}, reader, _FailingLoad(error), group, turn)


def _put_back(state: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Puts what was loaded into ``state``, as DCP does; each Stateful value gets its state."""
    for key, value in loaded.items():
        if key not in state:
            continue
        stateful: Any = state[key]
        if isinstance(state[key], QuickStateful):
            stateful.load_state_dict(value)
        else:
            state[key] = value


class _FailingLoad(BcpLoadPlanner):
    """Raises ``error`` in a hook from which DCP sends it to all ranks, and before the metadata are used."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise self._error


class _Failing(BcpSavePlanner):
    """Raises ``error`` in a hook from which DCP sends it to all ranks."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(config=Config())
        self._error = error

    def create_local_plan(self) -> Any:
        raise self._error


def _typed(
    exception: CheckpointException, several: type[SaveFailedError] | type[LoadFailedError] = SaveFailedError
) -> BaseException:
    """Returns the error to raise for a ``CheckpointException``, which has the errors of all ranks.

    A cancelled save and an exception that ends the process, such as KeyboardInterrupt, come first. If the ranks failed
    with one class of ours, it is an error of that class; otherwise one of class ``several`` names all of them.
    """
    failures: dict[int, BaseException] = {rank: failure for rank, (failure, _) in exception.failures.items()}
    only = next(iter(failures.values())) if len(failures) == 1 else None
    reasons = only.reasons if isinstance(only, SaveFailedError) else failures
    for rank, reason in sorted(reasons.items()):
        if isinstance(reason, SaveCancelledError):
            return SaveCancelledError(f"rank {rank}: {reason}", reason.path)
        if not isinstance(reason, Exception):
            return reason  # Ctrl-C, SystemExit
    if isinstance(only, CheckpointError):
        return only
    texts = texts_of_ranks(failures)
    kinds = {type(reason) for reason in failures.values()}
    first = failures[min(failures)] if failures else exception
    if len(kinds) == 1 and isinstance(first, CheckpointError):
        first.add_note(texts)
        return first
    return several(texts, failures)
