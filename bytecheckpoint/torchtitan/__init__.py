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

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.probes.of_torchtitan import TORCHFT, TORCHTITAN
from bytecheckpoint.probes.probe import require, warn_of_fallbacks
from bytecheckpoint.torchtitan._options import config_of

if TYPE_CHECKING:
    from torchtitan.components.checkpointer import CheckpointManager
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bytecheckpoint.torchtitan' has no attribute {name!r}")
    require(TORCHTITAN)
    if _HOMES[name] == "_torchft_manager":
        require(TORCHFT)
    return getattr(import_module(f"bytecheckpoint.torchtitan.{_HOMES[name]}"), name)


def use(
    config: CheckpointManager.Config, *, initial_load_spec: str | LoadSpec | None = None, **options: Any
) -> CheckpointManager.Config:
    """The override, which torchtitan calls with the configuration of its ``CheckpointManager``.

    Args:
        config: Configuration of torchtitan's manager.
        initial_load_spec: What the initial load takes of a checkpoint; see ``BcpCheckpointManager.Config``.
        options: Fields of ``bytecheckpoint.Config``.

    Returns:
        The configuration of our manager, with every setting of ``config``.

    Raises:
        ConfigError: An option does not exist, or has an invalid value; or the spec is wrong.
        UnsupportedError: torchtitan is not built as our manager needs it. The message names the probe that failed.
    """
    require(TORCHTITAN)
    warn_of_fallbacks(TORCHTITAN)
    from torchtitan.config.override import derive

    from bytecheckpoint.torchtitan._dcp_manager import BcpCheckpointManager

    return derive(config, BcpCheckpointManager.Config, engine=config_of(options), initial_load_spec=initial_load_spec)


def with_bytecheckpoint(config: C, *, initial_load_spec: str | LoadSpec | None = None, **options: Any) -> C:
    """Replaces torchtitan's manager by ours in the configuration of a trainer. For a recipe.

    Args:
        config: Configuration of a trainer. Its ``checkpoint`` is replaced by our manager's configuration, which keeps
            every setting. The TorchFT manager is replaced by ``BcpTorchFTCheckpointManager``.
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
    from torchtitan.config.override import derive

    theirs = config.checkpoint
    config.checkpoint = derive(
        theirs, _config_for(type(theirs)), engine=config_of(options), initial_load_spec=initial_load_spec
    )
    return config


def _config_for(theirs: type) -> Any:
    """Returns the configuration class of our manager that replaces ``theirs``.

    When torchtitan has a ``TorchCheckpointingManager``, the adapter for it belongs here.

    Raises:
        UnsupportedError: It is the configuration of a manager that must not be replaced.
    """
    from torchtitan.components.checkpointer import CheckpointManager

    from bytecheckpoint.torchtitan._dcp_manager import BcpCheckpointManager

    if theirs in (CheckpointManager.Config, BcpCheckpointManager.Config):
        return BcpCheckpointManager.Config
    if theirs.__module__.startswith("torchtitan.experiments.torchft."):
        require(TORCHFT)
        from bytecheckpoint.torchtitan._torchft_manager import BcpTorchFTCheckpointManager

        return BcpTorchFTCheckpointManager.Config
    manager = theirs.__qualname__.removesuffix(".Config")
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
    from torchtitan.components.checkpointer import CheckpointManager as _Theirs
    from torchtitan.config.override import override

    # Exact: a subclass, such as TorchFT's, may do more than we know, so the override does not replace it.
    use = override(target=_Theirs.Config, exact=True, description="checkpoints by bytecheckpoint")(use)
