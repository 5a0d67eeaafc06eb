# SPDX-License-Identifier: Apache-2.0
"""Ranks that end as processes do, with everything that the interpreter does at its end.

They are forked from a process that has imported torch, and fall off the end of its script.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

__all__ = ["Ended", "EndingRanks"]

TESTS = Path(__file__).parents[1]
LIMIT_S = 40.0
SCRIPT = "from distributed.ending import serve; work = serve(); work()"


@dataclass(frozen=True)
class Ended:
    """How one rank ended.

    Attributes:
        code: Of its exit, or minus the signal that killed it; None if it had to be killed because it hung.
        said: On stdout and stderr; the stacks of all threads if it hung.
    """

    code: int | None
    said: str


class EndingRanks:
    """The process from which ranks are forked."""

    def __init__(self) -> None:
        self._requests, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT],
            pass_fds=[theirs.fileno()],
            env={**environment, "BCP_TEST_PIPE": str(theirs.fileno()), "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Ended]:
        """``function(rank, *args)`` in a process for each rank, until all have ended."""
        self._requests.send_bytes(pickle.dumps((num_ranks, function, args)))
        assert self._requests.poll(2 * LIMIT_S), "the ranks and what forked them hang"
        ended: list[Ended] = self._requests.recv()
        return ended

    def close(self) -> None:
        self._requests.close()
        self._process.wait(LIMIT_S)


def serve() -> Callable[[], Any]:
    """What the process that calls it is to do: a rank its work, the one that forks them nothing more."""
    import torch
    import torch._dynamo  # the first operation on a DTensor imports it
    import torch.distributed.checkpoint.state_dict

    from distributed import test_group_life  # noqa: F401  # all that its saves need

    torch.set_num_threads(1)
    requests = Connection(int(os.environ["BCP_TEST_PIPE"]))
    while True:
        try:
            request = requests.recv_bytes()
        except EOFError:
            return lambda: None
        num_ranks, function, args = pickle.loads(request)
        ranks = []
        for rank in range(num_ranks):
            said = os.memfd_create("said")
            pid = os.fork()
            if not pid:
                requests.close()
                return lambda: _work(said, function, rank, args)
            ranks.append((os.pidfd_open(pid), pid, said))
        requests.send([_wait(*of_rank) for of_rank in ranks])


def _work(said: int, function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.enable()
    function(rank, *args)


def _wait(ended: int, pid: int, said: int) -> Ended:
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    hangs = not poll.poll(LIMIT_S * 1000)
    if hangs:
        os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks
    _, status = os.waitpid(pid, 0)
    os.close(ended)
    os.lseek(said, 0, os.SEEK_SET)
    with os.fdopen(said) as file:
        return Ended(None if hangs else os.waitstatus_to_exitcode(status), file.read())
