# SPDX-License-Identifier: Apache-2.0
"""Saves and loads on each file system of tests/ground, by our four classes and by stock DCP in turn, on the same mount.

Both are as durable: files and folders are synced. Loads begin with the page cache of their files dropped, and their
result is compared. Each round has both in an order of its own, and a ratio is the median of the rounds' ratios. "mount"
is what the file system itself allows: one file of as many bytes, written in pieces of 8 MiB and synced, and read. On
NFS all of this runs on a client with a kernel of its own, and the build with failpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from measurement import machine
from measurement.contenders import BASELINE, OUR_PLANNERS
from measurement.on_mounts import MOUNT, Seconds, measure
from measurement.results import ACTIONS
from rich.console import Console
from rich.table import Table

# File systems and machines are those of the tests. Their package comes before this script, which has its name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from ground.mounts import KINDS, Ground
from ground.shared_mounts import NFS_KINDS, SHARED_KINDS, SLOW_KINDS

ALL_KINDS = (*KINDS, *SHARED_KINDS, *SLOW_KINDS, *NFS_KINDS)
# A tensor of the kind "small" has 16 KiB.
_SMALL_GB = (16 << 10) / 1e9
_LIMIT_S = 3600.0


@contextlib.contextmanager
def started(kind: str, folder: Path) -> Iterator[Ground]:
    """Mounts a file system in an empty folder.

    Raises:
        pytest.skip.Exception: It cannot be mounted here, with the reason.
    """
    with contextlib.ExitStack() as stack:
        if kind in NFS_KINDS:
            yield NFS_KINDS[kind](stack, folder)
        else:
            yield Ground(kind, (KINDS | SHARED_KINDS | SLOW_KINDS)[kind](stack, folder))


def measure_on(ground: Ground, sizes: dict[str, float], repetitions: int) -> dict[str, Seconds]:
    if ground.machines is None:
        return measure(ground.views[0], sizes, repetitions, ground.kind)
    client = ground.machines[0]
    found: dict[str, Seconds] = client.wait(
        client.start(measure, ground.views[0], sizes, repetitions, ground.kind), _LIMIT_S
    ).unwrap()
    return found


def ratio(seconds: Seconds, of: str, to: str, action: str) -> float:
    """Returns how many times as fast ``of`` was as ``to``."""
    return statistics.median(b / a for a, b in zip(seconds[of][action], seconds[to][action], strict=True))


def print_table(found: dict[str, dict[str, Seconds]], console: Console) -> None:
    table = Table()
    for column in ("", "state", "", "ours, s", "DCP, s", "mount, s", "x DCP", "mount x DCP"):
        table.add_column(column)
    for kind, states in found.items():
        for state, seconds in states.items():
            for action in ACTIONS:
                medians = [statistics.median(seconds[each][action]) for each in (OUR_PLANNERS, BASELINE, MOUNT)]
                ours, allowed = (ratio(seconds, each, BASELINE, action) for each in (OUR_PLANNERS, MOUNT))
                table.add_row(kind, state, action, *(f"{s:.3f}" for s in medians), f"{ours:.2f}", f"{allowed:.2f}")
    console.print(table)


def parse_arguments() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"all without any: {'; '.join(ALL_KINDS)}")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the large state; 0 for none (default 1)")
    parser.add_argument("--tensors", type=int, default=5000, help="number of small ones; 0 for none (default 5000)")
    parser.add_argument("--repetitions", type=int, default=7, help="counted rounds, after one that is not (default 7)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the storage lies")
    parser.add_argument("--json", type=Path, help="also write all figures to this file, after each file system")
    arguments = parser.parse_args()
    if unknown := {*arguments.kinds} - {*ALL_KINDS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return arguments, parser


def main() -> None:
    arguments, parser = parse_arguments()
    console = Console(highlight=False, width=120)
    sizes = {"large": arguments.gigabytes, "small": arguments.tensors * _SMALL_GB}
    sizes = {kind: gigabytes for kind, gigabytes in sizes.items() if gigabytes}
    kept: dict[str, Any] = {"machine": machine.facts(arguments.dir), "versions": machine.versions(), "kinds": {}}
    kept["command"] = machine.command("ground.py", arguments, parser)
    for kind in arguments.kinds or ALL_KINDS:
        folder = Path(tempfile.mkdtemp(prefix="ground-", dir=arguments.dir))
        try:
            with started(kind, folder) as ground:
                kept["kinds"][kind] = measure_on(ground, sizes, arguments.repetitions)
        except pytest.skip.Exception as skipped:
            console.print(f"{kind} is left out: {skipped}")
        else:
            print_table({kind: kept["kinds"][kind]}, console)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(kept, indent=1))
    print_table(kept["kinds"], console)
    console.print(f"medians of {arguments.repetitions}; {machine.summary(kept['machine'])}")


if __name__ == "__main__":
    main()
