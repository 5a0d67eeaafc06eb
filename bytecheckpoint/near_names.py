# SPDX-License-Identifier: Apache-2.0
"""Names that are near to one that does not exist, for messages. Needs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(wrong: object, known: Iterable[str], most: int = 1) -> list[str]:
    """Returns the known names that look like a wrong one, the nearest first; letters may differ in case.

    If none does, those are returned that contain it, such as ``model.embed.weight`` for ``embed``.

    Args:
        wrong: The name; anything but a text has no near names.
        known: The names that exist.
        most: How many to return at most.
    """
    if not isinstance(wrong, str) or not wrong:
        return []
    by_lower: dict[str, str] = {}
    for name in known:
        by_lower.setdefault(name.lower(), name)
    near = difflib.get_close_matches(wrong.lower(), by_lower, most)
    return [by_lower[each] for each in near or [each for each in by_lower if wrong.lower() in each][:most]]


def did_you_mean(wrong: object, known: Iterable[str]) -> str:
    """Returns ``; did you mean 'name'?`` for the end of a message; "" if no known name is near."""
    found = nearest(wrong, known)
    return f"; did you mean '{found[0]}'?" if found else ""
