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
from bytecheckpoint.storage.tiers import Tiers

__all__ = ["config_of", "spec_of", "tiers_of"]

_TIERS = "tiers"


def config_of(options: Mapping[str, Any] | Config | None) -> Config:
    """Returns the settings of ``options``. ``BYTECHECKPOINT_*`` variables determine fields that ``options`` leaves out.

    The option ``tiers`` is none of them; see ``tiers_of``.

    Raises:
        ConfigError: An option has a name that no field of ``Config`` has, or an invalid value.
    """
    if isinstance(options, Config):
        return options
    known = [field.name for field in dataclasses.fields(Config)]
    given = {name: value for name, value in (options or {}).items() if name != _TIERS}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(
            f"bytecheckpoint.torchtitan: no such option: {', '.join(unknown)}; known are {', '.join([*known, _TIERS])}"
        )
    return dataclasses.replace(Config.from_env(), **given)


def tiers_of(options: Mapping[str, Any] | Config | None, folder: str) -> Tiers | None:
    """Returns the places of the run; None if the options name none.

    Args:
        options: With ``tiers``: ``Tiers``, or a dict of their arguments.
        folder: The manager's own folder, which is the place that a dict leaves out.

    Raises:
        ConfigError: See ``Tiers``; or steps would be in memory alone, some or all.
    """
    given = options.get(_TIERS) if isinstance(options, Mapping) else None
    if isinstance(given, Mapping):
        given = {"config": config_of(options), **given}
    tiers = Tiers.of(given, folder)
    if tiers is not None and tiers.near_every != 1:
        raise ConfigError(
            f"bytecheckpoint.torchtitan: near_every={tiers.near_every}: torchtitan looks for steps in folders, and "
            "would not find those in memory alone"
        )
    if tiers is not None and not tiers.disks:
        raise ConfigError(
            "bytecheckpoint.torchtitan: Tiers with memory alone: torchtitan wants a folder of the run: pass it as near"
        )
    return tiers


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
