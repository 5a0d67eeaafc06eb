# SPDX-License-Identifier: Apache-2.0
"""All fields of ``bytecheckpoint.Config``, for a table. Needs no Sphinx."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from bytecheckpoint import Config

__all__ = ["config_rows"]

_ENTRY = re.compile(r" {4}(\w+): (.*)")


def config_rows() -> list[tuple[str, str, str]]:
    """Returns name, default and description of each field, in the order of the class.

    Raises:
        ValueError: The docstring of the class leaves a field out, or describes what is no field.
    """
    described = _attributes(inspect.getdoc(Config) or "")
    fields = {field.name: field for field in dataclasses.fields(Config)}
    if described.keys() != fields.keys():
        raise ValueError(f"Config and its docstring have different fields: {sorted(described.keys() ^ fields.keys())}")
    return [(name, _default(name, field.default), described[name]) for name, field in fields.items()]


def _attributes(docstring: str) -> dict[str, str]:
    """Returns what the section ``Attributes`` of a Google docstring says, by name."""
    section = docstring.partition("Attributes:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry is not None:
            name, found[entry[1]] = entry[1], entry[2]
        else:
            found[name] += " " + line.strip()
    return found


def _default(name: str, value: Any) -> str:
    """Returns a default as somebody would write it."""
    if name.endswith("_bytes") and value:
        return f"{value >> 20} MiB"
    return str(int(value)) if type(value) is float else str(value)
