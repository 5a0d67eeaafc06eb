# SPDX-License-Identifier: Apache-2.0
"""Lists of names in messages, which name some and count the others."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed"]


def listed(names: Sequence[str], most: int = 20, total: int | None = None) -> str:
    """Returns ``a, b and 3 more``.

    Args:
        names: The names.
        most: The most that are named.
        total: How many there are, if ``names`` are only the first of them.
    """
    more = (len(names) if total is None else total) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")
