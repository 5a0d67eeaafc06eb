# SPDX-License-Identifier: Apache-2.0
"""``bytecheckpoint.load``: loads what ``bytecheckpoint.save`` saved into live objects of any framework."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bytecheckpoint import _C
from bytecheckpoint.checkpoint.in_use import Hold, hold
from bytecheckpoint.checkpoint.local_path import path_to_read
from bytecheckpoint.checkpoint.parts import PARTS, description_in, different_saves
from bytecheckpoint.checkpoint.roles import check_role, folder_of_role, known_roles
from bytecheckpoint.checkpoint.small_files import storage_errors
from bytecheckpoint.checkpoint.steps import scan_steps
from bytecheckpoint.checkpoint.wrong_path import refuse_reference
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._direct import run_load
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.distributed.agreement import agree, all_together, held_by_none
from bytecheckpoint.distributed.groups import own_group
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidPlanError,
    KeyMismatchError,
    ShapeMismatchError,
    StorageError,
)
from bytecheckpoint.probes.of_torch import FRAMEWORKS
from bytecheckpoint.probes.probe import require
from bytecheckpoint.reference_variables import set_logging_level
from bytecheckpoint.report import LoadReport
from bytecheckpoint.training_state.checkpoint_state import CheckpointState
from bytecheckpoint.training_state.extra_state import ExtraStateLoad
from bytecheckpoint.training_state.module_state import ModuleState
from bytecheckpoint.training_state.optimizer_state import OptimizerLoad, OptimizerState
from bytecheckpoint.training_state.stored import Stored
from bytecheckpoint.training_state.tracker import step_folder

__all__ = ["LoadResult", "load"]

# A message names no more keys than this.
_MOST_NAMES = 20


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What was loaded.

    Attributes:
        path: Folder of the parts.
        missing_keys: Keys of this rank's objects that the checkpoint does not have; their values are as before. Each is
            written as part and key, for example ``model: layer.weight``. Empty if ``strict``.
        unexpected_keys: Keys of the checkpoint that no rank asked for, or that the model did not take. Empty if
            ``strict``.
        parts: Report of each part, by name.
    """

    path: str
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    parts: dict[str, LoadReport] = field(default_factory=dict)


def load(
    ckpt_path: str | os.PathLike[str] | None,
    checkpoint_state: MutableMapping[str, Any],
    framework: str,
    fast_loading: bool = False,
    strict: bool = True,
    role: str | None = None,
    *,
    load_decomposed_model_optimizer: bool = True,
    process_group: dist.ProcessGroup | None = None,
    config: Config | None = None,
) -> LoadResult:
    """Loads what ``save`` saved, under any framework and on any number of ranks, into live objects.

    Collective over ``process_group``. Models and optimizers are filled in place. States that an optimizer does not have
    yet are made, without a step. ``checkpoint_state["extra_state"]`` is replaced by this rank's share of the saved one.

    If a model has load hooks, or its own ``load_state_dict``, ``_load_from_state_dict`` or ``set_extra_state``, its
    ``load_state_dict`` is called with the loaded values after the keys have been compared. The same holds for an
    optimizer.

    Args:
        ckpt_path: Folder of one step, as ``latest`` and ``find_latest_ckpt_path`` return it. None, which they return if
            there is no checkpoint, is a ``CheckpointNotFoundError``.
        checkpoint_state: The live objects; see ``save``. Parts that are not in it are not loaded.
        framework: Framework of the live objects, not of the checkpoint; see ``save``.
        fast_loading: Ignored here: every load is pipelined and reads all files at once.
        strict: Whether keys, shapes and dtypes must be the same on both sides. If False, keys that one side lacks are
            left out and listed in the result, tensors of another dtype are converted, and extra state that belonged to
            other ranks stays as it was passed.
        role: The role that it was saved with.
        load_decomposed_model_optimizer: For ``fsdp`` only. True fills the flat parameters in place, without
            communication. False loads the model by FSDP's own sharded state dict. Both load what either kind of save
            wrote.
        process_group: Group of the ranks that load; None takes the default group, if there is one.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        Which keys were missing or unexpected, and a report of each part.

    Raises:
        CheckpointNotFoundError: The checkpoint or a part of it does not exist. The message says which steps there are.
        KeyMismatchError: With ``strict``, keys differ, or a model does not take what its own ``state_dict`` has. In any
            case if parameters of one group were saved with different options.
        InvalidPlanError: A parameter is not in the model, or is in two optimizers. Or tensors of the model are on the
            meta device; the message names them.
        UnsupportedError: An optimizer keeps state that belongs to no parameter, or see ``save``.
        ShapeMismatchError: A tensor has another shape or, with ``strict``, another dtype.
        CheckpointChangedError: The parts are of different saves.
        CheckpointError: The load failed on all ranks; see ``load_state_dict``.
    """
    require(FRAMEWORKS)
    set_logging_level()
    role = check_role(role)
    config = config or Config.from_env()
    group = own_group(process_group, False, "calls" + role, config.stall_timeout_s, ("load", str(ckpt_path)))

    holds: list[Hold] = []  # `prune` in this process does not remove what is held

    def begin() -> _Loading:
        state = CheckpointState.of(checkpoint_state, framework)
        folder = _folder(ckpt_path, role)
        holds.extend(hold(folder / part) for part in PARTS)
        return _Loading(folder, state, config, group, strict)

    try:
        loading = all_together(group, "load", str(ckpt_path), begin)
        loading.check_alike()

        def model_state() -> ModuleState:
            return ModuleState(loading.state.model, load_decomposed_model_optimizer)

        # FSDP1's own state dict is already a collective of all ranks, so its errors need no exchange of ours.
        is_local = load_decomposed_model_optimizer
        model = all_together(group, "load", str(ckpt_path), model_state) if is_local else model_state()
        all_together(group, "load", str(ckpt_path), lambda: loading.plan(model))
        loading.check_unexpected()
        loading.read()
        all_together(group, "load", str(ckpt_path), loading.finish)
    finally:
        for held in holds:
            held.end()
    if loading.state.extra_state is not None:
        checkpoint_state["extra_state"] = loading.extra_state
    return loading.result()


class _Loading:
    """One load of several parts."""

    def __init__(
        self, folder: Path, state: CheckpointState, config: Config, group: dist.ProcessGroup | None, strict: bool
    ) -> None:
        self.folder, self.state, self.config, self.group, self.strict = folder, state, config, group, strict
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.reports: dict[str, LoadReport] = {}
        self.values: dict[str, dict[str, Any]] = {}
        self.asked: dict[str, set[str]] = {}  # keys of the checkpoint that this rank asks for, by part
        self.asides: set[str] = set()  # keys that were loaded early, to know what to ask for
        self.extra_state: dict[str, Any] = {}
        self._was_changed = False
        wanted = {"model": True, "optimizer": bool(state.optimizers), "extra_state": state.extra_state is not None}
        parts = [part for part, is_wanted in wanted.items() if is_wanted]
        self.stored = {"model": self._open("model")}
        self.description = description_in(self.stored["model"].user_metadata)
        self.stored.update((part, self._open(part)) for part in parts if part != "model")
        descriptions = {part: description_in(stored.user_metadata) for part, stored in self.stored.items()}
        mixed = different_saves(descriptions)
        if mixed:
            raise CheckpointChangedError(
                f"load({folder}): the parts are of different saves: {mixed}. A save over this folder was interrupted, "
                "or is under way: load another step, or the model alone",
                str(folder),
            )

    def _open(self, part: str) -> Stored:
        # The folder may hold the part of an older save, while the newest save had no such part.
        is_of_save = part in self.description.get("parts", [part]) if part != "model" else True
        try:
            stored = Stored(self.folder / part, self.config)
        except CheckpointNotFoundError as error:
            raise (error if part == "model" else self._no(part)) from error
        if not is_of_save and description_in(stored.user_metadata):
            raise self._no(part)
        return stored

    def _no(self, part: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"load({self.folder}): it was saved without {part}: leave '{part}' out of checkpoint_state, or load a "
            "checkpoint that was saved with it",
            str(self.folder / part),
        )

    def check_alike(self) -> None:
        """Checks that all ranks want the same parts and have found the same save of them. Collective."""
        arguments = {"the parts to load": [*self.stored], "strict": self.strict}
        agree(self.group, "load", str(self.folder), arguments)
        saves = {part: description_in(stored.user_metadata).get("save") for part, stored in self.stored.items()}
        agree(self.group, "load", str(self.folder), {"the save that is there": saves}, None, _changed)

    # Each of the following methods is either local to a rank or collective; the two kinds take turns.

    def plan(self, model: ModuleState) -> None:
        """Compares what this rank wants with what the checkpoint has, and collects what to load."""
        self._model = model
        self._take("model", model.values)
        if "optimizer" in self.stored:
            stored = self.stored["optimizer"]
            self._optimizer: OptimizerLoad = OptimizerState(
                self.state.model, self.state.optimizers, model.units
            ).plan_load(stored, self._groups(stored))
            self.missing += [f"optimizer: state.{fqn}" for fqn in self._optimizer.missing]
            self._take("optimizer", self._optimizer.values)
        if "extra_state" in self.stored:
            rank, size = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
            saved_ranks = self.description.get("world_size", size)
            policy = self.description.get("extra_state_policy", "own")
            self._extra = ExtraStateLoad(self.stored["extra_state"], policy, saved_ranks, rank, size)
            if self.strict:
                self._extra.check(saved_ranks)
            self.missing += [f"extra_state: {key}" for key in self._extra.unavailable]
            self._take("extra_state", self._extra.values)
        if self.strict and self.missing:
            raise KeyMismatchError(
                f"load({self.folder}): to be loaded, but not in the checkpoint: {_listed(self.missing)}; "
                "strict=False leaves them as they are"
            )
        model.before_load()

    def _take(self, part: str, values: dict[str, Any]) -> None:
        stored = self.stored[part]
        flat, ways = (values, {}) if part == "extra_state" else _C.flatten_state_dict(values)
        if part != "extra_state":
            self._refuse_meta(part, flat)
        absent = [key for key in flat if key not in stored]
        self.missing += [f"{part}: {key}" for key in absent]
        without = {ways[key][0] if key in ways else key for key in absent}
        self.values[part] = {key: value for key, value in values.items() if key not in without}
        self.asked[part] = flat.keys() - set(absent)
        if not self.strict:
            return
        others = []
        for key, value in flat.items():
            found = stored.get(key)
            if found is not None and isinstance(value, torch.Tensor) and found.dtype not in (None, value.dtype):
                others.append(f"'{key}' is {value.dtype}, stored is {found.dtype}")
        if others:
            raise ShapeMismatchError(
                f"load({self.folder / part}): other dtypes: {_listed(others)}; strict=False converts them, and "
                "model.to(dtype) before the load keeps every bit"
            )

    def _refuse_meta(self, part: str, flat: dict[str, Any]) -> None:
        """Refuses tensors on the meta device, into which nothing can be loaded."""
        keys = [
            key
            for key, value in flat.items()
            # A ShardedTensor cannot always answer `is_meta`, but it always has memory.
            if isinstance(value, torch.Tensor) and not isinstance(value, _compat.ShardedTensor) and value.is_meta
        ]
        if keys:
            raise InvalidPlanError(
                f"load({self.folder / part}): on the meta device, which holds no elements: {_listed(keys)}; give the "
                "model memory before the load: model.to_empty(device=...)"
            )

    def _groups(self, stored: Stored) -> dict[str, str]:
        """Returns the prefix of the options of each parameter, if the checkpoint numbers its parameter groups.

        Torch's state dicts of optimizers do that. For checkpoints of ``save`` the result is empty.
        """
        keys = [key for key in stored if key.startswith("param_groups.") and key.endswith(".params")]
        numbers = [key.split(".")[1] for key in keys if key.count(".") == 2 and key.split(".")[1].isdecimal()]
        members: dict[str, Any] = {f"param_groups.{number}.params": None for number in numbers}
        if members:
            self.asides.update(members)
            run_load(members, BcpReader(stored.path, config=self.config), _planner(is_flat=False), None, None)
        return {fqn: key.removesuffix(".params") for key, fqns in members.items() for fqn in fqns}

    def check_unexpected(self) -> None:
        """Finds the keys that no rank asks for; with ``strict`` they are an error. Collective."""
        for part in ("model", "optimizer"):
            if part not in self.stored:
                continue
            keys = [*self.stored[part]]
            is_asked = [key in self.asked[part] or key in self.asides for key in keys]
            nobodys = held_by_none(self.group, "load", str(self.folder), is_asked)
            self.unexpected += [f"{part}: {keys[position]}" for position in nobodys]
        if self.strict and self.unexpected:
            raise KeyMismatchError(
                f"load({self.folder}): in the checkpoint, but not asked for: {_listed(self.unexpected)}; "
                "strict=False leaves them out"
            )

    def read(self) -> None:
        """Reads all parts. Collective."""
        for part, values in self.values.items():
            reader = BcpReader(self.folder / part, config=self.config)
            self.reports[part] = run_load(values, reader, _planner(part == "extra_state"), self.group, None)
            self._was_changed |= reader.user_metadata != self.stored[part].user_metadata

    def finish(self) -> None:
        """Passes to the live objects what was not loaded in place."""
        if self._was_changed:
            raise _changed(f"load({self.folder}): a newer save was committed meanwhile: load again", str(self.folder))
        untaken = [f"model: {name}" for name in self._model.after_load(self.values["model"])]
        if self.strict and untaken:
            raise KeyMismatchError(
                f"load({self.folder}): the model has {_listed(untaken)} in its state_dict(), and its load_state_dict() "
                "does not take it; strict=False leaves it out"
            )
        self.unexpected += untaken
        if "optimizer" in self.values:
            self._optimizer.values.update(self.values["optimizer"])
            self._optimizer.finish()
        if "extra_state" in self.values:
            self._extra.values.update(self.values["extra_state"])
            given = self.state.extra_state or {}
            kept = {key: value for key, value in given.items() if key in self._extra.unavailable}
            self.extra_state = {**kept, **self._extra.loaded()}

    def result(self) -> LoadResult:
        return LoadResult(
            path=str(self.folder),
            missing_keys=tuple(self.missing),
            unexpected_keys=tuple(self.unexpected),
            parts=self.reports,
        )


def _planner(is_flat: bool) -> BcpLoadPlanner:
    planner = BcpLoadPlanner(flatten_state_dict=not is_flat, flatten_sharded_tensors=not is_flat)
    planner.warns = False  # keys have been compared already, and an error or the result names the differences
    return planner


def _changed(message: str, path: str) -> CheckpointChangedError:
    return CheckpointChangedError(message, path)


def _folder(ckpt_path: str | os.PathLike[str] | None, role: str) -> Path:
    """Returns the folder of the parts: ``ckpt_path`` itself or, with a role, the role's folder in the run.

    Raises:
        CheckpointNotFoundError: No model was saved there. The message says what was saved nearby.
        UnsupportedError: ByteCheckpoint 0.0.2 or 0.0.3 wrote the checkpoint there.
        StorageError: The file system refused to look there.
        ConfigError: The path is a URL.
    """
    path = path_to_read(ckpt_path)
    tried = [path]
    if role:
        tried += [folder_of_role(path, role), folder_of_role(path.parent, role) / path.name]
        tried = [folder for folder in tried if role in (folder.name, folder.parent.name)]
    with storage_errors("load", path):
        for folder in tried:
            if (folder / "model").is_dir():
                return folder
    refuse_reference(path, "load")
    of_role = f" of role {role!r}" if role else ""
    near = [path, path.parent, path.parent.parent] if role else [path, path.parent]
    hint = _what_there_is([folder_of_role(folder, role) for folder in near])
    if os.path.lexists(path / ".metadata"):
        hint = f", but one of a state dict, which load_state_dict loads{hint}"
    raise CheckpointNotFoundError(
        f"load({path}): no checkpoint of bytecheckpoint.save{of_role} in {' or '.join(map(str, tried))}{hint}",
        str(path),
    )


def _what_there_is(folders: Sequence[Path]) -> str:
    """Returns a hint for a user who asked for a step that does not exist."""
    for folder in folders:
        steps = _steps_in(folder)
        if steps:
            return (
                f"; {folder} has the steps {', '.join(map(str, steps[-_MOST_NAMES:]))}: pass "
                f"'{step_folder(folder, steps[-1])}', or what find_latest_ckpt_path gives"
            )
    for folder in folders:
        roles = [role for role in known_roles() if _steps_in(folder_of_role(folder, role))]
        if roles:
            return f"; {folder} has steps of the roles {', '.join(roles)}: pass role={roles[0]!r}"
    return (
        ": pass the folder of a step, as find_latest_ckpt_path gives it; a plain DCP checkpoint loads with "
        "load_state_dict"
    )


def _steps_in(folder: Path) -> list[int]:
    try:
        return [step.step for step in scan_steps(folder, pattern=r"global_step_(\d+)")]
    except StorageError:
        return []  # it is not a folder, or cannot be listed


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
