# SPDX-License-Identifier: Apache-2.0
"""A callback that lets transformers' ``Trainer`` save and resume through our engine, in the background.

::

    from bytecheckpoint.integrations.transformers import CheckpointCallback

    checkpoints = CheckpointCallback()
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[checkpoints])
    trainer.train(resume_from_checkpoint=checkpoints.latest(arguments.output_dir))

Importing this module imports transformers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from bytecheckpoint.checkpoint.retention import Retention
from bytecheckpoint.checkpoint.steps import scan_steps
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError, KeyMismatchError, UnsupportedError
from bytecheckpoint.integrations._needs import default_group, plain_optimizer, refuse_tiers, require_for_import
from bytecheckpoint.probes.of_integrations import TRANSFORMERS
from bytecheckpoint.report import SaveReport
from bytecheckpoint.staging.background import shutdown
from bytecheckpoint.staging.save_handle import SaveHandle
from bytecheckpoint.state_dicts import async_save_state_dict, load_state_dict
from bytecheckpoint.storage.step_names import run_and_step
from bytecheckpoint.training_state.latest import latest
from bytecheckpoint.training_state.rng_state import get_rng_state, set_rng_state

require_for_import(TRANSFORMERS)

from accelerate.state import AcceleratorState  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["CheckpointCallback"]

_logger = logging.getLogger("bytecheckpoint")

# Kinds of training whose state is not in the model and the optimizer that a callback gets, by Accelerate's names.
_REFUSED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
_OF_TRAINER = "optimizer.pt"  # what Trainer calls the file, which is there only if it saved the optimizer itself


class CheckpointCallback(TrainerCallback):
    """Saves model, optimizer, schedule and random numbers whenever ``Trainer`` saves, and resumes from there.

    Pass it to ``Trainer`` as one of the ``callbacks``. Whenever ``Trainer`` saves, to ``checkpoint-<step>`` in its
    ``output_dir``, the callback saves to the same folder: ``Trainer`` the weights for ``from_pretrained`` and its
    counters, the callback everything that a resume takes. So a step is complete when the callback's part is committed,
    and ``bytecheckpoint.latest``, ``prune``, ``scan_steps`` and ``bcp`` treat ``output_dir`` as the folder of a run.

    The save goes on in the background while ``Trainer`` trains. The callback waits for it before the next save, and
    when ``train()`` ends; if it failed, that is where the ``CheckpointError`` is raised, on all ranks. When ``train()``
    has returned nothing writes any more. If ``train()`` raised, call ``bytecheckpoint.shutdown()`` for that.

    It takes two of Trainer's settings over, and changes them in ``TrainingArguments``:

    - ``save_only_model`` becomes True, since ``Trainer`` need not save the optimizer a second time.
    - ``save_total_limit`` becomes None. The callback keeps that many complete checkpoints instead, among them the best
      if there is one, and removes others only when they are committed. During a save there may be one more. Unlike
      ``Trainer``, it keeps the newest at the end, also with a limit of 1 and another best.

    Random numbers continue as they would have without an interruption if as many ranks resume as saved. Any other
    number of ranks keeps its own, with a warning.

    Args:
        config: Settings of saves and loads; None reads ``BYTECHECKPOINT_*`` variables.

    Attributes:
        resume_from: Folder that the next ``train()`` resumes from. ``latest`` sets it. Set it yourself to resume from
            a checkpoint outside ``output_dir``, and pass the same to ``train``. None takes the folder of Trainer's
            step in ``output_dir``.

    Raises:
        ConfigError: In ``train()``: it was not called with ``resume_from`` as ``resume_from_checkpoint``.
        UnsupportedError: In ``Trainer()`` or ``train()``: FSDP or DeepSpeed shard the model, or ``Trainer`` searches
            for hyperparameters.
        CheckpointNotFoundError: In ``train()``: the folder to resume from has no complete checkpoint.
        CheckpointError: In ``train()``: a save or the load failed; see ``save_state_dict`` and ``load_state_dict``.
    """

    def __init__(self, *, config: Config | None = None) -> None:
        self.resume_from: str | None = None
        self._config = config
        self._limit: int | None = None
        self._saving: SaveHandle[SaveReport] | None = None
        self._rng: Mapping[str, Any] | None = None

    def latest(self, run: str | os.PathLike[str]) -> str | None:
        """Returns the folder of the newest complete checkpoint, and resumes from it in the next ``train()``.

        Collective over the default group, if there is one: ``Trainer`` makes it, so call this when there is one.
        ``Trainer.train(resume_from_checkpoint=True)`` would take the folder of the highest step, complete or not.

        Args:
            run: The ``output_dir`` of the run.

        Returns:
            The folder, for ``Trainer.train(resume_from_checkpoint=...)``; None if there is no checkpoint yet.

        Raises:
            CheckpointError: There are checkpoints, and none is complete; see ``bytecheckpoint.latest``.
            ConfigError: ``run`` is ``Tiers``.
        """
        refuse_tiers("CheckpointCallback.latest", run)
        self.resume_from = latest(run, process_group=default_group(), config=self._config)
        return self.resume_from

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Takes settings over."""
        self._take_over(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any
    ) -> None:
        """Loads the state that ``Trainer`` resumes from."""
        self._take_over(args)
        if state.is_hyper_param_search:
            raise UnsupportedError(
                "CheckpointCallback: a search for hyperparameters saves each trial to another folder"
            )
        self._wait()  # for what a train() that raised has left
        path, self.resume_from, self._rng = self.resume_from, None, None
        if state.global_step == 0:
            if path is not None:
                raise ConfigError(
                    f"CheckpointCallback: train() begins at step 0, but {path} is to be resumed from: pass it as "
                    "train(resume_from_checkpoint=...), or set resume_from to None"
                )
            return
        path = path or str(Path(args.output_dir, f"checkpoint-{state.global_step}"))
        step = run_and_step(path)[1]
        if step not in (None, state.global_step):
            raise ConfigError(
                f"CheckpointCallback: Trainer resumes at step {state.global_step}, but {path} is to be resumed from: "
                "pass that as train(resume_from_checkpoint=...), or set resume_from to what you pass"
            )
        self._load(path, of_trainer)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Sets random numbers before the epoch draws its order, if the run is resumed at the beginning of one."""
        if args.ignore_data_skip or float(state.epoch or 0).is_integer():
            self._set_rng()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Sets random numbers once ``Trainer`` has skipped the data of steps before."""
        self._set_rng()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any) -> None:
        """Begins a save, when the one before has ended."""
        self._wait()
        self._saving = async_save_state_dict(
            Path(args.output_dir, f"checkpoint-{state.global_step}"),
            _state_of(of_trainer),
            per_rank={"rng": get_rng_state()},
            user_metadata={"step": state.global_step, "epoch": state.epoch},
            config=self._config,
        )
        self._prune(args, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Waits for the last save."""
        self._wait()
        self._prune(args, state)
        shutdown()

    def _take_over(self, args: TrainingArguments) -> None:
        kind = AcceleratorState().distributed_type.name
        if kind in _REFUSED:
            raise UnsupportedError(
                f"CheckpointCallback: {kind} shards what a callback cannot get. For FSDP with SHARDED_STATE_DICT call "
                "bytecheckpoint.integrations.accelerate.install_in_functions() instead"
            )
        args.save_only_model = True
        if args.save_total_limit is not None:
            self._limit = args.save_total_limit if args.save_total_limit > 0 else None
            args.save_total_limit = None

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.committed.result()

    def _load(self, path: str, of_trainer: Mapping[str, Any]) -> None:
        loaded, of_rank = _state_of(of_trainer), {"rng": get_rng_state()}
        try:
            load_state_dict(path, loaded, per_rank=of_rank, config=self._config)
        except (CheckpointNotFoundError, KeyMismatchError) as error:  # on all ranks, before anything was loaded
            if Path(path, ".metadata").exists():
                raise
            if Path(path, _OF_TRAINER).exists():
                _logger.info("%s is a checkpoint of Trainer's own, which has loaded it", path)
                return
            raise CheckpointNotFoundError(
                f"CheckpointCallback: {path} has no complete checkpoint, only what Trainer itself wrote: pass "
                "checkpoints.latest(output_dir) as train(resume_from_checkpoint=...). For a checkpoint in another "
                "folder, set resume_from, too",
                path,
            ) from error
        set_state_dict(
            of_trainer["model"],
            plain_optimizer(of_trainer["optimizer"]),
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        of_trainer["lr_scheduler"].load_state_dict(loaded["schedule"][0])
        if "scaler" in loaded:
            of_trainer["optimizer"].scaler.load_state_dict(loaded["scaler"][0])
        self._rng = of_rank["rng"]

    def _set_rng(self) -> None:
        rng, self._rng = self._rng, None
        if rng is not None:
            set_rng_state(rng)

    def _prune(self, args: TrainingArguments, state: TrainerState) -> None:
        """Removes on rank 0 what Trainer's ``save_total_limit`` does not keep."""
        if self._limit is None or not state.is_world_process_zero:
            return
        best = None if state.best_model_checkpoint is None else run_and_step(state.best_model_checkpoint)[1]
        complete = [each.step for each in scan_steps(args.output_dir, config=self._config) if each.is_complete]
        newest = complete[-self._limit :]
        others = best in complete and best not in newest  # the best is one of those that are kept
        keep = max(self._limit - others, 1)
        # Trainer's own files, which are as those of other libraries, go with a save that died.
        retention = Retention(args.output_dir, keep_latest=keep, remove_foreign=True, config=self._config)
        retention.prune(protect=() if best is None else (best,))


def _state_of(of_trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what all ranks have together. What is in a tuple is loaded whole, whatever keys it has."""
    of_model, of_optimizer = get_state_dict(of_trainer["model"], plain_optimizer(of_trainer["optimizer"]))
    state = {"model": of_model, "optimizer": of_optimizer, "schedule": (of_trainer["lr_scheduler"].state_dict(),)}
    scaler = getattr(of_trainer["optimizer"], "scaler", None)
    return state if scaler is None else {**state, "scaler": (scaler.state_dict(),)}
