# SPDX-License-Identifier: Apache-2.0
"""Saves and loads as a trace for Perfetto, in the JSON of Chrome's trace events.

A rank is a process, and a lane of it is a thread. Ranks without recorded lanes have one span for the whole call: their
busy seconds say how much they did, not when.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bytecheckpoint.findings.figures import RankFigures, number, rank_figures, report_of, text_of
from bytecheckpoint.observability.spans import Lane, lanes_of

__all__ = ["trace_of"]

_CALL_LANE = "whole call"
# Lanes have numbers of their own in the whole trace: some viewers take a thread's number for unique.
_MOST_LANES = 256
# Of a whole trace, with Config(trace="full"); more would be gigabytes.
_MOST_RANKS = 4096
_MOST_SPANS = 1 << 15


def trace_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the trace as a JSON value, to be opened at ui.perfetto.dev or in chrome://tracing.

    Times are microseconds after ``otherData.begin_unix_s``.

    Args:
        records: Records of saves and loads, oldest first.
    """
    all_figures = [rank_figures(record) for record in records]
    begins = [
        number(record, "at") + min([0.0, *figures.columns.get("arrived_s", [])])
        for record, figures in zip(records, all_figures, strict=True)
    ]
    begin_s = min(begins, default=0.0)
    threads: dict[int, dict[str, int]] = {}
    hosts: dict[int, str] = {}
    spans: list[dict[str, Any]] = []
    for record, figures in zip(records, all_figures, strict=True):
        offset_us = round((number(record, "at") - begin_s) * 1e6)
        for rank, lane, span in _spans(record, figures, hosts):
            of_rank = threads.setdefault(rank, {})
            if lane not in of_rank and len(of_rank) == _MOST_LANES:
                continue
            place = {"pid": _pid(rank), "tid": _pid(rank) * _MOST_LANES + of_rank.setdefault(lane, len(of_rank))}
            spans.append(span | place | {"ph": "X", "ts": span["ts"] + offset_us})
    return {
        "traceEvents": [*_names(threads, hosts), *spans],
        "displayTimeUnit": "ms",
        "otherData": {"begin_unix_s": begin_s, "made_by": "bcp report"},
    }


def _pid(rank: int) -> int:
    return rank + 1  # 0 is the idle process, whose name is not shown


def _names(threads: Mapping[int, Mapping[str, int]], hosts: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    def metadata(what: str, rank: int, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": _pid(rank), "tid": tid, "ts": 0, "args": args}

    for rank, lanes in sorted(threads.items()):
        first = _pid(rank) * _MOST_LANES
        yield metadata("process_name", rank, first, name=f"rank {rank}{f' on {hosts[rank]}' if rank in hosts else ''}")
        yield metadata("process_sort_index", rank, first, sort_index=rank)
        for lane, tid in lanes.items():
            yield metadata("thread_name", rank, first + tid, name=lane)
            yield metadata("thread_sort_index", rank, first + tid, sort_index=tid)


def _spans(
    record: Mapping[str, Any], figures: RankFigures, hosts: dict[int, str]
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields rank, lane and span, with microseconds after the coordinator's begin. Notes the hosts of ranks."""
    by_rank = lanes_of(record, _MOST_RANKS, _MOST_SPANS)
    step = record.get("step")
    title = f"{record.get('kind')} {f'step {step}' if isinstance(step, int) else text_of(record, 'path')}"
    arrived, ended = figures.columns.get("arrived_s"), figures.columns.get("ended_s")
    for index, rank in enumerate(figures.ranks):
        if (host := figures.host_of(index)) is not None:
            hosts.setdefault(rank, host)
        begin = round(arrived[index] * 1e6) if arrived else 0
        end = round(ended[index] * 1e6) if ended else round(number(report_of(record), "total_s") * 1e6)
        busy = {name: seconds[index] for name, seconds in figures.phases.items() if seconds[index]}
        sizes = {name: column[index] for name, column in figures.columns.items() if name.startswith("num_")}
        whole = {
            "name": title,
            "cat": "call",
            "ts": begin,
            "dur": max(0, end - begin),
            "args": sizes | {"busy_s": busy},
        }
        yield rank, _CALL_LANE, whole
    for rank, lanes in by_rank.items():
        for lane in lanes:
            yield from ((rank, lane.name, span) for span in _of_lane(lane))


def _of_lane(lane: Lane) -> Iterator[dict[str, Any]]:
    """Yields the spans of a lane in order. One that begins within the one before it begins where that ends."""
    last = None
    for phase, begin, length, busy, count, num_bytes in sorted(lane.spans, key=lambda span: span[1]):
        start = round(begin) if last is None else max(round(begin), last)
        last = max(start, round(begin + length))
        args = {"bytes": num_bytes, "count": count, "busy_us": busy}
        yield {"name": phase, "cat": "phase", "ts": start, "dur": last - start, "args": args}
