# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of torchtitan through our engine.

- ``--override.imports bytecheckpoint.torchtitan.use``, or ``...use={"io_threads":2}`` with options: fields of
  ``bytecheckpoint.Config``;
- in a recipe ``config.checkpoint = BcpCheckpointManager.Config(enable=True, ...)`` or ``with_bytecheckpoint(config)``;
- with torchtitan 0.2 or older ``--experimental.custom_import bytecheckpoint.torchtitan.custom_import``.

Importing this tells torchtitan's registry of overrides of ``use``, which does nothing before it is asked for by name.
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

    from bytecheckpoint.torchtitan._dcp_manager import BcpCheckpointing, BcpCheckpointManager, EngineOptions
    from bytecheckpoint.torchtitan._torchft_manager import BcpTorchFTCheckpointManager

__all__ = [
    "BcpCheckpointManager",
    "BcpCheckpointing",
    "BcpTorchFTCheckpointManager",
    "EngineOptions",
    "use",
    "with_bytecheckpoint",
]

_HOMES = {
    "BcpCheckpointManager": "_dcp_manager",
    "BcpCheckpointing": "_dcp_manager",
    "BcpTorchFTCheckpointManager": "_torchft_manager",
    "EngineOptions": "_dcp_manager",
}

C = TypeVar("C", bound="Trainer.Config")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bytecheckpoint.torchtitan' has no attribute {name!r}")
    require(TORCHTITAN)
    if _HOMES[name] == "_torchft_manager":
        require(TORCHFT)
    return getattr(import_module(f"bytecheckpoint.torchtitan.{_HOMES[name]}"), name)


def use(config: CheckpointManager.Config, **options: Any) -> CheckpointManager.Config:
    """The override: what torchtitan calls with the configuration of its ``CheckpointManager``.

    Args:
        config: Every setting in it is kept.
        options: Fields of ``bytecheckpoint.Config``.

    Raises:
        ConfigError: No such option, or an impossible value.
        UnsupportedError: torchtitan is built otherwise than our manager needs it; names the probe.
    """
    require(TORCHTITAN)
    warn_of_fallbacks(TORCHTITAN)
    from torchtitan.config.override import derive

    from bytecheckpoint.torchtitan._dcp_manager import BcpCheckpointManager

    return derive(config, BcpCheckpointManager.Config, engine=config_of(options))


def with_bytecheckpoint(config: C, **options: Any) -> C:
    """For a recipe: the same configuration of a trainer, with our manager in the place of torchtitan's.

    Args:
        config: Its ``checkpoint`` is replaced, with every setting kept; that of the TorchFT manager by
            ``BcpTorchFTCheckpointManager``.
        options: Fields of ``bytecheckpoint.Config``.

    Returns:
        ``config`` itself.

    Raises:
        ConfigError: No such option, or an impossible value.
        UnsupportedError: torchtitan is built otherwise than our manager needs it, which names the probe; or it is such
            a manager.
    """
    require(TORCHTITAN)
    warn_of_fallbacks(TORCHTITAN)
    from torchtitan.config.override import derive

    theirs = config.checkpoint
    config.checkpoint = derive(theirs, _config_for(type(theirs)), engine=config_of(options))
    return config


def _config_for(theirs: type) -> Any:
    """Adapters by what they adapt. One for ``TorchCheckpointingManager`` belongs here once torchtitan has made that."""
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
    """Has torchtitan come to have a registry of overrides, as 0.3 did?"""
    return all(
        find_spec(name) is not None for name in ("torchtitan", "torchtitan.config", "torchtitan.config.override")
    )


if has_overrides():
    try:
        require(TORCHTITAN)
    except UnsupportedError as error:
        raise ImportError(str(error)) from None  # which torchtitan passes on with its text
    from torchtitan.components.checkpointer import CheckpointManager as _Theirs
    from torchtitan.config.override import override

    # A subclass, such as TorchFT's, does more than we know of: it is not replaced behind its back.
    use = override(target=_Theirs.Config, exact=True, description="checkpoints by bytecheckpoint")(use)
