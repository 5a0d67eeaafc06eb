# SPDX-License-Identifier: Apache-2.0
"""``bytecheckpoint.save``: saves a model, its optimizers and the extra state of a run as parts of one checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from bytecheckpoint.checkpoint.roles import check_role, folder_of_role
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.direct_calls import run_save
from bytecheckpoint.dcp.memory_first import forget_in_memory, is_in_memory
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.distributed.agreement import agree, all_together, gathered, held_first, joined
from bytecheckpoint.distributed.call_order import CallOrder, next_turn
from bytecheckpoint.distributed.groups import keep_watching, own_group, ranks_of
from bytecheckpoint.errors import CheckpointError, CheckpointExistsError, ConfigError, StorageError
from bytecheckpoint.near_names import did_you_mean
from bytecheckpoint.per_rank import Policy, check_policy, saved_values
from bytecheckpoint.planning.key_choice import KeyChoice, refuse_unmatched
from bytecheckpoint.probes.of_torch import FRAMEWORKS
from bytecheckpoint.probes.probe import require
from bytecheckpoint.reference_variables import set_logging_level
from bytecheckpoint.report import SaveReport
from bytecheckpoint.staging import background as _background
from bytecheckpoint.staging.background import BackgroundFuture
from bytecheckpoint.staging.save_handle import SaveHandle, save_in_background
from bytecheckpoint.staging.staged_state import StagingTime, staging_of
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.storage.paths import Place, below, location
from bytecheckpoint.training_state.checkpoint_report import CheckpointReport
from bytecheckpoint.training_state.checkpoint_state import CheckpointState
from bytecheckpoint.training_state.layouts import LAYOUTS, Layout, recorded_layouts
from bytecheckpoint.training_state.module_state import ModuleState, tied_names
from bytecheckpoint.training_state.optimizer_state import OptimizerState
from bytecheckpoint.training_state.regular_blocks import with_regular_blocks
from bytecheckpoint.training_state.tracker import step_folder, write_tracker

__all__ = ["save"]

_IRREGULAR = ("decompose", "exchange")


def save(
    ckpt_path: str | os.PathLike[str],
    checkpoint_state: Mapping[str, Any],
    framework: str,
    fast_saving: bool = False,
    global_steps: int | None = None,
    callback: Callable[[], object] | None = None,
    role: str | None = None,
    ignore_append_global_steps_to_folder: bool = False,
    *,
    save_decomposed_model_optimizer: bool = True,
    irregular: str = "decompose",
    extra_state_policy: Policy = "own",
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    overwrite: bool = True,
    digest: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    config: Config | None = None,
) -> SaveHandle[CheckpointReport]:
    """Saves a live model, its optimizers and extra state, each as an ordinary DCP checkpoint in a folder of its own.

    Collective over ``process_group``. The keys are the names that parameters have without any wrapping. So what was
    saved under one framework loads under every other one, on any number of ranks. Training is not changed: no optimizer
    makes a step, and no flat parameter is gathered. The folders are committed one by one, ``model`` last. Then the
    tracker ``latest_checkpointed_iteration.txt`` is written, and then ``callback`` is called.

    Args:
        ckpt_path: Folder of the run, or its URL in an object store, or ``Tiers``; the same on all ranks.
        checkpoint_state: ``model``: the module as it is wrapped. ``optimizer``: a torch optimizer, or a list of them.
            ``extra_state``: a dict of this rank. The last two may be absent.
        framework: ``ddp`` (also for a model without wrapping), ``fsdp`` (``FullyShardedDataParallel``) or ``fsdp2``
            (``fully_shard``, tensor parallelism, anything with DTensors).
        fast_saving: Whether to save in the background. What is saved is the state at the call.
        global_steps: Step of the run. The checkpoint goes to ``{ckpt_path}/global_step_{global_steps}``, and the
            tracker then names it as the newest of the run. None saves to ``ckpt_path`` itself, without a tracker.
        callback: Called on rank 0, without arguments, when everything is committed. If it raises, that is a warning.
        role: Which of several models of a job this is. Each role has its own folders, tracker, staging memory and
            thread.
        ignore_append_global_steps_to_folder: Whether to save to ``ckpt_path`` itself even with ``global_steps``. No
            tracker is written then, because it could not name this folder.
        save_decomposed_model_optimizer: For ``fsdp`` only. True takes flat parameters apart without communication.
            False saves the model by FSDP's own sharded state dict, for which all ranks gather each flat parameter;
            modules with state dict hooks of their own need this. The files have the same keys in both cases.
        irregular: For ``fsdp`` only: how to save parameters that the shards cut within a row. ``decompose``: each rank
            writes up to ``2 * ndim - 1`` boxes of each parameter, and ranks send nothing to each other. ``exchange``:
            ranks send pieces of rows to each other, in the background with ``fast_saving``, and each writes one block
            of whole rows.
        extra_state_policy: What another number of ranks gets at a load: ``own``, ``replicated`` or ``sharded``, for
            all keys, or a mapping by key, in which absent keys are ``own``. See docs/training_state.md.
        include: Patterns of the keys of the model to save, as ``LoadSpec`` has them, such as ``*.lora_*``; none: all
            keys. Optimizers and extra state are saved whole.
        exclude: Patterns of keys of the model that are left out, also if ``include`` matches them.
        overwrite: If False, a part that already exists is a ``CheckpointExistsError``.
        digest: Whether to store a digest of each part, which ``bcp digest`` compares. It costs the coordinator one read
            of the checkpoint. None takes ``config.digest``.
        process_group: Group of the ranks that save; None takes the default group, if there is one.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        A handle. Without ``fast_saving`` the save is done. With it, ``handle.staged`` says when tensors on devices may
        change, and ``handle.committed.result()`` waits for the end and raises if the save failed.

    Raises:
        ConfigError: The arguments do not fit; it is a ValueError.
        InvalidPlanError: A parameter of an optimizer is not in the model, or is in two optimizers or groups.
        UnsupportedError: An optimizer keeps state that belongs to no parameter, or its own ``state_dict`` is not by
            parameter. Or modules under FSDP1 have hooks or methods of their own for state dicts.
        CheckpointError: The save failed on all ranks; see ``save_state_dict``.
    """
    require(FRAMEWORKS)
    turn = next_turn(process_group, False, "save")
    set_logging_level()
    role = check_role(role)
    config = config or Config.from_env()
    if digest is not None:
        config = dataclasses.replace(config, digest=digest)
    if role and config.on_staging_busy == "wait":
        config = dataclasses.replace(config, on_staging_busy="double_buffer")  # another role's state may be staged
    root = folder_of_role(known(location(ckpt_path), config), role)
    tracked = None if global_steps is None or ignore_append_global_steps_to_folder else (root, global_steps)
    request = _Request(
        path=root if tracked is None else step_folder(*tracked),
        checkpoint_state=checkpoint_state,
        framework=framework,
        global_steps=global_steps,
        tracked=tracked,
        callback=callback,
        role=role,
        is_decomposed=save_decomposed_model_optimizer,
        irregular=irregular,
        extra_state_policy=extra_state_policy,
        choice=KeyChoice(include, exclude),
        overwrite=overwrite,
        process_group=process_group,
        config=config,
    )
    return _save_in_background(request, turn) if fast_saving else _save_now(request, turn)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What ``save`` was asked for; its docstring describes the arguments.

    Attributes:
        path: Folder of the parts.
        tracked: Folder of the tracker, and the step to write to it. None writes no tracker.
        is_decomposed: ``save_decomposed_model_optimizer``.
        choice: Which keys of the model are saved.
    """

    path: Place
    checkpoint_state: Mapping[str, Any]
    framework: str
    global_steps: int | None
    tracked: tuple[Place, int] | None
    callback: Callable[[], object] | None
    role: str
    is_decomposed: bool
    irregular: str
    extra_state_policy: Policy
    choice: KeyChoice
    overwrite: bool
    process_group: dist.ProcessGroup | None
    config: Config

    def check(self) -> CheckpointState:
        """Refuses arguments that do not fit, and returns the live objects."""
        _background.raise_unseen()
        step = self.global_steps
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise ConfigError(f"global_steps={step!r}: must be an int >= 0")
        if self.callback is not None and not callable(self.callback):
            raise ConfigError(f"callback={self.callback!r}: must be callable without arguments")
        check_policy(self.extra_state_policy)
        if self.irregular not in _IRREGULAR:
            names, near = " or ".join(map(repr, _IRREGULAR)), did_you_mean(self.irregular, _IRREGULAR)
            near = "; 'exchange' is what 'merge' was" if self.irregular == "merge" else near
            raise ConfigError(f"irregular={self.irregular!r}: must be {names}{near}")
        return CheckpointState.of(self.checkpoint_state, self.framework)

    def own_group(self, use: str) -> dist.ProcessGroup | None:
        """Returns a group of our own for ``use``; None for a process that saves alone."""
        log = ("save", str(self.path))
        return own_group(self.process_group, False, use + self.role, self.config.stall_timeout_s, log)


def _save_now(request: _Request, turn: CallOrder | None) -> SaveHandle[CheckpointReport]:
    saving = _Saving(request, request.own_group("calls"), turn)
    # Earlier saves must be committed first, so that the tracker never goes back to an older step.
    _background.wait_for_queue(request.role)
    try:
        values = saving.collect()
    except Exception as error:
        report = saving.fail(error)
    else:
        report = saving.commit(values)
    staged: Future[None] = Future()
    staged.set_result(None)
    committed: BackgroundFuture[CheckpointReport] = BackgroundFuture()
    committed.set_result(report)
    return SaveHandle(str(request.path), staged, committed, saving.cancel)


def _save_in_background(request: _Request, turn: CallOrder | None) -> SaveHandle[CheckpointReport]:
    group = request.own_group("background")
    saving = _Saving(request, group, turn)
    handle = save_in_background(
        str(request.path),
        saving.collect,
        saving.commit,
        saving.fail,
        saving.cancel,
        request.config,
        is_alone=group is None,
        queue=request.role,
        in_parts=lambda key: saving.is_in_parts(key.partition(".")[0]),
    )
    keep_watching(group, handle.committed)
    handle.memory = saving.in_memory
    return handle


def _values(
    state: CheckpointState, model: ModuleState, policy: Policy, group: dist.ProcessGroup | None
) -> tuple[dict[str, Any], dict[str, Layout]]:
    """Returns what this rank saves, by part, and the layouts of the optimizers.

    The tensors share the memory of the live objects.
    """
    values: dict[str, Any] = {"model": model.values}
    layouts: dict[str, Layout] = {}
    if state.optimizers:
        optimizers = OptimizerState(state.model, state.optimizers, model.units)
        values["optimizer"], layouts = optimizers.values(), optimizers.layouts()
    if state.extra_state is not None:
        values["extra_state"] = saved_values(state.extra_state, policy, 0 if group is None else group.rank())
    return values, layouts


class _Saving:
    """One save of several parts: ``collect``, and then ``commit``, which with ``fast_saving`` gets staged copies.

    Args:
        request: What to save, where and how.
        group: Group of our own, for all exchanges of the save; None saves alone.
        turn: Number of this call, by which ranks notice that they are out of step.
    """

    def __init__(self, request: _Request, group: dist.ProcessGroup | None, turn: CallOrder | None) -> None:
        self._request = request
        self._path = request.path
        self._group = group
        self._turn = turn
        self._is_first = group is None or group.rank() == 0
        self._writers: dict[str, BcpWriter] = {}
        self._arguments: dict[str, object] = {}  # the same on all ranks
        # Pairs of part and key for which only the value of the first rank that has it is saved.
        self._each_ranks_own: Sequence[tuple[str, str]] = ()
        self._layouts: dict[str, Layout] = {}  # of what this rank's optimizers hold
        self._description: dict[str, Any] = {}
        self._unmatched: tuple[str, ...] = ()  # patterns that match no key of the model on this rank
        self.in_memory: Future[SaveReport] | None = Future() if is_in_memory(str(request.path)) else None

    def collect(self) -> dict[str, Any]:
        """Returns what this rank saves, by part. The tensors share the memory of the live objects."""
        request = self._request
        if request.is_decomposed:
            state = request.check()
        else:  # FSDP gathers below, and would wait for a rank whose check failed
            state = all_together(request.own_group("calls"), "save", str(self._path), request.check)
        # This comes first because it may be collective: FSDP1's own state dict gathers.
        model = ModuleState(state.model, request.is_decomposed)
        if self._group is not None:
            model.check_ranks([*ranks_of(self._group)])
        self._begin(state, tied_names(state.model, model.units))
        values, self._layouts = _values(state, model, request.extra_state_policy, self._group)
        if request.choice:
            values["model"], _, self._unmatched = request.choice.chosen(model.values, None)
        self._each_ranks_own = [
            *(("model", key) for key in model.each_ranks_own() if key in values["model"]),
            *(("extra_state", key) for key in values.get("extra_state", {}) if key in (state.extra_state or {})),
        ]
        return values

    def _begin(self, state: CheckpointState, tied: list[list[str]]) -> None:
        """Makes the writers of the parts. A description goes into each of them; the coordinator's is stored."""
        request = self._request
        policy = request.extra_state_policy
        is_given = {"model": True, "optimizer": bool(state.optimizers), "extra_state": state.extra_state is not None}
        names = [part for part in PARTS if is_given[part]]
        self._description = description = {
            "save": uuid.uuid4().hex,
            "framework": request.framework,
            "role": request.role,
            "global_step": request.global_steps,
            "world_size": 1 if self._group is None else self._group.size(),
            "extra_state_policy": policy if isinstance(policy, str) else {**policy},
            "tied": tied,
            "parts": names,
        }
        self._arguments = {
            "checkpoint_state": names,
            "global_steps": request.global_steps,
            "extra_state_policy": description["extra_state_policy"],
            "include, exclude": [*request.choice.include, "", *request.choice.exclude],
            "overwrite": request.overwrite,
            "irregular": request.irregular,
        }
        if not request.overwrite and self._is_first:
            self._refuse_existing()
        for part in names:
            self._writers[part] = BcpWriter(
                below(self._path, part),
                overwrite=request.overwrite,
                user_metadata={"bytecheckpoint": description},
                config=request.config,
            )
        self._writers["model"].in_memory = self.in_memory or Future()

    def _refuse_existing(self) -> None:
        """Refuses an existing checkpoint before any part is committed. The writers check again for concurrent saves."""
        there = [part for part in PARTS if folder_at(below(self._path, part)).has(".metadata")]
        if there:
            raise CheckpointExistsError(
                f"save({self._path}): there is a checkpoint, of {' and '.join(there)}, and overwrite=False: save "
                "another step, or pass overwrite=True",
                str(self._path),
            )

    def commit(self, values: dict[str, Any]) -> CheckpointReport:
        """Writes and commits all parts in this thread, then publishes them. Collective."""
        agree(self._group, "save", str(self._path), self._arguments, turn=self._turn)
        if self._request.choice:
            refuse_unmatched(
                gathered(self._group, "save", str(self._path), self._unmatched) if self._group else [self._unmatched]
            )
        self._record_layouts()
        reports = self._write_parts(self._exchanged(values), staging_of(values))
        self._publish()
        return CheckpointReport(path=str(self._path), parts=reports)

    def _record_layouts(self) -> None:
        """Puts the layouts of all ranks into the description of the optimizers. Collective, if there are such."""
        if "optimizer" not in self._writers:
            return
        # A rank with one row of a tensor cannot tell in which order the others have it.
        held = {(key, bool(layout.order)): layout for key, layout in self._layouts.items()}
        of_ranks = joined(self._group, "save", str(self._path), held)
        layouts = {key: layout for (key, _), layout in sorted(of_ranks.items(), key=lambda item: item[0])}
        if layouts:
            description = {**self._description, LAYOUTS: recorded_layouts(layouts)}
            self._writers["optimizer"].user_metadata = json.dumps({"bytecheckpoint": description})

    def _exchanged(self, values: dict[str, Any]) -> dict[str, Any]:
        """Leaves out what another rank saves, and exchanges pieces of rows if ``irregular`` says so. Collective."""
        first = held_first(self._group, "save", str(self._path), self._each_ranks_own)
        for part, key in {*self._each_ranks_own} - first:
            del values[part][key]
        if self._request.irregular == "exchange":
            return with_regular_blocks(values, self._group, str(self._path))
        return values

    def is_in_parts(self, part: str) -> bool:
        """Returns whether tensors of subclasses are saved by their parts. Extra state is not taken apart."""
        return part != "extra_state" and self._request.config.tensor_subclasses == "parts"

    def _write_parts(self, values: dict[str, Any], staging: StagingTime | None) -> dict[str, SaveReport]:
        """Commits each part as a checkpoint of its own, ``model`` last. Collective.

        The first report has the time of ``staging``, which was for all parts.

        Raises:
            CheckpointError: A part could not be saved.
        """
        reports: dict[str, SaveReport] = {}
        tiers = ("memory", "disk") if self._request.overwrite else ("disk", "memory")  # a refusal changes nothing
        for tier in tiers if self.in_memory is not None else ("",):
            for number, (part, writer) in enumerate(self._writers.items()):
                if tier == "disk" and not writer.goes_on:
                    continue
                is_flat = part == "extra_state"  # flattening would take its dicts apart, and return their keys as text
                subclasses = "parts" if self.is_in_parts(part) else "opaque"
                config = dataclasses.replace(self._request.config, tensor_subclasses=subclasses)
                planner = BcpSavePlanner(not is_flat, not is_flat, config=config)
                try:
                    of_part = None if number else staging
                    report = run_save(values[part], writer, planner, self._group, self._turn, of_part, tier)
                    if tier == "memory" and cast(Any, report) is None:  # a step without a part of it is none
                        self._leave_memory(part)
                        break
                    reports[part] = reports.get(part, report) if tier == "memory" else report
                except CheckpointError as error:
                    if number:
                        error.add_note(
                            f"save({self._path}): this save has already committed {' and '.join(reports)}, so the "
                            "folder no longer loads as a whole: save again, or go on from another step"
                        )
                    raise
        return reports

    def _leave_memory(self, part: str) -> None:
        """Frees what is in memory of the save: a part of it is not. It goes on to the disk."""
        forget_in_memory(str(self._path))
        if self.in_memory is not None and not self.in_memory.done():
            self.in_memory.set_exception(StorageError(f"save({self._path}): {part} is not in memory", str(self._path)))

    def _publish(self) -> None:
        """Names the step in the tracker and calls the callback. Collective."""
        tracked, callback = self._request.tracked, self._request.callback
        if tracked is not None and self._writers["model"].goes_on:  # else there is nothing on the disk to track
            step = functools.partial(write_tracker, *tracked) if self._is_first else lambda: None
            all_together(self._group, "save", str(self._path), step)
        if callback is None or not self._is_first:
            return
        try:
            callback()
        except Exception as error:
            warnings.warn(
                f"bytecheckpoint: {self._path} is committed; its callback raised {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def fail(self, error: Exception) -> CheckpointReport:
        """Tells the other ranks, which are in ``commit``, why this rank cannot save, and raises. Collective."""
        agree(self._group, "save", str(self._path), {}, error, turn=self._turn)
        raise error

    def cancel(self) -> None:
        """Cancels the save as ``BcpWriter.cancel`` does. Parts that are committed stay."""
        for writer in self._writers.values():
            writer.cancel()
