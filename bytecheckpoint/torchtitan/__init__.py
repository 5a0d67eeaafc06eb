# SPDX-License-Identifier: Apache-2.0
"""Lets torchtitan save and load its checkpoints through our engine.

There are two ways to turn it on:

- On the command line, ``--override.imports bytecheckpoint.torchtitan.use``; or ``...use={"io_threads":2}`` with
  options, which are fields of ``bytecheckpoint.Config`` and ``initial_load_spec``.
- In a recipe, ``config.checkpoint = BcpCheckpointManager.Config(enable=True, ...)`` or ``with_bytecheckpoint(config)``.
torchtitan before 0.3 has no overrides: call ``bytecheckpoint.register()`` before training.

Importing this module registers ``use`` with torchtitan's overrides. It does nothing until it is asked for by name.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.probes.of_torchtitan import TORCHFT, TORCHTITAN
from bytecheckpoint.probes.probe import require, warn_of_fallbacks
from bytecheckpoint.torchtitan._options import config_of

if TYPE_CHECKING:
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.trainer import Trainer

    from bytecheckpoint.load_spec.spec import LoadSpec
    from bytecheckpoint.torchtitan._dcp_manager import (
        BcpCheckpointing,
        BcpCheckpointManager,
        EngineOptions,
        InitialLoadSpec,
    )
    from bytecheckpoint.torchtitan._torchft_manager import BcpTorchFTCheckpointManager

__all__ = [
    "BcpCheckpointManager",
    "BcpCheckpointing",
    "BcpTorchFTCheckpointManager",
    "EngineOptions",
    "InitialLoadSpec",
    "use",
    "with_bytecheckpoint",
]

_HOMES = {
    "BcpCheckpointManager": "_dcp_manager",
    "BcpCheckpointing": "_dcp_manager",
    "BcpTorchFTCheckpointManager": "_torchft_manager",
    "EngineOptions": "_dcp_manager",
    "InitialLoadSpec": "_dcp_manager",
}

C = TypeVar("C", bound="Trainer.Config")

_logger = logging.getLogger("bytecheckpoint")

# The module of torchtitan's manager for torch_checkpointing. Not every torch_checkpointing lets it be imported.
_OF_TORCH_CHECKPOINTING = ("torchtitan.components.checkpointer.torch_checkpointing", "TorchCheckpointingManager.Config")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bytecheckpoint.torchtitan' has no attribute {name!r}")
    require(TORCHTITAN)
    if _HOMES[name] == "_torchft_manager":
        require(TORCHFT)
    return getattr(import_module(f"bytecheckpoint.torchtitan.{_HOMES[name]}"), name)


def use(
    config: BaseCheckpointManager.Config, *, initial_load_spec: str | LoadSpec | None = None, **options: Any
) -> BaseCheckpointManager.Config:
    """The override, which torchtitan calls with the configuration of its manager.

    Args:
        config: Configuration of torchtitan's ``CheckpointManager`` or ``TorchCheckpointingManager``. That of another
            manager, such as TorchFT's, is returned as it is, with a warning in the log.
        initial_load_spec: What the initial load takes of a checkpoint; see ``BcpCheckpointManager.Config``.
        options: Fields of ``bytecheckpoint.Config``.

    Returns:
        The configuration of our manager, with every setting of ``config``. ``TorchCheckpointingManager`` saves in the
        background, and so does ours then: ``async_mode`` is ``async_with_pinned_mem``.

    Raises:
        ConfigError: An option does not exist, or has an invalid value; or the spec is wrong.
        UnsupportedError: torchtitan is not built as our manager needs it. The message names the probe that failed.
    """
    require(TORCHTITAN)
    warn_of_fallbacks(TORCHTITAN)
    from torchtitan.components.checkpointer import CheckpointManager

    theirs = type(config)
    if theirs is not CheckpointManager.Config and not _is_of_torch_checkpointing(theirs):
        _logger.warning("bytecheckpoint.torchtitan.use leaves the manager of %s.%s", theirs.__module__, _name(theirs))
        return config
    return _ours_for(config, initial_load_spec, options)


def with_bytecheckpoint(config: C, *, initial_load_spec: str | LoadSpec | None = None, **options: Any) -> C:
    """Replaces torchtitan's manager by ours in the configuration of a trainer. For a recipe.

    Args:
        config: Configuration of a trainer. Its ``checkpoint`` is replaced by our manager's configuration, which keeps
            every setting. The TorchFT manager is replaced by ``BcpTorchFTCheckpointManager``. For
            ``TorchCheckpointingManager`` see ``use``.
        initial_load_spec: What the initial load takes of a checkpoint; see ``BcpCheckpointManager.Config``.
        options: Fields of ``bytecheckpoint.Config``.

    Returns:
        ``config`` itself.

    Raises:
        ConfigError: An option does not exist, or has an invalid value; or the spec is wrong.
        UnsupportedError: torchtitan is not built as our manager needs it; the message names the probe that failed. Or
            ``config.checkpoint`` is of a manager that we cannot replace.
    """
    require(TORCHTITAN)
    warn_of_fallbacks(TORCHTITAN)
    config.checkpoint = _ours_for(config.checkpoint, initial_load_spec, options)
    return config


def _ours_for(theirs: Any, initial_load_spec: str | LoadSpec | None, options: dict[str, Any]) -> Any:
    """Returns the configuration of our manager that has the settings of ``theirs``."""
    from torchtitan.config.override import derive

    mode = {"async_mode": "async_with_pinned_mem"} if _is_of_torch_checkpointing(type(theirs)) else {}
    ours = _config_for(type(theirs))
    return derive(theirs, ours, engine=config_of(options), initial_load_spec=initial_load_spec, **mode)


def _is_of_torch_checkpointing(theirs: type) -> bool:
    return (theirs.__module__, theirs.__qualname__) == _OF_TORCH_CHECKPOINTING


def _name(theirs: type) -> str:
    return theirs.__qualname__.removesuffix(".Config")


def _config_for(theirs: type) -> Any:
    """Returns the configuration class of our manager that replaces ``theirs``.

    Raises:
        UnsupportedError: It is the configuration of a manager that must not be replaced.
    """
    from torchtitan.components.checkpointer import CheckpointManager

    from bytecheckpoint.torchtitan._dcp_manager import BcpCheckpointManager

    if theirs in (CheckpointManager.Config, BcpCheckpointManager.Config) or _is_of_torch_checkpointing(theirs):
        return BcpCheckpointManager.Config
    if theirs.__module__.startswith("torchtitan.experiments.torchft."):
        require(TORCHFT)
        from bytecheckpoint.torchtitan._torchft_manager import BcpTorchFTCheckpointManager

        return BcpTorchFTCheckpointManager.Config
    manager = _name(theirs)
    raise UnsupportedError(
        f"with_bytecheckpoint: config.checkpoint is of {theirs.__module__}.{manager}, which must not be replaced by "
        f"another manager. If it is a CheckpointManager, declare class X(BcpCheckpointing, {manager}) with a Config of "
        "its own that has a field engine: EngineOptions = None, and give X.Config"
    )


def has_overrides() -> bool:
    """Whether this torchtitan has a registry of overrides, as 0.3 and newer do."""
    return all(
        find_spec(name) is not None for name in ("torchtitan", "torchtitan.config", "torchtitan.config.override")
    )


if has_overrides():
    try:
        require(TORCHTITAN)
    except UnsupportedError as error:
        raise ImportError(str(error)) from None  # torchtitan shows the text of an ImportError
    from torchtitan.components.checkpointer import BaseCheckpointManager as _Theirs
    from torchtitan.config.override import override

    # Not exact, for two managers: it leaves any other itself, as one that may do more than we know.
    use = override(target=_Theirs.Config, exact=False, description="checkpoints by bytecheckpoint")(use)
