# SPDX-License-Identifier: Apache-2.0
"""The figures of a record's ranks, as far as they can be used, and robust statistics over ranks.

A record comes from a file that anything may have written. A column that does not fit the others, or that holds
something else than finite numbers, is left out as if the record did not have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RankFigures", "number", "rank_figures", "report_of", "spread", "text_of", "typical"]

_NUMBERS = ({int}, {float}, {int, float})
_MOST = 1e18  # what no figure reaches; larger ones would become infinite in sums and products


@dataclass(frozen=True)
class RankFigures:
    """Columns of figures, one entry a rank.

    Attributes:
        ranks: Numbers of the ranks.
        hosts: Names of hosts.
        host: Index into ``hosts`` of each rank; empty if it is not known.
        columns: Other columns by name, such as ``num_bytes``, ``arrived_s``, ``ended_s``. A ``clock_error_s`` of -1
            means that nothing is known of the clock.
        phases: Busy seconds of each phase.
    """

    ranks: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=dict)
    phases: dict[str, list[float]] = field(default_factory=dict)

    def host_of(self, index: int) -> str | None:
        """Returns the name of the host of the rank at this index, if it is known."""
        return self.hosts[self.host[index]] if self.host else None

    def sum_of(self, *names: str) -> list[float] | None:
        """Returns the seconds of some phases together; None if the record has none of them."""
        found = [self.phases[name] for name in names if name in self.phases]
        if len(found) < 2:
            return found[0] if found else None
        return [sum(each) for each in zip(*found, strict=True)]


def _column(values: Any, length: int) -> list[float] | None:
    if type(values) is not list or len(values) != length or set(map(type, values)) not in _NUMBERS:
        return None
    try:
        # A value that is not a number makes the sum no number.
        is_usable = min(values) > -_MOST and max(values) < _MOST and math.isfinite(sum(values))
    except OverflowError:
        return None
    return values if is_usable else None


def _errors(values: Any) -> Any:
    """Returns errors of clocks with -1 for a clock of which nothing is known."""
    return [-1.0 if value is None else value for value in values] if type(values) is list else values


def rank_figures(record: Mapping[str, Any]) -> RankFigures:
    """Returns the columns of a record that can be used; none at all if it does not say which ranks it is about."""
    given = record.get("ranks")
    if not isinstance(given, Mapping):
        return RankFigures()
    ranks: Any = given.get("rank")
    if type(ranks) is not list or not ranks or set(map(type, ranks)) != {int} or len(set(ranks)) != len(ranks):
        return RankFigures()
    length = len(ranks)
    columns = {
        name: column
        for name, values in given.items()
        if name not in ("rank", "host", "phases")
        and (column := _column(_errors(values) if name == "clock_error_s" else values, length)) is not None
    }
    of_phases = given.get("phases")
    phases = {
        name: column
        for name, values in (of_phases.items() if isinstance(of_phases, Mapping) else ())
        if (column := _column(values, length)) is not None and min(column) >= 0
    }
    hosts = record.get("hosts")
    hosts = [each if isinstance(each, str) else "?" for each in hosts] if isinstance(hosts, list) else []
    host: Any = given.get("host")
    is_known = type(host) is list and len(host) == length and set(map(type, host)) == {int}
    if not is_known or min(host) < 0 or max(host) >= len(hosts):
        host = []
    return RankFigures(ranks, hosts, host, columns, phases)


def number(mapping: Any, name: str) -> float:
    """Returns a figure of a report; 0 where it is missing, or no finite number."""
    value = mapping.get(name) if isinstance(mapping, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0.0
    return value if -_MOST < value < _MOST else 0.0


def report_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the report in a record; an empty one if there is none."""
    report = record.get("report")
    return report if isinstance(report, Mapping) else {}


def text_of(mapping: Mapping[str, Any], name: str) -> str:
    """Returns a text in a record; "" where it is missing, or no text."""
    value = mapping.get(name)
    return value if isinstance(value, str) else ""


def typical(ordered: Sequence[float]) -> float:
    """Returns the lower median. Up to half of the ranks may be slow without moving it.

    Args:
        ordered: At least one value, sorted.
    """
    return ordered[(len(ordered) - 1) // 2]


def spread(ordered: Sequence[float]) -> float:
    """Returns about one standard deviation, taken from the lower half alone, into which no straggler comes.

    Args:
        ordered: At least one value, sorted.
    """
    return typical(ordered) - ordered[int(0.16 * (len(ordered) - 1))]
