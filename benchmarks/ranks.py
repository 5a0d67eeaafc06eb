#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times a save and a load of DTensors on several gloo ranks: the plain call and `register()` against stock DCP.

Every rank holds its shard of every tensor. A call begins for all ranks at once and ends with the last. Every load is
compared byte by byte. Contenders take turns, in another order each round.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --ranks 2 --tensors 1000 --json ranks.json
    python benchmarks/ranks.py --ranks 2 --tensors 4 --tensor-bytes 4194304 --on "NFS 4.2"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measurement import machine
from measurement.conditions import add_arguments
from measurement.of_ranks import BASELINE, ROWS, Measured, measure, measure_on_own_machine
from rich.console import Console
from rich.table import Table

# Ranks and machines are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from ground.shared_mounts import NFS_KINDS
from support.nfs_machines import MEETING, MEETING_ENV
from support.ranks import run_ranks

_LIMIT_S = 3600.0


def measured_on(kind: str, root: Path, *arguments: Any) -> Measured:
    """Measures two ranks on two clients of NFS, each with a kernel of its own."""
    with contextlib.ExitStack() as stack:
        ground = NFS_KINDS[kind](stack, root)
        assert ground.machines is not None
        pids = [
            client.start(measure_on_own_machine, rank, MEETING, ground.views[rank], *arguments, env=MEETING_ENV)
            for rank, client in enumerate(ground.machines)
        ]
        first, _ = [client.wait(pid, _LIMIT_S).unwrap() for client, pid in zip(ground.machines, pids, strict=True)]
        return first  # type: ignore[no-any-return]


def report(found: Measured, arguments: argparse.Namespace) -> None:
    seconds = found.seconds
    gigabytes = arguments.tensors * arguments.tensor_bytes / 1e9
    where = f", {arguments.on}" if arguments.on else ""
    title = f"{arguments.tensors:,} DTensors, {gigabytes:.2f} GB, on {arguments.ranks} gloo ranks{where}"
    table = Table(title=title)
    for column in ("", "save, s", "least - most", "x DCP", "load, s", "least - most", "x DCP"):
        table.add_column(column, justify="right" if column else "left")
    for name, by_action in seconds.items():
        cells = []
        for action, all_s in by_action.items():
            ratio = statistics.median(
                theirs / ours for theirs, ours in zip(seconds[BASELINE][action], all_s, strict=True)
            )
            cells += [f"{statistics.median(all_s):.3f}", f"{min(all_s):.3f} - {max(all_s):.3f}", f"{ratio:.2f}"]
        table.add_row(name, *cells)
    console = Console(highlight=False, width=120)
    console.print(table)
    console.print(f"{found.num_calls} calls timed; {found.busy_starts} began on a busy machine")
    if arguments.json:
        facts = {
            "machine": machine.facts(arguments.dir),
            "ranks": arguments.ranks,
            "tensors": arguments.tensors,
            "tensor_bytes": arguments.tensor_bytes,
            "seconds": seconds,
            "on": arguments.on,
            "num_calls": found.num_calls,
            "busy_starts": found.busy_starts,
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8, 16), default=4, help="gloo ranks (default 4)")
    parser.add_argument("--tensors", type=int, default=20_000, help="sharded tensors (default 20000)")
    parser.add_argument("--tensor-bytes", type=int, default=16384, help="of each, all shards (default 16384)")
    parser.add_argument("--on", choices=[*NFS_KINDS], help="on two machines of this network file system; for 2 ranks")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.tensor_bytes % (4 * ROWS):
        parser.error(f"--tensor-bytes must be a multiple of {4 * ROWS}")
    if arguments.on and arguments.ranks != 2:
        parser.error("--on needs --ranks 2")
    of_state = (arguments.tensors, arguments.tensor_bytes)
    conditions = (arguments.repetitions, arguments.warm_gib, arguments.idle_limit_s)
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=arguments.dir) as root:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        if arguments.on:
            # Each client keeps its memory, and sees nothing of what else this computer does.
            found = measured_on(arguments.on, Path(root), *of_state, arguments.repetitions, 0.0, 0.0)
        else:
            found, *_ = run_ranks(arguments.ranks, measure, Path(root), *of_state, *conditions, limit_s=_LIMIT_S)
    report(found, arguments)


if __name__ == "__main__":
    main()
