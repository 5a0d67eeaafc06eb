# SPDX-License-Identifier: Apache-2.0
"""Makes states of numbered generations, saves them in processes of their own, and checks what is on disk afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpReader, BcpWriter, Config
from bytecheckpoint.errors import CheckpointNotFoundError
from support.fork_server import meet, wait_for

__all__ = [
    "Attempt",
    "SaveRequest",
    "are_equal",
    "assert_only_own_files",
    "attempt",
    "blank",
    "data_files",
    "generation_of",
    "generation_on_disk",
    "gloo",
    "load",
    "load_then_save",
    "load_twice",
    "names_in",
    "save",
    "save_when_told",
    "state",
]

# The smallest ring, so that a save of a few kilobytes does not wait for the kernel to make pages.
CONFIG = Config(ring_bytes=16 << 20)
# The main thread makes all calls but the writes of data, because strace counts the calls of each thread separately.
IN_ONE_THREAD = dataclasses.replace(CONFIG, io_timeout_s=0.0)
BOTH_RANKS = (0, 1)
NUM_ROWS = 120


def state(generation: int, ranks: tuple[int, ...] = (0,), num_rows: int = NUM_ROWS) -> dict[str, Any]:
    """Returns generation ``generation`` on ``ranks``. No value is equal to that of another generation.

    With few rows the tensors stay below the size from which torch uses several threads, which wait for each other on a
    busy machine. A row of the largest tensor is 1600 bytes.
    """
    values: dict[str, Any] = {
        "generation": generation,
        "shared": torch.arange(3000, dtype=torch.float32) + 10_000 * generation,
    }
    for rank in ranks:
        values[f"of_rank_{rank}"] = (torch.arange(200 * num_rows) * 100 + 2 * generation + rank).reshape(num_rows, 200)
    return values


@dataclass(frozen=True)
class SaveRequest:
    """One save, as one rank is asked to make it.

    Attributes:
        path: Directory of the checkpoint.
        store: URL at which several ranks meet, or file through which they do; unused for one rank.
        writer: More arguments of the BcpWriter.
        num_rows: Rows of the largest tensor.
        use_collectives: Argument of ``dcp.save``.
    """

    path: Path
    generation: int
    rank: int = 0
    num_ranks: int = 1
    store: str = ""
    config: Config = CONFIG
    writer: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_rows: int = NUM_ROWS
    use_collectives: bool = True


@dataclass(frozen=True)
class Attempt:
    """The result of a save: errors by rank, as DCP reports them, and the package's warnings."""

    errors: dict[int, BaseException]
    warnings: tuple[str, ...]


def save(request: SaveRequest) -> Attempt:
    """Makes one save, in a process group of its own if there are several ranks."""
    if request.num_ranks == 1:
        return attempt(request)
    with gloo(request):
        return attempt(request)


def save_when_told(address: bytes, request: SaveRequest) -> Attempt:
    """Makes one save, once the test says that it watches."""
    with contextlib.nullcontext() if request.num_ranks == 1 else gloo(request):
        test = meet(address)
        test.send("ready")
        wait_for(test)
        return attempt(request)


def save_then_look(request: SaveRequest) -> list[str]:
    """Makes a save that fails because a peer dies. Returns the names of the tmps that are there afterwards."""
    with gloo(request):
        try:
            attempt(request)
        except RuntimeError:
            pass  # gloo's: the connection is closed
        else:
            raise AssertionError("the peer lives")
        return [name for name in names_in(request.path) if name.endswith(".tmp")]


def save_twice(address: bytes, first: SaveRequest, then: SaveRequest) -> Attempt:
    """Saves, once the test says that its fault is in place, and sends the result. Saves again and returns that result.

    In between the test looks at the directory and ends the fault.
    """
    with contextlib.nullcontext() if first.num_ranks == 1 else gloo(first):
        test = meet(address)
        test.send("ready")
        wait_for(test)
        test.send(attempt(first))
        wait_for(test)
        return attempt(then)


def attempt(request: SaveRequest, planner: dcp.SavePlanner | None = None, writer: BcpWriter | None = None) -> Attempt:
    """Makes one save in the current process group; ``writer`` replaces the one that ``request`` describes."""
    writer = writer or BcpWriter(request.path, config=request.config, **request.writer)
    errors: dict[int, BaseException] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            dcp.save(
                state(request.generation, (request.rank,), request.num_rows),
                storage_writer=writer,
                planner=planner,
                use_collectives=request.use_collectives,
            )
        except CheckpointException as error:
            errors = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
    own = tuple(str(w.message) for w in caught if str(w.message).startswith("bytecheckpoint:"))
    return Attempt(errors, own)


@contextlib.contextmanager
def gloo(request: SaveRequest) -> Iterator[None]:
    """Makes a default process group for the ranks of ``request``. It stays if the save raises, as peers may be dead."""
    r = request
    # The timeout is shorter than a test waits, because gloo does not always notice at once that a peer was killed.
    timeout = timedelta(seconds=20)
    store = r.store if "://" in r.store else f"file://{r.store}"
    dist.init_process_group("gloo", store, timeout, rank=r.rank, world_size=r.num_ranks)
    yield
    dist.destroy_process_group()


def blank(ranks: tuple[int, ...] = (0,), num_rows: int = NUM_ROWS) -> dict[str, Any]:
    """Returns a state with all names of a generation, and with values that no generation has."""
    return {
        name: torch.full_like(value, -1) if isinstance(value, torch.Tensor) else -1
        for name, value in state(0, ranks, num_rows).items()
    }


def load(
    reader: dcp.StorageReader, ranks: tuple[int, ...] = (0,), num_rows: int = NUM_ROWS, *, no_dist: bool = True
) -> dict[str, Any]:
    """Returns all that a generation has names for, loaded by this process alone, or by its process group."""
    target = blank(ranks, num_rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=reader, no_dist=no_dist)
    return target


def load_then_save(saved_by: tuple[int, ...], request: SaveRequest) -> tuple[int, Attempt]:
    """Loads what other ranks have saved, and saves over it. Returns the loaded generation and the save's result."""
    with contextlib.nullcontext() if request.num_ranks == 1 else gloo(request):
        got = load(BcpReader(request.path, config=request.config), saved_by, no_dist=request.num_ranks == 1)
        return generation_of(got, saved_by), attempt(request)


def are_equal(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    same = (torch.equal(got[k], v) if isinstance(v, torch.Tensor) else got[k] == v for k, v in wanted.items())
    return got.keys() == wanted.keys() and all(same)


def generation_of(got: dict[str, Any], ranks: tuple[int, ...] = (0,), num_rows: int = NUM_ROWS) -> int:
    """Returns the generation of all that was loaded; fails if it is a mix, or holds other values."""
    generation: int = got["generation"]
    assert are_equal(got, state(generation, ranks, num_rows)), f"a mix, or wrong values, of generation {generation}"
    return generation


def load_twice(address: bytes, path: Path) -> dict[int, BaseException]:
    """Loads twice, when the test says so. Sends the errors of the first load, returns those of the second, by rank."""
    test = meet(address)
    test.send("ready")
    errors: list[dict[int, BaseException]] = []
    for _ in range(2):
        wait_for(test)
        try:
            generation_of(load(BcpReader(path, config=CONFIG)))
            errors.append({})
        except CheckpointException as error:
            errors.append({rank: wrapped[0] for rank, wrapped in error.failures.items()})
        if len(errors) == 1:
            test.send(errors[0])
    return errors[1]


def generation_on_disk(path: Path, ranks: tuple[int, ...] = (0,), num_rows: int = NUM_ROWS) -> int | None:
    """Returns the generation that our reader and stock DCP's find, or None; fails on a mix of two, or on damage."""
    # Where names are seen late, some file systems show them first in a listing, and others when asked for them.
    if ".metadata" not in names_in(path) and not (path / ".metadata").exists():
        with pytest.raises(CheckpointException) as caught:
            load(BcpReader(path, config=CONFIG), ranks, num_rows)
        assert [type(wrapped[0]) for wrapped in caught.value.failures.values()] == [CheckpointNotFoundError]
        return None
    generation = generation_of(load(BcpReader(path, config=CONFIG), ranks, num_rows), ranks, num_rows)
    stock = generation_of(load(dcp.FileSystemReader(path), ranks, num_rows), ranks, num_rows)
    assert stock == generation, f"{path}: stock reads generation {stock}, we read {generation}"
    return generation


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name != ".bcp") if path.exists() else []


def data_files(path: Path) -> list[str]:
    """Returns the names of the data files that the commit mark refers to, as stock DCP reads it."""
    storage = dcp.FileSystemReader(path).read_metadata().storage_data
    return sorted({info.relative_path for info in storage.values()})


def assert_only_own_files(path: Path) -> None:
    """Fails unless the directory holds just the commit mark and the files that it names."""
    assert names_in(path) == sorted([".metadata", *data_files(path)])
