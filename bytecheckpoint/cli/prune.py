# SPDX-License-Identifier: Apache-2.0
"""``bcp prune``."""

from __future__ import annotations

import dataclasses

import click

from bytecheckpoint.checkpoint.keeping import KeepBest
from bytecheckpoint.checkpoint.newest import refuse_a_checkpoint
from bytecheckpoint.checkpoint.retention import Retention
from bytecheckpoint.cli.options import checkpoint_argument, json_option
from bytecheckpoint.cli.text import one_line, print_json
from bytecheckpoint.listing import listed
from bytecheckpoint.storage.paths import location
from bytecheckpoint.storage.step_folder import step_paths

__all__ = ["command"]


def _keep_best(ctx: click.Context, param: click.Parameter, value: str | None) -> KeepBest | None:
    if value is None:
        return None
    metric, *rest = value.rsplit(":", 2) if value.endswith((":min", ":max")) else value.rsplit(":", 1)
    if not metric or not rest or not rest[0].isdecimal() or int(rest[0]) < 1:
        raise click.BadParameter(f"'{value}' must be like loss:3 or accuracy:3:max")
    return (metric, int(rest[0]), *rest[1:])  # type: ignore[return-value]


@click.command("prune")
@checkpoint_argument("run")
@click.option(
    "--keep-latest", type=click.IntRange(1), required=True, metavar="N", help="Keep the N newest complete checkpoints."
)
@click.option("--keep-every", type=click.IntRange(1), metavar="N", help="Also keep the steps that N divides.")
@click.option(
    "--keep-best",
    metavar="METRIC:K[:max]",
    callback=_keep_best,
    help="Also keep the best K by a metric of their user metadata, such as loss:3, or accuracy:3:max.",
)
@click.option("--keep-days", type=click.FloatRange(0), metavar="D", help="Also keep what is at most D days old.")
@click.option(
    "--pattern", metavar="PATTERN", help="Regular expression for names of step folders; its group is the step."
)
@click.option("--remove-corrupt", is_flag=True, help="Also remove damaged and incomplete checkpoints that are older.")
@click.option("--remove-foreign", is_flag=True, help="Also remove checkpoints in formats of other libraries.")
@click.option("--keep-others", is_flag=True, help="Remove only files of a checkpoint, and leave others in its folder.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, and say what would be removed.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    keep_latest: int,
    keep_every: int | None,
    keep_best: KeepBest | None,
    keep_days: float | None,
    pattern: str | None,
    remove_corrupt: bool,
    remove_foreign: bool,
    keep_others: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Removes the checkpoints of a run, except the newest and every n-th.

    RUN is the folder of a run, or its URL. Only complete checkpoints count; what is being saved or loaded here stays.
    The newest are those that were committed last; the step of the tracker stays besides, and what bcp pin has pinned. A
    removal that is interrupted never leaves half a checkpoint that loads. Ends with 1 if a removal failed, or left
    files of others in a step, which it names; steps that are left on purpose are listed, and are no failure.

    \b
    Example:
      bcp prune run --keep-latest 3 --keep-every 1000 --dry-run
    """
    if not step_paths(run, pattern):
        refuse_a_checkpoint(location(run), "prune")
    report = Retention(
        run,
        keep_latest=keep_latest,
        keep_every=keep_every,
        keep_best=keep_best,
        keep_within_s=None if keep_days is None else 86400 * keep_days,
        pattern=pattern,
        remove_corrupt=remove_corrupt,
        remove_foreign=remove_foreign,
        remove_others=not keep_others,
    ).prune(dry_run=dry_run)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        for path in (*report.removed, *report.swept):
            stays = f": what {listed(report.shared[path])} has, too, stays there" if path in report.shared else ""
            click.echo(one_line(f"{path}{stays}"))
        for path, reason in report.skipped.items():
            click.echo(one_line(f"left: {path}: {reason}"))
        for path, reason in report.protected.items():
            click.echo(one_line(f"kept: {path}: {reason}"))
        for doubt in report.doubts:
            click.echo(one_line(f"note: {doubt}"))
        for warning in report.warnings:
            click.echo(one_line(f"warning: {warning}"))
        click.echo(one_line(report.summary()))
    ctx.exit(1 if report.warnings else 0)
