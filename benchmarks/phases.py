# SPDX-License-Identifier: Apache-2.0
"""Splits the time of a save when the same state is saved again and again, from the reports of the saves.

Like a training loop, it uses one path, one writer, and a new planner each time. With several ranks, on this machine
with gloo, each rank holds the whole state, as in DDP, and the planner divides the writing among them. The first save
does not count. Time that is neither writing nor the removal of the previous save is planning (plans and their exchange)
or metadata and commit (lock, manifest, `.metadata`, rename, and their fsyncs, which wait for other users of the disk).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments
from measurement.states import KINDS, make_state
from rich.console import Console
from rich.table import Table

from bytecheckpoint import BcpSavePlanner, BcpWriter

Report = dict[str, Any]

PHASES = {
    "plan_s": "plan of the coordinator's own",
    "global_plan_s": "gather, global plan",
    "begin_s": "right to commit",
    "exchange_s": "scatter",
    "write_s": "write and sync",
    "wait_s": "wait for other ranks",
    "assemble_s": "manifest",
    "commit_s": "commit",
    "sweep_s": "removal of the save before",
}
PLANNING = ("plan_s", "global_plan_s", "exchange_s")
METADATA = ("begin_s", "assemble_s", "commit_s")
GOAL_PERCENT = 2.0
PLANNERS: dict[str, Callable[[], Any]] = {
    "cached": lambda: BcpSavePlanner(),
    "uncached": lambda: BcpSavePlanner(enable_plan_caching=False),
    "dcp": lambda: None,
}


def measure(rank: int, arguments: argparse.Namespace, root: str) -> None:
    """Saves on one rank. Rank 0 writes its reports to a file in ``root``."""
    warnings.filterwarnings("ignore")
    several = arguments.ranks > 1
    if several:
        store = f"file://{Path(root).resolve()}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=arguments.ranks)
    state = make_state(arguments.kind, arguments.gigabytes)
    writer = BcpWriter(Path(root) / "checkpoint")
    reports: list[Report] = []
    with ExitStack() as stack:
        stopwatch = stack.enter_context(Stopwatch(arguments.warm_gib, arguments.idle_limit_s)) if rank == 0 else None
        for repetition in range(arguments.repetitions + 1):
            with nullcontext() if stopwatch is None else stopwatch.conditions():
                if several:
                    dist.barrier()
                planner = PLANNERS[arguments.planner]()
                dcp.save(state.tree, storage_writer=writer, planner=planner, no_dist=not several)
            assert writer.last_report is not None
            if repetition:
                reports.append(json.loads(writer.last_report.to_json()))
                del reports[-1]["path"]  # figures are published, but not the path
        if stopwatch is not None:
            kept = {"description": state.description, "busy_starts": stopwatch.busy_starts, "reports": reports}
            (Path(root) / "kept.json").write_text(json.dumps(kept))
    if several:
        dist.destroy_process_group()


def median(reports: list[Report], *phases: str) -> float:
    """Returns the median of the sums of ``phases``."""
    return statistics.median(sum(report[phase] for phase in phases) for report in reports)


def median_percent(reports: list[Report], *phases: str) -> float:
    return statistics.median(100 * sum(report[phase] for phase in phases) / report["total_s"] for report in reports)


def print_table(reports: list[Report], title: str, console: Console) -> None:
    console.print(title)
    table = Table()
    for column in ("", "ms", "of the save"):
        table.add_column(column, justify="right" if column else "left")

    def add(name: str, *phases: str, style: str = "") -> None:
        percent = median_percent(reports, *phases)
        table.add_row(name, f"{median(reports, *phases) * 1e3:.2f}", f"{percent:.2f} %", style=style)

    for phase, name in PHASES.items():
        add(name, phase)
    table.add_section()
    add("planning", *PLANNING)
    add("metadata and commit", *METADATA)
    add("planning, metadata and commit", *PLANNING, *METADATA, style="bold")
    add("all", *PHASES)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="large", help="kind of state; see compare.py --help")
    parser.add_argument("--gigabytes", type=float, help="size of the state, instead of the kind's own")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that save, each with the whole state (default 1)")
    parser.add_argument(
        "--planner", choices=PLANNERS, default="cached", help="who plans (default: ours, with its cache)"
    )
    add_arguments(parser)
    arguments = parser.parse_args()

    console = Console(highlight=False, width=100)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="phases-") as root:
        if arguments.ranks > 1:
            torch.multiprocessing.spawn(measure, (arguments, root), nprocs=arguments.ranks)
        else:
            measure(0, arguments, root)
        kept = json.loads((Path(root) / "kept.json").read_text())
    reports: list[Report] = kept["reports"]
    facts = machine.facts(arguments.dir)
    ranks = f"{arguments.ranks} rank{'s' * (arguments.ranks > 1)}"
    print_table(reports, f"{kept['description']}, {ranks}, median of {len(reports)} saves", console)
    caches = [report["plan"]["cache"] for report in reports]
    console.print(f"plan cache: {', '.join(f'{cache} {caches.count(cache)}' for cache in sorted(set(caches)))}")
    rate = statistics.median(report["gb_per_s"] for report in reports)
    console.print(f"{rate:.2f} GB/s; {kept['busy_starts']} saves began on a busy machine")
    console.print(f"the goal for the three together is {GOAL_PERCENT:g} %; {machine.summary(facts)}")
    if arguments.json:
        report: dict[str, Any] = {"command": machine.command("phases.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "kind": arguments.kind, "ranks": arguments.ranks, **kept}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
