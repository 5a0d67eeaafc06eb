# SPDX-License-Identifier: Apache-2.0
"""Functions of processes that save or load again and again: until they are killed, or each time that the test asks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from support.fork_server import meet
from support.saves import SaveRequest, attempt, blank, generation_of, gloo
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter, Config
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.storage import local_folder

__all__ = [
    "LoadAsked",
    "Loaded",
    "SaveAsked",
    "Saved",
    "load_when_asked",
    "save_behind_readers",
    "save_until_killed",
    "save_when_asked",
]


@contextlib.contextmanager
def _told_by(address: bytes, request: SaveRequest) -> Iterator[Connection]:
    """Connects to the test and says that it may ask; in a process group if ``request`` has several ranks."""
    with contextlib.nullcontext() if request.num_ranks == 1 else gloo(request):
        test = meet(address)
        test.send(request.rank)
        # When a test is over, its end of the connection is closed.
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            yield test


def save_until_killed(address: bytes, request: SaveRequest) -> None:
    """Saves the generation of ``request`` and all after it, and reports each that is saved."""
    with _told_by(address, request) as test:
        test.recv()
        while True:
            assert attempt(request).errors == {}
            test.send(request.generation)
            request = dataclasses.replace(request, generation=request.generation + 1)


def save_behind_readers(address: bytes, request: SaveRequest) -> None:
    """Saves on and on, at the lowest priority: on a busy machine readers that begin again would never end."""
    os.nice(19)
    save_until_killed(address, request)


@dataclass(frozen=True)
class SaveAsked:
    """One save of a process that makes many.

    Attributes:
        patience_s: How long it waits for another save to end before it fails with a busy error.
    """

    generation: int
    take_over: bool = False
    patience_s: float = 0.0


@dataclass(frozen=True)
class Saved:
    """The result of a save on one rank.

    Attributes:
        errors: By rank.
        held: Two times of the system's clock between which the coordinator surely held the path: after the save began,
            and before its commit. None on other ranks, and if the save did not get that far.
    """

    errors: dict[int, BaseException]
    held: tuple[float, float] | None


class _TimedWriter(BcpWriter):
    """Records when it has the right to commit."""

    began = ended = 0.0

    def prepare_global_plan(self, plans: Any) -> Any:
        plans = super().prepare_global_plan(plans)
        self.began = time.monotonic()
        return plans

    def finish(self, metadata: Any, results: Any) -> None:
        self.ended = time.monotonic()
        super().finish(metadata, results)


def save_when_asked(address: bytes, request: SaveRequest) -> None:
    """Saves at the path of ``request`` each time that it gets a ``SaveAsked``, and answers with a ``Saved``."""
    with _told_by(address, request) as test:
        while True:
            asked: SaveAsked = test.recv()
            local_folder._BUSY_GRACE_S = asked.patience_s
            config = dataclasses.replace(request.config, take_over=asked.take_over)
            writer = _TimedWriter(request.path, config=config)
            errors = attempt(dataclasses.replace(request, generation=asked.generation), writer=writer).errors
            test.send(Saved(errors, (writer.began, writer.ended) if writer.ended else None))


@dataclass(frozen=True)
class LoadAsked:
    """One load: by "dcp.load", "register" or "load_state_dict"."""

    how: str


@dataclass(frozen=True)
class Loaded:
    """The result of a load on one rank: the generation of everything that was loaded, or errors by rank."""

    generation: int | None
    errors: dict[int, BaseException]


def load_when_asked(address: bytes, request: SaveRequest) -> None:
    """Loads what one rank saved at the path of ``request``, with all ranks, each time that it gets a ``LoadAsked``."""
    with _told_by(address, request) as test:
        while True:
            asked: LoadAsked = test.recv()
            got = blank()
            try:
                _load(asked.how, request.path, got, request.config)
                test.send(Loaded(generation_of(got), {}))
            except CheckpointException as error:
                test.send(Loaded(None, {rank: wrapped[0] for rank, wrapped in error.failures.items()}))
            except CheckpointError as error:
                test.send(Loaded(None, {request.rank: error}))


def _load(how: str, path: Path, target: dict[str, Any], config: Config) -> None:
    if how == "load_state_dict":
        bytecheckpoint.load_state_dict(path, target, config=config)
    elif how == "register":
        with bytecheckpoint.registered(config=config):
            dcp.load(target, checkpoint_id=path)
    else:
        dcp.load(target, storage_reader=BcpReader(path, config=config))
