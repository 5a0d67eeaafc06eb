# SPDX-License-Identifier: Apache-2.0
"""Saves and loads one state by every contender, interleaved in one run.

Every save is durable: files, directory and its entry are synced. Every load goes into existing, zeroed tensors with the
files' page cache dropped, and is compared byte by byte with what was saved. Each timed call begins on an idle machine
with warm memory. "disk" is the ceiling: O_DIRECT requests of 8 MiB, with one and with two threads, and the faster one
counts in each round. Prints medians. Absolute figures vary with the machine, ratios within a run vary less.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import warnings
from pathlib import Path

from measurement import machine
from measurement.call_clock import measure_split
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache
from measurement.contenders import BASELINE, NAMES, OURS, Contender, make_contenders, reason_to_leave_out
from measurement.results import ACTIONS, CEILING, DISK, Comparison
from measurement.states import KINDS, State, make_state
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

# Only for these does the memory of a `huge` save or load, besides the state, fit a machine of 24 GB. --only adds DCP.
HUGE_CONTENDERS = (OURS, DISK)


def one_round(state: State, contender: Contender, path: Path, stopwatch: Stopwatch) -> tuple[float, float]:
    """Returns the seconds of one save and of one load, whose result is compared."""
    save_s = stopwatch.time(lambda: contender.save(state, path))
    drop_page_cache(path)
    if contender.holds_state:
        state.blank()
    load_s = stopwatch.time(lambda: contender.load(state, path))
    if contender.holds_state:
        state.check()
    shutil.rmtree(path)
    return save_s, load_s


def run(
    comparison: Comparison, state: State, contenders: dict[str, Contender], root: Path, arguments: argparse.Namespace
) -> None:
    """Fills ``comparison``. Writes it after every round, so that a long run can be stopped early."""
    console = Console(stderr=True)
    path = root / "checkpoint"
    with (
        Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch,
        # Drawn only between the calls: a thread that refreshes would take time from the measured calls.
        Progress(console=console, disable=not console.is_terminal, auto_refresh=False) as progress,
    ):
        task = progress.add_task("", total=(arguments.repetitions + 1) * len(contenders))
        for repetition in range(arguments.repetitions + 1):
            # No contender should always get the disk in the state in which the same other one left it.
            for name in random.Random(repetition).sample(list(contenders), len(contenders)):
                progress.update(task, description=f"round {repetition}: {contenders[name].label}", refresh=True)
                figures = one_round(state, contenders[name], path, stopwatch)
                if repetition:
                    for action, seconds in zip(ACTIONS, figures, strict=True):
                        comparison.seconds[name][action].append(seconds)
                progress.advance(task)
            comparison.repetitions = repetition
            comparison.num_calls, comparison.busy_starts = stopwatch.num_calls, stopwatch.busy_starts
            if arguments.json and repetition:
                comparison.write(arguments.json)
        if OURS in contenders:
            comparison.split = measure_split(state, path, stopwatch)
            shutil.rmtree(path)


def print_tables(comparison: Comparison, console: Console) -> None:
    for action in ACTIONS:
        console.print(f"{action}: {comparison.state}")
        table = Table()
        for column in ("", "seconds", "least - most", "GB/s", f"x {comparison.baseline}", "of the disk"):
            table.add_column(column, justify="right" if column else "left")
        for name in comparison.names():
            all_s = comparison.all_s(name, action)
            to_baseline = comparison.ratio(name, comparison.baseline, action)
            to_disk = comparison.ratio(name, DISK, action)
            table.add_row(
                comparison.label(name),
                f"{comparison.median_s(name, action):.3f}",
                f"{min(all_s):.3f} - {max(all_s):.3f}",
                f"{comparison.gb_per_s(name, action):#.3g}",
                "" if to_baseline is None else f"{to_baseline:.2f}",
                "" if to_disk is None else f"{to_disk:.0%}" if to_disk >= 0.1 else f"{to_disk:.1%}",
                style="bold" if name == comparison.ours else "",
            )
        console.print(table)


def print_split(comparison: Comparison, console: Console) -> None:
    for action, seconds in comparison.split.items():
        planner = {part.removeprefix("planner: "): s for part, s in seconds.items() if part.startswith("planner")}
        parts = {part: s for part, s in seconds.items() if not part.startswith("planner")}
        console.print(
            f"{action} by {comparison.ours}, a call of its own: {sum(seconds.values()):.3f} s: "
            f"planner {sum(planner.values()):.3f} ({_list(planner)}), {_list(parts)}"
        )


def _list(seconds: dict[str, float]) -> str:
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {s:.3f}" for part, s in longest_first if s >= 0.0005) or "all under a millisecond"


def parse_arguments() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = "; ".join(f"{name}: {kind.meaning} ({kind.gigabytes:.2g} GB)" for name, kind in KINDS.items())
    parser.add_argument("kind", nargs="?", choices=KINDS, default="large", help=kinds)
    parser.add_argument("--gigabytes", type=float, help="size of the state, instead of the kind's own")
    parser.add_argument("--device", default="cpu", help="where the tensors are (default cpu), as in torch.device")
    parser.add_argument("--only", help=f"contenders, with commas between: {', '.join((*NAMES, DISK))}")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    if arguments.only:
        unknown = set(arguments.only.split(",")) - {*NAMES, DISK}
        if unknown:
            parser.error(f"--only: no contender is called {', '.join(sorted(unknown))}")
    return arguments, parser


def main() -> None:
    arguments, parser = parse_arguments()
    warnings.filterwarnings("ignore")
    console = Console(highlight=False, width=100)
    state = make_state(arguments.kind, arguments.gigabytes, arguments.device)

    wanted = arguments.only.split(",") if arguments.only else HUGE_CONTENDERS if arguments.kind == "huge" else None
    wanted = [name for name in (*NAMES, DISK) if wanted is None or name in wanted]
    names = [part for name in wanted for part in (CEILING if name == DISK else (name,))]
    reasons = {name: reason_to_leave_out(name, state, arguments.dir) for name in names}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in left_out.items():
        console.print(f"{name} is left out: {reason}")
    contenders = make_contenders(name for name in names if name not in left_out)

    comparison = Comparison(
        kind=arguments.kind,
        state=state.description,
        num_bytes=state.num_bytes,
        num_tensors=state.num_tensors,
        baseline=BASELINE,
        ours=OURS,
        repetitions=0,
        command=machine.command("compare.py", arguments, parser),
        machine=machine.facts(arguments.dir),
        versions=machine.versions(),
        labels={name: contender.label for name, contender in contenders.items()},
        left_out=left_out,
        seconds={name: {action: [] for action in ACTIONS} for name in contenders},
    )
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="compare-") as root:
        run(comparison, state, contenders, Path(root), arguments)
    if arguments.json:
        comparison.write(arguments.json)
    print_tables(comparison, console)
    print_split(comparison, console)
    console.print(
        f"medians of {comparison.repetitions}; {machine.summary(comparison.machine)}; "
        f"{comparison.busy_starts} of {comparison.num_calls} calls began on a busy machine"
    )


if __name__ == "__main__":
    main()
