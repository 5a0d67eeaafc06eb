# SPDX-License-Identifier: Apache-2.0
"""``bcp steps``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from bytecheckpoint.checkpoint.commit_order import commit_order
from bytecheckpoint.checkpoint.newest import Newest, newest_in, refuse_a_checkpoint
from bytecheckpoint.checkpoint.steps import scan_steps
from bytecheckpoint.cli.options import checkpoint_argument, json_option
from bytecheckpoint.cli.text import columns, counted, one_line, print_json
from bytecheckpoint.config import Config
from bytecheckpoint.errors import StorageError
from bytecheckpoint.report.text import duration_text, utc_text
from bytecheckpoint.storage.paths import Place, as_place, location, parent_of
from bytecheckpoint.storage.step_folder import StepFolder
from bytecheckpoint.storage.step_names import DEFAULT_PATTERN
from bytecheckpoint.storage.tiers import Tiers

__all__ = ["command"]

_MOST_SHOWN = 60  # letters of user metadata in a row


@click.command("steps")
@checkpoint_argument("root")
@click.option(
    "--pattern",
    metavar="REGEX",
    help=f"Regular expression for names of step folders. Its first group is the step.  [{DEFAULT_PATTERN}]",
)
@click.option("--durable", metavar="PLACE", help="Where the steps of the run are drained to: shows what is where.")
@click.option("--deep", is_flag=True, help="Read every byte of complete checkpoints, as verify does.")
@click.option("--long", "is_long", is_flag=True, help="Also say of complete ones what bcp info says.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    root: str,
    pattern: str | None,
    durable: str | None,
    deep: bool,
    is_long: bool,
    as_json: bool,
) -> None:
    """Lists the step folders of a run, and says which of them hold a checkpoint that loads.

    complete: it loads. saving: a save is under way. half: there is no commit mark, and no live save is seen. corrupt:
    the commit mark or a file is damaged. incomplete: it was committed without some elements of its tensors. unknown: it
    cannot be looked at (not readable, a newer format, an unknown writer), or nothing of a checkpoint is in it; the line
    says which. Ends with 1 if any is half, corrupt, incomplete, or cannot be looked at; folders with nothing of a
    checkpoint in them do not count.

    With --durable it also says of each step what is in durable storage: its state there, waits, draining, or another
    save.

    The newest complete one is that of the tracker, or else the one that was committed last. If others have higher
    numbers, the last line names them.

    \b
    Example:
      bcp steps run
    """
    tiers = Tiers(near=root, durable=durable) if durable else None
    folders = scan_steps(tiers or root, pattern=pattern, deep=deep)
    if not folders:
        refuse_a_checkpoint(location(root), "steps")
    faulty = sum(folder.is_faulty for folder in folders)
    newest, doubts = _newest(tiers.places if tiers else (location(root),), folders)
    facts = _facts_of(folders) if is_long else {}
    if as_json:
        steps = [{**folder.to_dict(), **({"info": facts.get(folder.path)} if is_long else {})} for folder in folders]
        print_json({"root": root, "findings": faulty, "newest": newest, "doubts": doubts, "steps": steps})
    else:
        rows = [(*_row(folder), *(_long(facts.get(folder.path)) if is_long else ())) for folder in folders]
        for line in columns(rows, right=frozenset({1, 2})) if rows else []:
            click.echo(line)
        counts = Counter(folder.state for folder in folders)
        states = [f"{counts.pop('complete', 0)} complete", *(f"{count} {state}" for state, count in counts.items())]
        click.echo(f"{one_line(root)}: {counted(len(folders), 'step folder')}: {', '.join(states)}")
        if doubts:
            click.echo(one_line(doubts))
    ctx.exit(1 if faulty else 0)


def _facts_of(folders: list[StepFolder]) -> dict[str, dict[str, Any]]:
    from bytecheckpoint.observability.checkpoint_facts import facts_of

    return {folder.path: facts_of(folder.path, Config.from_env()) for folder in folders if folder.is_complete}


def _long(facts: dict[str, Any] | None) -> tuple[str, ...]:
    if facts is None:
        return ("",) * 5
    return (
        utc_text(facts["committed_at"]),
        "" if facts["ranks"] is None else counted(facts["ranks"], "rank"),
        "" if facts["seconds"] is None else duration_text(facts["seconds"]),
        one_line(facts["pinned"] or ""),
        "" if facts["user_metadata"] is None else one_line(json.dumps(facts["user_metadata"]))[:_MOST_SHOWN],
    )


def _newest(runs: Sequence[Place], folders: list[StepFolder]) -> tuple[str | None, str]:
    """Returns the path of the newest complete step, and which others another order would take; see ``CommitOrder``."""
    complete = {folder.path: folder.step for folder in folders if folder.is_complete}
    doubts: list[str] = []

    def look(run: Place) -> Newest:
        here = [(step, path) for path, step in complete.items() if parent_of(as_place(path)) == run]
        order = commit_order(run, here)
        if not order.steps:
            return Newest(None)
        doubts.append(order.doubts_about(order.steps[0]))
        return Newest(order.steps[0][1])

    try:
        newest = newest_in(runs, look, "steps").path if complete else None
    except StorageError as error:
        return None, f"the newest is not known: {error}"
    return newest, "" if newest is None else "; ".join(filter(None, doubts))


def _row(folder: StepFolder) -> tuple[str, ...]:
    state = folder.state + (", being saved" if folder.is_being_saved and folder.state != "saving" else "")
    is_known = folder.state != "unknown" or folder.num_files > 0
    return (
        one_line(folder.name),
        counted(folder.num_files, "file") if is_known else "",
        f"{folder.num_bytes:,} bytes" if is_known else "",
        ", ".join(f"{tier} {of_tier}" for tier, of_tier in folder.tiers.items()) or state,
        one_line(folder.reason),
    )
