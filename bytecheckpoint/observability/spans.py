# SPDX-License-Identifier: Apache-2.0
"""The timelines of a record, as far as they can be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Lane", "lanes_of"]

_MOST_RANKS = 64
_MOST_LANES = 128
_MOST_SPANS = 5000
_LARGEST = 1e18

Span = tuple[str, float, float, float, float, float]


class Lane(NamedTuple):
    """A thread of a rank.

    Attributes:
        name: Its name, such as ``fill`` or ``write 0``.
        spans: Phase, begin, length and busy time in microseconds, count and bytes.
    """

    name: str
    spans: list[Span]


def lanes_of(record: Mapping[str, Any]) -> dict[int, list[Lane]]:
    """Returns the lanes of each rank that has some. What is no span is left out."""
    timelines = record.get("timelines")
    found = {}
    for rank, of_rank in list(timelines.items())[:_MOST_RANKS] if isinstance(timelines, Mapping) else ():
        lanes = of_rank.get("lanes") if isinstance(of_rank, Mapping) else None
        if rank.isdecimal() and len(rank) < 10 and isinstance(lanes, list):
            found[int(rank)] = [lane for each in lanes[:_MOST_LANES] if (lane := _lane(each)) is not None]
    return {rank: lanes for rank, lanes in found.items() if lanes}


def _lane(given: Any) -> Lane | None:
    name, spans = (given.get("name"), given.get("spans")) if isinstance(given, Mapping) else (None, None)
    if not isinstance(name, str) or not isinstance(spans, list):
        return None
    return Lane(name, [tuple(span[:6]) for span in spans[:_MOST_SPANS] if _is_span(span)])


def _is_span(span: Any) -> bool:
    if not isinstance(span, list) or len(span) < 6 or not isinstance(span[0], str):
        return False
    numbers = span[1:6]
    return set(map(type, numbers)) <= {int, float} and all(-1e12 < n < _LARGEST for n in numbers) and span[2] >= 0
