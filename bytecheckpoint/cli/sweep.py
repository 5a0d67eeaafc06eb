# SPDX-License-Identifier: Apache-2.0
"""``bcp sweep``."""

from __future__ import annotations

import click

from bytecheckpoint.cli.options import checkpoint_argument, json_option
from bytecheckpoint.cli.text import counted, one_line, print_json
from bytecheckpoint.storage.object_store.sweep import sweep

__all__ = ["command"]


@click.command("sweep")
@checkpoint_argument("url")
@click.option(
    "--older-than",
    "hours",
    type=float,
    metavar="HOURS",
    help="Leave what is younger, by the clock of the store. At least a day, which is the default, or twice "
    "Config.commit_deadline_s.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, and say what would be removed.")
@json_option
def command(url: str, hours: float | None, dry_run: bool, as_json: bool) -> None:
    """Removes from an object store what saves that died have left.

    URL is that of a checkpoint, of a run, or of a folder with several runs. Data files go that no commit mark names,
    and uploads that were never finished, whose parts are invisible and cost money. Uploads need boto3, and a store that
    speaks S3. Saves remove such files, too, each in its own folder; a prune removes whole steps.

    \b
    Example:
      bcp sweep s3://bucket/run --dry-run
    """
    report = sweep(url, older_than_s=None if hours is None else hours * 3600, dry_run=dry_run)
    if as_json:
        print_json(report.to_dict())
        return
    for name in (*report.removed, *(f"{name} (unfinished upload)" for name in report.aborted)):
        click.echo(one_line(name))
    for note in report.notes:
        click.echo(one_line(f"note: {note}"))
    click.echo(
        f"{one_line(url)}: {'would remove' if dry_run else 'removed'} {counted(len(report.removed), 'file')} "
        f"({report.bytes_freed:,} bytes) and {counted(len(report.aborted), 'unfinished upload')}"
    )
