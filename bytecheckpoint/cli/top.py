# SPDX-License-Identifier: Apache-2.0
"""``bcp top``."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from bytecheckpoint.cli.options import checked_path, json_option
from bytecheckpoint.cli.text import columns, counted, json_value, one_line, print_json
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.observability.drains import Drains, drain_text, drains_in
from bytecheckpoint.observability.journal import read_drains, read_failures, read_journal
from bytecheckpoint.observability.summary import failure_text
from bytecheckpoint.report.text import duration_text, rate_text, size_text
from bytecheckpoint.runtime.live_pages import LiveCall, Pages, read_live_pages

__all__ = ["command"]

_LAST_CALLS, _LAST_FAILURES, _LAST_DRAINS = 5, 3, 3
_MOST_DRAINS = 200  # that are counted
# Larger numbers in a journal are none of ours, and no time that can be shown.
_MOST = 1 << 60
# Moves the cursor to the upper left corner; removes what is right of the cursor, and all below it.
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_CLEAR = "\x1b[2J"


@click.command("top")
@click.argument("run", type=click.STRING, callback=checked_path, required=False)
@click.option("--once", is_flag=True, help="Print once and end, also where stdout is a terminal.")
@click.option("--interval", type=click.FloatRange(0.1, 3600.0), default=1.0, show_default=True, help="Seconds.")
@json_option
def command(run: str | None, once: bool, interval: float, as_json: bool) -> None:
    """Shows the saves and loads that are under way on this machine: who is in which phase, since when, how fast.

    RUN is the folder of a run, or a checkpoint; without it, all are shown. Below RUN are also, from its journal, the
    last calls that failed, the last that did not, and the copies to durable storage. It reads only, and processes of
    other users only as root. Ctrl-C ends it. With --once, with --json, and where stdout is no terminal, it prints once.

    \b
    Example:
      bcp top run
    """
    if as_json or once or not sys.stdout.isatty():
        pages = read_live_pages()
        if as_json:
            print_json(_document(run, pages))
        else:
            click.echo("\n".join(_lines(run, pages, {}, 0.0)))
        return
    before: dict[tuple[int, str, float], int] = {}
    click.echo(_CLEAR, nl=False)
    try:
        while True:
            pages = read_live_pages()
            lines = _lines(run, pages, before, interval)
            width, height = shutil.get_terminal_size()
            shown = "".join(line[:width] + _END_OF_LINE + "\n" for line in lines[: height - 1])
            click.echo(_HOME + shown + _BELOW, nl=False)
            before = {_key(call): call.bytes_done for call in pages.calls}
            time.sleep(interval)
    except KeyboardInterrupt:
        return


def _key(call: LiveCall) -> tuple[int, str, float]:
    return call.pid, call.path, call.began_at


def _is_below(path: str, run: str | None) -> bool:
    return run is None or path == run or path.startswith(run.rstrip("/") + "/")


def _document(run: str | None, pages: Pages) -> dict[str, Any]:
    calls = [dataclasses.asdict(call) for call in pages.calls if _is_below(call.path, run)]
    drains, last = _drains(run)
    return {
        "run": run,
        "calls": calls,
        "closed_processes": pages.num_closed,
        "unknown_pages": pages.num_unknown,
        "last": [_plain(record) for record in _last_calls(run)],
        "failed": [json_value(record) for record in _last_failures(run)],
        "drains": {**json_value(drains.to_dict()), "last": [json_value(record) for record in last]},
    }


def _lines(run: str | None, pages: Pages, before: dict[tuple[int, str, float], int], interval_s: float) -> list[str]:
    """Returns what is shown.

    Args:
        run: See ``command``.
        pages: What was found.
        before: Bytes that each call had done the last time; empty the first time.
        interval_s: Seconds since then.
    """
    calls = [call for call in pages.calls if _is_below(call.path, run)]
    now = time.time()
    lines = [f"{counted(len(calls), 'rank')} in saves and loads on this machine, {datetime.now():%H:%M:%S}"]
    rows: list[tuple[str, ...]] = [("PID", "RANK", "CALL", "SINCE", "PHASE", "FOR", "DONE", "OF", "RATE", "")]
    for call in calls:
        seconds, done = max(now - call.began_at, 0.0), call.bytes_done
        if _key(call) in before:
            seconds, done = interval_s, call.bytes_done - before[_key(call)]
        rows.append(_row(call, max(now - call.began_at, 0.0), max(done, 0) / 1e9 / seconds if seconds > 0 else 0.0))
    lines += ["", *columns(rows, right=frozenset({0, 1, 3, 5, 6, 7, 8}))] if calls else []
    lines += _of_paths(calls)
    if pages.num_closed:
        closed = counted(pages.num_closed, "process") if pages.num_closed == 1 else f"{pages.num_closed:,} processes"
        lines += ["", f"{closed} of other users cannot be looked into; root can"]
    if pages.num_unknown:
        lines += ["", f"{counted(pages.num_unknown, 'page')} of another version not shown"]
    failed = [one_line(failure_text(record)) for record in reversed(_last_failures(run))]
    lines += ["", "last that failed:", *(f"  {line}" for line in failed)] if failed else []
    last = [_plain(record) for record in _last_calls(run)]
    if last:
        lines += ["", "last calls:", *(f"  {line}" for line in columns([_row_of_last(each) for each in last]))]
    lines += _drain_lines(run)
    return [*lines, "", f"{one_line(run or '')}: there is no such folder yet"] if _is_missing(run) else lines


def _row(call: LiveCall, since_s: float, gb_per_s: float) -> tuple[str, ...]:
    world = f"/{call.world_size}" if call.world_size else ""
    return (
        str(call.pid),
        f"{call.rank}{world}",
        one_line(call.kind),
        duration_text(since_s),
        call.phase,
        duration_text(call.phase_s),
        size_text(call.bytes_done),
        size_text(call.bytes_expected) if call.bytes_expected else "?",
        rate_text(gb_per_s),
        call.state_text,
    )


def _of_paths(calls: Sequence[LiveCall]) -> list[str]:
    """Returns a line for each call: its path, and how much of it the ranks of this machine have done."""
    lines = []
    by_path: dict[tuple[str, str], list[LiveCall]] = {}
    for call in calls:
        by_path.setdefault((call.kind, call.path), []).append(call)
    for (kind, path), ranks in by_path.items():
        done, expected = (sum(getattr(call, name) for call in ranks) for name in ("bytes_done", "bytes_expected"))
        share = f", {100 * min(done / expected, 1.0):.0f} %" if expected else ""
        pids = ", ".join(str(call.pid) for call in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        lines.append(f"{one_line(kind)} {one_line(path)}: {counted(len(ranks), 'rank')} here{share} (pid {pids})")
    return ["", *lines] if lines else []


def _is_missing(run: str | None) -> bool:
    return run is not None and "://" not in run and not Path(run).exists()


def _last_calls(run: str | None) -> list[dict[str, Any]]:
    if run is None or "://" in run:
        return []
    for folder in (Path(run), Path(run).parent):
        try:
            records, _ = read_journal(folder, last=_LAST_CALLS)
        except CheckpointError:
            continue
        if records:
            return records
    return []


def _last_failures(run: str | None) -> list[dict[str, Any]]:
    if run is None or "://" in run:
        return []
    try:
        return read_failures(run, last=_LAST_FAILURES)
    except CheckpointError:
        return []


def _drains(run: str | None) -> tuple[Drains, list[dict[str, Any]]]:
    """Returns what became of the copies of a run to durable storage, and the records of the last ones."""
    if run is None or "://" in run:
        return Drains(), []
    for folder in (Path(run), Path(run).parent):
        try:
            records = read_drains(folder, _MOST_DRAINS)
        except CheckpointError:
            continue
        if found := drains_in(folder, records):
            return found, records[-_LAST_DRAINS:]
    return Drains(), []


def _drain_lines(run: str | None) -> list[str]:
    drains, last = _drains(run)
    if not drains:
        return []
    shown = [f"  {one_line(drain_text(record))}" for record in reversed(last)]
    return ["", f"to durable storage: {one_line(drains.summary())}", *shown]


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Returns what is shown of a record of the journal."""
    report = record.get("report") if isinstance(record.get("report"), dict) else {}
    assert isinstance(report, dict)
    size = report.get("total_bytes" if record["kind"] == "save" else "total_bytes_wanted")
    numbers = {"at": record.get("at"), "total_s": report.get("total_s"), "num_bytes": size}
    known = {name: value for name, value in numbers.items() if isinstance(value, (int, float)) and 0 <= value < _MOST}
    return {"kind": record["kind"], "path": str(record.get("path", "")), **dict.fromkeys(numbers), **known}


def _row_of_last(shown: dict[str, Any]) -> tuple[str, ...]:
    at, total_s, size = shown["at"], shown["total_s"], shown["num_bytes"]
    return (
        _time_text(at),
        shown["kind"],
        one_line(shown["path"]),
        "?" if size is None else size_text(int(size)),
        "?" if total_s is None else duration_text(total_s),
    )


def _time_text(at: float | None) -> str:
    try:
        return "?" if at is None else f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # a year that no calendar has
        return "?"
