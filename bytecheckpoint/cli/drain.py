# SPDX-License-Identifier: Apache-2.0
"""``bcp drain``."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from contextlib import suppress
from typing import Any

import click

from bytecheckpoint.cli.options import bar, checkpoint_argument, json_option, progress_option
from bytecheckpoint.cli.text import one_line, print_json
from bytecheckpoint.config import Config

__all__ = ["command"]

_NICENESS = 19


class _Shown(logging.Handler):
    """Shows each step as it is drained, dropped or failed."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(one_line(record.getMessage()), err=record.levelno >= logging.WARNING)


@click.command("drain")
@checkpoint_argument("near")
@checkpoint_argument("durable")
@click.option("--every", type=click.IntRange(1), default=1, metavar="N", help="Only steps that N divides.")
@click.option(
    "--most-waiting", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Older ones are dropped."
)
@click.option(
    "--rate", type=click.FloatRange(0), default=0, metavar="MB", help="Most megabytes written a second; 0: no limit."
)
@click.option(
    "--pattern", metavar="PATTERN", help="Regular expression for names of step folders; its group is the step."
)
@click.option(
    "--watch", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Go on looking until SIGTERM or Ctrl-C."
)
@json_option
@progress_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    near: str,
    durable: str,
    every: int,
    most_waiting: int,
    rate: float,
    pattern: str | None,
    watch: float | None,
    as_json: bool,
    progress: bool,
) -> None:
    """Copies the committed steps of a run to durable storage, behind the training.

    NEAR is the folder of a run, DURABLE a folder or the URL of a store. Each step is compared byte by byte, and is
    there whole or not at all; what is there already is left. If DURABLE hangs or is full, training goes on, steps wait,
    and the oldest of more than --most-waiting are dropped. SIGTERM ends it behind the step under way, a second one at
    once; the next drain begins that step anew. Ends with 1 if a step failed.

    \b
    Example:
      bcp drain /nvme/run s3://bucket/run --every 1000 --rate 200 --watch 10
    """
    from bytecheckpoint.checkpoint.draining import drain

    with suppress(OSError):
        os.nice(_NICENESS)
    stop = threading.Event()

    def end(number: int, frame: Any) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a store that closes a connection must not end the process
    logger = logging.getLogger("bytecheckpoint")
    shown = _Shown(logging.INFO)
    if not as_json:
        logger.addHandler(shown)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        with bar("draining", progress) as tell:
            report = drain(
                near,
                durable,
                every=every,
                most_waiting=most_waiting,
                bytes_per_s=int(rate * 1e6),
                pattern=pattern,
                watch_s=watch,
                stop=stop,
                config=Config.from_env(),
                progress=tell,
            )
    finally:
        logger.removeHandler(shown)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        click.echo(one_line(report.summary()))
    ctx.exit(1 if report.failed else 0)
