# SPDX-License-Identifier: Apache-2.0
"""Says what got worse between two runs of `bench_all.py`, beyond the noise that was measured in the same runs.

A series of seconds is divided, round by round, by that of a contender which is not ours and took its turns in the same
rounds: the disk, or DCP. So a slower machine does not look like slower code. The noise is the standard error of both
medians; a change counts from three of them on, and from 3 % on. Ends with 1 if something got worse.

    python benchmarks/compare_runs.py old.json new.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from measurement.held_figures import against_yardstick, change, is_ours, series_of
from rich.console import Console
from rich.table import Table

STYLES = {"worse": "bold red", "better": "green"}


def figures_of(file: Path) -> dict[str, Any]:
    runs = json.loads(file.read_text())["runs"]
    return {name: kept["figures"] for name, kept in runs.items() if kept["figures"] is not None}


def main() -> int:
    """Returns 1 if something got worse, 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="what bench_all.py wrote before")
    parser.add_argument("new", type=Path, help="what it wrote now")
    parser.add_argument("--all", action="store_true", help="show what did not change, too, and single figures")
    arguments = parser.parse_args()
    old, new = figures_of(arguments.old), figures_of(arguments.new)
    table = Table("benchmark", "figure", "divided by", "old", "new", "change", "noise", "")
    verdicts = []
    for name in (each for each in old if each in new):
        before, after = series_of(old[name]), series_of(new[name])
        for path in (each for each in before if each in after and is_ours(each)):
            old_values, yardstick = against_yardstick(path, before)
            new_values, new_yardstick = against_yardstick(path, after)
            if yardstick != new_yardstick:
                continue
            found = change(old_values, new_values)
            verdicts.append(found.verdict)
            if arguments.all or found.verdict in STYLES:
                noise = "" if found.noise is None else f"{found.noise:.1%}"
                cells = (f"{found.old:.4g}", f"{found.new:.4g}", f"{found.part:+.1%}", noise, found.verdict)
                table.add_row(name, ", ".join(path), yardstick, *cells, style=STYLES.get(found.verdict, ""))
    console = Console(highlight=False, width=150)
    if not verdicts:
        console.print("the two files have no figure in common")
        return 2
    if table.rows:
        console.print(table)
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("worse", "better", "same"))
    console.print(f"{counts}; {verdicts.count('')} single figures, of which nobody knows how they scatter")
    for gone in sorted(old.keys() - new.keys()):
        console.print(f"{gone}: not in the new run")
    return 1 if "worse" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
