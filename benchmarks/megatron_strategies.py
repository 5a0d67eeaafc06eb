#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times saves and loads by Megatron-Core's ``dist_checkpointing``, through its own strategies and through ours.

Each of the gloo ranks has its half of every tensor. Saves are synced, loads find no page in the cache; the strategies
take turns. A load is once on the same ranks, and once by the other dim of each tensor. Needs an environment with
megatron-core and our package, such as `make ground` leaves in build/megatron/0.16.1:

    build/megatron/0.16.1/bin/python benchmarks/megatron_strategies.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from bytecheckpoint.integrations.megatron import BcpLoadStrategy, BcpSaveStrategy

SIZE = 2400  # of a square bf16 matrix: 11 MiB
BYTES = SIZE * SIZE * 2


def state(num_tensors: int, dim: int, value: float | None) -> dict[str, ShardedTensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = [SIZE, SIZE]
    shape[dim] //= size
    made = {}
    for number in range(num_tensors):
        data = torch.full(shape, value or 0.0, dtype=torch.bfloat16)
        made[f"layers.{number}"] = ShardedTensor.from_rank_offsets(f"layers.{number}", data, (dim, rank, size))
    return made


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def forget_pages(path: Path) -> None:
    for file in path.glob("*.distcp"):
        opened = os.open(file, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def time_all(rank: int, root: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=arguments.ranks)
    count = int(arguments.gigabytes * 1e9) // BYTES
    saved = state(count, 0, 1.5)
    strategies = {
        "megatron": (lambda: TorchDistSaveShardedStrategy("torch_dist", 1), TorchDistLoadShardedStrategy),
        "bytecheckpoint": (BcpSaveStrategy, BcpLoadStrategy),
    }
    seconds: dict[str, list[float]] = {}
    for repetition in range(arguments.repetitions + 1):
        for name, (saves, loads) in strategies.items() if repetition % 2 else reversed(strategies.items()):
            path = Path(root, name)
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
            took = {"save": timed(lambda s=saves, p=path: dist_checkpointing.save(saved, str(p), s()))}  # type: ignore[misc]
            for dim, what in enumerate(("load", "load, resharded")):
                wanted = state(count, dim, None)
                forget_pages(path)
                took[what] = timed(
                    lambda w=wanted, p=path, s=loads: dist_checkpointing.load(w, str(p), s())  # type: ignore[misc]
                )
                assert all(bool((one.data == 1.5).all()) for one in wanted.values())
            for what, figure in took.items() if repetition else ():
                seconds.setdefault(f"{what}: {name}", []).append(figure)
    if rank == 0:
        report(seconds, count, arguments)
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], count: int, arguments: argparse.Namespace) -> None:
    version = importlib.metadata.version("megatron-core")
    print(
        f"megatron-core {version}, torch {torch.__version__}: {count} bf16 matrices of 11 MiB, {arguments.ranks} ranks"
    )
    for name in sorted(seconds):
        found = seconds[name]
        print(f"{name:32} {statistics.median(found):7.2f} s  ({min(found):.2f} - {max(found):.2f})")
    if arguments.json:
        settings = {"megatron-core": version, "tensors": count, "ranks": arguments.ranks}
        Path(arguments.json).write_text(json.dumps({"settings": settings, "seconds": seconds}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where to write")
    parser.add_argument("--json", default=None, help="keep all figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        mp.spawn(time_all, (root, arguments), arguments.ranks)


if __name__ == "__main__":
    main()
