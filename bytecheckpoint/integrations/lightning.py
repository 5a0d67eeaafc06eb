# SPDX-License-Identifier: Apache-2.0
"""A strategy and a plug-in for checkpoints that let Lightning's ``Trainer`` save through our engine, in the background.

::

    from bytecheckpoint.integrations.lightning import BcpModelParallelStrategy, latest

    trainer = lightning.Trainer(strategy=BcpModelParallelStrategy(), callbacks=[ModelCheckpoint("run")])
    trainer.fit(model, loader, ckpt_path=latest("run"))

Strategies that do not shard the model (a single device, DDP) take the plug-in instead:
``Trainer(plugins=[BcpCheckpointIO()])``.

Importing this module imports lightning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from bytecheckpoint.checkpoint.newest import newest_whole
from bytecheckpoint.config import Config
from bytecheckpoint.contents.stored_state import read
from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError
from bytecheckpoint.integrations._background import Background
from bytecheckpoint.integrations._needs import default_group, refuse_tiers, require_for_import
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.probes.of_integrations import LIGHTNING
from bytecheckpoint.state_dicts import async_save_state_dict, load_state_dict
from bytecheckpoint.training_state.latest import one_look
from bytecheckpoint.training_state.rng_state import get_rng_state, set_rng_state

require_for_import(LIGHTNING)

from lightning.pytorch.plugins.io import CheckpointIO  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

__all__ = ["BcpCheckpointIO", "BcpModelParallelStrategy", "latest"]

_logger = logging.getLogger("bytecheckpoint")

_PATTERN = r".*?step=(\d+).*\.ckpt"  # of ModelCheckpoint: epoch=0-step=4.ckpt, or with more behind the step
# Everything of a checkpoint of Lightning's that is no tensor of the model or of an optimizer, as one object.
_OTHERS = "lightning"
_THEIRS = "meta.pt"  # what Lightning's own strategies write beside their sharded checkpoints
_TENSOR = "bytecheckpoint.tensor"  # in the place of a tensor: the key that it is saved under


def latest(run: str | os.PathLike[str], *, pattern: str = _PATTERN, config: Config | None = None) -> str | None:
    """Returns the newest complete checkpoint in the folder of a ``ModelCheckpoint``, for ``fit(ckpt_path=...)``.

    ``ckpt_path="last"`` would take the newest folder, complete or not. The newest is the one that was committed last,
    see ``bytecheckpoint.latest``. Collective over the default group if there is one; Lightning makes it in ``fit``, so
    as a rule each rank looks for itself, and ``BcpModelParallelStrategy`` then loads what rank 0 has found.

    Args:
        run: Folder of the checkpoints, the ``dirpath`` of ``ModelCheckpoint``.
        pattern: Regular expression for their names, with a group around the number of the step. The default is for
            names that have ``step=`` in them, as those of ``ModelCheckpoint`` do unless a ``filename`` says otherwise.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        The path; None if there is no checkpoint yet.

    Raises:
        CheckpointError: There are checkpoints, and none is complete.
        ConfigError: ``pattern`` is no regular expression, or has no group; or ``run`` is ``Tiers``.
    """
    refuse_tiers("latest", run)
    found = one_look(
        "latest", run, "", config, default_group(), lambda folder: newest_whole(folder, pattern, "latest", None)
    )
    for text in found.warnings:
        _logger.warning("%s", text)
    return found.path


class BcpModelParallelStrategy(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` (FSDP2 and tensor parallelism), with checkpoints through our engine.

    It saves in the background: training goes on when the state is copied. It waits for a save before the next one, and
    when ``fit`` ends; if it failed, that is where the ``CheckpointError`` is raised, on all ranks. If another error
    ended ``fit``, the failure is logged, so that it does not hide that error. When ``fit`` has returned or raised,
    nothing writes any more.

    A checkpoint is one folder, with model, optimizers and everything else of Lightning's in it, and is committed
    together. What ``ModelCheckpoint(save_top_k=...)`` removes goes when the newer one is committed, not before.

    ``fit(ckpt_path=...)`` loads complete checkpoints, on any number of ranks, and continues each rank's random numbers
    if there are as many ranks as saved it. It also loads sharded checkpoints of Lightning's own strategy. Lightning's
    own does not load those of this one: for that, call ``bytecheckpoint.register()`` and keep Lightning's.

    Args:
        data_parallel_size: As Lightning's.
        tensor_parallel_size: As Lightning's.
        save_distributed_checkpoint: Must be True.
        process_group_backend: As Lightning's.
        config: Settings of saves and loads; None reads ``BYTECHECKPOINT_*`` variables.
        kwargs: Further arguments of Lightning's, such as ``timeout``.

    Raises:
        ConfigError: ``save_distributed_checkpoint`` is False.
    """

    def __init__(
        self,
        data_parallel_size: Any = "auto",
        tensor_parallel_size: Any = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        *,
        config: Config | None = None,
        **kwargs: Any,
    ) -> None:
        if not save_distributed_checkpoint:
            raise ConfigError(
                "BcpModelParallelStrategy: save_distributed_checkpoint=False: no tensor is gathered; pass True, and "
                "bcp convert makes one file of a checkpoint"
            )
        super().__init__(
            data_parallel_size, tensor_parallel_size, process_group_backend=process_group_backend, **kwargs
        )
        self._background = Background(config)
        self._rng: dict[str, Any] | None = None
        self._has_failed = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Begins a save; collective.

        Args:
            checkpoint: What Lightning collects of the trainer.
            filepath: Folder of the checkpoint. That of rank 0 counts.
            storage_options: Must be None.

        Raises:
            ConfigError: ``storage_options`` were passed.
            CheckpointError: The save before failed, or the state cannot be staged.
        """
        if storage_options is not None:
            raise ConfigError("BcpModelParallelStrategy: storage_options has no meaning here; pass config instead")
        refuse_tiers("save_checkpoint", filepath)
        others = dict(checkpoint)
        state = {"state_dict": others.pop("state_dict")}
        state.update((f"optimizer_{i}", each) for i, each in enumerate(others.pop("optimizer_states", ())))
        path, of_rank = str(self.broadcast(os.fspath(filepath))), {"rng": get_rng_state()}
        state[_OTHERS] = (others,)
        step = {"step": checkpoint.get("global_step"), "epoch": checkpoint.get("epoch")}
        self._background.begin(
            lambda: async_save_state_dict(
                path, state, per_rank=of_rank, user_metadata=step, config=self._background.config
            )
        )

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads into model and optimizers; collective.

        Args:
            checkpoint_path: Folder of the checkpoint. That of rank 0 counts.
            weights_only: False also loads objects that torch's ``weights_only`` rules refuse. Loading may then run code
                of the checkpoint.

        Returns:
            Everything else that Lightning collected.

        Raises:
            CheckpointNotFoundError: There is no complete checkpoint.
            CheckpointError: The load failed.
        """
        self._background.wait()
        path = Path(self.broadcast(os.fspath(checkpoint_path)))
        if path.is_file() or (path / _THEIRS).is_file():
            given = {} if weights_only is None else {"weights_only": weights_only}  # Lightning 2.5 has no such argument
            others: dict[str, Any] = super().load_checkpoint(checkpoint_path, **given)
            return others
        module, of_rank = self.lightning_module, {"rng": get_rng_state()}
        assert module is not None and self.model is not None  # noqa: PT018
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model), _OTHERS: ()}
        for number, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{number}"] = get_optimizer_state_dict(self.model, optimizer)
        spec = None if module.strict_loading else LoadSpec(strict=False)
        load_state_dict(
            path, state, spec=spec, per_rank=of_rank, config=_with_pickles(self._background.config, weights_only)
        )
        set_model_state_dict(self.model, state["state_dict"])
        for number, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(self.model, optimizer, state[f"optimizer_{number}"])
        if self.optimizers:  # to train: the fit loop begins with the order of the first epoch
            self._rng = of_rank["rng"]
            set_rng_state(self._rng)
        return dict(state[_OTHERS][0])

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Removes a checkpoint on rank 0, as soon as what is being saved now is committed.

        Args:
            filepath: Folder of the checkpoint.
        """
        if self.is_global_zero:
            self._background.remove(filepath)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Sets the random numbers of a run that is resumed within an epoch, once the data have begun.

        Args:
            batch: The batch.
            batch_idx: Its number in the epoch.
        """
        super().on_train_batch_start(batch, batch_idx)
        rng, self._rng = self._rng, None
        if rng is not None and batch_idx > 0:
            set_rng_state(rng)

    def on_exception(self, exception: BaseException) -> None:
        """Notes that an error ended the training.

        Args:
            exception: The error.
        """
        super().on_exception(exception)
        self._has_failed = True

    def teardown(self) -> None:
        """Waits for the last save; Lightning calls it at the end of ``fit``, whatever ended that.

        Raises:
            CheckpointError: The save failed, and no other error ended ``fit``.
        """
        has_failed, self._has_failed = self._has_failed, False
        try:
            self._background.end()
        except Exception:
            if not has_failed:
                raise
            _logger.exception("the last save failed, too")
        finally:
            super().teardown()


class BcpCheckpointIO(CheckpointIO):
    """Saves and loads checkpoints of strategies that do not shard the model (one device, DDP), through our engine.

    Pass it to the trainer: ``Trainer(plugins=[BcpCheckpointIO()])``. Lightning saves on rank 0, and loads on every rank
    the whole checkpoint. Saves go on in the background, as with ``BcpModelParallelStrategy``; a failure is raised on
    rank 0, where the save is.

    Args:
        config: Settings of saves and loads; None reads ``BYTECHECKPOINT_*`` variables.
    """

    def __init__(self, *, config: Config | None = None) -> None:
        self._background = Background(config)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Begins a save. Local: Lightning calls it on rank 0.

        Args:
            checkpoint: What Lightning collects of the trainer.
            path: Folder of the checkpoint.
            storage_options: Must be None.

        Raises:
            ConfigError: ``storage_options`` were passed.
            CheckpointError: The save before failed, or the state cannot be staged.
        """
        if storage_options is not None:
            raise ConfigError("BcpCheckpointIO: storage_options has no meaning here; pass config instead")
        refuse_tiers("save_checkpoint", path)
        state: dict[str, Any] = {}
        others = _without_tensors(checkpoint, "", state)
        step = {"step": checkpoint.get("global_step"), "epoch": checkpoint.get("epoch")}
        self._background.begin(
            lambda: async_save_state_dict(
                path,
                {**state, _OTHERS: (others,)},
                no_dist=True,
                user_metadata=step,
                config=self._background.config,
            )
        )

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a whole checkpoint. Local.

        Args:
            path: Folder of the checkpoint.
            map_location: Device to put tensors on; a function has no meaning here. None: host memory.
            weights_only: See ``BcpModelParallelStrategy.load_checkpoint``.

        Returns:
            What was saved, in new tensors.

        Raises:
            CheckpointNotFoundError: There is no complete checkpoint of this class.
            CheckpointError: The load failed.
        """
        self._background.wait()
        stored = read(path, config=_with_pickles(self._background.config, weights_only))
        if _OTHERS not in stored:
            raise CheckpointNotFoundError(
                f"load_checkpoint({path}): it is no checkpoint of BcpCheckpointIO: load its tensors with "
                "bytecheckpoint.read",
                str(path),
            )
        device = map_location if isinstance(map_location, str | torch.device) else None

        def tensor(key: str) -> torch.Tensor:
            found: torch.Tensor = stored[key]
            return found.clone() if device is None else found.to(device, copy=True)

        loaded: dict[str, Any] = _with_tensors(stored[_OTHERS][0], tensor)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint as soon as what is being saved now is committed.

        Args:
            path: Folder of the checkpoint.
        """
        self._background.remove(path)

    def teardown(self) -> None:
        """Waits for the last save.

        Raises:
            CheckpointError: The save failed.
        """
        self._background.end()


def _with_pickles(config: Config | None, weights_only: bool | None) -> Config | None:
    return config if weights_only is not False else replace(config or Config.from_env(), allow_pickle=True)


def _without_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns ``value`` with the key of each tensor in its place, and puts the tensors into ``tensors`` by key."""
    if isinstance(value, torch.Tensor):
        while name in tensors:  # a key with dots in it
            name += "'"
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, dict):
        made = {
            key: _without_tensors(each, f"{name}.{key}" if name else str(key), tensors) for key, each in value.items()
        }
        return made
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(each, f"{name}.{i}", tensors) for i, each in enumerate(value))
    return value


def _with_tensors(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Returns what ``_without_tensors`` was given."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensor(value[_TENSOR])
        return {key: _with_tensors(each, tensor) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(each, tensor) for each in value)
    return value
