# SPDX-License-Identifier: Apache-2.0
"""Runs functions in processes that may be killed, which it forks from a server that has already imported torch.

A torch import takes seconds, a fork milliseconds. The server runs the installed package, or another build of it.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["ForkServer", "Meeting", "Outcome", "meet", "wait_for"]

TESTS = Path(__file__).parents[1]
LIMIT_S = 40.0
_START_LIMIT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """How one process ended.

    Attributes:
        signal: The signal that killed it, or 0.
        timed_out: True if it had to be killed; ``stacks`` says where it hung.
        value: The return value of its function, if it returned.
        traceback: The traceback of what its function raised, or empty.
    """

    signal: int
    timed_out: bool
    value: Any
    traceback: str
    stacks: str

    @property
    def was_killed(self) -> bool:
        return self.signal == signal.SIGKILL and not self.timed_out

    def unwrap(self) -> Any:
        """Returns ``value``; fails if there is none."""
        assert self.signal == 0, f"died of signal {self.signal}, timed_out={self.timed_out}\n{self.stacks}"
        assert not self.traceback, self.traceback
        return self.value


class ForkServer:
    """The tests' side of the server.

    Args:
        package: Directory that holds another build of the package, or None for the installed one.
        environment: More environment variables for the server and all its processes.
    """

    def __init__(self, package: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        paths = [*([str(package)] if package else []), str(TESTS), os.environ.get("PYTHONPATH", "")]
        # Without -P the sources in the working directory would come before the build that is asked for.
        code = f"from support.fork_server import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=[theirs.fileno()],
            # Otherwise OpenBLAS starts threads when numpy is imported.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "OPENBLAS_NUM_THREADS": "1",
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._info: dict[str, Any] | None = None

    @property
    def info(self) -> dict[str, Any]:
        """Returns the ``file`` of the package, its ``failpoints``, and how many ``threads`` the server has."""
        if self._info is None:
            self._info = self._receive(_START_LIMIT_S)
        return self._info

    def start(self, function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None) -> int:
        """Runs ``function(*args)``, which it pickles, in a process of its own. Returns the process id."""
        assert self.info["threads"] == 1, "a process with threads must not fork"
        self._connection.send(("start", pickle.dumps((function, args)), dict(env or {})))
        pid: int = self._receive(LIMIT_S)
        return pid

    def wait(self, pid: int, limit_s: float = LIMIT_S) -> Outcome:
        """Waits for a process to end, and kills it after ``limit_s``. Returns how it ended."""
        self._connection.send(("wait", pid, limit_s))
        outcome: Outcome = self._receive(limit_s + LIMIT_S)
        return outcome

    def wait_stopped(self, pid: int, limit_s: float = LIMIT_S) -> bool:
        """Waits until a process stops by itself or ends. Returns whether it stopped. ``wait`` must still be called."""
        self._connection.send(("wait_stopped", pid, limit_s))
        stopped: bool = self._receive(limit_s + LIMIT_S)
        return stopped

    def run(self, function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None) -> Outcome:
        return self.wait(self.start(function, *args, env=env))

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, limit_s: float) -> Any:
        if not self._connection.poll(limit_s):
            self._process.kill()
            raise TimeoutError(f"the fork server did not answer for {limit_s} s")
        return self._connection.recv()


class Meeting:
    """A socket where a process tells the test how far it got, and waits until the test lets it go on."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(LIMIT_S)
        self._socket.bind("")  # the kernel chooses an abstract name
        self._socket.listen()
        self.address: bytes = self._socket.getsockname()

    def accept(self) -> Connection:
        peer, _ = self._socket.accept()
        peer.setblocking(True)
        return Connection(peer.detach())

    @staticmethod
    def receive(connection: Connection) -> Any:
        assert connection.poll(LIMIT_S), "the process did not get there in time"
        return connection.recv()

    def close(self) -> None:
        self._socket.close()


def meet(address: bytes) -> Connection:
    """Connects to a Meeting. Returns a connection whose ``recv`` raises EOFError when the test is over."""
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(address)
    return Connection(peer.detach())


def wait_for(connection: Connection) -> Any:
    """Returns what the test sends. Whether it was waiting already when strace came changes no count of its reads."""
    connection.poll(None)
    return connection.recv()


@dataclass(frozen=True)
class _Child:
    pidfd: int
    value_fd: int
    stacks_fd: int


def serve(fd: int) -> None:
    """Runs the server until the tests close their side."""
    import torch

    import bytecheckpoint
    from support import saves  # noqa: F401  # imports what the children need

    torch.set_num_threads(1)
    # Otherwise a child could stop between the check of its state and the wait for this signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    connection = Connection(fd)
    extension = bytecheckpoint.build_info()["torch_extension"]
    connection.send(
        {
            "file": bytecheckpoint.__file__,
            "failpoints": extension["failpoints"],
            "threads": len(list(Path("/proc/self/task").iterdir())),
        }
    )
    children: dict[int, _Child] = {}
    while True:
        try:
            message = connection.recv()
        except EOFError:
            break
        if message[0] == "start":
            pid, child = _fork(connection, *message[1:])
            children[pid] = child
            connection.send(pid)
        elif message[0] == "wait_stopped":
            connection.send(_stops(*message[1:]))
        else:
            connection.send(_reap(message[1], children.pop(message[1]), message[2]))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _fork(connection: Connection, work: bytes, env: dict[str, str]) -> tuple[int, _Child]:
    value_fd, stacks_fd = os.memfd_create("value"), os.memfd_create("stacks")
    pid = os.fork()
    if pid:
        return pid, _Child(os.pidfd_open(pid), value_fd, stacks_fd)
    pid = os.getpid()
    try:
        connection.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        os.environ.update(env)
        faulthandler.enable(stacks_fd)
        function, args = pickle.loads(work)
        result = pickle.dumps((function(*args), ""))
    except BaseException:
        if os.getpid() != pid:
            raise  # a process that the function forked ends in its own way
        text = io.StringIO()
        traceback.print_exc(file=text)
        result = pickle.dumps((None, text.getvalue()))
    os.write(value_fd, result)
    os._exit(0)


def _stops(pid: int, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while True:
        change = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if change is not None:
            return change.si_code == os.CLD_STOPPED
        left = end - time.monotonic()
        if left <= 0 or signal.sigtimedwait([signal.SIGCHLD], left) is None:
            return False


def _reap(pid: int, child: _Child, limit_s: float) -> Outcome:
    ended = select.poll()
    ended.register(child.pidfd, select.POLLIN)
    timed_out = not ended.poll(limit_s * 1000)
    if timed_out:
        os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks
        os.kill(pid, signal.SIGCONT)  # else not before it goes on, if it has stopped
        if not ended.poll(5000):
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    value, stacks = (_contents(fd) for fd in (child.value_fd, child.stacks_fd))
    os.close(child.pidfd)
    returned, raised = pickle.loads(value) if value else (None, "")
    return Outcome(os.WTERMSIG(status), timed_out, returned, raised, stacks.decode(errors="replace"))


def _contents(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "rb") as file:
        return file.read()
