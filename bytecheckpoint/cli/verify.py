# SPDX-License-Identifier: Apache-2.0
"""``bcp verify``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import click

from bytecheckpoint.cli.options import bar, checkpoint_argument, json_option, progress_option
from bytecheckpoint.cli.text import counted, one_line, print_json, safe_name
from bytecheckpoint.config import Config
from bytecheckpoint.report import Problem, VerifyReport
from bytecheckpoint.verification import verify

__all__ = ["command", "settings"]

_SLOT_BYTES = 8 << 20


def settings(threads: int) -> Config:
    """For ``threads`` that read and as many that sum: a slot for each of them, and one on the way between them."""
    return dataclasses.replace(Config.from_env(), io_threads=threads, ring_bytes=(2 * threads + 1) * _SLOT_BYTES)


@click.command("verify")
@checkpoint_argument("path")
@click.option(
    "--threads", type=click.IntRange(1, 16), default=4, show_default=True, help="That read, and as many that sum."
)
@json_option
@progress_option
@click.pass_context
def command(ctx: click.Context, path: str, threads: int, as_json: bool, progress: bool) -> None:
    """Reads every byte of a checkpoint and compares it with its checksum.

    Also that both parts of the metadata say the same, that stock readers find what ours do, that every element of every
    tensor is stored, and that no data file is left that nobody refers to. Of a checkpoint of stock DCP the CRCs in its
    records are compared. Opens nothing for writing. Ends with 1 if there are findings.

    \b
    Example:
      bcp verify ckpt && rsync -a ckpt backup:
    """
    with bar("verifying", progress) as tell:
        report = verify(path, config=settings(threads), progress=tell)
    findings = len(report.problems) + len(report.unreferenced)
    if as_json:
        print_json({**dataclasses.asdict(report), "is_whole": report.is_whole, "findings": findings})
    else:
        for line in _lines(report):
            click.echo(line)
    ctx.exit(1 if findings else 0)


def _lines(report: VerifyReport) -> Iterator[str]:
    for problem in report.problems:
        place = f"{problem.section}{_where(problem)}{_whose(problem)}"
        yield f"{one_line(problem.file)}: {place}: {one_line(problem.message)}"
    for name in report.unreferenced:
        yield f"{one_line(name)}: nobody refers to this file"
    for note in report.notes:
        yield f"note: {one_line(note)}"
    found = [
        *([counted(len(report.problems), "problem")] if report.problems else []),
        *([counted(len(report.unreferenced), "file") + " too many"] if report.unreferenced else []),
    ]
    yield (
        f"{one_line(report.path)}: {' and '.join(found) or 'whole'}; {counted(report.num_records, 'record')} in "
        f"{counted(report.num_files, 'file')}, {report.bytes_checked:,} bytes compared with their checksums"
        + (f", {report.bytes_unchecked:,} have none" if report.bytes_unchecked else "")
    )


def _where(problem: Problem) -> str:
    if problem.offset is None:
        return ""
    return f" at {problem.offset:,}" + (f" ({problem.num_bytes:,} bytes)" if problem.num_bytes is not None else "")


def _whose(problem: Problem) -> str:
    return f" of {', '.join(map(safe_name, problem.fqns))}" if problem.fqns else ""
