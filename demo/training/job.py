# SPDX-License-Identifier: Apache-2.0
"""The work of the ranks in the demo's two jobs. Rank 0 reports to the parent process through a queue of events."""

from __future__ import annotations

import faulthandler
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from bytecheckpoint import BcpReader, BcpWriter
from training.comparison import blank_copy, compare
from training.model import ModelConfig
from training.trainer import Trainer

OURS = "bytecheckpoint"
STOCK = "stock DCP"


@dataclass(frozen=True)
class JobOptions:
    """Options of both jobs. Ranks train ``steps`` steps before the save, and as many again after it."""

    directory: Path
    model: ModelConfig
    num_sequences: int
    steps: int
    repetitions: int
    seed: int
    time_limit_s: float

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    @property
    def reference(self) -> Path:
        return self.directory / "reference.pt"


@dataclass(frozen=True)
class PhaseBegun:
    title: str
    num_ticks: int


@dataclass(frozen=True)
class Tick:
    """One of the phase's ``num_ticks`` parts is done."""


@dataclass(frozen=True)
class LossMeasured:
    step: int
    loss: float


@dataclass(frozen=True)
class Timed:
    """One save or load took ``seconds``; ``disk_bytes`` is the size of the checkpoint directory."""

    engine: str
    action: str
    seconds: float
    disk_bytes: int


@dataclass(frozen=True)
class Compared:
    what: str
    equal: bool
    details: str


Event = PhaseBegun | Tick | LossMeasured | Timed | Compared
Job = Callable[[JobOptions, Callable[[Event], None]], None]


def run_rank(rank: int, num_ranks: int, job: Job, options: JobOptions, events: Queue[Event]) -> None:
    """Entry point of a rank's process: joins the group, runs the job, leaves the group. Ends the process."""
    # This process's own time limit: it ends the rank and shows where it hung, even if the parent is gone.
    faulthandler.dump_traceback_later(options.time_limit_s, exit=True)

    def tell(event: Event) -> None:
        if rank == 0:
            events.put(event)

    try:
        with process_group(rank, num_ranks, options.directory / f"rendezvous_{job.__name__}"):
            job(options, tell)
    except CheckpointException as error:
        # It is not an Exception, so multiprocessing would lose its message.
        raise RuntimeError(f"rank {rank} has failed to save or to load") from error
    # gloo's threads outlive the group. If one of them drops a tensor while the interpreter shuts down, it aborts the
    # process. So the process ends without shutting the interpreter down.
    events.close()
    events.join_thread()
    os._exit(0)


@contextmanager
def process_group(rank: int, num_ranks: int, store: Path) -> Iterator[None]:
    """Joins a gloo group that meets through a file, so it needs no free port."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # DCP warns about plain tensors among DTensors and about an existing directory, but both are intended.
    warnings.filterwarnings("ignore", module="torch.distributed")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120)
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


def pretrain(options: JobOptions, tell: Callable[[Event], None]) -> None:
    """Trains, saves, measures, and trains on without interruption, for comparison with the resumed job."""
    trainer = Trainer(options.model, options.num_sequences, data_seed=options.seed, init_seed=options.seed)
    tell(PhaseBegun("train", options.steps))
    train(trainer, options.steps, tell)

    tell(PhaseBegun("save", 2))
    write_reference(trainer.full_state(), options.reference)
    tell(Tick())
    state = trainer.state()
    seconds = timed(lambda: dcp.save(state, storage_writer=BcpWriter(options.checkpoint)))
    tell(Timed(OURS, "first save", seconds, directory_bytes(options.checkpoint)))
    tell(Tick())

    tell(PhaseBegun("measure saving and loading", 4 * (options.repetitions + 1)))
    measure(state, options, tell)

    tell(PhaseBegun("train on, uninterrupted", options.steps))
    train(trainer, options.steps, tell)


def resume(options: JobOptions, tell: Callable[[Event], None]) -> None:
    """Loads on this job's ranks what the ranks of ``pretrain`` saved, compares all of it, and trains on."""
    # Initial parameters and the seed differ, so values that are equal afterwards came from the checkpoint.
    trainer = Trainer(options.model, options.num_sequences, data_seed=0, init_seed=options.seed + 1)
    tell(PhaseBegun("load and compare", 2))
    state = trainer.state()
    seconds = timed(lambda: dcp.load(state, storage_reader=BcpReader(options.checkpoint)))
    tell(Timed(OURS, "resharding load", seconds, directory_bytes(options.checkpoint)))
    trainer.load_state(state)
    tell(Tick())

    full_state = trainer.full_state()
    if dist.get_rank() == 0:
        reference = torch.load(options.reference, weights_only=True, mmap=True)
        comparison = compare(reference, full_state)
        tell(Compared(f"loaded on {dist.get_world_size()} ranks", comparison.equal, str(comparison)))
    tell(Tick())

    tell(PhaseBegun("train on, resumed", options.steps))
    train(trainer, options.steps, tell)


def train(trainer: Trainer, num_steps: int, tell: Callable[[Event], None]) -> None:
    for _ in range(num_steps):
        step, loss = trainer.train_step()
        tell(LossMeasured(step, loss))
        tell(Tick())


def write_reference(full_state: dict[str, Any], path: Path) -> None:
    """Writes the gathered state on rank 0, without DCP."""
    if dist.get_rank() == 0:
        with path.open("wb") as file:
            torch.save(full_state, file)
            file.flush()
            # Otherwise the kernel would write it back during the measurement.
            os.fsync(file.fileno())
    dist.barrier()


def measure(state: dict[str, Any], options: JobOptions, tell: Callable[[Event], None]) -> None:
    """Saves and loads ``state`` by both engines in turn. The first round is not reported.

    Each save goes to a fresh directory and is durable when it ends (stock syncs its files by default). Each load finds
    the files dropped from the page cache, and loads into tensors of NaN that are then compared.
    """
    engines = [(STOCK, dcp.FileSystemWriter, dcp.FileSystemReader), (OURS, BcpWriter, BcpReader)]
    for repetition in range(options.repetitions + 1):
        for engine, writer, reader in engines:
            path = options.directory / f"measured_{repetition}_{engine.split()[0]}"
            timings = measure_engine(engine, path, state, writer, reader)
            for timing in timings:
                tell(Tick())
                if repetition > 0:
                    tell(timing)
        # Neither engine should always get the disk in the state in which the other left it.
        engines.reverse()


def measure_engine(
    engine: str,
    path: Path,
    state: dict[str, Any],
    writer: Callable[[Path], StorageWriter],
    reader: Callable[[Path], StorageReader],
) -> tuple[Timed, Timed]:
    """Saves ``state`` once to ``path``, loads it once into other tensors, and removes it."""
    save_seconds = timed(lambda: dcp.save(state, storage_writer=writer(path)))
    disk_bytes = directory_bytes(path)
    destination = blank_copy(state)
    if dist.get_rank() == 0:
        drop_page_cache(path)
    load_seconds = timed(lambda: dcp.load(destination, storage_reader=reader(path)))
    comparison = compare(local_shards(state), local_shards(destination))
    if not comparison.equal:
        raise RuntimeError(f"rank {dist.get_rank()}: loaded by {engine}: {comparison}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return Timed(engine, "save", save_seconds, disk_bytes), Timed(engine, "load", load_seconds, disk_bytes)


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds from when the last rank is ready until the last rank has finished."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def local_shards(node: Any) -> Any:
    """Copies a tree, replacing every DTensor by this rank's part."""
    if isinstance(node, dict):
        return {key: local_shards(value) for key, value in node.items()}
    return node.to_local() if isinstance(node, DTensor) else node


def directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def drop_page_cache(path: Path) -> None:
    """Makes the next load read from disk. The files must have been synced, because dirty pages stay in the cache."""
    for file in filter(Path.is_file, path.iterdir()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
