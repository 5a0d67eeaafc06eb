# SPDX-License-Identifier: Apache-2.0
"""``bcp verify``."""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Iterator
from typing import Any

import click

from bytecheckpoint.checkpoint.steps import look_at_step
from bytecheckpoint.checkpoint.verification import verify
from bytecheckpoint.cli.options import Failure, bar, checkpoint_argument, json_option, progress_option
from bytecheckpoint.cli.published import names_in
from bytecheckpoint.cli.text import counted, one_line, print_json, safe_name
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import components_in
from bytecheckpoint.contents.wrong_path import refuse_reference
from bytecheckpoint.report import Problem, VerifyReport
from bytecheckpoint.storage.paths import below

__all__ = ["command", "settings"]

_SLOT_BYTES = 8 << 20
# The engine ends messages of failed system calls in this way.
_ERRNO = re.compile(r"\(errno (\d{1,4})\)$")
# These mean that there is no file, or something other than a file, or a link in its place.
_OF_DAMAGE = frozenset({errno.ENOENT, errno.EISDIR, errno.EINVAL, errno.ENOTDIR, errno.ELOOP, errno.EXDEV})


def settings(threads: int) -> Config:
    """Returns settings for ``threads`` threads that read and as many that compute checksums.

    The ring has a slot for each of these threads, and one on the way between them.
    """
    return dataclasses.replace(Config.from_env(), io_threads=threads, ring_bytes=(2 * threads + 1) * _SLOT_BYTES)


@click.command("verify")
@checkpoint_argument("path")
@click.option(
    "--threads",
    type=click.IntRange(1, 16),
    default=4,
    show_default=True,
    help="Threads that read, and as many that compute checksums.",
)
@click.option("--allow-unchecked", is_flag=True, help="Accept a checkpoint none of whose bytes has a checksum.")
@json_option
@progress_option
@click.pass_context
def command(ctx: click.Context, path: str, threads: int, allow_unchecked: bool, as_json: bool, progress: bool) -> None:
    """Reads every byte of a checkpoint and compares it with its checksum.

    PATH is a checkpoint, or a step folder of bytecheckpoint.save: then all parts are verified, and that they are of one
    save; or a place of a Publisher: then all bases and deltas are. It also verifies that both parts of the metadata say
    the same, that stock readers find what ours do, that every element of every tensor is stored, and that there is no
    data file that nothing refers to. For a checkpoint of stock DCP, the CRCs in its records are compared. It opens
    nothing for writing. Ends with 1 if there are findings, or if no byte has a checksum to compare it with, as in
    safetensors, and with 2 if files could not be read and nothing else was found.

    \b
    Example:
      bcp verify ckpt && rsync -a ckpt backup:
    """
    components = components_in(path)
    if components:
        refuse_reference(path, "verify")
    parts = components or names_in(path)
    reports: dict[str, VerifyReport] = {}
    for name in parts or [""]:
        with bar(f"verifying {name}".strip(), progress) as tell:
            reports[name] = verify(below(path, name) if name else path, config=settings(threads), progress=tell)
    folder = look_at_step(0, path) if components else None
    mismatch = folder.reason if folder is not None and folder.state == "half" else ""
    problems = [problem for report in reports.values() for problem in report.problems]
    unreferenced = [name for report in reports.values() for name in report.unreferenced]
    findings = len(problems) + len(unreferenced) + bool(mismatch)
    if as_json:
        of_each = {name: _as_json(report) for name, report in reports.items()}
        whole = {"path": path, "findings": findings, "is_whole": not problems and not mismatch, "mismatch": mismatch}
        print_json({**whole, "parts": of_each} if parts else of_each[""])
    else:
        for report in reports.values():
            for line in _lines(report):
                click.echo(line)
        if mismatch:
            click.echo(f"{one_line(path)}: {one_line(mismatch)}")
    if problems and findings == len(problems) and all(map(_could_not_be_read, problems)):
        raise Failure(f"{path}: {counted(len(problems), 'file')} could not be read; the checkpoint may still be whole")
    # A checkpoint without any tensor or object has nothing to compare.
    checked = sum(report.bytes_checked for report in reports.values())
    unchecked = sum(report.bytes_unchecked for report in reports.values())
    is_unchecked = not findings and not allow_unchecked and unchecked > 0 and checked == 0
    if is_unchecked:
        nothing = "nothing was compared: no byte has a checksum; --allow-unchecked accepts that"
        click.echo(f"bcp: {one_line(path)}: {nothing}", err=True)
    ctx.exit(1 if findings or is_unchecked else 0)


def _as_json(report: VerifyReport) -> dict[str, Any]:
    findings = len(report.problems) + len(report.unreferenced)
    return {**dataclasses.asdict(report), "is_whole": report.is_whole, "findings": findings}


def _could_not_be_read(problem: Problem) -> bool:
    """Whether the system refused to read an existing file; False if the file differs from what was written."""
    found = _ERRNO.search(problem.message)
    return found is not None and int(found[1]) not in _OF_DAMAGE


def _lines(report: VerifyReport) -> Iterator[str]:
    for problem in report.problems:
        place = f"{problem.section}{_where(problem)}{_whose(problem)}"
        yield f"{one_line(problem.file)}: {place}: {one_line(problem.message)}"
    for name in report.unreferenced:
        yield f"{one_line(name)}: the checkpoint does not refer to this file"
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
