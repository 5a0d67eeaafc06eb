# SPDX-License-Identifier: Apache-2.0
"""``PeerConnection``: what a holder does for one process of another machine.

A peer may ask for less than a process of this machine: it can neither end the holder, nor remove what others have put.
It may put something in its place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from bytecheckpoint.storage.memory.arriving_file import ArrivingFile
from bytecheckpoint.storage.memory.machine_memory import Promises
from bytecheckpoint.storage.memory.messages import refusal
from bytecheckpoint.storage.memory.peer_frames import (
    MOST_REQUEST_BYTES,
    receive_frame,
    send_file,
    send_frame,
    skip_body,
)

__all__ = ["MOST_BODY_BYTES", "SMALL_BYTES", "ObjectsOfPeers", "PeerConnection"]

MOST_BODY_BYTES = 64 << 20  # of an answer
SMALL_BYTES = 1 << 20  # may be put without a reservation

_MOST_REPR = 100
_WITH_CRCS = ".distcp"  # the files of the engine have a CRC for each of their blocks


class ObjectsOfPeers(Protocol):
    """What a connection needs of ``Holder``. Not thread-safe."""

    def connected_remotely(self) -> int:
        """Notes a peer, and returns its number."""

    def left(self, peer: int) -> bool:
        """Notes that a process has gone, and frees what goes with it."""

    def answer(self, peer: int, request: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
        """Does what a process asks for."""

    def take_spare(self, name: str) -> int | None:
        """Returns the descriptor of a file to write over."""

    def release(self, peer: int, name: str) -> None:
        """Takes back the promise of memory for an object."""

    def has_read(self, peer: int, name: str) -> None:
        """Notes that a peer has closed the descriptor of an object that it was given."""


@dataclass
class _Reserved:
    num_bytes: int
    spare: int | None
    there: int  # bytes of the spare
    promised: int  # bytes of the machine, which have not arrived yet


@dataclass(frozen=True)
class _Part:
    answer: dict[str, Any]
    fd: int
    begin: int
    num_bytes: int


class PeerConnection:
    """Answers the requests of one peer, one after the other, until it goes.

    Args:
        peer: The connection, behind the handshake, and without a timeout. The caller closes it.
        holder: The objects.
        lock: Held around each use of the holder; never while bytes come or go.
        promises: Memory of the machine that peers were promised, all together.
        check: Raises if a file of the engine is damaged.
    """

    def __init__(
        self,
        peer: socket.socket,
        holder: ObjectsOfPeers,
        lock: threading.Lock,
        promises: Promises,
        check: Callable[[int], object],
    ) -> None:
        self._peer = peer
        self._holder = holder
        self._lock = lock
        self._promises = promises
        self._check = check
        self._reserved: dict[str, _Reserved] = {}
        self._number = 0

    def serve(self) -> None:
        """Serves the peer until it goes. What it has put, and no commit mark stands beside, goes with it.

        Raises:
            OSError: The connection failed.
            ValueError: The peer sent what is no request.
        """
        with self._lock:
            self._number = self._holder.connected_remotely()
        try:
            while (received := receive_frame(self._peer, MOST_REQUEST_BYTES)) is not None:
                self._serve_one(*received)
        finally:
            for name in [*self._reserved]:
                self._forget(name)
            with self._lock:
                self._holder.left(self._number)

    def _serve_one(self, request: dict[str, Any], num_bytes: int) -> None:
        op = request.get("op")
        if op == "put":
            send_frame(self._peer, self._put(request, num_bytes))
            return
        if num_bytes:
            raise ValueError("a body behind a request that has none")
        part = None
        with contextlib.ExitStack() as until_sent:
            try:
                if op == "get":
                    part = until_sent.enter_context(self._opened(request))
                else:
                    answer = self._asked(op, request)
            except Exception as error:  # whatever a peer asks for, the others keep what they have
                answer = refusal(error)
            if part is None:
                send_frame(self._peer, answer)
            else:
                send_file(self._peer, part.answer, part.fd, part.num_bytes, part.begin)

    def _asked(self, op: Any, request: dict[str, Any]) -> dict[str, Any]:
        if op == "reserve":
            return self._reserve(str(request["name"]), int(request["bytes"]))
        if op not in ("head", "list", "discard"):
            raise OSError(errno.EOPNOTSUPP, f"a process of another machine may not ask for {repr(op)[:_MOST_REPR]}")
        answer = self._of_holder(request)
        if op == "discard":
            for name in [name for name in self._reserved if name.startswith(str(request["below"]))]:
                self._forget(name)
        return answer

    def _of_holder(self, request: dict[str, Any], fd: int | None = None) -> dict[str, Any]:
        with self._lock:
            return self._holder.answer(self._number, request, fd)[0]

    def _reserve(self, name: str, num_bytes: int) -> dict[str, Any]:
        """Promises memory, in place of what was promised for the name before."""
        self._forget(name)
        with self._lock:
            answer, _ = self._holder.answer(self._number, {"op": "reserve", "name": name, "bytes": num_bytes}, None)
            if "errno" in answer:
                return answer
            spare = self._holder.take_spare(name)
        there = 0 if spare is None else os.fstat(spare).st_size
        self._reserved[name] = _Reserved(num_bytes, spare, there, 0)
        try:
            self._reserved[name].promised = self._promises.take(num_bytes, there)
        except OSError:
            self._forget(name)
            raise
        return answer

    def _forget(self, name: str) -> None:
        reserved = self._reserved.pop(name, None)
        if reserved is None:
            return
        if reserved.spare is not None:
            os.close(reserved.spare)
        self._promises.give_back(reserved.promised)
        with self._lock:
            self._holder.release(self._number, name)

    def _put(self, request: dict[str, Any], num_bytes: int) -> dict[str, Any]:
        """Receives an object. Its reservation ends, whatever comes of it: who tries again reserves again.

        Raises:
            ValueError: The body is longer than what was promised: it is not received, so that the connection ends.
            OSError: The connection failed.
        """
        name = str(request.get("name"))
        most = self._reserved[name].num_bytes if name in self._reserved else SMALL_BYTES
        if num_bytes > most:
            raise ValueError(f"a body of {num_bytes:,} bytes, and {most:,} were promised")
        if name not in self._reserved:
            answer = self._of_holder({"op": "reserve", "name": name, "bytes": num_bytes})
            if "errno" in answer:
                skip_body(self._peer, num_bytes)
                return answer
            self._reserved[name] = _Reserved(num_bytes, None, 0, 0)
        reserved = self._reserved[name]
        try:
            try:
                wanted, crc = self._wanted(request)
                spare, reserved.spare = reserved.spare, None
                arriving = ArrivingFile(spare, num_bytes)
            except Exception as error:
                skip_body(self._peer, num_bytes)
                return refusal(error)
            with arriving:
                arriving.receive(self._peer, lambda begin, end: self._take(reserved, begin, end))
                try:
                    self._require_undamaged(name, arriving, crc)
                except OSError as error:
                    return refusal(error)
                return self._of_holder(wanted, arriving.given())
        finally:
            self._forget(name)

    def _wanted(self, request: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """Returns what the holder is asked for, and the CRC-32 of the body; None if the file has its own."""
        if "if" in request:
            raise OSError(errno.EOPNOTSUPP, "a process of another machine may not put on a condition")
        name = str(request["name"])
        crc = None if name.endswith(_WITH_CRCS) else int(request["crc"])
        return {"op": "put", "name": name, "stays": bool(request["stays"])}, crc

    def _take(self, reserved: _Reserved, begin: int, end: int) -> None:
        """Notes that a piece has taken memory of the machine, which is promised no more."""
        taken = min(reserved.promised, max(0, end - max(begin, reserved.there)))
        reserved.promised -= taken
        self._promises.give_back(taken)

    def _require_undamaged(self, name: str, arriving: ArrivingFile, crc: int | None) -> None:
        if crc is None:
            try:
                self._check(arriving.fd)
            except Exception as error:  # whatever it says, nothing says that the file is as it was
                raise OSError(errno.EBADMSG, f"what arrived of {name!r} is damaged: {error}") from error
        elif (got := arriving.crc32()) != crc:
            raise OSError(
                errno.EBADMSG,
                f"what arrived of {name!r} is damaged: its CRC-32 is {got:#010x}, and that of what was sent is "
                f"{crc:#010x}",
            )

    @contextmanager
    def _opened(self, request: dict[str, Any]) -> Iterator[_Part]:
        """Yields a part of an object. Until it is sent, nobody writes over the file."""
        name, begin, most = str(request["name"]), int(request["offset"]), int(request["bytes"])
        if begin < 0 or most < 0:
            raise ValueError(f"{most} bytes from {begin} are no part of an object")
        with self._lock:
            answer, fd = self._holder.answer(self._number, {"op": "get", "name": name}, None)
        if fd is None:
            raise OSError(answer["errno"], answer["why"])
        try:
            if request["e_tag"] not in (None, answer["e_tag"]):
                raise OSError(errno.ESTALE, "there is another version")
            num_bytes = max(0, min(most, MOST_BODY_BYTES, answer["size"] - begin))
            yield _Part({"size": answer["size"], "e_tag": answer["e_tag"]}, fd, begin, num_bytes)
        finally:
            os.close(fd)
            with self._lock:
                self._holder.has_read(self._number, name)
