# SPDX-License-Identifier: Apache-2.0
"""Measures what checking costs a load: with and without verification (Config(verify=False)), interleaved.

Wall-clock seconds are what a user waits. Processor seconds are what checksums take from other work, and vary less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache
from measurement.states import KINDS, State, make_state
from rich.console import Console
from rich.table import Table

import bytecheckpoint

CLOCKS = ("wall_s", "cpu_s")
LOADS = {"load": True, "load without": False}  # whether it verifies
Figures = dict[str, dict[str, list[float]]]


def measure(state: State, path: Path, stopwatch: Stopwatch, repetitions: int) -> Figures:
    """Returns seconds by load and clock, one figure for each round."""
    dcp.save(state.tree, storage_writer=bytecheckpoint.BcpWriter(path), no_dist=True)
    figures: Figures = {name: {clock: [] for clock in CLOCKS} for name in LOADS}
    for repetition in range(repetitions + 1):
        # No contender should always get the disk in the state in which the same other one left it.
        for name in sorted(LOADS, reverse=repetition % 2 == 1):
            config = bytecheckpoint.Config(verify=LOADS[name])
            state.blank()
            drop_page_cache(path)
            with stopwatch.conditions():
                wall, cpu = time.perf_counter(), time.process_time()
                dcp.load(state.tree, storage_reader=bytecheckpoint.BcpReader(path, config=config), no_dist=True)
                seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            state.check()
            if repetition:
                for clock in CLOCKS:
                    figures[name][clock].append(seconds[clock])
    return figures


def print_table(figures: Figures, title: str, console: Console) -> None:
    console.print(title)
    table = Table()
    for column in ("", "wall, s", "cost", "processor, s", "cost"):
        table.add_column(column, justify="right" if column else "left")
    medians = {name: {clock: statistics.median(s[clock]) for clock in CLOCKS} for name, s in figures.items()}
    without = medians["load without"]
    for name, seconds in medians.items():
        costs = [f"{seconds[clock] / without[clock] - 1:+.1%}" if name == "load" else "" for clock in CLOCKS]
        cells = [cell for clock, cost in zip(CLOCKS, costs, strict=True) for cell in (f"{seconds[clock]:.3f}", cost)]
        table.add_row(name, *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="large", help="kind of state; see compare.py --help")
    parser.add_argument("--gigabytes", type=float, help="size of the state, instead of the kind's own")
    add_arguments(parser)
    arguments = parser.parse_args()
    console = Console(highlight=False, width=100)
    warnings.filterwarnings("ignore")
    with (
        tempfile.TemporaryDirectory(dir=arguments.dir, prefix="checks-") as folder,
        Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch,
    ):
        state = make_state(arguments.kind, arguments.gigabytes)
        figures = measure(state, Path(folder, "saved"), stopwatch, arguments.repetitions)
    facts = machine.facts(arguments.dir)
    print_table(figures, f"{state.description}, {machine.summary(facts)}", console)
    if arguments.json:
        report: dict[str, Any] = {"command": machine.command("checks.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "state": state.description, "seconds": figures}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
