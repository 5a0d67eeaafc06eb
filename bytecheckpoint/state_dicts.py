# SPDX-License-Identifier: Apache-2.0
"""Saves and loads state dicts through the same engine, without DCP's entry points."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from bytecheckpoint.config import Config
from bytecheckpoint.dcp.direct_calls import fail_load, fail_save, run_load, run_save, with_states
from bytecheckpoint.dcp.memory_first import is_in_memory
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.dcp.save_planner import BcpSavePlanner, stores_parts, to_stage
from bytecheckpoint.dcp.tiers_to_load import meet_to_load
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.distributed.call_order import next_turn
from bytecheckpoint.distributed.groups import keep_watching, own_group
from bytecheckpoint.errors import ConfigError, InvalidPlanError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.per_rank import PerRankPlanner, Policy, patterns_with_per_rank, with_per_rank
from bytecheckpoint.planning.key_choice import KeyChoice
from bytecheckpoint.report import LoadReport, SaveReport
from bytecheckpoint.staging import background as _background
from bytecheckpoint.staging.save_handle import SaveHandle, save_in_background
from bytecheckpoint.staging.staged_state import claimed, staging_of

__all__ = ["SaveHandle", "async_save_state_dict", "load_state_dict", "save_state_dict"]


def save_state_dict(
    path: str | os.PathLike[str],
    state_dict: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    cast: Mapping[str, str | torch.dtype] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    per_rank_policy: Policy = "own",
    overwrite: bool = True,
    user_metadata: Mapping[str, Any] | None = None,
    digest: bool | None = None,
    config: Config | None = None,
) -> SaveReport:
    """Saves a state dict, as ``dcp.save`` does with our writer and planner.

    Collective over ``process_group``. The first call makes a gloo group of our own with the same ranks, and a liveness
    monitor for it, as ``new_group`` does. The checkpoint is durable when the call returns; until then the previous
    checkpoint at the path stays whole.

    Args:
        path: Directory, created if absent, or URL; the same on all ranks. Or a step of ``Tiers``: then it is durable in
            the nearest of its places but memory, unless ``SaveReport.tier`` is ``memory``.
        state_dict: Nested dicts and lists of tensors and objects. For a ``Stateful`` value at the top level, its
            ``state_dict()`` is saved.
        process_group: Group of the ranks that save; None takes the default group, if there is one.
        no_dist: Whether this process saves alone, whatever groups there are.
        planner: Planner of the save; None makes a ``BcpSavePlanner``.
        include: Patterns of the keys to save, as ``LoadSpec`` has them; none: all keys. A pattern may match keys of
            some ranks only; one that matches no key of any rank is an error before a byte is written.
        exclude: Patterns of keys that are left out, also if ``include`` matches them. They are not staged either.
        cast: Dtypes in which floating-point tensors are stored, by pattern; see ``BcpSavePlanner``. With
            ``{**state, "model_bf16": state["model"]}`` and ``cast={"model_bf16": "bfloat16"}`` a copy for inference
            is stored beside the model.
        per_rank: Values that each rank has of its own, such as random numbers, a sampler, a data loader: tensors, and
            objects that ``weights_only`` loads; of a ``Stateful`` value, its ``state_dict()``. They are saved whatever
            ``include`` says. ``load_state_dict(per_rank=...)`` gives them back.
        per_rank_policy: What another number of ranks gets, for all values or by key. ``own``: nothing. ``replicated``:
            the value, which is equal on all ranks. ``sharded``: a share of the values of all ranks, joined; they are
            lists, tuples or tensors with a dim. Equal on all ranks.
        overwrite: If False, an existing checkpoint at the path is a ``CheckpointExistsError``.
        user_metadata: Any JSON-serialisable values; ``BcpReader.user_metadata`` returns them.
        digest: Whether to store a digest of what is saved, which ``bcp digest`` compares. It costs the coordinator one
            read of the checkpoint. None takes ``config.digest``.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        A report: on the coordinator about all ranks, on any other rank about that rank.

    Raises:
        CheckpointError: The save failed. All ranks raise; the error says what failed where, see ``BcpWriter``. An
            earlier background save whose failure nobody has looked at also raises here.
        ConfigError: A pattern is none, or matches nothing; or both ``planner`` and patterns were passed. Or a launcher
            has started several ranks (``WORLD_SIZE``), but there is no process group, and no ``no_dist=True``.
        OutOfStepError: An earlier call failed on one rank alone, before that rank met the others.
        RankLostError: A rank died, or stopped for longer than ``Config.stall_timeout_s``. Each rank that lives raises
            it once, in the call under way or in its next call.
    """
    turn = next_turn(process_group, no_dist, "calls")
    writer = BcpWriter(path, overwrite=overwrite, user_metadata=user_metadata, digest=digest, config=config)
    group = own_group(process_group, no_dist, "calls", writer.config.stall_timeout_s, ("save", str(path)))
    try:
        _background.raise_unseen()
        state = _state("save_state_dict", path, state_dict, per_rank, per_rank_policy, group)
        planner = _planner("save_state_dict", path, planner, KeyChoice(include, exclude, cast), per_rank, writer.config)
    except Exception as error:
        return fail_save(writer, error, group, turn)
    with claimed(state_dict):
        return run_save(state, writer, planner, group, turn, staging_of(state_dict))


def load_state_dict(
    path: str | os.PathLike[str] | None,
    state_dict: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
    spec: LoadSpec | None = None,
    per_rank: MutableMapping[str, Any] | None = None,
    config: Config | None = None,
) -> LoadReport:
    """Loads into a state dict in place, as ``dcp.load`` does with our reader and planner.

    Collective over ``process_group``. It uses the same gloo group of our own as ``save_state_dict``. If a newer save is
    committed at the path during the load, the load begins again and loads that one.

    Args:
        path: Directory of a checkpoint of ours or of stock DCP, for example what ``latest`` returns; or safetensors or
            files of torch.save, a file or a folder of Hugging Face; or a step of ``Tiers``. None, which ``latest``
            returns if a run has no checkpoint yet, is a ``CheckpointNotFoundError``.
        state_dict: Its tensors are filled, and its other values are replaced. For a ``Stateful`` value,
            ``load_state_dict`` is called.
        process_group: Group of the ranks that load; None takes the default group, if there is one.
        no_dist: Whether this process loads alone, whatever groups there are.
        planner: Planner of the load; None makes a ``BcpLoadPlanner``. With any planner passed here, a newer commit
            during the load is a ``CheckpointChangedError``.
        spec: What to load, under which names, in which form; see ``LoadSpec``. None: all that the state asks for, under
            its own names; a tensor of another dtype is converted if that loses no value, else it is a
            ``ShapeMismatchError``.
        per_rank: Receives what ``save_state_dict(per_rank=...)`` saved and this rank gets: the values take the place of
            those that are there, and a ``Stateful`` value gets its own by ``load_state_dict``. Values that belong to
            single ranks are no use to another number of ranks: what ``per_rank`` has under their keys stays, with a
            warning, and if it has nothing there, that is a ``KeyMismatchError``. So is a key that was not saved, unless
            ``spec.strict`` allows keys to be missing.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        A report: on the coordinator about all ranks, on any other rank about that rank.

    Raises:
        CheckpointError: The load failed. All ranks raise; the error says what failed where, see ``BcpReader``.
        ConfigError: Both ``planner`` and ``spec`` were passed.
        OutOfStepError: See ``save_state_dict``.
        RankLostError: See ``save_state_dict``.
    """
    turn = next_turn(process_group, no_dist, "calls")
    config = config or Config.from_env()
    group = own_group(process_group, no_dist, "calls", config.stall_timeout_s, ("load", str(path)))
    meet_to_load(path, group, "load", config)
    reader = BcpReader(path, config=config)
    try:
        _checked("load_state_dict", path, state_dict, MutableMapping)
        if planner is not None and spec is not None:
            raise ConfigError(f"load_state_dict({path}): pass planner or spec, not both: BcpLoadPlanner takes a spec")
        if planner is not None and per_rank is not None:
            raise ConfigError(f"load_state_dict({path}): pass planner or per_rank, not both: per_rank needs its own")
    except (ConfigError, InvalidPlanError) as error:
        return fail_load(reader, error, group, turn)
    if per_rank is None:
        return run_load(state_dict, reader, planner, group, turn, spec)
    planners: list[PerRankPlanner] = []  # one for each try

    def make_planner() -> PerRankPlanner:
        planners.append(PerRankPlanner(per_rank, group, spec))
        return planners[-1]

    return run_load(
        state_dict, reader, None, group, turn, make_planner=make_planner, finish=lambda: planners[-1].finish()
    )


def async_save_state_dict(
    path: str | os.PathLike[str],
    state_dict: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    cast: Mapping[str, str | torch.dtype] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    per_rank_policy: Policy = "own",
    overwrite: bool = True,
    user_metadata: Mapping[str, Any] | None = None,
    digest: bool | None = None,
    config: Config | None = None,
) -> SaveHandle[SaveReport]:
    """Saves a state dict in the background, as it is at the call.

    Collective over ``process_group``. The first call makes a gloo group of our own with the same ranks, so that
    training can go on using ``process_group``. The saves of one process run in the order of the calls.

    Args:
        path: See ``save_state_dict``.
        state_dict: See ``save_state_dict``.
        process_group: See ``save_state_dict``.
        no_dist: See ``save_state_dict``.
        planner: See ``save_state_dict``.
        include: See ``save_state_dict``.
        exclude: See ``save_state_dict``.
        cast: See ``save_state_dict``. Tensors are cast at the call, before they are staged.
        per_rank: See ``save_state_dict``.
        per_rank_policy: See ``save_state_dict``.
        overwrite: See ``save_state_dict``.
        user_metadata: See ``save_state_dict``.
        digest: See ``save_state_dict``.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables. ``staging_bytes`` and ``on_staging_busy`` determine
            how much memory staged states take, ``handle_sigterm`` whether SIGTERM waits for saves.

    Returns:
        A handle. The call returns as soon as host tensors and objects are copied; ``SaveHandle.staged`` says when
        tensors on devices are.

    Raises:
        CheckpointError: The state cannot be staged (``StagingFullError``, ``StagingBusyError``, ``InvalidPlanError``),
            or an earlier background save failed and nobody has looked at its error. The save then fails on all ranks.
    """
    turn = next_turn(process_group, no_dist, "background")
    writer = BcpWriter(path, overwrite=overwrite, user_metadata=user_metadata, digest=digest, config=config)
    group = own_group(process_group, no_dist, "background", writer.config.stall_timeout_s, ("save", str(path)))

    def state() -> dict[str, Any]:
        nonlocal planner
        _background.raise_unseen()
        choice = KeyChoice(include, exclude, cast)
        planner = _planner("async_save_state_dict", path, planner, choice, per_rank, writer.config)
        return to_stage(_state("async_save_state_dict", path, state_dict, per_rank, per_rank_policy, group), planner)

    handle = save_in_background(
        str(writer.checkpoint_id),
        state,
        lambda state: run_save(state, writer, planner, group, turn, staging_of(state)),
        lambda error: fail_save(writer, error, group, turn),
        writer.cancel,
        writer.config,
        is_alone=group is None,
        in_parts=lambda _: stores_parts(planner),
    )
    keep_watching(group, handle.committed)
    handle.memory = writer.in_memory if is_in_memory(handle.path) else None
    return handle


def _planner(
    call: str,
    path: str | os.PathLike[str],
    planner: SavePlanner | None,
    choice: KeyChoice,
    per_rank: Mapping[str, Any] | None,
    config: Config,
) -> SavePlanner:
    """Returns the planner of a save.

    Raises:
        ConfigError: Both a planner and patterns were passed.
    """
    if planner is None:
        include = choice.include if per_rank is None else patterns_with_per_rank(choice.include)
        return BcpSavePlanner(config=config, include=include, exclude=choice.exclude, cast=choice.cast)
    if choice:
        raise ConfigError(
            f"{call}({path}): pass planner or patterns, not both: BcpSavePlanner takes include, exclude and cast"
        )
    return planner


def _state(
    call: str,
    path: str | os.PathLike[str],
    state_dict: Mapping[str, Any],
    per_rank: Mapping[str, Any] | None,
    policy: Policy,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Returns what is saved."""
    state = with_states(_checked(call, path, state_dict, Mapping))
    return with_per_rank(state, per_rank, policy, group)


def _checked(
    call: str, path: str | os.PathLike[str] | None, state_dict: Mapping[str, Any], kind: type
) -> Mapping[str, Any]:
    """Returns ``state_dict``, if it is an instance of ``kind``.

    Raises:
        InvalidPlanError: It is something else, such as a list of tensors or a module.
    """
    if not isinstance(state_dict, kind):
        raise InvalidPlanError(
            f"{call}({path}): the state must be a dict of values by name, got a {type(state_dict).__name__}", str(path)
        )
    return state_dict
