# SPDX-License-Identifier: Apache-2.0
"""Values as TOML, which ``tomllib`` reads and does not write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from bytecheckpoint.errors import ConfigError

__all__ = ["assignment"]


def assignment(key: str, value: object) -> str:
    """Returns a line ``key = value``.

    Raises:
        ConfigError: The value is none of TOML.
    """
    return f"{_text(key)} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(assignment(key, one) for key, one in value.items()) + " }" if value else "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return _text(value)
    raise ConfigError(f"{value!r} cannot be written to a TOML file")


def _text(text: str) -> str:
    # TOML escapes as JSON does, but for DEL, and has no pairs of surrogates.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
