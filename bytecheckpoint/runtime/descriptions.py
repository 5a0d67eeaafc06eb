# SPDX-License-Identifier: Apache-2.0
"""The ``repr`` of objects with settings, in one line."""

from __future__ import annotations

import dataclasses
from typing import Any

from bytecheckpoint.config import Config

__all__ = ["described"]


def described(value: object, *first: object, **defaults: Any) -> str:
    """Returns ``Type(first, name=...)`` with the attributes and config fields of ``value`` that differ from defaults.

    Args:
        value: The object.
        first: Values to put before the attributes.
        defaults: Default of each attribute, by its name. An attribute that ``value`` does not have is left out.
    """
    parts = [repr(one) for one in first]
    for name, default in defaults.items():
        now = getattr(value, name, default)
        if now != default:
            parts.append(f"{name}={now!r}")
    config = getattr(value, "config", None)
    changed = _changed(config) if isinstance(config, Config) else ""
    if changed:
        parts.append(f"config=Config({changed})")
    return f"{type(value).__name__}({', '.join(parts)})"


def _changed(config: Config) -> str:
    fields = [field for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]
    return ", ".join(f"{field.name}={getattr(config, field.name)!r}" for field in fields)
