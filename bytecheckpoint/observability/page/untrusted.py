# SPDX-License-Identifier: Apache-2.0
"""Values of a journal, made fit for a page: of bounded size, finite, and without characters that control anything."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["cleaned", "shown"]

_MOST_CHARACTERS = 400
_MOST_ENTRIES = 300
_MOST_DEPTH = 5


def shown(text: str) -> str:
    """Returns text with everything escaped that cannot be printed: line ends, terminal codes, marks that reorder."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS - 60]} ... [{len(text):,} characters] ... {text[-40:]}"
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode("ascii") for each in text
    )


def cleaned(value: Any, depth: int = 0) -> Any:
    """Returns a JSON value with its texts as ``shown``; what is too deep, too long or no finite number is left out.

    Args:
        value: What ``json.loads`` gave.
        depth: How deep in another value it is.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, int | float):
        return value if -1e18 < value < 1e18 and math.isfinite(value) else None
    if depth >= _MOST_DEPTH:
        return None
    if isinstance(value, list):
        return [cleaned(each, depth + 1) for each in value[:_MOST_ENTRIES]]
    if isinstance(value, dict):
        return {shown(str(key)): cleaned(each, depth + 1) for key, each in list(value.items())[:_MOST_ENTRIES]}
    return None
