# SPDX-License-Identifier: Apache-2.0
"""Roles: the models of one job that trains several, each with its own checkpoints, staging memory and thread."""

from __future__ import annotations

import os
from collections.abc import Mapping

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.reference_variables import ROLE_SUFFIX
from bytecheckpoint.storage.paths import Place, below

__all__ = ["check_role", "folder_of_role", "known_roles"]

_KNOWN = ("default", "actor", "critic", "ref", "rm")


def known_roles(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Returns ``default``, ``actor``, ``critic``, ``ref``, ``rm``, and the roles in BYTECHECKPOINT_ROLE_SUFFIX.

    The variable lists roles, separated by commas.

    Raises:
        ConfigError: A role in the variable cannot be the name of a folder.
    """
    environ = os.environ if environ is None else environ
    own = [name.strip().lower() for name in environ.get(ROLE_SUFFIX, "").split(",") if name.strip()]
    for name in own:
        if name in (".", "..") or "/" in name or "\0" in name:
            raise ConfigError(f"{ROLE_SUFFIX}={environ[ROLE_SUFFIX]!r}: {name!r} cannot be the name of a folder")
    return (*_KNOWN, *own)


def check_role(role: str | None) -> str:
    """Returns the role in lower case; "" if there is none.

    Raises:
        ConfigError: The role is unknown.
    """
    if not role:
        return ""
    if role.lower() not in known_roles():
        raise ConfigError(
            f"role={role!r}: unknown; known are {', '.join(known_roles())}; add it with {ROLE_SUFFIX}={role.lower()}"
        )
    return role.lower()


def folder_of_role(root: Place, role: str) -> Place:
    """Returns the folder of a role's step folders: two roles never write to one folder."""
    return below(root, role) if role else root
