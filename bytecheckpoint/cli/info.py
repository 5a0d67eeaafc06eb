# SPDX-License-Identifier: Apache-2.0
"""``bcp info``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from bytecheckpoint.cli.options import checkpoint_argument, json_option
from bytecheckpoint.cli.text import columns, counted, json_value, one_line, print_json
from bytecheckpoint.config import Config
from bytecheckpoint.listing import listed
from bytecheckpoint.observability.checkpoint_facts import facts_of
from bytecheckpoint.report.text import duration_text, rate_text, size_text, utc_text

__all__ = ["command"]


@click.command("info")
@checkpoint_argument("path")
@json_option
def command(path: str, as_json: bool) -> None:
    """Says when, by how many ranks and how fast a checkpoint was saved, and what was noted of it.

    PATH is a checkpoint, or a step folder of bytecheckpoint.save. Only its metadata are read, and the journal in it,
    .bcp/journal.jsonl, which knows seconds, mesh, hosts and versions; without it these lines are left out. The time of
    the commit is that of the last change of the commit mark: of a copy it may be that of the copying.

    \b
    Example:
      bcp info run/step_100
    """
    facts = facts_of(path, Config.from_env())
    if as_json:
        print_json(json_value(facts))
        return
    for line in columns([*_rows(facts)]):
        click.echo(line)


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    parts = f": {listed(facts['parts'])}" if facts["parts"] else ""
    yield "checkpoint", one_line(f"{facts['path']}, by {facts['format']}{parts}")
    yield "committed", utc_text(facts["committed_at"])
    if facts["step"] is not None:
        yield "step", one_line(f"{facts['step']}, of {facts['framework']}")
    holds = f"{counted(facts['tensors'], 'tensor')}, {counted(facts['objects'], 'object')}"
    yield "holds", f"{holds}; {size_text(facts['bytes'])} in {counted(facts['files'], 'file')}"
    if facts["ranks"] is not None:
        yield "ranks", one_line(_ranks_text(facts))
    if facts["seconds"] is not None:
        background = ", in the background" if facts["is_async"] else ""
        yield "took", f"{duration_text(facts['seconds'])}, {rate_text(facts['gb_per_s'] or 0.0)}{background}"
    if isinstance(facts["versions"], Mapping):
        yield "versions", one_line(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    for name in ("digest", "pinned"):
        if facts[name] is not None:
            yield name, one_line(facts[name])
    if facts["user_metadata"] is not None:
        yield "user metadata", one_line(json.dumps(facts["user_metadata"], ensure_ascii=False))


def _ranks_text(facts: Mapping[str, Any]) -> str:
    mesh = " x ".join(f"{name} {size}" for name, size in facts["mesh"] or ())
    hosts = f" on {listed(facts['hosts'])}" if facts["hosts"] else ""
    return f"{facts['ranks']}{f' ({mesh})' if mesh else ''}{hosts}"
