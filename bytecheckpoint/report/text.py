# SPDX-License-Identifier: Apache-2.0
"""Numbers of a report in words, and a report as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from bytecheckpoint.report.rank_trace import RankTrace

__all__ = ["duration_text", "in_words", "rate_text", "ratio", "size_text", "to_plain", "utc_text", "who"]


def ratio(value: float, by: float) -> float:
    """Returns ``value / by``; 0 if there is nothing to divide by."""
    return value / by if by > 0 else 0.0


def who(rank: int, num_ranks: int) -> str:
    """Returns who did what a report says, for example "4 ranks"; ``num_ranks`` is 0 in the report of one rank."""
    if not num_ranks:
        return f"rank {rank}"
    return "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"


def to_plain(report: Any, left_out: Collection[str] = (), **derived: float | None) -> dict[str, Any]:
    """Returns the fields of a report, which is a dataclass, and what is derived from them, as plain values.

    Instead of a trace there are the ``host`` of the rank and its ``phases``, seconds by name.
    """
    names = [field.name for field in dataclasses.fields(report) if field.name not in left_out]
    values = {name: _plain(getattr(report, name)) for name in names}
    trace = values.pop("trace", None)
    return {**values, **(trace or {}), **derived}


def _plain(value: Any) -> Any:
    if isinstance(value, RankTrace):
        return {"host": value.host, "phases": value.phases}
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def size_text(num_bytes: int) -> str:
    """Returns a size for people, for example "1.07 GB"."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return "1 byte" if num_bytes == 1 else f"{num_bytes} bytes"


def rate_text(gb_per_s: float) -> str:
    """Returns a rate for people, for example "1.07 GB/s"."""
    return f"{gb_per_s:.2f} GB/s" if gb_per_s < 10 else f"{gb_per_s:.0f} GB/s"


def duration_text(seconds: float) -> str:
    """Returns a duration for people, for example "31 ms"."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def utc_text(at: object) -> str:
    """Returns a Unix time for people, for example "2026-11-29 09:15:02 UTC"; "?" if it is none that can be shown."""
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" if isinstance(at, int | float) else "?"
    except (ValueError, OverflowError, OSError):  # a year that no calendar has
        return "?"


def in_words(phases: dict[str, float]) -> str:
    """Returns durations by name for people, for example "plan 17 ms, write 400 ms"."""
    return ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in phases.items())
