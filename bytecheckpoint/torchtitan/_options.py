# SPDX-License-Identifier: Apache-2.0
"""Settings as they come from a command line or a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import ConfigError

__all__ = ["config_of"]


def config_of(options: Mapping[str, Any] | Config | None) -> Config:
    """The settings that ``options`` are of; what they leave out is as ``BYTECHECKPOINT_*`` variables say.

    Raises:
        ConfigError: An option has a name that no field of ``Config`` has, or an impossible value.
    """
    if isinstance(options, Config):
        return options
    known = [field.name for field in dataclasses.fields(Config)]
    unknown = sorted(set(options or {}) - set(known))
    if unknown:
        raise ConfigError(
            f"bytecheckpoint.torchtitan: no such option: {', '.join(unknown)}; known are {', '.join(known)}"
        )
    return dataclasses.replace(Config.from_env(), **(options or {}))
