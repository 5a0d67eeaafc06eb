# SPDX-License-Identifier: Apache-2.0
"""Figures of ranks as a page holds them: whole numbers and a scale; where there are too many, of blocks of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.findings.figures import RankFigures
from bytecheckpoint.observability.page.untrusted import shown
from bytecheckpoint.observability.spans import lanes_of

__all__ = ["num_cells", "num_spans", "of_blocks", "of_ranks", "timelines_of"]

_NUM_BLOCKS = 64
_LARGEST = 99_999  # of a column as whole numbers: five digits are more than a page shows


def num_cells(figures: RankFigures) -> int:
    """Returns how many numbers the columns have."""
    return len(figures.ranks) * (len(figures.columns) + len(figures.phases))


def of_ranks(figures: RankFigures) -> dict[str, Any]:
    """Returns the columns, one entry a rank."""
    is_range = figures.ranks == list(range(len(figures.ranks)))
    return {
        "num": len(figures.ranks),
        "rank": None if is_range else figures.ranks,
        "host": figures.host or None,
        "hosts": [shown(host) for host in figures.hosts],
        "columns": {shown(name): _scaled(column) for name, column in figures.columns.items()},
        "phases": {shown(name): _scaled(column) for name, column in figures.phases.items()},
    }


def of_blocks(figures: RankFigures) -> dict[str, Any]:
    """Returns the columns of blocks of neighbouring ranks. Each block has the largest figure of its ranks."""
    length = len(figures.ranks)
    step = max(1, -(-length // _NUM_BLOCKS))
    if step == 1:
        return of_ranks(figures)
    begins = range(0, length, step)

    def largest(column: Sequence[float]) -> Any:
        return _scaled([max(column[begin : begin + step]) for begin in begins])

    return {
        "num": len(begins),
        "rank": [figures.ranks[begin] for begin in begins],
        "last": [figures.ranks[min(begin + step, length) - 1] for begin in begins],
        "host": None,
        "hosts": [],
        "columns": {shown(name): largest(column) for name, column in figures.columns.items()},
        "phases": {shown(name): largest(column) for name, column in figures.phases.items()},
    }


def _scaled(column: Sequence[float]) -> list[Any]:
    scale = max(max(column), -min(column)) / _LARGEST
    if scale == 0:
        return [0, len(column)]
    factor = 1 / scale
    return [scale, [round(value * factor) for value in column]]


def num_spans(record: Mapping[str, Any]) -> int:
    """Returns about how many spans the timelines of a record have, without a look at each."""
    timelines = record.get("timelines")
    all_lanes = [
        of_rank.get("lanes")
        for of_rank in (timelines.values() if isinstance(timelines, Mapping) else ())
        if isinstance(of_rank, Mapping)
    ]
    spans = [
        lane.get("spans")
        for lanes in all_lanes
        for lane in (lanes if isinstance(lanes, list) else ())
        if isinstance(lane, Mapping)
    ]
    return sum(len(each) for each in spans if isinstance(each, list))


def timelines_of(record: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """Returns ``[lane, spans]`` by rank, where a span is ``[phase, begin_us, length_us, busy_us, count, bytes]``."""
    return {
        str(rank): [[shown(lane.name), [[shown(phase), *numbers] for phase, *numbers in lane.spans]] for lane in lanes]
        for rank, lanes in lanes_of(record).items()
    }
