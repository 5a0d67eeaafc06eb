# SPDX-License-Identifier: Apache-2.0
"""Lists and tables of names for people, which name some and count the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["listed", "table"]

# A column is at most this wide; a longer name does not widen the others.
_MOST_WIDTH = 100


def listed(names: Sequence[str], most: int = 20, total: int | None = None) -> str:
    """Returns ``a, b and 3 more``.

    Args:
        names: The names.
        most: The most that are named.
        total: How many there are, if ``names`` are only the first of them.
    """
    more = (len(names) if total is None else total) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def table(kinds: Mapping[str, tuple[Sequence[tuple[str, str]], int]], most: int) -> str:
    """Returns rows in aligned columns, with the kind before the first row of each. Kinds without rows are left out.

    Args:
        kinds: For each kind its rows of a name and a note, and how many rows there would be if all were known.
        most: The most rows of each kind.
    """
    lines: list[tuple[str, str, str]] = []
    for kind, (rows, total) in kinds.items():
        shown = [(_printable(name), _printable(note)) for name, note in rows[:most]]
        if rows and total > len(shown):
            shown.append((f"and {total - len(shown):,} more", ""))
        lines += [("" if number else kind, *row) for number, row in enumerate(shown)]
    of_kind, of_name = (min(max((len(line[column]) for line in lines), default=0), _MOST_WIDTH) for column in (0, 1))
    return "\n".join(f"{kind:<{of_kind}}  {name:<{of_name}}  {note}".rstrip() for kind, name, note in lines)


def _printable(text: str) -> str:
    """Returns text that cannot end the line or move the cursor: a checkpoint's keys may be anything."""
    return text if text.isprintable() else text.encode("unicode_escape", "surrogatepass").decode("ascii")
