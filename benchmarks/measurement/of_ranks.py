# SPDX-License-Identifier: Apache-2.0
"""Times saves and loads of DTensors by several ranks: our classes, stock DCP, and a registered process, in turn."""

from __future__ import annotations

import random
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint
from measurement.conditions import Stopwatch, drop_page_cache, sync_directories
from measurement.stock_dcp import stock_dcp

__all__ = ["BASELINE", "ROWS", "Measured", "measure", "measure_on_own_machine"]

BASELINE, PLAIN, REGISTERED = "DCP, 2 threads", "bytecheckpoint, plain call", "bytecheckpoint, registered"
ROWS = 64  # rows of each tensor, divided among the ranks

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
    shape = (ROWS // dist.get_world_size(), tensor_bytes // 4 // ROWS)
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
    # On every machine. Stock DCP has looked for the metadata before the save, and on NFS sees none before a listing.
    drop_page_cache(path)
    dist.barrier()
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


@dataclass(frozen=True)
class Measured:
    """What rank 0 has measured, which waits for all ranks.

    Attributes:
        seconds: Of all counted calls, by contender and action.
        num_calls: Calls that were timed.
        busy_starts: Those of them that began on a busy machine.
    """

    seconds: Seconds
    num_calls: int
    busy_starts: int


def measure(
    folder: Path, num_tensors: int, tensor_bytes: int, repetitions: int, warm_gib: float, idle_limit_s: float
) -> Measured:
    """Returns what rank 0 has measured; the first round is not counted. For all ranks of the default group.

    Args:
        folder: Of all ranks.
        warm_gib: See ``Stopwatch``.
        idle_limit_s: See ``Stopwatch``.
    """
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    state = make_state(num_tensors, tensor_bytes)
    seconds: Seconds = {name: {"save": [], "load": []} for name in CONTENDERS}
    stopwatch = Stopwatch(warm_gib, idle_limit_s) if dist.get_rank() == 0 else None
    with stopwatch or nullcontext():
        for repetition in range(repetitions + 1):
            for name in random.Random(repetition).sample(list(CONTENDERS), len(CONTENDERS)):
                # A name of its own: on NFS, other machines still see for a while that an old one is gone.
                path = folder / f"checkpoint-{repetition}-{[*CONTENDERS].index(name)}"
                figures = one_round(name, state, path, stopwatch)
                for action, s in zip(("save", "load"), figures, strict=True):
                    if repetition:
                        seconds[name][action].append(s)
    return Measured(seconds, stopwatch.num_calls if stopwatch else 0, stopwatch.busy_starts if stopwatch else 0)


def measure_on_own_machine(rank: int, meeting: str, *arguments: Any) -> Measured:
    """Calls ``measure`` as one of two ranks, which meet at the URL ``meeting``."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    try:
        return measure(*arguments)
    finally:
        dist.destroy_process_group()
