# SPDX-License-Identifier: Apache-2.0
"""Writes the table of figures in docs/benchmarks.md, between its two markers, from a file of `bench_all.py`.

Each row is a median of ours. Others took turns with it in the same run: how many times as fast it was as stock DCP, and
its part of the speed of the disk, of which the faster number of threads counts.

    python benchmarks/figures_table.py build/bench/all.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_all import COMMANDS
from measurement import machine
from measurement.held_figures import is_ours, series_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- benchmarks/figures_table.py makes what follows -->", "<!-- to here -->"
STOCK = ("dcp-2", "DCP, 2 threads", "dcp-thread")
DISKS = ("disk-1", "disk-2", "disk, reading and writing", "disk, 1 threads", "disk, 2 threads")
# The series that readers look for, by the first or last of their keys; compare_runs.py compares all.
SHOWN_FIRST, SHOWN_LAST = "seconds", ("return_s", "committed_s")
HEADER = ("| benchmark | figure | median | x stock DCP | of the disk |", "| --- | --- | --- | --- | --- |")

Keys = tuple[str, ...]


def beside(path: Keys, series: Mapping[Keys, list[float]], names: tuple[str, ...]) -> float | None:
    """Returns the least median of the named contenders at the place of ours, or None if none took part."""
    found = [
        statistics.median(series[other])
        for place in range(len(path))
        for other in ((*path[:place], name, *path[place + 1 :]) for name in names)
        if other in series
    ]
    return min(found, default=None)


def rows_of(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the rows of a report of ``bench_all.py``. A command that failed has a row that says so."""
    for name, kept in report["runs"].items():
        if kept["figures"] is None:
            yield f"| {name} | failed | | | |"
            continue
        series = series_of(kept["figures"])
        for path, values in series.items():
            if is_ours(path) and (path[0] == SHOWN_FIRST or path[-1] in SHOWN_LAST):
                median = statistics.median(values)
                stock, disk = beside(path, series, STOCK), beside(path, series, DISKS)
                faster = "" if stock is None else f"{stock / median:.2f}"
                share = "" if disk is None else f"{disk / median:.0%}"
                words = [key for key in path if key not in (SHOWN_FIRST, "states", "figures")]
                figure = ", ".join(key.removesuffix("_s") for key in words)
                yield f"| {name} | {figure} | {median:.3f} s | {faster} | {share} |"


def table_of(report: Mapping[str, Any]) -> str:
    """Returns the table, with the machine and the commands that made it."""
    commands = [f"    # {name}\n    python benchmarks/{shlex.join(COMMANDS[name])}" for name in report["runs"]]
    caption = f"`make bench-all`, {machine.summary(report['machine'])}; its commands are below."
    return "\n".join([caption, "", *HEADER, *rows_of(report), "", *commands])


def put(page: str, table: str) -> str:
    """Returns the page with another table between its markers. Raises ValueError if it lacks one of them."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN!r} and {END!r} once each")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="what bench_all.py wrote")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/benchmarks.md")
    arguments = parser.parse_args()
    table = table_of(json.loads(arguments.report.read_text()))
    arguments.page.write_text(put(arguments.page.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
