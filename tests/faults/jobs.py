# SPDX-License-Identifier: Apache-2.0
"""Saves by several ranks, each a process of its own, of which some may be killed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from faults.fork_server import ForkServer, Outcome
from faults.saves import SaveRequest, save

__all__ = ["Job", "run_job"]


class Job:
    """One process for each rank of a save, running.

    Args:
        request: As rank 0 of one is asked; the others get theirs from it.
        function: Called with the rank's request, behind ``arguments``; of single ranks, ``function_of``.
        env: More environment of single ranks.

    Attributes:
        requests: By rank.
        pids: By rank.
    """

    def __init__(
        self,
        server: ForkServer,
        request: SaveRequest,
        num_ranks: int = 1,
        *,
        function: Callable[..., Any] = save,
        arguments: tuple[Any, ...] = (),
        function_of: Mapping[int, Callable[..., Any]] | None = None,
        env: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self._server = server
        # Not beside the checkpoint, whose disk may be lost.
        self._directory = tempfile.TemporaryDirectory(prefix="job-")
        store = str(Path(self._directory.name) / "store")
        self.requests = [replace(request, rank=rank, num_ranks=num_ranks, store=store) for rank in range(num_ranks)]
        self.pids = [
            server.start((function_of or {}).get(of.rank, function), *arguments, of, env=(env or {}).get(of.rank))
            for of in self.requests
        ]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(len(self.pids)))

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def go_on(self, rank: int) -> None:
        """After it has stopped."""
        os.kill(self.pids[rank], signal.SIGCONT)

    def stops(self, rank: int) -> bool:
        """Waits until the rank stops by itself; False if it ended instead."""
        return self._server.wait_stopped(self.pids[rank])

    def wait(self) -> list[Outcome]:
        """How each rank ended; fails if one had to be killed because it hung."""
        outcomes = [self._server.wait(pid) for pid in self.pids]
        self._directory.cleanup()
        for rank, outcome in enumerate(outcomes):
            assert not outcome.timed_out, f"rank {rank} hangs:\n{outcome.stacks}"
        return outcomes


def run_job(server: ForkServer, request: SaveRequest, num_ranks: int = 1) -> None:
    """A save that nothing disturbs, and that succeeds on all ranks."""
    for outcome in Job(server, request, num_ranks).wait():
        assert outcome.unwrap().errors == {}
