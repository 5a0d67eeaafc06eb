# SPDX-License-Identifier: Apache-2.0
"""Functions of processes whose storage stops answering: their save or load fails in time; they try again, or exit."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.fork_server import LIMIT_S, meet
from support.saves import Attempt, SaveRequest, attempt, generation_on_disk, gloo, save_twice, state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItemType

from bytecheckpoint import BcpReader
from faults.paused_saves import PausingPlanner

__all__ = ["load_twice_pausing", "save_then_exit", "save_twice_and_look"]


def save_twice_and_look(address: bytes, first: SaveRequest, then: SaveRequest) -> tuple[Attempt, list[str]]:
    """Does what ``save_twice`` does. Also returns which files below the path are still open in the end."""
    second = save_twice(address, first, then)
    end = time.monotonic() + LIMIT_S / 2
    # Threads that nobody waits for close these files when they can.
    while (left := _open_below(then.path)) and time.monotonic() < end:
        threading.Event().wait(0.01)
    return second, left


def _open_below(path: Path) -> list[str]:
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(entry.readlink()))
    return [name for name in names if name.startswith(f"{path}/")]


class PausingLoadPlanner(DefaultLoadPlanner):
    """Calls ``pause`` once: before the tensors are read, or after them but before the objects."""

    def __init__(self, pause: Callable[[], None], at: str) -> None:
        super().__init__()
        self._pause: Callable[[], None] | None = pause
        self._at = at

    def _pass(self, hook: str) -> None:
        if self._pause is not None and hook == self._at:
            pause, self._pause = self._pause, None
            pause()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self._pass("before tensors")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._pass("behind tensors")
        super().commit_tensor(read_item, tensor)


def load_twice_pausing(address: bytes, request: SaveRequest, ranks: tuple[int, ...], at: str) -> int | None:
    """Loads, with a pause at ``at`` on the last rank, sends the errors by rank, and loads again when the test says so.

    Returns the generation that the second load found.
    """
    with contextlib.nullcontext() if request.num_ranks == 1 else gloo(request):
        test = meet(address)

        def pause() -> None:
            test.send("paused")
            test.recv()

        pauses = request.rank == request.num_ranks - 1
        if pauses and at == "before all":
            pause()
        if request.num_ranks > 1:
            dist.barrier()
        errors: dict[int, BaseException] = {}
        target: dict[str, Any] = {
            name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1
            for name, value in state(0, ranks, request.num_rows).items()
        }
        planner = PausingLoadPlanner(pause, at) if pauses else DefaultLoadPlanner()
        try:
            dcp.load(target, storage_reader=BcpReader(request.path, config=request.config), planner=planner)
        except CheckpointException as error:
            errors = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
        test.send(errors)
        test.recv()
        return generation_on_disk(request.path, ranks, request.num_rows)


def save_then_exit(address: bytes, request: SaveRequest) -> int:
    """Forks a child that saves, pauses when its file is there, and then exits as programs do. Returns its status."""
    child = os.fork()
    if child == 0:
        test = meet(address)

        def pause() -> None:
            test.send("paused")
            test.recv()

        test.send(attempt(request, PausingPlanner(pause, WriteItemType.BYTE_IO)))
        sys.exit(7)
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    if not ended.poll(LIMIT_S * 800):
        return -1  # it may be that no signal can end it
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
