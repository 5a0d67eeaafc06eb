# SPDX-License-Identifier: Apache-2.0
"""Converts options from a command line or a recipe to settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.load_spec.spec import LoadSpec

__all__ = ["config_of", "spec_of"]


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


def spec_of(given: str | os.PathLike[str] | LoadSpec | None) -> LoadSpec | None:
    """Returns the spec of an option, which may be the path of a TOML file.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong; or the option is none of these.
    """
    if given is None or isinstance(given, LoadSpec):
        return given
    if isinstance(given, str | os.PathLike):
        return LoadSpec.from_file(given) if given else None
    raise ConfigError(f"initial_load_spec={given!r}: must be a LoadSpec, or the path of a TOML file with one")
