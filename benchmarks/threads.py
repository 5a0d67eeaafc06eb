# SPDX-License-Identifier: Apache-2.0
"""Counts how often the threads of a save or load wait, for up to 16 of them, on a file system in memory.

Where nothing waits for a disk, a thread that goes to sleep waits for another thread: for a slot, or for a lock. The
kernel counts how often ("voluntary context switches"). With a lock that all threads take for small things, they would
grow with the number of threads, and so would the processor time. Both are shown for each slot of 8 MiB that is written
or read, beside seconds: with more threads than cores, these cannot get shorter. "pread" is the ceiling of a load: as
many threads read the files to warm memory, 8 MiB at a time, and check nothing.

    python benchmarks/threads.py
    python benchmarks/threads.py small --threads 1 16 --json threads.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch.distributed.checkpoint as dcp
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments
from measurement.states import KINDS, State, make_state
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.native import _C

SLOT_BYTES = 8 << 20
THREADS = (1, 2, 4, 8, 16)
ACTIONS = ("save", "load", "pread")
FIGURES = ("seconds", "cpu_s", "waits")


def save(state: State, path: Path, config: Config) -> None:
    dcp.save(
        state.tree,
        storage_writer=BcpWriter(path, config=config),
        planner=BcpSavePlanner(config=config),
        no_dist=True,
    )


def load(state: State, path: Path, config: Config) -> None:
    dcp.load(state.tree, storage_reader=BcpReader(path, config=config), planner=BcpLoadPlanner(), no_dist=True)


def pread(path: Path, num_threads: int, memory: bytearray) -> None:
    """Reads all files of a checkpoint to ``memory``, each thread every so many pieces."""
    views, position = [], 0
    for file in sorted(filter(Path.is_file, path.iterdir())):
        for offset in range(0, size := file.stat().st_size, SLOT_BYTES):
            piece = min(SLOT_BYTES, size - offset)
            views.append((file, offset, memoryview(memory)[position : position + piece]))
            position += piece

    def read(first: int) -> None:
        for file, offset, view in views[first::num_threads]:
            with file.open("rb", buffering=0) as stream:
                assert os.preadv(stream.fileno(), [view], offset) == len(view)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, range(num_threads)))


def counted(stopwatch: Stopwatch, call: Callable[[], None]) -> dict[str, float]:
    """Returns the figures of one call."""
    figures: dict[str, float] = {}

    def run() -> None:
        cpu_s, waits = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        call()
        figures["cpu_s"] = time.process_time() - cpu_s
        figures["waits"] = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits

    figures["seconds"] = stopwatch.time(run)
    return figures


def measure(arguments: argparse.Namespace, root: Path, state: State) -> dict[str, dict[int, list[dict[str, float]]]]:
    """Returns the figures of all calls, by action and number of threads."""
    all_figures: dict[str, dict[int, list[dict[str, float]]]] = {a: {n: [] for n in arguments.threads} for a in ACTIONS}
    memory = bytearray(state.num_bytes * 2)  # more than the files; touched in the round that does not count
    with Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch:
        for repetition in track(range(arguments.repetitions + 1), console=Console(stderr=True), transient=True):
            for num_threads in arguments.threads if repetition % 2 == 0 else reversed(arguments.threads):
                config = Config(io_threads=num_threads, ring_bytes=256 << 20)
                path = root / "checkpoint"
                figures = {"save": counted(stopwatch, partial(save, state, path, config))}
                state.blank()
                figures["load"] = counted(stopwatch, partial(load, state, path, config))
                state.check()
                figures["pread"] = counted(stopwatch, partial(pread, path, num_threads, memory))
                shutil.rmtree(path)
                if repetition:
                    for action in ACTIONS:
                        all_figures[action][num_threads].append(figures[action])
    return all_figures


def print_table(console: Console, action: str, rows: dict[int, list[dict[str, float]]], num_slots: float) -> None:
    table = Table(title=f"{action}, a slot", title_justify="left")
    for column in ("threads", "ms", "processor, ms", "waits"):
        table.add_column(column, justify="right")
    for num_threads, of_calls in rows.items():
        median = {name: statistics.median(call[name] for call in of_calls) / num_slots for name in FIGURES}
        table.add_row(
            str(num_threads),
            f"{median['seconds'] * 1e3:.2f}",
            f"{median['cpu_s'] * 1e3:.2f}",
            f"{median['waits']:.1f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="large", help="kind of state; see compare.py --help")
    parser.add_argument("--gigabytes", type=float, help="size of the state, instead of the kind's own")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=THREADS, help="numbers of threads (default: %(default)s)"
    )
    add_arguments(parser)
    parser.set_defaults(dir=Path("/dev/shm"))
    arguments = parser.parse_args()
    if not _C.is_in_memory(str(arguments.dir), 0.0):
        sys.exit(f"{arguments.dir}: not in memory: a thread would wait for the disk there, too; give --dir a tmpfs")

    state = make_state(arguments.kind, arguments.gigabytes)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="threads-") as folder:
        figures = measure(arguments, Path(folder), state)
    console = Console(highlight=False, width=100)
    facts = machine.facts(arguments.dir)
    console.print(f"{state.description}; medians of {arguments.repetitions}; {machine.summary(facts)}")
    num_slots = state.num_bytes / SLOT_BYTES
    for action in ACTIONS:
        print_table(console, action, figures[action], num_slots)
    if arguments.json:
        report = {"command": machine.command("threads.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "state": state.description, "slots": num_slots, **figures}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
