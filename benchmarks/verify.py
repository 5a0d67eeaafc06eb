# SPDX-License-Identifier: Apache-2.0
"""Measures how fast a checkpoint is verified, beside the disk's own speed: sequential O_DIRECT reads of as many bytes.

`verify` runs in this process with several numbers of reading threads (as many threads compute checksums). `bcp verify`
runs as a user starts it, including the start of the interpreter. They take turns in one run, and page caches are
dropped before each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed.checkpoint as dcp
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache
from measurement.raw_disk import Disk, has_direct_io
from measurement.states import KINDS, make_state
from rich.console import Console
from rich.table import Table

from bytecheckpoint import BcpWriter, verify
from bytecheckpoint.cli.verify import settings

DISK = "disk, {} threads"


def verify_with(path: Path, num_threads: int) -> None:
    report = verify(path, config=settings(num_threads))
    if not report.is_whole:
        sys.exit(f"{path}: {report.problems[0]}")


def run_command(path: Path) -> None:
    # Drops settings from the environment of this process.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BYTECHECKPOINT_")}
    command = [sys.executable, "-m", "bytecheckpoint", "verify", str(path)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def measure(arguments: argparse.Namespace, root: Path) -> tuple[dict[str, list[float]], int, str]:
    """Returns seconds by contender, the number of bytes that each reads, and the state in words."""
    path, raw = root / "ckpt", root / "raw"
    state = make_state(arguments.kind, arguments.gigabytes)
    dcp.save(state.tree, storage_writer=BcpWriter(path), no_dist=True)
    num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    disks = {threads: Disk(threads) for threads in (1, 2)}
    disks[1].write(raw, num_bytes)
    contenders: dict[str, Callable[[], None]] = {
        **{DISK.format(n): partial(disk.read, raw, num_bytes) for n, disk in disks.items()},
        **{f"verify, {n} threads": partial(verify_with, path, n) for n in (1, 2, 4)},
        "bcp verify": partial(run_command, path),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch:
        for repetition in range(arguments.repetitions + 1):
            for name in contenders if repetition % 2 == 0 else reversed(contenders):
                drop_page_cache(path)
                took = stopwatch.time(contenders[name])
                if repetition:
                    seconds[name].append(took)
    return seconds, num_bytes, state.description


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="large", help="kind of state; see compare.py --help")
    parser.add_argument("--gigabytes", type=float, help="size of the state, instead of the kind's own")
    add_arguments(parser)
    arguments = parser.parse_args()
    if not has_direct_io(arguments.dir):
        sys.exit(f"{arguments.dir}: this file system has no O_DIRECT")

    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="verify-") as folder:
        seconds, num_bytes, description = measure(arguments, Path(folder))
    facts = machine.facts(arguments.dir)
    console = Console(highlight=False, width=100)
    console.print(f"{description}, {machine.summary(facts)}")
    medians = {name: statistics.median(of_rounds) for name, of_rounds in seconds.items()}
    best = min(medians[DISK.format(n)] for n in (1, 2))
    table = Table()
    for column in ("", "s", "GB/s", "of the disk's speed"):
        table.add_column(column, justify="right" if column else "left")
    for name, s in medians.items():
        table.add_row(name, f"{s:.3f}", f"{num_bytes / s / 1e9:.2f}", f"{best / s:.0%}")
    console.print(table)
    if arguments.json:
        report = {"command": machine.command("verify.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "state": description, "bytes": num_bytes, "seconds": seconds}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
