# SPDX-License-Identifier: Apache-2.0
"""A peer of a holder, as a test speaks for it; and services and holders that listen for one."""

from __future__ import annotations

import json
import os
import socket
import struct
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.memory.connection import HolderOptions, set_options, stop_holder, url_of_run
from bytecheckpoint.storage.memory.holder import Holder
from bytecheckpoint.storage.memory.messages import VERSION
from bytecheckpoint.storage.memory.peer_frames import (
    MOST_HEADER_BYTES,
    admit,
    enter,
    receive_frame,
    receive_into,
    send_frame,
)
from bytecheckpoint.storage.memory.peer_service import PeerService
from support.ports import new_address

__all__ = [
    "DAMAGED",
    "LIMIT_S",
    "TOKEN",
    "Peer",
    "Served",
    "admitted",
    "descriptors",
    "header_of",
    "listening_holder",
    "served",
]

LIMIT_S = 30.0
TOKEN = b"a token of 32 bytes, as it is al"
DAMAGED = b"damaged"  # what the check of data files refuses in these tests, at the begin of a file


def descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


def check(fd: int) -> None:
    if os.pread(fd, len(DAMAGED), 0) == DAMAGED:
        raise RuntimeError("block 0: the CRC is another one")


def header_of(message: dict[str, Any], num_bytes: int) -> bytes:
    """Returns a frame without its body."""
    data = json.dumps(message).encode()
    return struct.pack("<IQ", len(data), num_bytes) + data


class Peer:
    """One connection; each method returns the answer."""

    def __init__(self, service: Any, token: bytes = TOKEN) -> None:
        self.socket = socket.create_connection((service.address, service.port), LIMIT_S)
        try:
            enter(self.socket, token)
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def ask(self, op: Any, body: bytes = b"", **fields: Any) -> dict[str, Any]:
        return self.ask_for_bytes(op, body, **fields)[0]

    def ask_for_bytes(self, op: Any, body: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        send_frame(self.socket, {"op": op, **fields}, body)
        return self.receive()

    def receive(self) -> tuple[dict[str, Any], bytes]:
        received = receive_frame(self.socket, MOST_HEADER_BYTES)
        assert received is not None
        data = bytearray(received[1])
        receive_into(self.socket, memoryview(data))
        return received[0], bytes(data)

    def put(self, name: str, body: bytes, *, stays: bool = False, reserves: bool = False) -> dict[str, Any]:
        if reserves:
            assert self.ask("reserve", name=name, bytes=len(body)) == {}
        return self.ask("put", body, name=name, stays=stays, crc=zlib.crc32(body))

    def get(self, name: str, offset: int = 0, most: int = 64 << 20, e_tag: str | None = None) -> Any:
        answer, body = self.ask_for_bytes("get", name=name, e_tag=e_tag, offset=offset, bytes=most)
        return answer if "errno" in answer else body

    def names(self, below: str = "") -> list[str]:
        return [each["path"] for each in self.ask("list", below=below)["objects"]]

    def has_ended(self) -> bool:
        """Whether the service ends this connection within the limit."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def reset(self) -> None:
        """Ends as a process that is killed with bytes on their way."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()


class Served:
    """A service in this process, its objects, and what process 0 of this machine asks for."""

    def __init__(self, **arguments: Any) -> None:
        self.holder = Holder()
        self.holder.connected(0)
        self.service = PeerService(self.holder, self.holder.lock, new_address(), **{"check": check, **arguments})
        self.service.allow(TOKEN)

    def ask(self, op: str, fd: int | None = None, **fields: Any) -> tuple[dict[str, Any], int | None]:
        with self.holder.lock:
            return self.holder.answer(0, {"op": op, **fields}, fd)

    def put(self, name: str, body: bytes) -> None:
        fd = os.memfd_create("object")
        os.write(fd, body)
        assert "errno" not in self.ask("put", fd, name=name, stays=True)[0]

    def names(self) -> list[str]:
        return [each["path"] for each in self.ask("list", below="")[0]["objects"]]

    def close(self) -> None:
        self.service.close()
        self.holder.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    before = descriptors()
    yield made
    made.service.close()
    number = len(made.names())
    spares = len(made.holder._spares)
    assert made.service.promised_bytes == 0
    assert [*made.holder._peers] == [0]
    assert descriptors() == before - 1 + number + spares  # the listener is gone; an object is a file
    made.holder.close()


class ListeningHolder:
    """A holder in a process of its own, which listens."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.client = HolderClient(url_of_run(run))
        self.pid = self.client._asked({"op": "hello", "version": VERSION, "most_bytes": 0}, starts=True)["pid"]
        self.listen(new_address())

    def listen(self, address: str, token: bytes = TOKEN) -> int:
        request = {"op": "listen", "address": address, "token": token.hex()}
        self.port: int = self.client._asked(request)["port"]
        self.address = address
        return self.port


@pytest.fixture
def listening_holder() -> Iterator[ListeningHolder]:
    run = uuid.uuid4().hex
    set_options(url_of_run(run), HolderOptions(linger_s=0.5))
    yield ListeningHolder(run)
    stop_holder(run)


@contextmanager
def admitted(*tokens: bytes, within_s: float = LIMIT_S) -> Iterator[tuple[socket.socket, Any]]:
    """Yields the end of a client, and the future of what ``admit`` returns."""
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    with ours, theirs, ThreadPoolExecutor(1) as pool:

        def serve() -> bool:
            with theirs:
                return admit(theirs, tokens, within_s)

        yield ours, pool.submit(serve)
