# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of state dicts without DCP's entry points, through the same engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from bytecheckpoint import _background
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._direct import fail_load, fail_save, run_load, run_save, with_states
from bytecheckpoint.dcp._groups import keep_watching, own_group
from bytecheckpoint.dcp._turns import next_turn
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.report import LoadReport, SaveReport
from bytecheckpoint.save_handle import SaveHandle, save_in_background

__all__ = ["SaveHandle", "async_save_state_dict", "load_state_dict", "save_state_dict"]


def save_state_dict(
    path: str | os.PathLike[str],
    state_dict: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    overwrite: bool = True,
    user_metadata: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> SaveReport:
    """Saves a state dict, as ``dcp.save`` would with our writer and planner.

    Collective over ``process_group``, of which the first call makes a gloo group of its own, watched as those of
    ``new_group``. Durable when it returns; the checkpoint that was there stays whole until then.

    Args:
        path: Directory, created if absent; the same on all ranks.
        state_dict: Nested dicts and lists of tensors and objects. ``Stateful`` values give their ``state_dict()``.
        process_group: Of the ranks that save; None takes the default group, if there is one.
        no_dist: Save alone, whatever groups there are.
        planner: None makes a ``BcpSavePlanner``.
        overwrite: False makes an existing checkpoint a ``CheckpointExistsError``.
        user_metadata: Free-form, JSON-serialisable; ``BcpReader.user_metadata`` gives it back.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        What was done: on the coordinator of all ranks, on the others of themselves.

    Raises:
        CheckpointError: On all ranks; what failed where, as ``BcpWriter`` says. Also the failure of an earlier
            background save that nobody has looked at.
        OutOfStepError: An earlier call failed on one rank alone, before that rank came to the others.
        RankLostError: A rank died, or stopped for longer than ``Config.stall_timeout_s``. Once on each rank that lives,
            in the call that was under way or in its next.
    """
    turn = next_turn(process_group, no_dist, "calls")
    writer = BcpWriter(path, overwrite=overwrite, user_metadata=user_metadata, config=config)
    group = own_group(process_group, no_dist, "calls", writer.config.stall_timeout_s, ("save", str(path)))
    try:
        _background.raise_unseen()
        state = with_states(_checked("save_state_dict", path, state_dict, Mapping))
    except Exception as error:
        return fail_save(writer, error, group, turn)
    return run_save(state, writer, planner, group, turn)


def load_state_dict(
    path: str | os.PathLike[str] | None,
    state_dict: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
    config: Config | None = None,
) -> LoadReport:
    """Loads into a state dict, in place, as ``dcp.load`` would with our reader and planner.

    Collective over ``process_group``, as ``save_state_dict``, with which it shares a group. When a newer save is
    committed meanwhile, it begins again, with that one.

    Args:
        path: Directory of a checkpoint of ours or of stock DCP, as ``latest`` gives it. None, which it gives if a run
            has none yet, is a ``CheckpointNotFoundError``.
        state_dict: Tensors are filled; other values are replaced. ``Stateful`` values get ``load_state_dict``.
        process_group: Of the ranks that load; None takes the default group, if there is one.
        no_dist: Load alone, whatever groups there are.
        planner: None makes a ``BcpLoadPlanner``. With any other a newer commit is a ``CheckpointChangedError``.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        What was done: on the coordinator of all ranks, on the others of themselves.

    Raises:
        CheckpointError: On all ranks; what failed where, as ``BcpReader`` says.
        OutOfStepError, RankLostError: As for ``save_state_dict``.
    """
    turn = next_turn(process_group, no_dist, "calls")
    reader = BcpReader(path, config=config)
    group = own_group(process_group, no_dist, "calls", reader.config.stall_timeout_s, ("load", str(path)))
    try:
        _checked("load_state_dict", path, state_dict, MutableMapping)
    except InvalidPlanError as error:
        return fail_load(reader, error, group, turn)
    return run_load(state_dict, reader, planner, group, turn)


def async_save_state_dict(
    path: str | os.PathLike[str],
    state_dict: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    overwrite: bool = True,
    user_metadata: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> SaveHandle[SaveReport]:
    """Saves a state dict in the background: what is saved is the state at the call.

    Collective over ``process_group``, of which the first call makes a gloo group of its own, so that training may go on
    using it. Saves of one process follow one another in the order of the calls.

    Args:
        path, state_dict, process_group, no_dist, planner, overwrite, user_metadata: As for ``save_state_dict``.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables. ``staging_bytes`` and ``on_staging_busy`` say how
            much memory staged states take, ``handle_sigterm`` whether SIGTERM waits for saves.

    Returns:
        A handle, when host tensors and objects are copied; see ``SaveHandle.staged`` for those on devices.

    Raises:
        CheckpointError: The state cannot be staged (``StagingFullError``, ``StagingBusyError``, ``InvalidPlanError``),
            or an earlier background save failed and nobody has looked. The save then fails on all ranks.
    """
    turn = next_turn(process_group, no_dist, "background")
    writer = BcpWriter(path, overwrite=overwrite, user_metadata=user_metadata, config=config)
    group = own_group(process_group, no_dist, "background", writer.config.stall_timeout_s, ("save", str(path)))

    def state() -> dict[str, Any]:
        _background.raise_unseen()
        return with_states(_checked("async_save_state_dict", path, state_dict, Mapping))

    handle = save_in_background(
        str(writer.checkpoint_id),
        state,
        lambda state: run_save(state, writer, planner, group, turn),
        lambda error: fail_save(writer, error, group, turn),
        writer.cancel,
        writer.config,
        is_alone=group is None,
    )
    keep_watching(group, handle.committed)
    return handle


def _checked(
    call: str, path: str | os.PathLike[str] | None, state_dict: Mapping[str, Any], kind: type
) -> Mapping[str, Any]:
    """``state_dict``, if it is of that kind.

    Raises:
        InvalidPlanError: It is something else, such as a list of tensors or a module.
    """
    if not isinstance(state_dict, kind):
        raise InvalidPlanError(
            f"{call}({path}): a dict of values by name wanted, got a {type(state_dict).__name__}", str(path)
        )
    return state_dict
