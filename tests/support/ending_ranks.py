# SPDX-License-Identifier: Apache-2.0
"""Runs ranks and scripts in processes that end as usual, with everything that the interpreter does at its end.

They are forked from a process that has already imported torch, because that takes seconds. Each one then returns to the
end of that process's script.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from support.preloaded import PRELOADED

__all__ = ["Ended", "EndingRanks", "run_script"]

TESTS = Path(__file__).parents[1]
LIMIT_S = 40.0
# What triton, which torch imports, prints at the end of a process in which ``gc.freeze`` was called.
_OF_FROZEN_MODULES = re.compile(r"^(nanobind: | - leaked | - \.\.\. skipped |See https://nanobind).*\n?", re.MULTILINE)
SCRIPT = "from support.ending_ranks import serve; work = serve(); work()"


@dataclass(frozen=True)
class Ended:
    """How one rank ended.

    Attributes:
        code: Its exit code, or minus the signal that killed it; None if it hung and was killed for that.
        said: What it wrote to stdout and stderr; with the stacks of all threads if it hung.
    """

    code: int | None
    said: str


@dataclass(frozen=True)
class _Rank:
    """One rank, as the process that forked it knows it. ``ended`` and ``said`` are file descriptors."""

    ended: int
    pid: int
    said: int

    def take_said(self) -> str:
        os.close(self.ended)
        os.lseek(self.said, 0, os.SEEK_SET)
        with os.fdopen(self.said) as file:
            return _OF_FROZEN_MODULES.sub("", file.read())


class EndingRanks:
    """The process from which ranks are forked.

    Args:
        modules: What it imports besides ``PRELOADED``.
    """

    def __init__(self, *modules: str) -> None:
        self._requests, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT],
            pass_fds=[theirs.fileno()],
            env={
                **environment,
                "BCP_TEST_PIPE": str(theirs.fileno()),
                "BCP_TEST_MODULES": " ".join(modules),
                "OPENBLAS_NUM_THREADS": "1",
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
            },
        )
        theirs.close()

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        grace_s: float | None = None,
        frees_modules: bool = False,
        limit_s: float = LIMIT_S,
    ) -> list[Ended]:
        """Runs ``function(rank, *args)`` in a process for each rank, and returns how each of them ended.

        Args:
            grace_s: If a rank fails, the others are killed after this time, as a launcher does. None: they are not.
            frees_modules: Whether the last garbage collection also frees what torch's modules hold, as at the end of
                any process. It takes most of a second.
            limit_s: Ranks that have not ended after this time count as hung, and are killed.
        """
        self._requests.send_bytes(pickle.dumps((num_ranks, grace_s, limit_s, frees_modules, function, args)))
        assert self._requests.poll(limit_s + LIMIT_S), "the ranks and what forked them hang"
        ended: list[Ended] = self._requests.recv()
        return ended

    def close(self) -> None:
        self._requests.close()
        self._process.wait(LIMIT_S)


def run_script(rank: int, script: str, *arguments: object) -> None:
    """Runs a script as ``python -c script arguments`` does, in a process that has already imported torch."""
    sys.argv[1:] = map(str, arguments)
    exec(compile(script, "<string>", "exec"), vars(sys.modules["__main__"]))


def serve() -> Callable[[], Any]:
    """Forks ranks on request. In each rank it returns the function that the rank is to run."""
    for module in (*PRELOADED, "bytecheckpoint.registration", *os.environ["BCP_TEST_MODULES"].split()):
        import_module(module)
    sys.modules["torch"].set_num_threads(1)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads must not fork"
    gc.freeze()  # else the last garbage collection of a rank would touch all modules, and so copy their pages
    requests = Connection(int(os.environ["BCP_TEST_PIPE"]))
    while True:
        try:
            request = requests.recv_bytes()
        except EOFError:
            os._exit(0)
        num_ranks, grace_s, limit_s, frees_modules, function, args = pickle.loads(request)
        ranks = []
        for rank in range(num_ranks):
            said = os.memfd_create("said")
            pid = os.fork()
            if not pid:
                requests.close()
                if frees_modules:
                    gc.unfreeze()
                return lambda: _work(said, function, rank, args)
            ranks.append(_Rank(os.pidfd_open(pid), pid, said))
        requests.send(_wait(ranks, grace_s, limit_s))


def _work(said: int, function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.enable()
    function(rank, *args)


def _wait(ranks: list[_Rank], grace_s: float | None, limit_s: float) -> list[Ended]:
    end, hangs, codes = time.monotonic() + limit_s, set[int](), dict[int, int]()
    poll = select.poll()
    for rank in ranks:
        poll.register(rank.ended, select.POLLIN)
    while len(codes) < len(ranks):
        for fd, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000):
            poll.unregister(fd)
            pid = next(rank.pid for rank in ranks if rank.ended == fd)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if codes[pid] != 0 and grace_s is not None:
                end = min(end, time.monotonic() + grace_s)
        if time.monotonic() >= end:
            left = [rank.pid for rank in ranks if rank.pid not in codes]
            is_launcher = grace_s is not None and any(codes.values())
            for pid in left:
                os.kill(pid, signal.SIGKILL if is_launcher else signal.SIGABRT)  # faulthandler writes the stacks
            if not is_launcher:
                hangs.update(left)
            end = time.monotonic() + LIMIT_S
    return [Ended(None if rank.pid in hangs else codes[rank.pid], rank.take_said()) for rank in ranks]
