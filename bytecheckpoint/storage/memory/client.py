# SPDX-License-Identifier: Apache-2.0
"""``HolderClient``: the objects that the holder of a run has, as the engine and the commit ask for them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bytecheckpoint.native import _core
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.memory.messages import VERSION, address_of, is_of_this_user, receive, send
from bytecheckpoint.storage.object_store.conditions import AS_GIVEN, Conditions
from bytecheckpoint.storage.object_store.entries import Entry, is_tombstone
from bytecheckpoint.storage.object_store.urls import HELD, joined

__all__ = [
    "HolderClient",
    "HolderOptions",
    "disconnect",
    "end_holders",
    "holders",
    "set_options",
    "stop_holder",
    "url_of_run",
]

_STARTS_WITHIN_S, _BETWEEN_TRIES_S = 20.0, 0.02
_SPARE_BYTES = 256 << 20  # of the machine, are left to what else it does


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


class _Connection:
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


_connections: PerProcess[dict[str, _Connection]] = PerProcess(dict)


def set_options(url: str, options: HolderOptions) -> None:
    """Notes how the holder of a run is started by this process.

    Args:
        url: What ``url_of_run`` returned.
        options: See there.
    """
    _connection_to(url.partition("://")[2]).options = options


def end_holders() -> None:
    """Says to all holders that this process needs nothing any more: they end with the last of such processes."""
    for connection in [*(_connections.if_made() or {}).values()]:
        connection.end()


def disconnect(run: str) -> None:
    """Closes the connection of this process to the holder of a run, which need not stay for it."""
    _connection_to(run).close()


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
    _connection_to(run).close()
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


def _connection_to(run: str) -> _Connection:
    connections = _connections.get()
    return connections.setdefault(run, _Connection(run))


class HolderClient:
    """The objects below a URL of a run in memory; has what ``StoreClient`` has, and what ``MemoryObjects`` asks for.

    Thread-safe. A run without a holder has no objects; the first object starts one.

    Args:
        url: URL of the folder.
    """

    is_http = False

    def __init__(self, url: str) -> None:
        self.url = url
        run, _, self._prefix = url.partition("://")[2].partition("/")
        self._to = _connection_to(run)
        self.num_requests = 0
        self.on_request: Callable[[int, int], None] | None = None

    # What the engine calls; see csrc/io/object_store.h.

    def open(self, name: str) -> tuple[int, str]:
        """Returns the size of an object in bytes, and its version."""
        meta = self.head(name)
        if meta is None or is_tombstone(meta):
            raise FileNotFoundError(errno.ENOENT, "there is no such object")
        return meta["size"], meta["e_tag"]

    def descriptor(self, name: str) -> int:
        """Returns a descriptor of an object, which the caller closes."""
        meta, fd = self._got(name)
        if is_tombstone(meta):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "it was removed")
        return fd

    def spare(self, name: str) -> int:
        """Returns a descriptor of memory for a new object, which the caller closes; -1 if there is none to spare."""
        _, fd = self._to.ask({"op": "spare", "name": self._key(name)}, starts=True)
        return -1 if fd is None else fd

    def reserve(self, name: str, num_bytes: int, there: int = 0) -> None:
        """Asks for memory, of the holder and of the machine; of the latter without ``there`` bytes, which it has."""
        left, missing = _core.available_memory_bytes(), max(0, num_bytes - there)
        if missing and 0 <= left < missing + _SPARE_BYTES:
            raise OSError(
                errno.ENOMEM,
                f"{missing:,} bytes are needed, and {_SPARE_BYTES:,} for what else the machine does, but {left:,} are "
                "available",
            )
        self._asked({"op": "reserve", "name": self._key(name), "bytes": num_bytes}, starts=True)

    def keep(self, name: str, fd: int) -> None:
        """Gives an object to the holder. It goes with this process until there is a commit mark beside it."""
        self._asked({"op": "put", "name": self._key(name), "stays": False}, fd, starts=True)

    def discard(self) -> None:
        """Frees what this process has kept below the URL, and no commit mark stands beside."""
        self._asked_if_there({"op": "discard", "below": f"{self._prefix}/"})

    def names(self, folder: str = "") -> list[str]:
        """Returns the names right below ``folder``, of objects and of folders; without tombstones."""
        return [each.name for each in self.entries(folder) if not each.is_tombstone] + self.folders(folder)

    # What Python calls.

    def entries(self, folder: str = "") -> list[Entry]:
        """Returns the objects right below ``folder``."""
        return [each for each in self._below(folder) if "/" not in each.name]

    def folders(self, folder: str = "") -> list[str]:
        """Returns the names of the folders right below ``folder``."""
        return sorted({each.name.partition("/")[0] for each in self._below(folder) if "/" in each.name})

    def everything(self, folder: str) -> list[Entry]:
        """Returns all objects below ``folder``; their names are relative to the URL."""
        return [Entry(joined(folder, each.name), each.num_bytes, each.last_modified) for each in self._below(folder)]

    def _below(self, folder: str) -> list[Entry]:
        key = self._key(folder)
        below = f"{key}/" if key else ""
        found = self._asked_if_there({"op": "list", "below": below})
        objects = [] if found is None else found["objects"]
        return [Entry(each["path"][len(below) :], each["size"], _time(each["last_modified"])) for each in objects]

    def head(self, name: str) -> dict[str, Any] | None:
        """Returns what is known of an object; None if there is none."""
        try:
            found = self._asked_if_there({"op": "head", "name": self._key(name)})
        except FileNotFoundError:
            return None
        return None if found is None else _meta(found)

    def exists(self, name: str) -> bool:
        """Whether there is an object. A tombstone is none."""
        meta = self.head(name)
        return meta is not None and not is_tombstone(meta)

    def get(self, name: str) -> bytes:
        """Returns all of an object."""
        return self.get_with_meta(name)[1]

    def get_with_meta(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Returns what ``head`` says of an object, and all of it."""
        meta, fd = self._got(name)
        try:
            return meta, os.pread(fd, meta["size"], 0)
        finally:
            os.close(fd)

    def get_if(self, name: str, e_tag: str) -> bytes:
        """Returns all of an object, if it still has that ETag; else it is an ESTALE."""
        meta, data = self.get_with_meta(name)
        if meta["e_tag"] != e_tag:
            raise OSError(errno.ESTALE, "there is another version")
        return data

    def put(self, name: str, data: bytes, *, once: bool = False) -> None:
        """Writes an object, in place of one that is there."""
        with _in_memory(data) as fd:
            self._asked({"op": "put", "name": self._key(name), "stays": True}, fd, starts=True)

    def put_if(self, name: str, data: bytes, replaces: dict[str, Any] | None) -> None:
        """Creates an object, or replaces one version of it; see ``StoreClient.put_if``."""
        self.send_put_if(name, data, replaces)

    def send_put_if(
        self, name: str, data: bytes, replaces: dict[str, Any] | None, etag_form: str = AS_GIVEN, *, once: bool = False
    ) -> None:
        """Does what ``put_if`` does."""
        request = {"op": "put", "name": self._key(name), "stays": True, "if": replaces and replaces["e_tag"]}
        with _in_memory(data) as fd:
            self._asked(request, fd, starts=True)

    def conditions(self) -> Conditions:
        """Returns which conditions of writes a holder obeys: all."""
        return Conditions((), AS_GIVEN, self.url, self.server(), is_final=True)

    def server(self) -> str:
        """Returns what holds the objects."""
        return f"the holder of {self._to.run}"

    def delete(self, names: Sequence[str], *, spares: bool = False) -> None:
        """Removes objects. Those that are already gone are no error.

        Args:
            names: Their names.
            spares: Whether their memory is kept for objects that are made next, until others are removed.
        """
        self._asked_if_there({"op": "delete", "names": [self._key(name) for name in names], "spares": spares})

    def delete_once(self, name: str) -> None:
        """Removes an object."""
        self.delete([name])

    def _got(self, name: str) -> tuple[dict[str, Any], int]:
        try:
            found, fd = self._to.ask({"op": "get", "name": self._key(name)})
        except ConnectionRefusedError:
            raise FileNotFoundError(errno.ENOENT, f"{self.server()} does not run") from None
        if fd is None:
            raise OSError(errno.EPROTO, f"{self.server()} has sent no descriptor")
        return _meta(found), fd

    def _asked(self, request: dict[str, Any], fd: int | None = None, *, starts: bool = False) -> dict[str, Any]:
        answer: dict[str, Any] = self._to.ask(request, fd, starts=starts)[0]
        return answer

    def _asked_if_there(self, request: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return self._asked(request)
        except ConnectionRefusedError:
            return None

    def _key(self, name: str) -> str:
        return joined(self._prefix, name)


@contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("bytecheckpoint", os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
        yield fd
    finally:
        os.close(fd)


def _meta(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "last_modified": _time(found["last_modified"])}


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
