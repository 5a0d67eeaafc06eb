# SPDX-License-Identifier: Apache-2.0
"""How long a job takes that is started again: from the memory tier, from the disk, and by stock DCP, in turn.

One launcher starts all ranks of a job at once, each time with a cold page cache. The seconds count from the first line
behind the imports to the end of the first step, on the slowest rank: the process group, with DCP's ``timeout`` of 30 s,
the state, of FSDP2's kind and not filled yet, the load, and a step that changes every parameter. The second figure is
the load alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache
from measurement.job_of_ranks import run_job
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bytecheckpoint import MemoryTier, Tiers, resume, save_state_dict
from bytecheckpoint.storage.memory.connection import stop_holder

MEMORY, DISK, STOCK = WAYS = "memory", "disk", "stock DCP"
WIDTH = 1024


def places(folder: Path) -> Tiers:
    return Tiers(memory=MemoryTier(), near=folder / "run")


def sharded(num_tensors: int, rows: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows_here = rows // dist.get_world_size()
    return {
        f"layers.{n}": DTensor.from_local(torch.empty(rows_here, WIDTH), mesh, [Shard(0)]) for n in range(num_tensors)
    }


def work_as_a_rank(folder: Path, way: str, num_tensors: int, rows: int) -> None:
    begin = time.perf_counter()
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    state = sharded(num_tensors, rows)
    dist.barrier()
    begin_of_load = time.perf_counter()
    if way == "save":
        for number, tensor in enumerate(state.values()):
            tensor.to_local().fill_(number)
        save_state_dict(places(folder) / "step-1", state)
    elif way == STOCK:
        dcp.load(state, checkpoint_id=f"{folder}/run/step-1")
    else:
        resumed = resume(places(folder) if way == MEMORY else folder / "run", state)
        assert resumed is not None
        assert resumed.path.startswith("held://") == (way == MEMORY), resumed.path
    dist.barrier()
    load_s = time.perf_counter() - begin_of_load
    for number, tensor in enumerate(state.values()):
        local = tensor.to_local()
        assert local[0, 0] == number == local[-1, -1]
        local.mul_(0.999)
    dist.barrier()
    slowest = torch.tensor([time.perf_counter() - begin, load_s])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        (folder / "seconds").write_text(json.dumps(slowest.tolist()))
    dist.barrier()
    os._exit(0)  # as a job that is killed: shutdown() would end the holder


def time_job(folder: Path, way: str, args: argparse.Namespace) -> list[float]:
    """Starts all ranks of a job at once; returns the seconds until the first step is done, and those of the load."""
    rows = int(args.gigabytes * 1e9 / 4 / args.tensors / WIDTH) // args.ranks * args.ranks
    run_job([__file__, "--as-rank", str(folder), way, str(args.tensors), str(rows)], args.ranks)
    seconds: list[float] = json.loads((folder / "seconds").read_text())
    return seconds


def show(seconds: dict[str, list[list[float]]], what: str) -> dict[str, float]:
    table = Table("from", "of the", "seconds", "least", "most", "of stock DCP", title=what)
    ratios = {}
    for number, part in enumerate(("restart", "load")):
        times = {way: [of_job[number] for of_job in of_one] for way, of_one in seconds.items()}
        medians = {way: statistics.median(of_way) for way, of_way in times.items()}
        for way, of_way in times.items():
            cells = medians[way], min(of_way), max(of_way), medians[way] / medians[STOCK]
            table.add_row(way, part, *(f"{cell:.2f}" for cell in cells))
            ratios[f"{part} from {way}, of stock DCP's time"] = medians[way] / medians[STOCK]
    Console().print(table)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the state, of all ranks (default 2)")
    parser.add_argument("--tensors", type=int, default=40, help="(default 40)")
    parser.add_argument("--ranks", type=int, default=4, help="(default 4)")
    add_arguments(parser)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="recovery-"))
    seconds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    try:
        time_job(folder, "save", args)
        with Stopwatch(args.warm_gib, args.idle_limit_s) as watch:
            for repetition in range(args.repetitions + 1):
                for way in WAYS[:: -1 if repetition % 2 else 1]:
                    drop_page_cache(folder / "run")
                    with watch.conditions():
                        took = time_job(folder, way, args)
                    seconds[way] += [took] if repetition else []
        print(f"{watch.busy_starts} of {watch.num_calls} jobs began on a busy machine")
    finally:
        stop_holder(places(folder).in_memory.rpartition("/")[2])
        shutil.rmtree(folder)
    ratios = show(seconds, f"{args.gigabytes:g} GB, {args.ranks} ranks")
    if args.json:
        facts = machine.facts(args.dir)
        args.json.write_text(json.dumps({"seconds": seconds, "ratios": ratios, "machine": facts}, indent=1))


if __name__ == "__main__":
    if "--as-rank" in sys.argv:
        work_as_a_rank(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
