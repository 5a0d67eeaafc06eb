# SPDX-License-Identifier: Apache-2.0
"""``bcp report``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from bytecheckpoint.cli.options import Failure, checkpoint_argument, json_option
from bytecheckpoint.cli.text import counted, json_value, one_line, print_json
from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.findings.figures import number, rank_figures, report_of, text_of
from bytecheckpoint.findings.findings import Finding
from bytecheckpoint.observability.drains import drain_text, drains_in
from bytecheckpoint.observability.page import page_of
from bytecheckpoint.observability.page.contents import page_contents
from bytecheckpoint.observability.page.untrusted import cleaned
from bytecheckpoint.observability.perfetto import trace_of
from bytecheckpoint.observability.run_contents import largest_tensors, space_of
from bytecheckpoint.observability.run_folder import Run, journal_files, page_folder, read_run, trace_folders
from bytecheckpoint.observability.summary import Trouble, failure_text, findings_of_all, troubles
from bytecheckpoint.observability.trace_files import with_whole_traces
from bytecheckpoint.observability.whole_calls import num_calls, part_of
from bytecheckpoint.report.text import duration_text, size_text
from bytecheckpoint.storage.folders import folder_at

__all__ = ["command"]

_DEFAULT_LAST = 200
_MOST_IN_WORDS = 5


@click.command("report")
@checkpoint_argument("run")
@click.option("-o", "--output", metavar="FILE", type=click.Path(dir_okay=False), help="Where to write the page.")
@click.option("--trace", metavar="FILE", type=click.Path(dir_okay=False), help="Write a trace for Perfetto, too.")
@click.option("--follow", is_flag=True, help="Write the page again whenever there is a new record, until Ctrl-C.")
@click.option(
    "--interval",
    metavar="S",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Seconds between looks at the journal, with --follow.",
)
@click.option(
    "--last",
    metavar="N",
    type=click.IntRange(min=1),
    default=_DEFAULT_LAST,
    show_default=True,
    help="Take only the newest N saves and loads, each with all its parts.",
)
@click.option("--since", metavar="STEP", type=int, help="Take only saves and loads of this step and later ones.")
@json_option
def command(
    run: str,
    output: str | None,
    trace: str | None,
    follow: bool,
    interval: float,
    last: int,
    since: int | None,
    as_json: bool,
) -> None:
    """Says what to look at in the saves and loads of a run, and writes a page with charts of them.

    RUN is a run folder, or a checkpoint, or a folder that Config(journal=...) named: each save writes a line to .bcp in
    the folder of its checkpoint. Saves that failed or died come first. The page is one HTML file, report.html here, or
    in RUN/.bcp if there is such a folder. It needs no network. With --json, with --trace and without -o, and if no call
    has succeeded, no page is written; nor without plotly (pip install 'bytecheckpoint-dcp[report]'), which is an error
    with -o and --follow alone. A trace is opened at ui.perfetto.dev.

    \b
    Example:
      bcp report run
    """
    if not folder_at(run).keeps_journals:
        raise Failure(f"{run}: a journal is in a run folder on a file system; this is a URL of an object store")
    if follow and as_json:
        raise click.UsageError("--follow writes a page, so it does not go with --json")
    folder = Path(run)
    seen = _marks(folder)  # before it is read: what is added meanwhile is new to those who follow
    records = _read(folder, last, since)
    found = findings_of_all(records.records)
    if trace is not None:
        whole = [with_whole_traces(record, trace_folders(folder, record)) for record in records.records]
        _write(Path(trace), json.dumps(trace_of(whole), allow_nan=False))
    if as_json:
        print_json(_as_json(records, found))
        return
    for line in _lines(records, troubles(records.records, found)):
        click.echo(line)
    if not records.records:
        return
    if output is not None or trace is None or follow:
        try:
            page = _write_page(records, found, output, interval if follow else 0.0)
        except UnsupportedError as error:  # plotly is not installed
            if output is not None or follow:  # the page is what was asked for
                raise
            click.echo(str(error))
        else:
            click.echo(f"page: {one_line(str(page))}")
    if trace is not None:
        click.echo(f"trace: {one_line(trace)}")
    if follow:
        _follow(folder, seen, last, since, output, interval)


def _read(folder: Path, last: int, since: int | None) -> Run:
    if not folder.is_dir():
        raise Failure(f"{folder}: there is no such run folder")
    run = read_run(folder, last=last, since=since)
    if not journal_files(folder) and not run.failures:
        raise Failure(
            f"{folder} has no journal: each save adds a line to .bcp/journal.jsonl in the folder of its checkpoint, "
            "unless Config(journal='off'), and no such file is in the folders of steps here; see docs/journal.md"
        )
    if not run.records and not run.failures and not run.drains:
        what = "" if since is None else f" of step {since} or later"
        raise Failure(
            f"{folder}: the journal has no save and no load{what} ({counted(run.num_skipped, 'line')} skipped)"
        )
    return run


def _write(path: Path, text: str) -> None:
    """Writes a file that others see whole or not at all, also if several do so, and in place of anything there."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def _write_page(run: Run, found: Sequence[Sequence[Finding]], output: str | None, reload_s: float) -> Path:
    """Writes the page, and returns where."""
    of_run = troubles(run.records, found)
    tensors, space = largest_tensors(run), space_of(run)
    page = page_of(page_contents(run, found, of_run, tensors=tensors, space=space, reload_s=reload_s))
    if output is not None:
        _write(Path(output), page)
        return Path(output)
    folder, here = page_folder(run.path), Path("report.html")
    if folder is not None:
        with suppress(OSError):
            _write(folder / here, page)
            return folder / here
    _write(here, page)
    return here


def _follow(
    folder: Path, seen: list[tuple[str, int, int]], last: int, since: int | None, output: str | None, interval: float
) -> None:
    """Writes the page again whenever the journal is no longer as ``_marks`` said in ``seen``."""
    while True:
        time.sleep(interval)
        marks = _marks(folder)
        if marks == seen:
            continue
        seen = marks
        run = _read(folder, last, since)
        if not run.records:
            continue
        found = findings_of_all(run.records)
        page = _write_page(run, found, output, interval)
        newest, of_newest = run.records[-1], found[-1]
        click.echo(
            f"{_call_text(newest)}: {one_line(of_newest[0].text) if of_newest else 'nothing stands out'}; {page}"
        )


def _marks(folder: Path) -> list[tuple[str, int, int]]:
    """Returns what changes when the journal does."""
    found = []
    for file in journal_files(folder):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        found.append((file.name, status.st_size, status.st_mtime_ns))
    return found


def _call_text(record: Mapping[str, Any]) -> str:
    report, step = report_of(record), record.get("step")
    what = one_line(text_of(record, "path") or "?")
    if isinstance(step, int):
        what = f"step {step:,}" + (f" ({part_of(record)})" if part_of(record) else "")
    size = number(report, "total_bytes") or number(report, "total_bytes_wanted")
    return (
        f"{record['kind']} of {what}: {size_text(int(size))} in {duration_text(number(report, 'total_s'))}, "
        f"{size_text(int(number(report, 'gb_per_s') * 1e9))}/s"
    )


def _num_text(records: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Returns how many saves or loads there are, and of how many parts if that is another number."""
    num, num_records = num_calls(records, kind), sum(record["kind"] == kind for record in records)
    parts = f" in {counted(num_records, 'part')}" if num_records > num else ""
    return f"{counted(num, kind)}{parts}"


def _lines(run: Run, of_run: Sequence[Trouble]) -> list[str]:
    skipped = f"; {counted(run.num_skipped, 'line')} of the journal could not be read" if run.num_skipped else ""
    lines = [f"{one_line(str(run.path))}: {_num_text(run.records, 'save')}, {_num_text(run.records, 'load')}{skipped}"]
    if run.failures:
        lines.append(f"failed: {counted(len(run.failures), 'call')}, the newest first:")
        lines += [f"- {one_line(failure_text(each))}" for each in run.failures[: -_MOST_IN_WORDS - 1 : -1]]
        if len(run.failures) > _MOST_IN_WORDS:
            lines.append(f"and {len(run.failures) - _MOST_IN_WORDS} more; bcp why RUN lists them all")
    lines += _drain_lines(run)
    if not run.records:
        return lines
    lines.append(f"newest: {_call_text(run.records[-1])}")
    for trouble in of_run[:_MOST_IN_WORDS]:
        lines.append(f"- {one_line(trouble.finding.text)} ({trouble.how_often()}, {trouble.seconds:.2f} s in all)")
        if trouble.finding.advice:
            lines.append(f"  {one_line(trouble.finding.advice)}")
    if not of_run:
        lines.append("Nothing stands out.")
    elif len(of_run) > _MOST_IN_WORDS:
        lines.append(f"and {len(of_run) - _MOST_IN_WORDS} more, which cost less")
    return lines


def _drain_lines(run: Run) -> list[str]:
    """Returns what became of the copies to durable storage; nothing for a run without any."""
    drains = drains_in(run.path, run.drains)
    if not drains:
        return []
    lines = [f"to durable storage: {one_line(drains.summary())}"]
    lines += [f"- {one_line(drain_text(each))}" for each in drains.left_out[: -_MOST_IN_WORDS - 1 : -1]]
    if len(drains.left_out) > _MOST_IN_WORDS:
        lines.append(f"and {len(drains.left_out) - _MOST_IN_WORDS} more that were not copied")
    return lines


def _as_json(run: Run, found: Sequence[Sequence[Finding]]) -> dict[str, Any]:
    of_run = troubles(run.records, found)
    return {
        "run": str(run.path),
        "skipped": run.num_skipped,
        "failures": [cleaned(record) for record in run.failures],
        "drains": {
            **json_value(drains_in(run.path, run.drains).to_dict()),
            "records": [cleaned(record) for record in run.drains],
        },
        "troubles": [
            json_value(trouble.finding.to_dict())
            | {"calls": list(trouble.calls), "worst": trouble.worst, "all_seconds": round(trouble.seconds, 6)}
            for trouble in of_run
        ],
        "records": [_record_as_json(record, of_record) for record, of_record in zip(run.records, found, strict=True)],
    }


def _record_as_json(record: Mapping[str, Any], found: Sequence[Finding]) -> dict[str, Any]:
    names = ("kind", "at", "path", "step", "save_id", "world_size", "rank", "is_async", "mesh")
    figures = rank_figures(record)
    return {
        **{name: cleaned(record.get(name)) for name in names},
        "report": cleaned({name: value for name, value in report_of(record).items() if name != "ranks"}),
        "phases": {
            name: {"max": max(column), "mean": sum(column) / len(column)} for name, column in figures.phases.items()
        },
        "findings": [json_value(finding.to_dict()) for finding in found],
    }
