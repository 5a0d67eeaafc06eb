#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times what the comparison of copies costs in a save that is waited for: replicated plain tensors, as with DDP.

Each rank holds the whole state. A save of it is timed, and within it the making of the checksums that ranks compare,
which is all that ``differing_copies="trust"`` leaves out. The table has medians of the ranks that take longest; that of
the checksums is time of a core.

    python benchmarks/copies.py
    python benchmarks/copies.py --ranks 4 --gigabytes 1 --tensors 4000
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measurement import machine
from measurement.conditions import add_arguments
from rich.console import Console
from rich.table import Table

from bytecheckpoint import Config, save_state_dict
from bytecheckpoint.native import _C


def time_saves(rank: int, root: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=arguments.ranks)
    numel = int(arguments.gigabytes * 1e9) // 4 // arguments.tensors
    state = {f"layers.{i}.weight": torch.full((numel,), float(i)) for i in range(arguments.tensors)}
    spent: list[float] = []
    made: Any = _C.CopiesOfState

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()  # of this thread alone: a busy machine does not make it longer
        copies = made(*args, **kwargs)
        spent.append(time.thread_time() - begin)
        return copies

    _C.CopiesOfState = timed  # type: ignore[assignment, misc]  # as the planner looks it up
    seconds: dict[str, list[tuple[float, float]]] = {"warn": [], "trust": []}
    for repetition in range(arguments.repetitions + 1):
        for mode in seconds if repetition % 2 else reversed(seconds):
            spent.clear()
            dist.barrier()
            begin = time.perf_counter()
            save_state_dict(f"{root}/{mode}", state, config=Config(differing_copies=mode))
            figures = torch.tensor([time.perf_counter() - begin, sum(spent)], dtype=torch.float64)
            dist.all_reduce(figures, dist.ReduceOp.MAX)
            if repetition:
                seconds[mode].append((figures[0].item(), figures[1].item()))
    if rank == 0:
        report(seconds, arguments)
    dist.destroy_process_group()


def report(seconds: dict[str, list[tuple[float, float]]], arguments: argparse.Namespace) -> None:
    table = Table(
        title=f"{arguments.tensors:,} plain tensors, {arguments.gigabytes:g} GB, equal on {arguments.ranks} gloo ranks"
    )
    for column in ("differing_copies", "save, s", "least - most", "checksums, s", "of the save"):
        table.add_column(column, justify="left" if column == "differing_copies" else "right")
    for mode, figures in seconds.items():
        saves, checksums = zip(*figures, strict=True)
        share = statistics.median(part / whole for whole, part in figures)
        table.add_row(
            mode,
            f"{statistics.median(saves):.3f}",
            f"{min(saves):.3f} - {max(saves):.3f}",
            f"{statistics.median(checksums):.4f}",
            f"{share:.2%}",
        )
    Console(highlight=False, width=120).print(table)
    if arguments.json:
        facts = {"machine": machine.facts(arguments.dir), "seconds": seconds, "ranks": arguments.ranks}
        facts |= {"tensors": arguments.tensors, "gigabytes": arguments.gigabytes}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks (default 2)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state (default 1)")
    parser.add_argument("--tensors", type=int, default=100, help="tensors of the state (default 100)")
    add_arguments(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="copies-", dir=arguments.dir) as root:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        mp.spawn(time_saves, (root, arguments), arguments.ranks)


if __name__ == "__main__":
    main()
