# SPDX-License-Identifier: Apache-2.0
"""``bcp holder``."""

from __future__ import annotations

import click

from bytecheckpoint.checkpoint.steps import scan_steps
from bytecheckpoint.cli.options import json_option
from bytecheckpoint.cli.text import counted, one_line, print_json
from bytecheckpoint.errors import StorageError
from bytecheckpoint.report.text import size_text
from bytecheckpoint.storage.memory.connection import disconnect, holders, stop_holder, url_of_run

__all__ = ["command"]


@click.command("holder")
@click.argument("action", type=click.Choice(["list", "stop"]), default="list")
@click.argument("run", required=False)
@json_option
def command(action: str, run: str | None, as_json: bool) -> None:
    """Lists the runs that are held in the memory of this machine, or ends the holder of one.

    A holder is a small process that keeps the newest states of a run for a restart: see Tiers(memory=...). list shows
    those of this user; bcp steps held://RUN shows the steps of one, and bcp verify and bcp copy take them. stop frees
    the memory of RUN, or of all runs.

    \b
    Example:
      bcp holder list
      bcp holder stop 3f0c
    """
    runs = [each for each in holders() if run is None or each == run]
    if action == "stop":
        for each in runs:
            stop_holder(each)
    said = {each: [] if action == "stop" else _steps(each) for each in runs}
    if as_json:
        print_json({"action": action, "runs": [{"run": each, "steps": steps} for each, steps in said.items()]})
        return
    for each, steps in said.items():
        held = ", ".join(f"{one_line(str(step['name']))} ({size_text(int(step['num_bytes']))})" for step in steps)
        click.echo(f"{url_of_run(one_line(each))}: {'stopped' if action == 'stop' else held or 'nothing'}")
    if not runs or action == "list":
        click.echo(counted(len(runs), "holder"))


def _steps(run: str) -> list[dict[str, str | int]]:
    try:
        return [{"name": each.name, "num_bytes": each.num_bytes} for each in scan_steps(url_of_run(run))]
    except StorageError:  # it has gone meanwhile
        return []
    finally:
        disconnect(run)
