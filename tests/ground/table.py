# SPDX-License-Identifier: Apache-2.0
"""Makes the table of file systems in docs/guarantees.md from what `make ground` found.

    python tests/ground/table.py build/ground.json

takes the record of a run over, and writes the table anew. Kinds that the run left out keep what an older one found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["MEASURED", "PAGE", "in_page", "table", "take_over"]

MEASURED = Path(__file__).with_name("measured.json")
PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
_BEGIN = "<!-- tests/ground/table.py makes the table from here -->"
_END = "<!-- to here -->"
_LATE = {"rename": "a new commit", "create": "a new file", "list": "a new name in a listing"}
# What takes less is the time of the watching itself.
_LATE_S = 0.2
_COLUMNS = (
    "file system",
    "version, date",
    "tests",
    "`flock` holds on another machine",
    "seen late on another machine",
    "`O_DIRECT`",
    "`overwrite=False` is one step",
)


def _lateness(late: dict[str, Any]) -> str:
    parts = []
    for key, what in _LATE.items():
        seen = late[key]
        if not seen["is_seen"]:
            parts.append(f"{what}: over {seen['seconds']:.0f} s")
        elif seen["seconds"] >= _LATE_S:
            parts.append(f"{what}: {seen['seconds']:.1f} s")
        elif "new" in seen["between"]:
            parts.append(f"{what}: for a moment cut to the old size")
    return "; ".join(parts) or "nothing"


def _tests(tests: dict[str, str]) -> str:
    ran = {name: outcome for name, outcome in tests.items() if outcome != "skipped"}
    failed = [f"`{name}`" for name, outcome in ran.items() if outcome != "passed"]
    return f"all {len(ran)}" if not failed else f"{len(ran) - len(failed)} of {len(ran)}: not {', '.join(failed)}"


def _row(kind: str, found: dict[str, Any]) -> str:
    facts = found["facts"]
    direct = facts["O_DIRECT"]
    creating = [name for name in ("link", "no_replace") if facts[name] == "yes"]
    cells = (
        kind,
        f"{facts['version']}, {facts['date']}",
        _tests(found["tests"]),
        "yes" if facts["flock"]["there"] else "no: local to a mount",
        _lateness(facts["late"]),
        "yes" if direct == "yes" else f"no (`{direct}`)",
        "yes" if creating else "no: such a save is refused at its begin",
    )
    return f"| {' | '.join(cells)} |"


def table(measured: dict[str, Any]) -> str:
    """Returns the table in Markdown."""
    head = [f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    return "\n".join(head + [_row(kind, found) for kind, found in measured.items()])


def in_page(page: str, rows: str) -> str:
    """Returns the page with that table in it."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{rows}\n{_END}{after}"


def take_over(record: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Returns what was measured, with the kinds of a run in place of their older ones. Kinds that skipped stay."""
    ran = {
        kind: {"facts": found["facts"], "tests": {name: of["outcome"] for name, of in found["tests"].items()}}
        for kind, found in record["kinds"].items()
        if "facts" in found
    }
    return measured | ran


def main() -> None:
    measured = take_over(json.loads(Path(sys.argv[1]).read_text()), json.loads(MEASURED.read_text()))
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n")
    PAGE.write_text(in_page(PAGE.read_text(), table(measured)))


if __name__ == "__main__":
    main()
