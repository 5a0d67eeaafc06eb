# SPDX-License-Identifier: Apache-2.0
"""Converts options from a command line or a recipe to settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import ConfigError

__all__ = ["config_of"]


def config_of(options: Mapping[str, Any] | Config | None) -> Config:
    """Returns the settings of ``options``. ``BYTECHECKPOINT_*`` variables determine fields that ``options`` leaves out.

    Raises:
        ConfigError: An option has a name that no field of ``Config`` has, or an invalid value.
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
