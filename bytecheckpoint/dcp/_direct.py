# SPDX-License-Identifier: Apache-2.0
"""Saves and loads for our own entry points: DCP's flow of hooks, without its entry points, and with typed errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from bytecheckpoint.config import Config
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp._again import load_until_unchanged
from bytecheckpoint.dcp._groups import calling
from bytecheckpoint.dcp._stateful import QuickStateful
from bytecheckpoint.dcp._turns import Turn, in_turn
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.errors import CheckpointError, SaveCancelledError, SaveFailedError
from bytecheckpoint.report import LoadReport, SaveReport

__all__ = ["fail_load", "fail_save", "failing_planner", "run_load", "run_save", "save_over_group", "with_states"]


def with_states(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict`` with the state of what is Stateful, as DCP asks for it: of the values of the top alone."""
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
    turn: Turn | None,
) -> SaveReport:
    """A whole save in this thread, of the call ``turn``. Collective over ``group``, as ``own_group`` gives it; None
    saves alone."""
    path = str(writer.checkpoint_id)
    try:
        with in_turn(turn, "save", path), calling(group, "save", path):
            _compat.save_state(
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


def save_over_group(
    group: dist.ProcessGroup,
    staged: Any,
    *,
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: StorageWriter,
    planner: SavePlanner,
    turn: Turn | None,
    use_collectives: bool = True,
) -> Metadata:
    """What DCP's executor does in its thread, over a group of our own. Collective over ``group``.

    Args:
        staged: The state, or a future of it.
        checkpoint_id: Of ``async_save``; as there, the writer is directed to it if there is one.
    """
    if checkpoint_id is not None:
        storage_writer.reset(checkpoint_id)
    state: dict[str, Any] = {}
    try:
        state = with_states(staged.result() if isinstance(staged, Future) else staged)
    except Exception as error:  # the others come to this save, and hear of it there
        planner = failing_planner(error)
    path = str(checkpoint_id or getattr(storage_writer, "checkpoint_id", ""))
    with in_turn(turn, "save", path), calling(group, "save", path):
        return _compat.save_state(
            state_dict=state,
            storage_writer=storage_writer,
            process_group=group,
            planner=planner,
            use_collectives=use_collectives,
        )


def failing_planner(error: BaseException) -> SavePlanner:
    """For this rank's part of a save that it cannot take part in: the others, who come to it, are told ``error``."""
    return _Failing(error)


def fail_save(
    writer: BcpWriter, error: BaseException, group: dist.ProcessGroup | None, turn: Turn | None
) -> SaveReport:
    """This rank's part of a save that it cannot take part in: the others, who come to it, are told ``error``."""
    return run_save({}, writer, failing_planner(error), group, turn)


def run_load(
    state: dict[str, Any],
    reader: BcpReader,
    planner: LoadPlanner | None,
    group: dist.ProcessGroup | None,
    turn: Turn | None,
) -> LoadReport:
    """A whole load in this thread, as ``run_save``."""
    path = str(reader.checkpoint_id)

    def load() -> None:
        with in_turn(turn, "load", path), calling(group, "load", path):
            _compat.load_state(
                state,
                storage_reader=reader,
                planner=BcpLoadPlanner() if planner is None else planner,
                process_group=group,
                no_dist=group is None,
            )

    try:
        if planner is None:
            load_until_unchanged(load, reader)
        else:
            load()  # whether a planner of the caller's can begin again is not known
    except CheckpointException as exception:
        raise _typed(exception) from exception
    assert reader.last_report is not None
    return reader.last_report


def fail_load(reader: BcpReader, error: Exception, group: dist.ProcessGroup | None, turn: Turn | None) -> LoadReport:
    """This rank's part of a load that it cannot take part in, as ``fail_save``."""
    return run_load({}, reader, _FailingLoad(error), group, turn)


class _FailingLoad(BcpLoadPlanner):
    """As ``_Failing``; before the metadata are looked at."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise self._error


class _Failing(BcpSavePlanner):
    """Raises where DCP takes note of it on all ranks."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(config=Config())
        self._error = error

    def create_local_plan(self) -> Any:
        raise self._error


def _typed(exception: CheckpointException) -> BaseException:
    """What DCP's exception of all ranks is about."""
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
    texts = "; ".join(f"rank {rank}: {type(reason).__name__}: {reason}" for rank, reason in sorted(failures.items()))
    kinds = {type(reason) for reason in failures.values()}
    first = failures[min(failures)] if failures else exception
    if len(kinds) == 1 and isinstance(first, CheckpointError):
        first.add_note(texts)
        return first
    return SaveFailedError(texts, failures)
