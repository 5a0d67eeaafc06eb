# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of a store: counts its requests, makes its link slow, and lets requests fail in every way."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from support.ports import new_address

__all__ = ["Fault", "Request", "StoreProxy"]

_PIECE = 1 << 18
_LIMIT_S = 30.0
_REASONS = {403: "Forbidden", 412: "Precondition Failed", 429: "Too Many Requests", 500: "Error", 503: "Slow Down"}


@dataclass(frozen=True)
class Request:
    """One request of a client.

    Attributes:
        number: How many requests came before it.
        method: ``GET``, ``PUT``, ...
        target: Path and query.
        headers: By name, in lower case.
        num_bytes: Of its body.
    """

    number: int
    method: str
    target: str
    headers: dict[str, str] = field(repr=False)
    num_bytes: int


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    Attributes:
        status: Answer with this status and ``code``; the store never sees the request.
        code: Code of S3 in that answer.
        drops_request: Close the connection; the store never sees the request.
        drops_reply: Let the store carry it out, and close the connection instead of replying.
        truncates: Close the connection in the middle of the body of the reply.
        flips: Flip a bit in the middle of the body of the reply.
        flips_request: Flip a bit in the middle of the body of the request.
        refuses: Close the connection, and accept none any more.
        delay_s: Wait before anything else.
    """

    status: int = 0
    code: str = "SlowDown"
    drops_request: bool = False
    drops_reply: bool = False
    truncates: bool = False
    flips: bool = False
    flips_request: bool = False
    refuses: bool = False
    delay_s: float = 0.0


class _Link:
    """One direction of a link that all connections share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def pass_through(self, num_bytes: int) -> None:
        if self._bytes_per_s:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.01) + num_bytes / self._bytes_per_s
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)


class StoreProxy:
    """Listens on a free loopback port. Runs in a thread of its own, until ``close``.

    Attributes:
        endpoint: URL to use instead of the store's.
        requests: The requests so far, in the order in which they came.
        rule: Called for each request; returns what happens to it. None: nothing unusual.
    """

    def __init__(
        self,
        upstream: str,
        rule: Callable[[Request], Fault | None] | None = None,
        *,
        bytes_per_s: float = 0.0,
        latency_s: float = 0.0,
    ) -> None:
        self.requests: list[Request] = []
        self.rule = rule
        place = urlsplit(upstream)
        self._upstream = place.hostname or "", place.port or 80
        self._latency_s = latency_s
        self._up, self._down = _Link(bytes_per_s), _Link(bytes_per_s)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        address = new_address()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, address, 0, limit=_PIECE))
        self.endpoint = f"http://{address}:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-proxy", daemon=True)
        self._thread.start()

    def wait_until_idle(self) -> None:
        """Waits until no connection is open: nothing that a client has sent is still on its way."""

        async def wait() -> None:
            while self._tasks:
                await asyncio.wait([*self._tasks])

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(_LIMIT_S)

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            for task in [*self._tasks]:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream: list[asyncio.StreamWriter] = []
        try:
            # Python 3.11 prints a traceback for each such task that ends as cancelled, which ``close`` does to all.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                store, store_writer = await asyncio.open_connection(*self._upstream, limit=_PIECE)
                upstream.append(store_writer)
                while await self._exchange(reader, writer, store, store_writer):
                    pass
        finally:
            for each in (writer, *upstream):
                each.transport.abort()
            self._tasks.discard(task)

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        store: asyncio.StreamReader,
        store_writer: asyncio.StreamWriter,
    ) -> bool:
        """Passes one request on, and its reply back. Returns whether the connection goes on."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, headers = _parsed(head)
        request = Request(len(self.requests), method, target, headers, int(headers.get("content-length", 0)))
        self.requests.append(request)
        fault = (self.rule(request) if self.rule else None) or Fault()
        await asyncio.sleep(fault.delay_s + self._latency_s)
        if fault.refuses:
            self._server.close()
        if fault.drops_request or fault.refuses:
            return False
        if fault.status:
            await _relay_body(reader, None, headers, self._up)
            body = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
            reason = _REASONS.get(fault.status, "")
            writer.write(f"HTTP/1.1 {fault.status} {reason}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            return True
        store_writer.write(head)
        await _relay_body(
            reader, store_writer, headers, self._up, _change(request.num_bytes, flips=fault.flips_request)
        )
        reply = await store.readuntil(b"\r\n\r\n")
        has_body = method != "HEAD" and reply.split(b" ", 2)[1] not in (b"204", b"304")
        if fault.drops_reply:
            if has_body:
                await _relay_body(store, None, _headers(reply), self._down)
            return False
        writer.write(reply)
        if has_body:
            num_bytes = int(_headers(reply).get("content-length", 0))
            change = _change(num_bytes, flips=fault.flips, truncates=fault.truncates)
            return await _relay_body(store, writer, _headers(reply), self._down, change)
        await writer.drain()
        return True


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    method, target, _ = head.partition(b"\r\n")[0].decode("latin-1").split(" ", 2)
    return method, target, _headers(head)


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


def _change(num_bytes: int, *, flips: bool, truncates: bool = False) -> Callable[[int, bytes], bytes | None]:
    """Returns what a fault makes of a piece of a body at some position; None ends the connection there."""
    middle = num_bytes // 2

    def change(position: int, piece: bytes) -> bytes | None:
        if not position <= middle < position + len(piece):
            return piece
        if truncates:
            return None
        if flips:
            at = middle - position
            return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
        return piece

    return change


async def _relay_body(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter | None,
    headers: dict[str, str],
    link: _Link,
    change: Callable[[int, bytes], bytes | None] = lambda _, piece: piece,
) -> bool:
    """Passes a body on, or drops it without ``writer``. Returns False if ``change`` ends the connection."""
    if headers.get("transfer-encoding") == "chunked":
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.partition(b";")[0], 16)
            piece = await reader.readexactly(size + 2)
            if writer is not None:
                writer.write(line + piece)
                await writer.drain()
            if size == 0:
                return True
    left = int(headers.get("content-length", 0))
    position = 0
    while left:
        piece = await reader.read(min(left, _PIECE))
        if not piece:
            raise asyncio.IncompleteReadError(piece, left)
        left -= len(piece)
        await link.pass_through(len(piece))
        changed = change(position, piece)
        position += len(piece)
        if changed is None:
            return False
        if writer is not None:
            writer.write(changed)
            await writer.drain()
    return True


def main() -> None:
    """Runs a proxy until its standard input ends; each line on it is answered with the requests since the last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("upstream")
    parser.add_argument("--bytes-per-s", type=float, default=0.0)
    parser.add_argument("--latency-s", type=float, default=0.0)
    arguments = parser.parse_args()
    proxy = StoreProxy(arguments.upstream, bytes_per_s=arguments.bytes_per_s, latency_s=arguments.latency_s)
    print(proxy.endpoint, flush=True)
    for _ in sys.stdin:
        said: list[Any] = [[request.method, request.target, request.num_bytes] for request in proxy.requests]
        proxy.requests.clear()
        print(json.dumps(said), flush=True)
    proxy.close()


if __name__ == "__main__":
    main()
