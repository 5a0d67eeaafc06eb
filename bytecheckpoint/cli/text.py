# SPDX-License-Identifier: Apache-2.0
"""Text for terminals and for programs. Text from a checkpoint is hostile: it may contain anything."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import click

__all__ = [
    "box_text",
    "columns",
    "counted",
    "json_value",
    "one_line",
    "print_json",
    "safe_lines",
    "safe_name",
    "short_name",
]

# Letters of right-to-left scripts reorder the text beside them.
_RIGHT_TO_LEFT = frozenset({"R", "AL", "AN"})


# How many characters of a long name are shown, from its beginning and from its end.
_FIRST, _LAST = 200, 50
# A column is at most this wide; a wider cell does not widen the others.
_MOST_WIDTH = 120


def _is_safe(letter: str) -> bool:
    return letter.isprintable() and unicodedata.bidirectional(letter) not in _RIGHT_TO_LEFT


def _escaped(letter: str) -> str:
    return (
        letter.encode("unicode_escape", "surrogatepass").decode("ascii") if ord(letter) > 0x7F else repr(letter)[1:-1]
    )


def one_line(text: str) -> str:
    """Returns ``text`` with everything escaped that could end the line, move the cursor or reorder letters."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if _is_safe(letter) else _escaped(letter) for letter in text)


def safe_lines(text: str) -> str:
    """Does what ``one_line`` does, line by line."""
    return "\n".join(one_line(line) for line in text.split("\n"))


def safe_name(name: str) -> str:
    """Returns a key as it is shown. Different names are shown differently."""
    shown = "".join("\\\\" if letter == "\\" else one_line(letter) for letter in name) if not name.isalnum() else name
    shown = one_line(shown)
    return f"'{shown}'" if not shown or shown != shown.strip() else shown


def short_name(name: str) -> str:
    """Does what ``safe_name`` does, for lists. A name too long for a model is cut to its beginning, end and length."""
    if len(name) <= _FIRST + _LAST:
        return safe_name(name)
    return f"{safe_name(name[:_FIRST])} ... [{len(name):,} characters] ... {safe_name(name[-_LAST:])}"


def box_text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Returns a box as text, for example ``[0:2, 4:8]``."""
    return f"[{', '.join(f'{begin}:{begin + size}' for begin, size in zip(offsets, sizes, strict=True))}]"


def counted(count: int, noun: str) -> str:
    """Returns a number with a noun, for example ``1 tensor`` or ``1,000 tensors``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def columns(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Returns lines of aligned columns. A very wide cell shifts the rest of its own line, but not other lines.

    Args:
        rows: Rows of the same number of cells.
        right: Indices of columns that are aligned to the right.
    """
    widths = [min(max(map(len, column)), _MOST_WIDTH) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths, right)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int], right: frozenset[int]) -> Iterable[str]:
    for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if number in right else cell.ljust(width)


def json_value(value: Any) -> Any:
    """Converts ``value`` to JSON types: numbers that are not finite to strings, complex ones to [real, imaginary].

    Raises:
        TypeError: ``value`` does not consist of builtin values.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"inf": "Infinity", "-inf": "-Infinity"}.get(str(value), "NaN")
    if isinstance(value, complex):
        return [json_value(value.real), json_value(value.imag)]
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: json_value(each) for key, each in value.items()}
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def print_json(value: Any) -> None:
    """Prints one JSON document in ASCII."""
    click.echo(json.dumps(value, allow_nan=False, indent=2))
