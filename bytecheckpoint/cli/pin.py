# SPDX-License-Identifier: Apache-2.0
"""``bcp pin``."""

from __future__ import annotations

import click

from bytecheckpoint.checkpoint.keeping import pin, pins_of, unpin
from bytecheckpoint.cli.options import checkpoint_argument, json_option
from bytecheckpoint.cli.text import one_line, print_json

__all__ = ["command"]


@click.command("pin")
@checkpoint_argument("path")
@click.option("--why", default="", metavar="TEXT", help="What bcp prune is to say of it.")
@click.option("--remove", is_flag=True, help="Remove the pin.")
@json_option
def command(path: str, why: str, remove: bool, as_json: bool) -> None:
    """Pins a checkpoint, so that no prune removes it; with --remove, removes the pin.

    PATH is the folder of a step, or its URL. The pin is a small file in it, .bcp/pin.txt. It keeps prunes off, those of
    training jobs, too, and nothing else: a save over the checkpoint replaces it.

    \b
    Example:
      bcp pin run/step_1000 --why "released as v2"
      bcp pin run/step_1000 --remove
    """
    was_pinned = unpin(path) if remove else bool(pins_of([path]))
    if not remove:
        pin(path, why)
    if as_json:
        print_json({"path": path, "was_pinned": was_pinned, "is_pinned": not remove})
        return
    said = ("the pin is removed" if was_pinned else "it was not pinned") if remove else pins_of([path])[path]
    click.echo(f"{one_line(path)}: {one_line(said)}")
