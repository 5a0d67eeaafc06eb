# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of checksums: saves with and without them, loads with and without verification, interleaved.

A load without verification uses Config(verify=False). A save always computes checksums, so a save without them needs
another build of the package (--without DIR), whose crc32 returns 0. To prove that it is such a build, the ordinary
build must refuse what it wrote. Each build runs in a child process that lives through all rounds. Wall-clock seconds
are what a user waits. Processor seconds are what checksums take from other work, and vary less.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measurement import machine
from measurement.build_process import BuildProcess
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache
from measurement.states import KINDS
from rich.console import Console
from rich.table import Table

CLOCKS = ("wall_s", "cpu_s")
Figures = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Call:
    """One of the compared calls."""

    name: str
    process: BuildProcess
    action: str
    path: Path
    verify: bool = True


def measure(calls: list[Call], stopwatch: Stopwatch, repetitions: int) -> Figures:
    """Returns seconds by call and clock, one figure for each round."""
    figures: Figures = {call.name: {clock: [] for clock in CLOCKS} for call in calls}
    saves = [call for call in calls if call.action == "save"]
    loads = [call for call in calls if call.action == "load"]
    for repetition in range(repetitions + 1):
        for call in saves + loads:
            call.process.prepare(call.action, call.path, call.verify)
            with stopwatch.conditions():
                seconds = call.process.go()
            call.process.check()
            drop_page_cache(call.path)
            if repetition:
                for clock in CLOCKS:
                    figures[call.name][clock].append(seconds[clock])
        if repetition == 0 and len(saves) > 1 and not loads[0].process.refuses(saves[1].path):
            sys.exit("--without: this build takes checksums")
        for path in {call.path for call in saves}:
            shutil.rmtree(path)
        saves.reverse()  # no contender should always get the disk in the state in which the same other one left it
        loads.reverse()
    return figures


def print_table(figures: Figures, title: str, console: Console) -> None:
    console.print(title)
    table = Table()
    for column in ("", "wall, s", "cost", "processor, s", "cost"):
        table.add_column(column, justify="right" if column else "left")
    medians = {name: {clock: statistics.median(s[clock]) for clock in CLOCKS} for name, s in figures.items()}
    for name, seconds in medians.items():
        without = medians.get(f"{name} without")
        cells = []
        for clock in CLOCKS:
            cost = "" if without is None else f"{seconds[clock] / without[clock] - 1:+.1%}"
            cells += [f"{seconds[clock]:.3f}", cost]
        table.add_row(name, *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="large", help="kind of state; see compare.py --help")
    parser.add_argument("--gigabytes", type=float, help="size of the state, instead of the kind's own")
    parser.add_argument("--without", type=Path, metavar="DIR", help="where a build is whose crc32 returns 0")
    add_arguments(parser)
    arguments = parser.parse_args()
    console = Console(highlight=False, width=100)

    with (
        tempfile.TemporaryDirectory(dir=arguments.dir, prefix="checks-") as folder,
        Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch,
    ):
        root = Path(folder)
        product = BuildProcess(None, arguments.kind, arguments.gigabytes)
        calls = [
            Call("save", product, "save", root / "with"),
            Call("load", product, "load", root / "with"),
            Call("load without", product, "load", root / "with", verify=False),
        ]
        if arguments.without:
            other = BuildProcess(arguments.without, arguments.kind, arguments.gigabytes)
            calls.insert(1, Call("save without", other, "save", root / "without"))
        figures = measure(calls, stopwatch, arguments.repetitions)
        for process in {id(call.process): call.process for call in calls}.values():
            process.close()

    facts = machine.facts(arguments.dir)
    print_table(figures, f"{product.description}, {machine.summary(facts)}", console)
    if not arguments.without:
        console.print("the cost of a save was not measured: --without DIR has the build to compare with")
    if arguments.json:
        report: dict[str, Any] = {"command": machine.command("checks.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "state": product.description, "seconds": figures}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
