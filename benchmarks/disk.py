# SPDX-License-Identifier: Apache-2.0
"""Measures the disk's own ceiling: sequential O_DIRECT writes and reads of one file, in requests of 8 MiB.

Buffers lie on pages of 2 MiB, with which a request reaches the device in few pieces, and on pages of 4 KiB for
reference. The timed write preallocates the file and syncs it at the end, as an engine does. Nothing is copied, and no
checksum is computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

from measurement import machine
from measurement.conditions import Stopwatch, add_arguments
from measurement.raw_disk import Disk, has_direct_io
from rich.console import Console
from rich.table import Table


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Returns seconds of each configuration by round.

    Configurations are interleaved, the first round does not count.
    """
    disks = {
        f"{pages}, {threads} thread{'s' * (threads > 1)}": Disk(threads, pages == "2 MiB pages")
        for pages in ("2 MiB pages", "4 KiB pages")
        for threads in (1, 2)
    }
    num_bytes = int(arguments.gigabytes * 1e9)
    seconds: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in disks}
    with (
        Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch,
        tempfile.TemporaryDirectory(dir=arguments.dir, prefix="disk-") as folder,
    ):
        path = Path(folder) / "raw"
        for repetition in range(arguments.repetitions + 1):
            for name, disk in disks.items():
                save_s = stopwatch.time(partial(disk.write, path, num_bytes))
                load_s = stopwatch.time(partial(disk.read, path, num_bytes))
                path.unlink()
                if repetition:
                    seconds[name]["save"].append(save_s)
                    seconds[name]["load"].append(load_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the file (default 1)")
    add_arguments(parser)
    arguments = parser.parse_args()
    if not has_direct_io(arguments.dir):
        sys.exit(f"{arguments.dir}: this file system has no O_DIRECT")

    seconds = measure(arguments)
    facts = machine.facts(arguments.dir)
    console = Console(highlight=False, width=100)
    console.print(f"{arguments.gigabytes:g} GB, {machine.summary(facts)}")
    table = Table()
    for column in ("", "write, s", "GB/s", "read, s", "GB/s"):
        table.add_column(column, justify="right" if column else "left")
    for name, by_action in seconds.items():
        medians = [statistics.median(by_action[action]) for action in ("save", "load")]
        table.add_row(name, *(text for s in medians for text in (f"{s:.3f}", f"{arguments.gigabytes / s:.2f}")))
    console.print(table)
    if arguments.json:
        command = machine.command("disk.py", arguments, parser)
        report = {"command": command, "machine": facts, "gigabytes": arguments.gigabytes, "seconds": seconds}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
