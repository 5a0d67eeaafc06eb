# SPDX-License-Identifier: Apache-2.0
"""Lets Accelerate's ``save_state`` and ``load_state`` go through our engine: one call for each ``Accelerator``.

::

    from bytecheckpoint.integrations.accelerate import install

    accelerator = Accelerator(project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    install(accelerator)
    accelerator.load_state()  # the newest complete checkpoint, if there is one
    ...
    accelerator.save_state()  # returns when the state is copied to host memory
    ...
    accelerator.end_training()  # waits for the last save, and raises if it failed

Importing this module imports accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from bytecheckpoint.checkpoint.retention import Retention
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.errors import CheckpointExistsError, ConfigError, UnsupportedError
from bytecheckpoint.integrations._needs import plain_optimizer, refuse_tiers, require_for_import
from bytecheckpoint.probes.of_integrations import ACCELERATE, ACCELERATE_FUNCTIONS
from bytecheckpoint.probes.probe import require
from bytecheckpoint.report import LoadReport, SaveReport
from bytecheckpoint.staging.background import shutdown
from bytecheckpoint.staging.save_handle import SaveHandle
from bytecheckpoint.state_dicts import async_save_state_dict, load_state_dict
from bytecheckpoint.training_state.resuming import Resumed, resume
from bytecheckpoint.training_state.rng_state import get_rng_state, set_rng_state

require_for_import(ACCELERATE)

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["install", "install_in_functions"]

_REFUSED = ("DEEPSPEED", "MEGATRON_LM", "XLA")  # by Accelerate's names: these save in their own ways


def install(accelerator: Accelerator, *, config: Config | None = None) -> None:
    """Makes ``save_state``, ``load_state`` and ``end_training`` of one ``Accelerator`` use our engine.

    Local; call it once on every rank. The three calls are collective, as Accelerate's own are. All that belongs to a
    checkpoint is in one, and is committed together: models and optimizers, sharded as they are (FSDP2, DDP, a single
    process), schedulers, the scaler, what ``register_for_checkpointing`` got, the step, and of each rank its random
    numbers and the place of its ``StatefulDataLoader``. Number i of the optimizers must be that of model number i.

    - ``save_state(output_dir=None)`` returns a ``SaveHandle``, as ``async_save_state_dict`` does, when the state is
      copied. It first waits for the save before, and raises if that failed. ``safe_serialization`` has no meaning.
    - ``load_state(input_dir=None)`` loads a complete checkpoint or raises. Without ``input_dir`` it takes the newest
      complete one of ``automatic_checkpoint_naming`` and returns what ``resume`` does: None if there is none yet. The
      next save then gets the next number. Given a folder it returns a ``LoadReport``; or None if Accelerate itself
      saved it, which Accelerate then loads.
    - ``end_training()`` waits for the last save, and raises if it failed. Then nothing writes any more. Without it,
      call ``bytecheckpoint.shutdown()``.

    With ``automatic_checkpoint_naming``, ``total_limit`` complete checkpoints are kept, and others are removed only
    when a newer one is committed. Without it Accelerate keeps everything: use ``Retention``.

    Another number of ranks loads the same checkpoint; each rank then keeps its own random numbers and place in the
    data, with a warning. ``state_dict_type`` of an FSDP plugin makes no difference: no tensor is gathered.

    Args:
        accelerator: The accelerator. What it has prepared is looked up at each call.
        config: Settings of saves and loads; None reads ``BYTECHECKPOINT_*`` variables.

    Raises:
        ConfigError: It was called before with this accelerator; or ``project_dir`` is ``Tiers``.
        UnsupportedError: DeepSpeed, Megatron-LM or XLA train; or ``save_on_each_node`` is set.
    """
    if isinstance(getattr(accelerator.save_state, "__self__", None), _Checkpoints):
        raise ConfigError("bytecheckpoint.integrations.accelerate: install() was called with this accelerator before")
    refuse_tiers("ProjectConfiguration(project_dir=...)", accelerator.project_dir)
    kind = accelerator.distributed_type.name
    if kind in _REFUSED:
        raise UnsupportedError(f"bytecheckpoint.integrations.accelerate: {kind} saves and loads in a way of its own")
    if accelerator.project_configuration.save_on_each_node:
        raise UnsupportedError(
            "bytecheckpoint.integrations.accelerate: save_on_each_node=True: a checkpoint is one for all ranks, in a "
            "folder that they share"
        )
    checkpoints = _Checkpoints(accelerator, config)
    for name in ("save_state", "load_state", "end_training"):
        setattr(accelerator, name, getattr(checkpoints, name))


def install_in_functions() -> None:
    """Makes Accelerate's ``save_fsdp_model``, and the three functions like it, use our writer, reader and planners.

    For ``Trainer(fsdp=...)`` and others that call these functions themselves, with ``SHARDED_STATE_DICT``. They save in
    the foreground, and model and optimizer are checkpoints of their own.

    Local; call it on every rank before the first save or load. These functions name DCP's classes in each call, so it
    replaces ``FileSystemWriter`` and ``FileSystemReader`` of ``torch.distributed.checkpoint``, and the default planners
    of its ``default_planner``, for the rest of the process.

    Raises:
        UnsupportedError: Accelerate's functions look the classes up elsewhere. The message names the probe.
    """
    require(ACCELERATE_FUNCTIONS)
    for module, name, ours in (
        (dcp, "FileSystemWriter", BcpWriter),
        (dcp, "FileSystemReader", BcpReader),
        (default_planner, "DefaultSavePlanner", BcpSavePlanner),
        (default_planner, "DefaultLoadPlanner", BcpLoadPlanner),
    ):
        setattr(module, name, ours)


class _Prepared:
    """What an ``Accelerator`` has prepared. Accelerate has no public names for it: the probe ``ACCELERATE`` lists them.

    Raises:
        ConfigError: There are more optimizers than models, or nothing was prepared.
        UnsupportedError: Hooks would change what is saved.
    """

    def __init__(self, accelerator: Any) -> None:
        self.models: list[Any] = accelerator._models
        self.optimizers: list[Any] = accelerator._optimizers
        self.schedulers: list[Any] = accelerator._schedulers
        self.custom: list[Any] = accelerator._custom_objects
        self.loaders = {
            f"dataloader_{number}": loader
            for number, loader in enumerate(accelerator._dataloaders)
            if getattr(loader, "use_stateful_dataloader", False)
        }
        if not self.models or len(self.optimizers) > len(self.models):
            raise ConfigError(
                f"bytecheckpoint.integrations.accelerate: {len(self.models)} models and {len(self.optimizers)} "
                "optimizers were prepared: pass them to accelerator.prepare() first, with a model for each optimizer"
            )
        if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
            raise UnsupportedError(
                "bytecheckpoint.integrations.accelerate: hooks of register_save_state_pre_hook and "
                "register_load_state_pre_hook are not called: remove them, or save without install()"
            )

    def pairs(self) -> Iterator[tuple[int, Any, Any]]:
        """Yields each optimizer with its number and its model."""
        for number, optimizer in enumerate(self.optimizers):
            yield number, self.models[number], plain_optimizer(optimizer)


class _Checkpoints:
    """The checkpoints of one ``Accelerator``; see ``install``."""

    def __init__(self, accelerator: Accelerator, config: Config | None) -> None:
        self._accelerator, self._config = accelerator, config
        self._their_load_state, self._their_end = accelerator.load_state, accelerator.end_training
        self._saving: SaveHandle[SaveReport] | None = None

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> SaveHandle[SaveReport]:
        """Saves in the background; see ``install``."""
        if kwargs:
            raise ConfigError(f"save_state: {', '.join(kwargs)}: no such argument without DeepSpeed")
        refuse_tiers("save_state", output_dir)
        run, project = self._run(), self._accelerator.project_configuration
        if run is not None:
            output_dir = run / f"checkpoint_{project.iteration}"
            if (output_dir / ".metadata").exists():
                raise CheckpointExistsError(
                    f"save_state: {output_dir} has a checkpoint: resume from it with load_state(), or set "
                    "project_configuration.iteration to the number to go on with",
                    str(output_dir),
                )
            self._accelerator.wait_for_everyone()  # so that all have looked before one writes
        elif output_dir is None:
            raise ConfigError("save_state: pass output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        self._wait()
        state, of_rank = self._state(), self._of_rank()
        self._saving = async_save_state_dict(output_dir, state, per_rank=of_rank, config=self._config)
        self._prune()
        project.iteration += 1
        return self._saving

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Resumed | LoadReport | None:
        """Loads a complete checkpoint; see ``install``."""
        refuse_tiers("load_state", input_dir)
        self._wait()
        if input_dir is not None and _is_theirs(Path(input_dir).expanduser()):
            self._their_load_state(input_dir, load_kwargs, **kwargs)
            return None
        if load_kwargs or kwargs:
            raise ConfigError(f"load_state: {', '.join([*(load_kwargs or ()), *kwargs])}: for Accelerate's own format")
        state, of_rank = self._state(), self._of_rank()
        options: dict[str, Any] = {"per_rank": of_rank, "config": self._config}
        if input_dir is not None:
            report = load_state_dict(Path(input_dir).expanduser(), state, **options)
            self._put(state, of_rank)
            return report
        run = self._run()
        if run is None:
            raise ConfigError("load_state: pass input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        resumed = resume(run, state, **options)
        if resumed is not None:
            self._put(state, of_rank)
            self._accelerator.project_configuration.iteration = resumed.step + 1
        return resumed

    def end_training(self) -> None:
        """Waits for the last save, then does what Accelerate does; see ``install``."""
        try:
            self._wait()
            self._prune()
            shutdown()
        finally:
            self._their_end()

    def _run(self) -> Path | None:
        """Returns the folder of the checkpoints that Accelerate names, if it does."""
        if not self._accelerator.project_configuration.automatic_checkpoint_naming:
            return None
        return Path(self._accelerator.project_dir, "checkpoints")

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.committed.result()

    def _prune(self) -> None:
        run, limit = self._run(), self._accelerator.project_configuration.total_limit
        if run is not None and limit is not None:
            Retention(run, keep_latest=limit, remove_foreign=True, config=self._config).after_save()

    def _state(self) -> dict[str, Any]:
        """Returns what all ranks have together. What is in a tuple is loaded whole, whatever keys it has."""
        prepared, scaler = _Prepared(self._accelerator), self._accelerator.scaler
        state: dict[str, Any] = {"step": self._accelerator.step}
        for number, model in enumerate(prepared.models):
            state[f"model_{number}"] = get_model_state_dict(model)
        for number, model, optimizer in prepared.pairs():
            state[f"optimizer_{number}"] = get_optimizer_state_dict(model, optimizer)
        for kind, objects in (("scheduler", prepared.schedulers), ("custom", prepared.custom)):
            state.update((f"{kind}_{number}", (each.state_dict(),)) for number, each in enumerate(objects))
        return state if scaler is None else {**state, "scaler": (scaler.state_dict(),)}

    def _of_rank(self) -> dict[str, Any]:
        loaders = _Prepared(self._accelerator).loaders
        return {"rng": get_rng_state(), **{name: loader.state_dict() for name, loader in loaders.items()}}

    def _put(self, state: dict[str, Any], of_rank: dict[str, Any]) -> None:
        """Puts what was loaded into what was prepared."""
        prepared, scaler = _Prepared(self._accelerator), self._accelerator.scaler
        for number, model in enumerate(prepared.models):
            set_model_state_dict(model, state[f"model_{number}"])
        for number, model, optimizer in prepared.pairs():
            set_optimizer_state_dict(model, optimizer, state[f"optimizer_{number}"])
        for kind, objects in (("scheduler", prepared.schedulers), ("custom", prepared.custom)):
            for number, each in enumerate(objects):
                each.load_state_dict(state[f"{kind}_{number}"][0])
        if scaler is not None:
            scaler.load_state_dict(state["scaler"][0])
        self._accelerator.step = state["step"]
        for name, loader in prepared.loaders.items():
            loader.load_state_dict(of_rank[name])
        set_rng_state(of_rank["rng"])


def _is_theirs(path: Path) -> bool:
    """Whether Accelerate's own ``save_state`` wrote a folder: every rank writes a file of random numbers."""
    return not (path / ".metadata").exists() and any(path.glob("random_states_*.pkl"))
