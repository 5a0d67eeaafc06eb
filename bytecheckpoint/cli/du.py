# SPDX-License-Identifier: Apache-2.0
"""``bcp du``."""

from __future__ import annotations

from collections.abc import Iterator

import click

from bytecheckpoint.checkpoint.checkpoint_usage import CheckpointUsage
from bytecheckpoint.checkpoint.disk_usage import DiskUsage, Freed, disk_usage, freed_by
from bytecheckpoint.checkpoint.retention import Retention
from bytecheckpoint.cli.options import checkpoint_argument, json_option
from bytecheckpoint.cli.text import columns, counted, one_line, print_json, short_name
from bytecheckpoint.report.text import size_text
from bytecheckpoint.storage.paths import location, name_of
from bytecheckpoint.storage.step_names import DEFAULT_PATTERN

__all__ = ["command"]


@click.command("du")
@checkpoint_argument("path")
@click.option(
    "--depth",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="By how many of the names in a key, which dots separate, to count.",
)
@click.option(
    "--pattern",
    metavar="REGEX",
    help=f"Regular expression for names of step folders. Its first group is the step.  [{DEFAULT_PATTERN}]",
)
@click.option(
    "--keep-latest", type=click.IntRange(1), metavar="N", help="Say what bcp prune --keep-latest N would free."
)
@click.option("--keep-every", type=click.IntRange(1), metavar="N", help="With --keep-latest: as for bcp prune.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    path: str,
    depth: int,
    pattern: str | None,
    keep_latest: int | None,
    keep_every: int | None,
    as_json: bool,
) -> None:
    """Says what a checkpoint, or each step of a run, takes on disk, and what for.

    PATH is a run folder, a step folder or a checkpoint, of ours, of stock DCP or safetensors; or its URL. It counts by
    key and dtype; what files need beside elements (headers, checksums, padding, metadata); what no commit mark names;
    and what hard links save. It lists folders and reads the commit mark of each checkpoint once, and no data; of
    safetensors the headers. --keep-latest also reads the end of each data file, as bcp prune does. Ends with 1 if there
    are files that no commit mark names, or checkpoints that cannot be read.

    \b
    Example:
      bcp du run --keep-latest 3
    """
    if keep_every is not None and keep_latest is None:
        raise click.UsageError("--keep-every goes with --keep-latest")
    usage = disk_usage(path, depth=depth, pattern=pattern)
    if keep_latest is not None and not usage.is_run:
        raise click.UsageError(f"--keep-latest is for a run folder, and {path} is a checkpoint")
    freed = None
    if keep_latest is not None:
        freed = freed_by(Retention(path, keep_latest=keep_latest, keep_every=keep_every, pattern=pattern), usage)
    if as_json:
        of_rules = {} if freed is None else {"would_free": freed.to_dict()}
        print_json({**usage.to_dict(), **of_rules})
    else:
        for line in _lines(usage, freed):
            click.echo(line)
    ctx.exit(1 if usage.num_findings else 0)


def _lines(usage: DiskUsage, freed: Freed | None) -> Iterator[str]:
    if usage.is_run:
        yield from _table_of_steps(usage.checkpoints)
        yield ""
    yield from _table_of_keys(usage)
    yield ""
    if not usage.is_run:
        yield from _overhead(usage.checkpoints[0])
    for each in usage.checkpoints:
        prefix = f"{one_line(name_of(location(each.path)))}/" if usage.is_run else ""
        yield from (
            f"{prefix}{one_line(name)}: the checkpoint does not refer to this file" for name in each.unreferenced
        )
        yield from (one_line(problem) for problem in each.problems)
    yield _summary(usage)
    if usage.beside_files:
        yield f"beside the steps: {counted(usage.beside_files, 'file')}, {usage.beside_bytes:,} bytes"
    if freed is not None:
        yield (
            f"a prune would remove {counted(len(freed.removed), 'step')} with {freed.num_bytes:,} bytes, and free "
            f"{freed.allocated_bytes:,} bytes on disk"
        )


def _table_of_steps(checkpoints: list[CheckpointUsage]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("STEP", "FILES", "BYTES", "ON DISK", "LINKED", "OVERHEAD", "UNREFERENCED", "UNFINISHED", "OTHER", "")
    ]
    for each in checkpoints:
        sizes = (
            each.num_bytes,
            each.allocated_bytes,
            each.linked_bytes,
            each.overhead_bytes,
            each.unreferenced_bytes,
            each.unfinished_bytes,
            each.other_bytes,
        )
        name = one_line(name_of(location(each.path)))
        rows.append((name, f"{len(each.files):,}", *(f"{size:,}" for size in sizes), _state(each)))
    yield from columns(rows, right=frozenset(range(1, 9)))


def _state(usage: CheckpointUsage) -> str:
    if usage.problems:
        return "cannot be read"
    return ", ".join(usage.formats) or ("no checkpoint" if usage.files else "empty")


def _table_of_keys(usage: DiskUsage) -> Iterator[str]:
    header = ("KEY", "DTYPE", "ITEMS", "BYTES") + (("NEWEST STEP",) if usage.is_run else ())
    rows: list[tuple[str, ...]] = [header]
    for row, newest in usage.by_key():
        of_run = (f"{newest:,}",) if usage.is_run else ()
        rows.append((short_name(row.key), row.dtype or "object", f"{row.num_items:,}", f"{row.num_bytes:,}", *of_run))
    yield from columns(rows, right=frozenset({2, 3, 4}))


def _overhead(usage: CheckpointUsage) -> Iterator[str]:
    sizes = {
        "metadata": usage.metadata,
        "journal": usage.records,
        "headers and trailers": usage.headers,
        "checksums of blocks": usage.block_tables,
        "around elements": usage.archives,
        "between records": usage.padding,
    }
    listed = ", ".join(f"{name} {size:,}" for name, size in sizes.items() if size)
    share = usage.overhead_bytes / usage.num_bytes if usage.num_bytes else 0
    yield f"overhead: {usage.overhead_bytes:,} bytes ({share:.2%}): {listed or 'none'}"
    others = {
        "in files that no commit mark names": usage.unreferenced_bytes,
        "of a save that is under way, or has died": usage.unfinished_bytes,
        "in data files whose metadata cannot be used": usage.unread_bytes,
        "in files that are not of a checkpoint": usage.other_bytes,
        "on disk in files that have other names, too": usage.linked_bytes,
    }
    yield from (f"{size:,} bytes {what}" for what, size in others.items() if size)


def _summary(usage: DiskUsage) -> str:
    files = sum(len(each.files) for each in usage.checkpoints)
    steps = f"{counted(len(usage.checkpoints), 'step')}, " if usage.is_run else ""
    links = f"; hard links save {usage.shared_bytes:,}" if usage.shared_bytes else ""
    return (
        f"{one_line(usage.path)}: {steps}{counted(files, 'file')}, {usage.num_bytes:,} bytes "
        f"({size_text(usage.num_bytes)}), {usage.allocated_bytes:,} on disk{links}"
    )
