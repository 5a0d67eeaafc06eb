#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times a save and a load of DTensors on several gloo ranks: ours with its planners against stock DCP.

Every rank holds its shard of every tensor. A call begins for all ranks at once and ends with the last. Every load is
compared byte by byte. Contenders take turns, in another order each round.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --ranks 2 --tensors 1000 --json ranks.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache, sync_directories
from measurement.stock_dcp import stock_dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint

BASELINE, PLAIN, REGISTERED = "DCP, 2 threads", "bytecheckpoint, plain call", "bytecheckpoint, registered"
_ROWS = 64  # rows of each tensor, divided among the ranks

Seconds = dict[str, dict[str, list[float]]]


def save_stock(state: dict[str, Any], path: Path) -> None:
    with stock_dcp():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2))
    if dist.get_rank() == 0:
        sync_directories(path)


def load_stock(state: dict[str, Any], path: Path) -> None:
    with stock_dcp():
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))


def save_plainly(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=bytecheckpoint.BcpWriter(path))


def load_plainly(state: dict[str, Any], path: Path) -> None:
    dcp.load(state, storage_reader=bytecheckpoint.BcpReader(path))


def save_registered(state: dict[str, Any], path: Path) -> None:
    with bytecheckpoint.registered():
        dcp.save(state, checkpoint_id=path)


def load_registered(state: dict[str, Any], path: Path) -> None:
    with bytecheckpoint.registered():
        dcp.load(state, checkpoint_id=path)


CONTENDERS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    BASELINE: (save_stock, load_stock),
    PLAIN: (save_plainly, load_plainly),
    REGISTERED: (save_registered, load_registered),
}


def make_state(num_tensors: int, tensor_bytes: int) -> dict[str, Any]:
    """Makes a state that is sharded by rows over all ranks. Its content is known and differs between ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (_ROWS // dist.get_world_size(), tensor_bytes // 4 // _ROWS)
    return {
        "model": {
            f"layers.{i}.weight": DTensor.from_local(torch.rand(shape, generator=generator), mesh, [Shard(0)])
            for i in range(num_tensors)
        }
    }


def time_call(call: Callable[[], None], stopwatch: Stopwatch | None) -> float:
    """Returns the seconds until the last rank is done, measured on rank 0. No other rank is timed separately."""
    with stopwatch.conditions() if stopwatch is not None else nullcontext():
        dist.barrier()
        begin = time.perf_counter()
        call()
        dist.barrier()
        return time.perf_counter() - begin


def one_round(name: str, state: dict[str, Any], path: Path, stopwatch: Stopwatch | None) -> tuple[float, float]:
    save, load = CONTENDERS[name]
    save_s = time_call(lambda: save(state, path), stopwatch)
    if dist.get_rank() == 0:
        drop_page_cache(path)
    tensors = [tensor.to_local() for tensor in state["model"].values()]
    wanted = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    load_s = time_call(lambda: load(state, path), stopwatch)
    if not all(torch.equal(got, of_save) for got, of_save in zip(tensors, wanted, strict=True)):
        raise AssertionError(f"{name}: rank {dist.get_rank()} has other bytes than were saved")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return save_s, load_s


def run_rank(rank: int, root: str, arguments: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=arguments.ranks)
    state = make_state(arguments.tensors, arguments.tensor_bytes)
    seconds: Seconds = {name: {"save": [], "load": []} for name in CONTENDERS}
    with Stopwatch(arguments.warm_gib, arguments.idle_limit_s) if rank == 0 else nullcontext() as stopwatch:
        for repetition in range(arguments.repetitions + 1):
            for name in random.Random(repetition).sample(list(CONTENDERS), len(CONTENDERS)):
                figures = one_round(name, state, Path(root) / "checkpoint", stopwatch)
                for action, s in zip(("save", "load"), figures, strict=True):
                    if repetition:
                        seconds[name][action].append(s)
        if stopwatch is not None:
            report(seconds, stopwatch, arguments)
    dist.destroy_process_group()


def report(seconds: Seconds, stopwatch: Stopwatch, arguments: argparse.Namespace) -> None:
    gigabytes = arguments.tensors * arguments.tensor_bytes / 1e9
    table = Table(title=f"{arguments.tensors:,} DTensors, {gigabytes:.2f} GB, on {arguments.ranks} gloo ranks")
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
    console.print(f"{stopwatch.num_calls} calls timed; {stopwatch.busy_starts} began on a busy machine")
    if arguments.json:
        facts = {
            "machine": machine.facts(arguments.dir),
            "ranks": arguments.ranks,
            "tensors": arguments.tensors,
            "tensor_bytes": arguments.tensor_bytes,
            "seconds": seconds,
            "num_calls": stopwatch.num_calls,
            "busy_starts": stopwatch.busy_starts,
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8, 16), default=4, help="gloo ranks (default 4)")
    parser.add_argument("--tensors", type=int, default=20_000, help="sharded tensors (default 20000)")
    parser.add_argument("--tensor-bytes", type=int, default=16384, help="of each, all shards (default 16384)")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.tensor_bytes % (4 * _ROWS):
        parser.error(f"--tensor-bytes must be a multiple of {4 * _ROWS}")
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=arguments.dir) as root:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        mp.spawn(run_rank, (root, arguments), arguments.ranks)


if __name__ == "__main__":
    main()
