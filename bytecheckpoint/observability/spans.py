# SPDX-License-Identifier: Apache-2.0
"""The timelines of a record, as far as they can be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Lane", "lanes_of"]

_MOST_LANES = 128
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


def lanes_of(record: Mapping[str, Any], most_ranks: int = 64, most_spans: int = 5000) -> dict[int, list[Lane]]:
    """Returns the lanes of each rank that has some. What is no span is left out.

    Args:
        record: A record.
        most_ranks: The most ranks that are returned.
        most_spans: The most spans of a lane that are returned.
    """
    timelines = record.get("timelines")
    found = {}
    for rank, of_rank in list(timelines.items())[:most_ranks] if isinstance(timelines, Mapping) else ():
        lanes = of_rank.get("lanes") if isinstance(of_rank, Mapping) else None
        if rank.isdecimal() and len(rank) < 10 and isinstance(lanes, list):
            found[int(rank)] = [lane for each in lanes[:_MOST_LANES] if (lane := _lane(each, most_spans)) is not None]
    return {rank: lanes for rank, lanes in found.items() if lanes}


def _lane(given: Any, most_spans: int) -> Lane | None:
    name, spans = (given.get("name"), given.get("spans")) if isinstance(given, Mapping) else (None, None)
    if not isinstance(name, str) or not isinstance(spans, list):
        return None
    return Lane(name, [tuple(span[:6]) for span in spans[:most_spans] if _is_span(span)])


def _is_span(span: Any) -> bool:
    if not isinstance(span, list) or len(span) < 6 or not isinstance(span[0], str):
        return False
    numbers = span[1:6]
    return set(map(type, numbers)) <= {int, float} and all(-1e12 < n < _LARGEST for n in numbers) and span[2] >= 0
