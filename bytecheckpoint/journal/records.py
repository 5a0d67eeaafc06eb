# SPDX-License-Identifier: Apache-2.0
"""Records of the journal: what a save or a load of all ranks did, as plain values.

docs/internals/journal_fields.md has the fields.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.journal.clocks import offset_of
from bytecheckpoint.journal.failures import CallFailure
from bytecheckpoint.native import _core
from bytecheckpoint.report import LoadReport, RankLoadReport, RankSaveReport, SaveReport
from bytecheckpoint.report.rank_trace import RankTrace
from bytecheckpoint.storage.save_records import FORMAT

__all__ = ["failure_record_of", "record_of"]

# Lanes are kept of so many ranks at most.
_MOST_TIMELINES = 16
# Letters of the text of an error.
_MOST_MESSAGE = 4000
# Digits of a time in seconds: microseconds.
_DIGITS = 6
# The phases of a rank, in their order; they end when the rank has done its part.
_OWN_PHASES = {
    "save": ("plan_s", "global_plan_s", "begin_s", "exchange_s", "write_s"),
    "load": ("metadata_s", "plan_s", "exchange_s", "read_s", "objects_s"),
}
# A rank that is slowest in one of these is worth a timeline.
_WORTH_A_LOOK = ("write", "sync", "copy", "wait_slot", "read", "verify", "scatter", "wait_peer", "plan")


def record_of(report: SaveReport | LoadReport, config: Config, path: str, step: int | None) -> dict[str, Any]:
    """Returns the record of a call, made from the report of its coordinator.

    Args:
        report: Report of the coordinator.
        config: Settings of the call.
        path: Path of the checkpoint, relative to the folder of the run if it is below that.
        step: Number of the step; None if the path names none.
    """
    kind = "save" if isinstance(report, SaveReport) else "load"
    plain = report.to_dict(with_ranks=False)
    mesh = plain.pop("mesh", ())
    for field in ("path", "save_id", "rank", "began_at", "is_async"):
        plain.pop(field, None)
    ranks: Sequence[RankSaveReport | RankLoadReport] = report.ranks or (report,)
    return {
        "format": FORMAT,
        "kind": kind,
        "at": round(report.began_at, 3),
        "path": path,
        "step": step,
        "save_id": report.save_id,
        "world_size": len(ranks),
        "rank": report.rank,
        "is_async": getattr(report, "is_async", False),
        "report": {name: _rounded(value) for name, value in plain.items()},
        **_of_ranks(kind, report, ranks, config),
        "mesh": {"names": [name for name, _ in mesh], "shape": [size for _, size in mesh]} if mesh else None,
        "config": _changed(config),
        "versions": _versions(),
    }


def failure_record_of(failure: CallFailure, config: Config, path: str, step: int | None) -> dict[str, Any]:
    """Returns the record of a call that failed.

    Args:
        failure: What failed.
        config: Settings of the call.
        path: See ``record_of``.
        step: See ``record_of``.
    """
    return {
        "format": FORMAT,
        "kind": "failure",
        "at": round(failure.began_at, 3),
        "of": failure.kind,
        "path": path,
        "step": step,
        "rank": failure.rank,
        "total_s": round(failure.total_s, _DIGITS),
        "error_type": failure.error_type,
        "message": failure.message[:_MOST_MESSAGE],
        "save_id": failure.save_id or None,
        "config": _changed(config),
        "versions": _versions(),
    }


def _of_ranks(
    kind: str, report: SaveReport | LoadReport, ranks: Sequence[RankSaveReport | RankLoadReport], config: Config
) -> dict[str, Any]:
    """Returns what the record says of each rank, in columns."""
    traces = [each.trace for each in ranks]
    hosts = [trace.host if trace is not None else "" for trace in traces]
    places = {host: place for place, host in enumerate(sorted(set(hosts)))}
    columns = _core.trace_columns([b"" if trace is None else trace.spans for trace in traces])
    begins = [_began_s(trace, report.trace) for trace in traces]
    lengths = [sum(getattr(each, name, 0.0) for name in _OWN_PHASES[kind]) for each in _completed(report, ranks)]
    of_ranks: dict[str, Any] = {
        "rank": [each.rank for each in ranks],
        "host": [places[host] for host in hosts],
        "arrived_s": [round(begin, _DIGITS) for begin, _ in begins],
        "clock_error_s": [None if error is None else round(error, _DIGITS) for _, error in begins],
        "ended_s": [round(begin + length, _DIGITS) for (begin, _), length in zip(begins, lengths, strict=True)],
        "phases": {name: [round(s, _DIGITS) for s in column] for name, column in columns["phases"].items()},
    }
    if kind == "save":
        of_ranks["num_bytes"] = [getattr(each, "bytes_written", 0) for each in ranks]
        of_ranks["num_records"] = [getattr(each, "num_records", 0) for each in ranks]
        if isinstance(report, SaveReport) and report.is_async:
            of_ranks["phases"]["stage"] = [round(getattr(each, "blocked_s", 0.0), _DIGITS) for each in ranks]
    else:
        of_ranks["num_bytes"] = [getattr(each, "bytes_read", 0) for each in ranks]
        of_ranks["bytes_received"] = [getattr(each, "bytes_received", 0) for each in ranks]
        of_ranks["num_records"] = [getattr(each, "num_boxes", 0) for each in ranks]
    return {
        "hosts": [*places] if config.journal_hosts else [f"host {place}" for place in places.values()],
        "ranks": of_ranks,
        "sizes": {
            name: [[c, n, round(s, _DIGITS), b] for c, n, s, b in rows] for name, rows in columns["sizes"].items()
        },
        "timelines": {
            str(ranks[place].rank): {"lanes": trace.lanes(begins[place][0])}
            for place in _chosen(of_ranks)
            if (trace := traces[place]) is not None
        },
    }


def _completed(
    report: SaveReport | LoadReport, ranks: Iterable[RankSaveReport | RankLoadReport]
) -> list[RankSaveReport | RankLoadReport]:
    """Returns the reports of the ranks, with the one of the coordinator that has all of its phases."""
    return [report if each.rank == report.rank else each for each in ranks]


def _began_s(trace: RankTrace | None, coordinator: RankTrace | None) -> tuple[float, float | None]:
    """Returns when a rank began, in seconds after the coordinator, and the most that this may be wrong."""
    if trace is None or coordinator is None:
        return 0.0, None
    offset, error = offset_of(trace, coordinator)
    return (trace.began_ns - coordinator.began_ns) / 1e9 + offset, error


def _chosen(of_ranks: dict[str, Any]) -> list[int]:
    """Returns the places of the ranks whose lanes are kept: the coordinator, the median, and who is far from it."""
    ended, arrived, sizes = of_ranks["ended_s"], of_ranks["arrived_s"], of_ranks["num_bytes"]
    by_end = sorted(range(len(ended)), key=ended.__getitem__)
    places = [0, by_end[-1], by_end[len(by_end) // 2], max(range(len(arrived)), key=arrived.__getitem__)]
    places.append(max(range(len(sizes)), key=sizes.__getitem__))
    columns = (of_ranks["phases"].get(name) for name in _WORTH_A_LOOK)
    places += [max(range(len(column)), key=column.__getitem__) for column in columns if column]
    places += [by_end[0], *by_end[-3:], *range(len(ended))]
    return sorted(list(dict.fromkeys(places[: 4 * _MOST_TIMELINES]))[:_MOST_TIMELINES])


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return value


def _changed(config: Config) -> dict[str, Any]:
    """Returns the settings that are not the default ones; without options of an object store, which may be secret."""
    fields = [field for field in dataclasses.fields(config) if field.name != "storage_options"]
    return {f.name: getattr(config, f.name) for f in fields if getattr(config, f.name) != f.default}


def _versions() -> dict[str, str]:
    packages = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in ("bytecheckpoint", "torch")}
    return {"python": platform.python_version(), **packages}
