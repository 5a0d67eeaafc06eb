# SPDX-License-Identifier: Apache-2.0
"""What the modules of frameworks share: the check of the framework, and what is the state of a training."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from bytecheckpoint.errors import ConfigError, UnsupportedError
from bytecheckpoint.probes.probe import Feature, require
from bytecheckpoint.storage.paths import TieredPath

__all__ = ["default_group", "plain_optimizer", "refuse_tiers", "require_for_import"]


def require_for_import(feature: Feature) -> None:
    """Checks that a framework is there and built as we need it, where a module is imported.

    Raises:
        ImportError: It is not. The message names the versions, the probes that failed, and what to do.
    """
    try:
        require(feature)
    except UnsupportedError as error:
        raise ImportError(str(error)) from None


def refuse_tiers(call: str, path: object) -> None:
    """Refuses ``Tiers``, which a framework would take for their near folder.

    Args:
        call: What the user called.
        path: What was passed as a folder.

    Raises:
        ConfigError: It is of ``Tiers``.
    """
    if isinstance(path, TieredPath):
        raise ConfigError(
            f"{call}: Tiers cannot be passed here: pass their near folder, {path}, and run bcp drain for the copies in "
            "durable storage"
        )


def default_group() -> dist.ProcessGroup | None:
    """Returns the default group, if there is one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def plain_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that Accelerate wraps.

    torch steps an optimizer without state once when its state is asked for. The wrapper would do that by the gradient
    scaler, which has no scale yet when a run is resumed.
    """
    return getattr(optimizer, "optimizer", optimizer)
