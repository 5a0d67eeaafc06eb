# SPDX-License-Identifier: Apache-2.0
"""The process that holds the checkpoints of a run in the memory of its machine: ``python -m ...holder RUN``.

It knows objects: a name, and a file in memory (memfd), which readers get for reading alone. The memory is that of the
file, whoever made it: so a process that trains may die, and the object stays. An object that no commit mark stands
beside goes with the process that made it. The files of a state that is not needed any more are spare: the next state is
written over them, which takes half the time that new pages take.

Peers are processes of other machines. They come by ``PeerService``, once a process of this machine asks for it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, cast

from bytecheckpoint.storage.memory.messages import VERSION, address_of, is_of_this_user, receive, refusal, send
from bytecheckpoint.storage.memory.peer_frames import require_token
from bytecheckpoint.storage.memory.peer_service import PeerService

__all__ = ["Holder", "main"]

_MARK = ".metadata"
_LOOK_S = 1.0
_LEAST_APART_S = 1e-5  # of times of changes


@dataclass
class _Object:
    fd: int
    num_bytes: int
    etag: str
    modified_at: float
    owner: int | None  # the connection of a process with which it goes
    maker: int  # the connection that made it
    readers: set[int] = field(default_factory=set)  # connections that were given a descriptor


@dataclass
class _Peer:
    is_local: bool
    is_done: bool = False
    reserved: dict[str, int] = field(default_factory=dict)


class Holder:
    """The objects, and what is done with them. Each request gets one answer; one that fails says errno and why.

    Not thread-safe: once it listens for peers, it is used under its lock alone. Processes of this machine have the
    numbers that the caller gives them, from 0; peers have numbers below 0.

    Args:
        most_bytes: Most bytes of all objects; 0 for no limit.

    Attributes:
        lock: Held around each use.
    """

    def __init__(self, most_bytes: int = 0) -> None:
        self.lock = threading.Lock()
        self._most_bytes = most_bytes
        self._objects: dict[str, _Object] = {}
        self._peers: dict[int, _Peer] = {}
        self._num_made = 0
        self._last_at = 0.0
        self._spares: list[tuple[str, int]] = []  # last names of what they were, and descriptors
        self._service: PeerService | None = None
        self._numbers_of_peers = itertools.count(-1, -1)
        self._calls = {
            "hello": self._hello,
            "spare": self._spare,
            "reserve": self._reserve,
            "put": self._put,
            "get": self._get,
            "head": self._head,
            "list": self._list,
            "delete": self._delete,
            "discard": self._discard,
            "done": self._done,
            "listen": self._listen,
            "stop": self._stop,
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(each.num_bytes for each in self._objects.values())

    @property
    def has_processes(self) -> bool:
        """Whether a process of this machine is connected."""
        return any(each.is_local for each in self._peers.values())

    def close(self) -> None:
        """Frees everything, and ends the connections of peers. The caller does not hold the lock."""
        if self._service is not None:
            self._service.close()
        for fd in [*(each.fd for each in self._objects.values()), *(fd for _, fd in self._spares)]:
            os.close(fd)
        self._objects, self._spares, self._service = {}, [], None

    def connected(self, peer: int) -> None:
        """Notes a process of this machine."""
        self._peers[peer] = _Peer(is_local=True)

    def connected_remotely(self) -> int:
        """Notes a peer, and returns its number."""
        number = next(self._numbers_of_peers)
        self._peers[number] = _Peer(is_local=False)
        return number

    def left(self, peer: int) -> bool:
        """Notes that a process has gone. Returns whether it had said that it needs nothing any more."""
        self._free(peer, "")
        return self._peers.pop(peer).is_done

    def answer(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        """Does what a process asks for.

        Args:
            peer: The process.
            request: What it asks for.
            fd: A descriptor that came along; it is the holder's now.

        Returns:
            The answer, and a descriptor to go along, which the caller closes.
        """
        is_kept = False
        try:
            call = self._calls.get(request.get("op", ""), self._unknown)
            answered: tuple[dict[str, Any], int | None] = call(peer, request, fd)
            is_kept = call == self._put
        except Exception as error:  # whatever a process asks for, the others keep what they have
            answered = refusal(error), None
        if fd is not None and not is_kept:
            os.close(fd)
        return answered

    def _unknown(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        raise OSError(errno.EOPNOTSUPP, f"a holder of version {VERSION} does not know {request.get('op')!r}")

    def _hello(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        if request["version"] != VERSION:
            raise OSError(
                errno.EPROTO, f"it is of version {VERSION}, and this process of {request['version']}: bcp holder stop"
            )
        if request["most_bytes"] is not None:
            self._most_bytes = int(request["most_bytes"])
        return {"pid": os.getpid()}, None

    def _spare(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        return {}, self.take_spare(str(request["name"]))

    def take_spare(self, name: str) -> int | None:
        """Returns the descriptor of a file to write over, which is the caller's; None if there is none.

        Args:
            name: Of the object to be. What had the same name in another save has its size, too.
        """
        if not self._spares:
            return None
        last = _last_of(name)
        at = next((at for at, (name, _) in enumerate(self._spares) if name == last), 0)
        return self._spares.pop(at)[1]

    def _reserve(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        name, num_bytes = str(request["name"]), int(request["bytes"])
        if num_bytes < 0:
            raise ValueError(f"{num_bytes} bytes cannot be promised")
        promised = sum(sum(each.reserved.values()) for each in self._peers.values())
        if self._most_bytes and self.num_bytes + promised + num_bytes > self._most_bytes:
            raise OSError(
                errno.ENOMEM,
                f"{num_bytes:,} bytes more would be above the limit of {self._most_bytes:,}: it holds "
                f"{self.num_bytes:,}, and {promised:,} are promised",
            )
        self._peers[peer].reserved[name] = num_bytes
        return {}, None

    def release(self, peer: int, name: str) -> None:
        """Takes back the promise of memory for an object, if there is one."""
        self._peers[peer].reserved.pop(name, None)

    def _put(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        name = str(request["name"])
        if fd is None:
            raise ValueError("put without a descriptor")
        there = self._objects.get(name)
        if "if" in request:
            wanted = request["if"]
            if wanted is None and there is not None:
                raise OSError(errno.EEXIST, "there is an object")
            if wanted is not None and (there is None or there.etag != wanted):
                raise OSError(errno.ESTALE, "there is another version")
        folder, _, last = name.rpartition("/")
        self._num_made += 1
        owner = None if request["stays"] else peer
        etag = f"{self._num_made:x}"
        self._last_at = max(
            time.time(), self._last_at + _LEAST_APART_S
        )  # the order of commits, whatever the clock says
        made = _Object(fd, os.fstat(fd).st_size, etag, self._last_at, owner, peer)
        if there is not None:
            os.close(there.fd)
        self._objects[name] = made
        self.release(peer, name)
        self._peers[peer].is_done = False
        if last == _MARK:  # what it names stays with it
            for other, each in self._objects.items():
                if other.rpartition("/")[0] == folder:
                    each.owner = None
        return self._of(name), None

    def _get(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        name = str(request["name"])
        answer = self._of(name)
        found = self._objects[name]
        found.readers.add(peer)
        return answer, os.open(f"/proc/self/fd/{found.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def has_read(self, peer: int, name: str) -> None:
        """Notes that a peer has closed the descriptor of an object that it was given."""
        if name in self._objects:
            self._objects[name].readers.discard(peer)

    def _head(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        return self._of(str(request["name"])), None

    def _list(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        below = str(request["below"])
        return {"objects": [self._of(name) for name in sorted(self._objects) if name.startswith(below)]}, None

    def _delete(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        names = [name for name in dict.fromkeys(request["names"]) if name in self._objects]
        spares = [(_last_of(name), os.dup(self._objects[name].fd)) for name in names if self._is_spare(name)]
        for name in names:
            self._drop(name)
        unmarked = {name.rpartition("/")[0] for name in names if _last_of(name) == _MARK}
        for name, each in self._objects.items():
            if name.rpartition("/")[0] in unmarked:  # nobody would look for it any more
                each.owner = peer
        if request["spares"] and spares:
            self._spares, spares = spares, self._spares  # those before were of no use
        for _, spare in spares:
            os.close(spare)
        return {}, None

    def _is_spare(self, name: str) -> bool:
        """Whether nobody reads an object: a process that saved it has only looked whether all is there.

        A peer is noted for as long as its answer is on its way, so that it reads whatever else it did.
        """
        each = self._objects[name]
        folder = name.rpartition("/")[0]
        makers = {of.maker for other, of in self._objects.items() if other.startswith(f"{folder}/")}
        readers = each.readers & self._peers.keys()
        return _last_of(name) != _MARK and all(number in makers and self._peers[number].is_local for number in readers)

    def _discard(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        below = str(request["below"])
        self._free(peer, below)
        reserved = self._peers[peer].reserved
        for name in [name for name in reserved if name.startswith(below)]:
            del reserved[name]
        return {}, None

    def _done(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        self._peers[peer].is_done = bool(request["is_done"])
        return {}, None

    def _listen(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        address, token = str(request["address"]), bytes.fromhex(request["token"])
        require_token(token)
        service = self._service
        if service is None or service.address != address:
            service = PeerService(self, self.lock, address)
            if self._service is not None:
                self._service.close(waits=False)  # its threads need the lock, which is held here
            self._service = service
        service.allow(token)
        return {"port": service.port}, None

    def _stop(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        raise SystemExit

    def _of(self, name: str) -> dict[str, Any]:
        each = self._objects.get(name)
        if each is None:
            raise OSError(errno.ENOENT, "there is no such object")
        return {"path": name, "size": each.num_bytes, "e_tag": each.etag, "last_modified": each.modified_at}

    def _free(self, peer: int, below: str) -> None:
        """Frees what goes with a process."""
        for name in [name for name, each in self._objects.items() if each.owner == peer and name.startswith(below)]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        os.close(self._objects.pop(name).fd)


def _last_of(name: str) -> str:
    """Returns the last name without what a save drew: of the files of one rank it is the same in all saves."""
    last = name.rpartition("/")[2]
    return last if last.startswith(".") else last.partition(".")[0]


def serve(address: str, linger_s: float) -> None:
    """Serves the processes of this machine, and of this user, until nobody needs the objects any more.

    That is: the last process has said so before it went, or went ``linger_s`` ago; or somebody says ``stop``. Peers do
    not count: what they have put is for the processes of this machine, or for a training that has ended.

    Raises:
        OSError: Another holder has the address.
    """
    holder, selector, numbers = Holder(), selectors.DefaultSelector(), itertools.count()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(128)
    selector.register(listener, selectors.EVENT_READ)
    alone_since = time.monotonic()
    while True:
        for key, _ in selector.select(_LOOK_S):
            peer, number = cast(socket.socket, key.fileobj), key.data
            if peer is listener:
                with contextlib.suppress(OSError):  # it has gone already, or there is no descriptor for it
                    accepted, _ = listener.accept()
                    if is_of_this_user(accepted):
                        number = next(numbers)
                        with holder.lock:
                            holder.connected(number)
                        selector.register(accepted, selectors.EVENT_READ, number)
                    else:
                        accepted.close()
                continue
            if _serve_one(holder, peer, number):
                continue
            selector.unregister(peer)
            peer.close()
            with holder.lock:
                is_over, has_others = holder.left(number), holder.has_processes
            alone_since = time.monotonic()
            if is_over and not has_others:
                return
        with holder.lock:
            has_others = holder.has_processes
        if not has_others and time.monotonic() - alone_since > linger_s:
            return


def _serve_one(holder: Holder, peer: socket.socket, number: int) -> bool:
    """Answers one request. Returns False if the process has gone, or sent what is none."""
    try:
        received = receive(peer)
        if received is None:
            return False
        with holder.lock:
            answer, fd = holder.answer(number, *received)
        try:
            send(peer, answer, fd)
        finally:
            if fd is not None:
                os.close(fd)
    except Exception:  # also of a message that no process of ours sends
        return False
    return True


def main(arguments: list[str]) -> None:
    """Holds a run: ``RUN LINGER_S``."""
    run, linger_s = arguments
    if os.fork():  # nobody's child: what ends a training, and all that it has started, does not end the holder
        os._exit(0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each object is an open file
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal of a training that it shall outlive
    with contextlib.suppress(OSError, SystemExit):  # another one was faster, or it was told to stop
        serve(address_of(run), float(linger_s))


if __name__ == "__main__":
    main(sys.argv[1:])
