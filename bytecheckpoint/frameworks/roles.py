# SPDX-License-Identifier: Apache-2.0
"""Several models that one job trains, each with checkpoints, memory and a thread of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.reference_variables import ROLE_SUFFIX

__all__ = ["check_role", "folder_of_role", "known_roles"]

_KNOWN = ("default", "actor", "critic", "ref", "rm")


def known_roles(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """``default``, ``actor``, ``critic``, ``ref``, ``rm``, and those of BYTECHECKPOINT_ROLE_SUFFIX, between commas.

    Raises:
        ConfigError: One of the variable is no name of a folder.
    """
    environ = os.environ if environ is None else environ
    own = [name.strip().lower() for name in environ.get(ROLE_SUFFIX, "").split(",") if name.strip()]
    for name in own:
        if name in (".", "..") or "/" in name or "\0" in name:
            raise ConfigError(f"{ROLE_SUFFIX}={environ[ROLE_SUFFIX]!r}: {name!r} cannot be the name of a folder")
    return (*_KNOWN, *own)


def check_role(role: str | None) -> str:
    """The role in lower case, "" if there is none.

    Raises:
        ConfigError: An unknown one.
    """
    if not role:
        return ""
    if role.lower() not in known_roles():
        raise ConfigError(
            f"role={role!r}: {', '.join(known_roles())} are known; add others with {ROLE_SUFFIX}={role.lower()}"
        )
    return role.lower()


def folder_of_role(root: str | os.PathLike[str], role: str) -> Path:
    """Where a role keeps its step folders: two roles never write to one folder."""
    return Path(root) / role if role else Path(root)
