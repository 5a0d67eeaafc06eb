# SPDX-License-Identifier: Apache-2.0
"""``bcp copy``."""

from __future__ import annotations

import dataclasses
import signal

import click

from bytecheckpoint.cli.options import bar, checkpoint_argument, json_option, progress_option
from bytecheckpoint.cli.text import one_line, print_json
from bytecheckpoint.config import Config

__all__ = ["command"]


@click.command("copy")
@checkpoint_argument("source")
@checkpoint_argument("target")
@click.option("--overwrite", is_flag=True, help="Replace another checkpoint at TARGET.")
@click.option(
    "--rate", type=click.FloatRange(0), default=0, metavar="MB", help="Most megabytes written a second; 0: no limit."
)
@json_option
@progress_option
def command(source: str, target: str, overwrite: bool, rate: float, as_json: bool, progress: bool) -> None:
    """Copies a checkpoint as it is, between directories and object stores.

    Every byte is compared with its checksum, and TARGET has all of the checkpoint or nothing of it. If TARGET has this
    save already, nothing is done, so the command may be repeated. SOURCE is a checkpoint of bytecheckpoint, or a step
    of bytecheckpoint.save; bcp convert writes others anew. Pins, journals and files of yours are not copied.

    \b
    Example:
      bcp copy /nvme/run/step-100 s3://bucket/run/step-100 --rate 200
    """
    from bytecheckpoint.checkpoint.copying import copy_checkpoint

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a store that closes a connection must not end the process
    with bar("copying", progress) as tell:
        report = copy_checkpoint(
            source,
            target,
            overwrite=overwrite,
            bytes_per_s=int(rate * 1e6),
            config=Config.from_env(),
            progress=tell,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    click.echo(one_line(report.summary()))
    for warning in report.warnings:
        click.echo(one_line(f"warning: {warning}"))
