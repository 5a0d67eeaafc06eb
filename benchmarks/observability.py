# SPDX-License-Identifier: Apache-2.0
"""What looking at a run costs: findings of one record, and the page of a run, from simulated journals.

`findings` is one save of that many ranks, compared with the ten before it. `page` is all of `bcp report RUN` as a
process: it reads the journal, looks for findings and writes the page. Figures are the least of --repetitions, in
wall-clock seconds and in processor seconds, which vary less on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measurement import machine
from measurement.conditions import wait_until_idle
from rich.console import Console
from rich.table import Table

from bytecheckpoint.observability import findings

ROOT = Path(__file__).resolve().parents[1]
# The simulator is that of the tests.
sys.path.append(str(ROOT / "tests"))
from support.simulated_journal import Job, Straggler, simulate_save, write_run  # noqa: E402

Figures = dict[str, Any]


def _timed(call: Callable[[], None], repetitions: int) -> Figures:
    """Returns the least seconds; those of child processes count, too."""
    figures: Figures = {"wall_s": [], "cpu_s": []}
    for _ in range(repetitions):
        cpu, wall = sum(os.times()[:4]), time.perf_counter()
        call()
        figures["wall_s"].append(time.perf_counter() - wall)
        figures["cpu_s"].append(sum(os.times()[:4]) - cpu)
    return figures


def measure_findings(ranks: int, saves: int, repetitions: int) -> Figures:
    job = Job(ranks, with_timelines=False)
    history = [simulate_save(job, seed) for seed in range(min(saves, 10))]
    record = simulate_save(job, 10, straggler=Straggler("slow_storage", (ranks // 2,), 4.0))
    assert findings(record, history)[0].rank == ranks // 2
    return _timed(lambda: findings(record, history) and None, repetitions)


def measure_page(ranks: int, saves: int, repetitions: int) -> Figures:
    job = Job(ranks)
    slow = Straggler("slow_storage", (ranks // 2,), 4.0)
    records = (
        simulate_save(job, step, step=step, at=1e9 + 60 * step, straggler=slow if step % 10 == 0 else None)
        for step in range(1, saves + 1)
    )
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder), records)
        command = [sys.executable, "-m", "bytecheckpoint", "report", str(run)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}

        def report() -> None:
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

        figures = _timed(report, repetitions)
        figures["journal_bytes"] = (run / ".bcp" / "journal.jsonl").stat().st_size
        figures["page_bytes"] = (run / ".bcp" / "report.html").stat().st_size
    return figures


SECTIONS = {"findings": measure_findings, "page": measure_page}


def print_table(all_figures: list[Figures], console: Console) -> None:
    table = Table()
    for column in ("", "ranks", "saves", "wall", "processor", "journal", "page"):
        table.add_column(column, justify="right")
    for figures in all_figures:
        sizes = [f"{figures[name] / 1e6:.2f} MB" if name in figures else "" for name in ("journal_bytes", "page_bytes")]
        seconds = [f"{min(figures[name]):.3f} s" for name in ("wall_s", "cpu_s")]
        table.add_row(figures["section"], f"{figures['ranks']:,}", f"{figures['saves']:,}", *seconds, *sizes)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, help="one section instead of all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 1024, 10_000], help="default 4 1024 10000")
    parser.add_argument(
        "--saves", type=int, nargs="+", default=[100, 100, 20], help="of a run, a number for each --ranks"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="default 3")
    parser.add_argument("--idle-limit-s", type=float, default=20.0, help="longest wait for idleness (default 20)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    arguments = parser.parse_args()
    if len(arguments.ranks) != len(arguments.saves):
        parser.error("--ranks and --saves need as many numbers")
    console = Console(highlight=False, width=100)

    all_figures = []
    for section in [arguments.only] if arguments.only else SECTIONS:
        for ranks, saves in zip(arguments.ranks, arguments.saves, strict=True):
            if not wait_until_idle(arguments.idle_limit_s):
                console.print(f"the machine was still busy after {arguments.idle_limit_s:g} s")
            figures = SECTIONS[section](ranks, saves, arguments.repetitions)
            all_figures.append({"section": section, "ranks": ranks, "saves": saves} | figures)
    facts = machine.facts(Path.cwd())
    console.print(machine.summary(facts))
    print_table(all_figures, console)
    if arguments.json:
        report = {"command": machine.command("observability.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "figures": all_figures}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
