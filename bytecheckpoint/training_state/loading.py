# SPDX-License-Identifier: Apache-2.0
"""``bytecheckpoint.load``: loads what ``bytecheckpoint.save`` saved into live objects of any framework."""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bytecheckpoint.checkpoint.roles import check_role
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.direct_calls import run_load
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.dcp.tiers_to_load import meet_to_load
from bytecheckpoint.distributed.agreement import agree, all_together, gathered, held_by_none
from bytecheckpoint.distributed.groups import own_group
from bytecheckpoint.distributed.launch import refuse_unaware_rank
from bytecheckpoint.errors import CheckpointChangedError, InvalidPlanError, KeyMismatchError, ShapeMismatchError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.load_spec.wrapped_names import spec_that_loads
from bytecheckpoint.native import _C
from bytecheckpoint.per_rank import RankStateLoad
from bytecheckpoint.probes.of_torch import FRAMEWORKS
from bytecheckpoint.probes.probe import require
from bytecheckpoint.reference_variables import set_logging_level
from bytecheckpoint.report import LoadReport
from bytecheckpoint.storage.in_use import Hold, hold
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.storage.paths import Place, below
from bytecheckpoint.tensors.casts import refused
from bytecheckpoint.tensors.subclass_parts import StoredKeys, with_stored_parts
from bytecheckpoint.training_state.checkpoint_state import CheckpointState
from bytecheckpoint.training_state.folder_to_load import folder_to_load
from bytecheckpoint.training_state.module_extra_states import extra_states_as_stored
from bytecheckpoint.training_state.module_state import ModuleState
from bytecheckpoint.training_state.optimizer_state import OptimizerLoad, OptimizerState
from bytecheckpoint.training_state.stored import Stored
from bytecheckpoint.training_state.stored_parts import StoredParts

__all__ = ["LoadResult", "load"]


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
    strict: bool | str = True,
    role: str | None = None,
    *,
    load_decomposed_model_optimizer: bool = True,
    process_group: dist.ProcessGroup | None = None,
    spec: LoadSpec | None = None,
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
        strict: As in ``LoadSpec``: whether keys must be the same on both sides (``True``), one side may lack some
            (``"checkpoint"``, ``"model"``), or either may (``False``). What is lacking is left out and listed in the
            result; extra state that belonged to other ranks stays as it was passed. Dtypes must be the same, but with
            ``False``, which converts. Shapes must be in any case.
        role: The role that it was saved with.
        load_decomposed_model_optimizer: For ``fsdp`` only. True fills the flat parameters in place, without
            communication. False loads the model by FSDP's own sharded state dict. Both load what either kind of save
            wrote.
        process_group: Group of the ranks that load; None takes the default group, if there is one.
        spec: What to load into the model, under which names, in which form; see ``LoadSpec``. For the model its
            ``strict`` and ``cast`` take the place of ``strict``. Other parts are loaded under the names that they have.
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
        ConfigError: The arguments do not fit. Or a launcher has started several ranks, but there is no process group,
            so it is not known which rank's extra state to load.
        ShapeMismatchError: A tensor has another shape or, with ``strict``, another dtype.
        CheckpointChangedError: The parts are of different saves.
        CheckpointError: The load failed on all ranks; see ``load_state_dict``.
    """
    require(FRAMEWORKS)
    set_logging_level()
    role = check_role(role)
    config = config or Config.from_env()
    group = own_group(process_group, False, "calls" + role, config.stall_timeout_s, ("load", str(ckpt_path)))
    meet_to_load(ckpt_path, group, "load", config)
    loading = _Loading(group, strict, load_decomposed_model_optimizer, config, spec)
    try:
        loading.open(ckpt_path, role, checkpoint_state, framework)
        loading.compare()
        loading.read()
        loading.finish()
    finally:
        loading.close()
    if loading.extra_state is not None:
        checkpoint_state["extra_state"] = loading.extra_state
    return loading.result()


class _Loading:
    """One load of several parts: ``open``, ``compare``, ``read`` and ``finish``, each of which is collective.

    A step that a rank takes by itself ends on all ranks with the same error, or without one.

    Args:
        group: Group of our own, for all exchanges of the load; None loads alone.
        strict: ``strict`` of ``load``.
        is_decomposed: ``load_decomposed_model_optimizer`` of ``load``.
        config: Settings.
        spec: What to load into the model; None loads it as it is.

    Attributes:
        extra_state: What ``finish`` made of the extra state; None if it was not loaded.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        strict: bool | str,
        is_decomposed: bool,
        config: Config,
        spec: LoadSpec | None,
    ) -> None:
        self._group = group
        of_keys = LoadSpec(strict=strict, cast="any" if strict is False else "same")
        self._strict = strict
        self._spec = spec
        self._specs = dict.fromkeys(PARTS, of_keys)
        self._specs["model"] = spec or self._specs["model"]
        self._is_decomposed = is_decomposed
        self._config = config
        self._holds: list[Hold] = []  # `prune` in this process does not remove what is held
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._casts: list[str] = []  # those that are refused
        self._reports: dict[str, LoadReport] = {}
        self._values: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, set[str]] = {}  # keys of the checkpoint that this rank asks for, by part
        self._read_early: set[str] = set()  # keys that were loaded while comparing, to know what to ask for
        self.extra_state: dict[str, Any] | None = None

    def open(
        self,
        ckpt_path: str | os.PathLike[str] | None,
        role: str,
        checkpoint_state: MutableMapping[str, Any],
        framework: str,
    ) -> None:
        """Opens the parts, and checks that all ranks want the same parts and have found the same save of them."""

        def open_parts() -> None:
            self._state = state = CheckpointState.of(checkpoint_state, framework)
            if self._group is None and state.extra_state is not None:  # what it gets of this depends on its rank
                refuse_unaware_rank("load", str(ckpt_path))
            self._folder = folder_to_load(ckpt_path, role, self._config)
            self._holds += [hold(self._place_of(part)) for part in PARTS]
            wanted = {"model": True, "optimizer": bool(state.optimizers), "extra_state": state.extra_state is not None}
            self._stored = StoredParts(
                self._folder, [part for part, is_wanted in wanted.items() if is_wanted], self._config, self._spec
            )

        all_together(self._group, "load", str(ckpt_path), open_parts)
        self._path = str(self._folder)
        agree(self._group, "load", self._path, {"the list of parts to load": [*self._stored], "strict": self._strict})
        saves = {"the id of the save at this path": self._stored.save_ids}
        agree(self._group, "load", self._path, saves, None, CheckpointChangedError)

    def close(self) -> None:
        """Lets other calls of this process remove the checkpoint again."""
        for held in self._holds:
            held.end()

    def compare(self) -> None:
        """Compares what the ranks want with what the checkpoint has, and collects what to read."""
        if self._is_decomposed:
            self._model = all_together(self._group, "load", self._path, self._model_state)
        else:  # FSDP1's own state dict is already a collective of all ranks, so its errors need no exchange of ours
            self._model = self._model_state()
        all_together(self._group, "load", self._path, self._collect)
        self._find_unexpected()
        self._refuse()
        self._model.before_load()

    def read(self) -> None:
        """Reads all parts into the values that ``compare`` has collected."""
        self._was_changed = False
        for part, values in self._values.items():
            reader = BcpReader(self._place_of(part), config=self._config)
            planner = _planner(part == "extra_state", self._spec if part == "model" else None)
            self._reports[part] = run_load(values, reader, planner, self._group, None)
            self._was_changed |= reader.user_metadata != self._stored[part].user_metadata

    def finish(self) -> None:
        """Passes to the live objects what was not loaded in place."""
        all_together(self._group, "load", self._path, self._pass_on)

    def result(self) -> LoadResult:
        """Returns what was loaded."""
        return LoadResult(
            path=self._path,
            missing_keys=tuple(self._missing),
            unexpected_keys=tuple(self._unexpected),
            parts=self._reports,
        )

    # What follows is local to a rank, but for `_find_unexpected` and `_refuse`.

    def _place_of(self, part: str) -> Place:
        return below(self._folder, part)

    def _model_state(self) -> ModuleState:
        return ModuleState(self._state.model, self._is_decomposed)

    def _collect(self) -> None:
        """Compares what this rank wants with what the checkpoint has, and collects what to load."""
        model = self._model
        self._collect_part("model", model.values)
        if "optimizer" in self._stored:
            stored = self._stored["optimizer"]
            self._optimizer: OptimizerLoad = OptimizerState(
                self._state.model, self._state.optimizers, model.units
            ).plan_load(stored, self._option_prefixes(stored))
            self._missing += [f"optimizer: state.{fqn}" for fqn in self._optimizer.missing]
            self._collect_part("optimizer", self._optimizer.values)
        if "extra_state" in self._stored:
            rank, size = (0, 1) if self._group is None else (self._group.rank(), self._group.size())
            saved_ranks = self._stored.description.get("world_size", size)
            policy = self._stored.description.get("extra_state_policy", "own")
            stored_extra = self._stored["extra_state"]
            self._extra = RankStateLoad(stored_extra, stored_extra.empty, policy, saved_ranks, rank, size)
            if self._specs["extra_state"].refuses_missing:
                self._extra.check("load with strict=False, which keeps what extra_state has under these keys")
            self._missing += [f"extra_state: {key}" for key in self._extra.unavailable]
            self._collect_part("extra_state", self._extra.values)

    def _way_out(self, lacking: list[str]) -> str:
        """Returns the clause that names the spec with which the model's keys would be found; "" if none is known."""
        names = [name.removeprefix("model: ") for name in lacking if name.startswith("model: ")]
        spec = (
            spec_that_loads(names, [*self._stored["model"]], self._model.values) if names and self._spec is None else ""
        )
        return spec and f"; {spec}"

    def _refuse(self) -> None:
        """Raises one error with all that differs on any rank and must not. Collective.

        Warns on the first rank of parts of which no rank finds anything, if that is allowed.

        Raises:
            KeyMismatchError: Keys differ. The message also names the dtypes that differ.
            ShapeMismatchError: Dtypes alone differ.
        """
        lacking = [name for name in self._missing if self._specs[name.partition(":")[0]].refuses_missing]
        casts = self._casts
        found = [part for part, keys in self._asked.items() if keys]
        empty = [part for part in self._asked if any(name.startswith(f"{part}: ") for name in self._missing)]
        if self._group is not None:
            of_ranks = gathered(self._group, "load", self._path, (lacking, casts, found, empty))
            lacking, casts, found, empty = (
                [*dict.fromkeys(itertools.chain(*lists))] for lists in zip(*of_ranks, strict=True)
            )
        left_over = [name for name in self._unexpected if self._specs[name.partition(":")[0]].refuses_unexpected]
        faults = []
        if lacking:
            faults.append(
                f"these are to be loaded, but not in the checkpoint: {listed(lacking)}; strict=False leaves them as "
                f"they are{self._way_out(lacking)}"
            )
        if left_over:
            faults.append(
                f"these are in the checkpoint, but not asked for: {listed(left_over)}; strict=False leaves them out"
            )
        if casts:
            faults.append(
                f"the stored dtypes differ: {listed(casts)}; strict=False converts them, and model.to(dtype) "
                "before the load keeps every bit"
            )
        if faults:
            kind = KeyMismatchError if lacking or left_over else ShapeMismatchError
            raise kind(f"load({self._folder}): {'; '.join(faults)}")
        without = [part for part in empty if part not in found]
        if without and (self._group is None or self._group.rank() == 0):
            warnings.warn(
                f"load({self._folder}): the checkpoint has nothing of what checkpoint_state has as "
                f"{listed([*map(repr, without)])}, which stays as it was; leave it out of checkpoint_state if that is "
                "meant, or give other names with spec=LoadSpec(rename=...)",
                RuntimeWarning,
                stacklevel=4,
            )

    def _collect_part(self, part: str, values: dict[str, Any]) -> None:
        stored = self._stored[part]
        if part == "model":  # a module is handed its extra state, which may have another size in each save
            values.update(extra_states_as_stored(stored, values, self._specs[part].as_stored_bytes))
        flat, tree_paths = (values, {}) if part == "extra_state" else _C.flatten_state_dict(values)
        if part != "extra_state":
            self._refuse_meta(part, flat)
            subclasses = _C.find_special_tensors(flat).subclasses
            keys = StoredKeys(stored.__contains__, stored.keys)
            flat, tree_paths, _ = with_stored_parts(flat, tree_paths, subclasses, keys)
        absent = [key for key in flat if key not in stored]
        self._missing += [f"{part}: {key}" for key in absent]
        without = {tree_paths[key][0] if key in tree_paths else key for key in absent}
        self._values[part] = {key: value for key, value in values.items() if key not in without}
        self._asked[part] = flat.keys() - set(absent)
        casts = []
        for key, value in flat.items():
            found = stored.get(key)
            if found is not None and isinstance(value, torch.Tensor) and found.dtype not in (None, value.dtype):
                casts.append((key, str(found.dtype).removeprefix("torch."), value.dtype))
        self._casts += [
            f"{part}: '{key}' is {to}, stored is torch.{dtype}" for key, dtype, to in refused(casts, self._specs[part])
        ]

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
                f"load({self._place_of(part)}): tensors on the meta device hold no elements: {listed(keys)}; give the "
                "model memory before the load: model.to_empty(device=...)"
            )

    def _option_prefixes(self, stored: Stored) -> dict[str, str]:
        """Returns the prefix of the options of each parameter, if the checkpoint numbers its parameter groups.

        Torch's state dicts of optimizers do that. For checkpoints of ``save`` the result is empty.
        """
        keys = [key for key in stored if key.startswith("param_groups.") and key.endswith(".params")]
        numbers = [key.split(".")[1] for key in keys if key.count(".") == 2 and key.split(".")[1].isdecimal()]
        members: dict[str, Any] = {f"param_groups.{number}.params": None for number in numbers}
        if members:
            self._read_early.update(members)
            run_load(members, BcpReader(stored.path, config=self._config), _planner(is_flat=False), None, None)
        return {fqn: key.removesuffix(".params") for key, fqns in members.items() for fqn in fqns}

    def _find_unexpected(self) -> None:
        """Finds the keys that no rank asks for. Collective."""
        for part in ("model", "optimizer"):
            if part not in self._stored:
                continue
            keys = [*self._stored[part]]
            is_asked = [key in self._asked[part] or key in self._read_early for key in keys]
            nobodys = held_by_none(self._group, "load", self._path, is_asked)
            self._unexpected += [f"{part}: {keys[position]}" for position in nobodys]

    def _pass_on(self) -> None:
        """Passes to the live objects what was not loaded in place."""
        if self._was_changed:
            raise CheckpointChangedError(
                f"load({self._folder}): a newer save was committed meanwhile: load again", str(self._folder)
            )
        untaken = [f"model: {name}" for name in self._model.after_load(self._values["model"])]
        if self._specs["model"].refuses_unexpected and untaken:
            raise KeyMismatchError(
                f"load({self._folder}): the model has {listed(untaken)} in its state_dict(), and its "
                "load_state_dict() does not take it; strict=False leaves it out"
            )
        self._unexpected += untaken
        if "optimizer" in self._values:
            self._optimizer.values.update(self._values["optimizer"])
            self._optimizer.finish()
        if "extra_state" in self._values:
            self._extra.values.update(self._values["extra_state"])
            given = self._state.extra_state or {}
            kept = {key: value for key, value in given.items() if key in self._extra.unavailable}
            self.extra_state = {**kept, **self._extra.loaded()}


def _planner(is_flat: bool, spec: LoadSpec | None = None) -> BcpLoadPlanner:
    planner = BcpLoadPlanner(
        flatten_state_dict=not is_flat,
        flatten_sharded_tensors=not is_flat,
        # Keys and dtypes have been compared already.
        spec=None if spec is None else dataclasses.replace(spec, strict=False, cast="any"),
    )
    planner.warns = False  # keys have been compared already, and an error or the result names the differences
    return planner
