# SPDX-License-Identifier: Apache-2.0
"""The holders of this machine, and the connection of this process to each."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.memory.messages import VERSION, address_of, is_of_this_user, receive, send
from bytecheckpoint.storage.object_store.urls import HELD

__all__ = [
    "Connection",
    "HolderOptions",
    "connection_to",
    "disconnect",
    "end_holders",
    "holders",
    "run_of",
    "set_options",
    "stop_holder",
    "url_of_run",
]

_STARTS_WITHIN_S, _BETWEEN_TRIES_S = 20.0, 0.02


@dataclass(frozen=True)
class HolderOptions:
    """How a holder is started.

    Attributes:
        most_bytes: Most bytes that it holds; 0 for no limit; None leaves the limit as it is.
        linger_s: Seconds for which it stays when the last process has died.
    """

    most_bytes: int | None = None
    linger_s: float = 1800.0


def url_of_run(run: str) -> str:
    """Returns the URL of a run in memory."""
    return f"{HELD}://{run}"


def run_of(url: str) -> str:
    """Returns the run in memory that a URL is in."""
    return url.partition("://")[2].partition("/")[0]


class Connection:
    """The socket to the holder of one run. Thread-safe."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.options = HolderOptions()
        self._said: HolderOptions | None = None  # to the holder that it is connected to
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def ask(self, request: dict[str, Any], fd: int | None = None, *, starts: bool = False) -> tuple[Any, int | None]:
        """Returns the answer, and a descriptor that came along.

        Args:
            request: What is asked for.
            fd: A descriptor to go along.
            starts: Whether a holder is started if there is none.

        Raises:
            OSError: There is no holder (ECONNREFUSED), it has gone, or it refuses.
        """
        with self._lock:
            was_connected = self._socket is not None
            answered = self._asked(request, fd, starts)
            if answered is None and was_connected:  # it has ended since
                answered = self._asked(request, fd, starts)
            if answered is None:
                raise OSError(errno.ECONNRESET, f"the holder of {self.run} has gone")
        answer, came = answered
        if "errno" in answer:
            raise OSError(answer["errno"], answer["why"])
        return answer, came

    def _asked(self, request: dict[str, Any], fd: int | None, starts: bool) -> tuple[dict[str, Any], int | None] | None:
        peer = self._socket or self._connect(starts)
        self._socket = peer
        try:
            if self._said != self.options:
                self._hello(peer)
            send(peer, request, fd)
            answered = receive(peer)
        except OSError:
            answered = None
        except BaseException:  # its answer must not be taken for that of the next request
            peer.close()
            self._socket = None
            raise
        if answered is None:
            peer.close()
            self._socket = None
        return answered

    def _connect(self, starts: bool) -> socket.socket:
        until = time.monotonic() + _STARTS_WITHIN_S
        is_started = False
        while True:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                peer.connect(address_of(self.run))
                if not is_of_this_user(peer):
                    raise PermissionError(errno.EACCES, f"the holder of {self.run} is of another user")
                self._hello(peer)
            except ConnectionRefusedError:
                peer.close()
                if not starts or time.monotonic() > until:
                    raise
                if not is_started:
                    self._start()
                    is_started = True
                time.sleep(_BETWEEN_TRIES_S)
                continue
            except OSError:
                peer.close()
                raise
            return peer

    def _hello(self, peer: socket.socket) -> None:
        said = self.options
        send(peer, {"op": "hello", "version": VERSION, "most_bytes": said.most_bytes})
        answered = receive(peer)
        if answered is None:
            raise ConnectionResetError(errno.ECONNRESET, f"the holder of {self.run} has gone")
        if "errno" in answered[0]:
            raise OSError(answered[0]["errno"], f"the holder of {self.run}: {answered[0]['why']}")
        self._said = said

    def _start(self) -> None:
        # In a session of its own: what ends the processes of a training does not end it.
        command = [sys.executable, "-m", "bytecheckpoint.storage.memory.holder", self.run, str(self.options.linger_s)]
        null = subprocess.DEVNULL
        subprocess.run(command, stdin=null, stdout=null, stderr=null, start_new_session=True, cwd="/", check=False)

    def close(self) -> None:
        """Closes the socket; the next request connects anew."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def end(self) -> None:
        """Says that this process needs nothing any more, if it was connected."""
        with self._lock, contextlib.suppress(OSError):
            if self._socket is not None:
                self._asked({"op": "done", "is_done": True}, None, starts=False)


_connections: PerProcess[dict[str, Connection]] = PerProcess(dict)


def set_options(url: str, options: HolderOptions) -> None:
    """Notes how the holder of a run is started by this process.

    Args:
        url: What ``url_of_run`` returned.
        options: See there.
    """
    connection_to(run_of(url)).options = options


def end_holders() -> None:
    """Says to all holders that this process needs nothing any more: they end with the last of such processes."""
    for connection in [*(_connections.if_made() or {}).values()]:
        connection.end()


def disconnect(run: str) -> None:
    """Closes the connection of this process to the holder of a run, which need not stay for it."""
    connection_to(run).close()


def holders() -> list[str]:
    """Returns the runs that this user has holders of, on this machine and in this network namespace."""
    prefix = "@" + address_of("")[1:]
    names = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return sorted({name.removeprefix(prefix) for name in names if name.startswith(prefix)})


def stop_holder(run: str) -> bool:
    """Ends the holder of a run, and with it all that it holds. Returns whether there was one.

    Raises:
        OSError: It refuses, or does not end.
    """
    connection_to(run).close()
    was_there = False
    until = time.monotonic() + _STARTS_WITHIN_S
    while time.monotonic() < until:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as peer:
            try:
                peer.connect(address_of(run))
                was_there = True
                send(peer, {"op": "stop"})
                answered = receive(peer)
            except ConnectionRefusedError:
                return was_there
            except OSError:  # it is ending
                answered = None
        if answered is not None:
            raise OSError(answered[0].get("errno", errno.EBUSY), f"the holder of {run} does not stop")
        time.sleep(_BETWEEN_TRIES_S)
    raise OSError(errno.EBUSY, f"the holder of {run} does not end")


def connection_to(run: str) -> Connection:
    """Returns the connection of this process to the holder of a run; it is made when it is first used."""
    connections = _connections.get()
    return connections.setdefault(run, Connection(run))
