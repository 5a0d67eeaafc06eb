# SPDX-License-Identifier: Apache-2.0
"""Runs saves of several ranks, each in a process of its own, and kills some of them."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.fork_server import ForkServer, Outcome
from support.saves import SaveRequest, save

__all__ = ["Job", "run_job"]


class Job:
    """The running processes of a save, one for each rank.

    Args:
        server: What all ranks run on, or what each of them does.
        request: The request as for a single rank; each rank gets its own copy of it.
        function: Called with ``arguments`` and then the rank's request. ``function_of`` replaces it for single ranks.
        env: More environment variables, for single ranks.

    Attributes:
        requests: By rank.
        pids: By rank.
    """

    def __init__(
        self,
        server: ForkServer | Sequence[ForkServer],
        request: SaveRequest,
        num_ranks: int = 1,
        *,
        function: Callable[..., Any] = save,
        arguments: tuple[Any, ...] = (),
        function_of: Mapping[int, Callable[..., Any]] | None = None,
        env: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self._servers = [server] * num_ranks if isinstance(server, ForkServer) else server
        # The store is not beside the checkpoint, because the test may cut the power of that disk.
        self._directory = tempfile.TemporaryDirectory(prefix="job-")
        store = request.store or str(Path(self._directory.name) / "store")
        self.requests = [replace(request, rank=rank, num_ranks=num_ranks, store=store) for rank in range(num_ranks)]
        self.pids = [
            each.start((function_of or {}).get(of.rank, function), *arguments, of, env=(env or {}).get(of.rank))
            for each, of in zip(self._servers, self.requests, strict=True)
        ]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(len(self.pids)))

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def go_on(self, rank: int) -> None:
        """Lets a stopped rank go on."""
        os.kill(self.pids[rank], signal.SIGCONT)

    def stops(self, rank: int) -> bool:
        """Waits until the rank stops by itself or ends. Returns whether it stopped."""
        return self._servers[rank].wait_stopped(self.pids[rank])

    def wait(self) -> list[Outcome]:
        """Waits for all ranks and returns how each ended; fails if one hung."""
        outcomes = [server.wait(pid) for server, pid in zip(self._servers, self.pids, strict=True)]
        self._directory.cleanup()
        for rank, outcome in enumerate(outcomes):
            assert not outcome.timed_out, f"rank {rank} hangs:\n{outcome.stacks}"
        return outcomes


def run_job(server: ForkServer, request: SaveRequest, num_ranks: int = 1) -> None:
    """Makes an undisturbed save, which must succeed on all ranks."""
    for outcome in Job(server, request, num_ranks).wait():
        assert outcome.unwrap().errors == {}
