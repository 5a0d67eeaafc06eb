# SPDX-License-Identifier: Apache-2.0
"""What an object is, in one line, for whoever prints it."""

from __future__ import annotations

import dataclasses
from typing import Any

from bytecheckpoint.config import Config

__all__ = ["described"]


def described(value: object, *first: object, **defaults: Any) -> str:
    """``Type(first, name=...)`` with the attributes of ``value`` and the fields of its ``config`` that are no defaults.

    Args:
        first: Stand before the attributes.
        defaults: By the name of an attribute. One that is not there, in a subclass, is left out.
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
