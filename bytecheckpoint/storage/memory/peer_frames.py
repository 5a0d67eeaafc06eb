# SPDX-License-Identifier: Apache-2.0
"""What goes over a TCP connection between a holder and a peer, which is a process of another machine.

First each shows the other that it knows the token: an HMAC of what both have drawn for this connection. The token
itself is never sent. Then there are frames: the lengths of a header and of a body, the header, which is JSON, and the
body. Nothing is encrypted: as with NCCL, whoever can read the network of the training can read the checkpoints.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "HANDSHAKE_S",
    "MAGIC",
    "MOST_HEADER_BYTES",
    "MOST_REQUEST_BYTES",
    "admit",
    "enter",
    "receive_frame",
    "receive_into",
    "require_token",
    "send_file",
    "send_frame",
    "skip_body",
]

MAGIC = b"bcppeer\x01"  # the last byte is the version of all that is in this file
HANDSHAKE_S = 10.0
MOST_HEADER_BYTES = 64 << 20  # of an answer, which may be a listing
MOST_REQUEST_BYTES = 64 << 10

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LEAST_TOKEN_BYTES = 16
_LENGTHS = struct.Struct("<IQ")
_MOST_SENT_AT_ONCE = 1 << 30  # the system takes less than 2 GiB
_MOST_SKIPPED_AT_ONCE = 1 << 20


def require_token(token: bytes) -> None:
    """Raises if a token could be guessed.

    Raises:
        ValueError: It is too short.
    """
    if len(token) < _LEAST_TOKEN_BYTES:
        raise ValueError(f"a token needs {_LEAST_TOKEN_BYTES} bytes, and this one has {len(token)}")


def admit(peer: socket.socket, tokens: Collection[bytes], within_s: float = HANDSHAKE_S) -> bool:
    """Does the part of the server in a handshake.

    Args:
        peer: The connection. Its timeout is as before when this returns.
        tokens: Those that are accepted.
        within_s: Seconds for all of it.

    Returns:
        Whether the client knows one of the tokens. If not, the caller closes the connection: also of a client that says
        nothing, something else, or too little.
    """
    before, until = peer.gettimeout(), time.monotonic() + within_s
    mine = secrets.token_bytes(_NONCE_BYTES)
    try:
        _send_until(peer, MAGIC + mine, until)
        if _exactly(peer, len(MAGIC), until) != MAGIC:
            return False
        theirs, proof = _exactly(peer, _NONCE_BYTES, until), _exactly(peer, _PROOF_BYTES, until)
        # All are compared, so that the time does not tell which one it is.
        matching = [each for each in tokens if hmac.compare_digest(proof, _proof(each, b"client", mine, theirs))]
        if not matching:
            return False
        _send_until(peer, _proof(matching[0], b"server", theirs, mine), until)
        peer.settimeout(before)
    except OSError:
        return False
    return True


def enter(peer: socket.socket, token: bytes, within_s: float = HANDSHAKE_S) -> None:
    """Does the part of the client in a handshake.

    Args:
        peer: The connection. Its timeout is as before when this returns.
        token: What the server accepts.
        within_s: Seconds for all of it.

    Raises:
        PermissionError: The token is not that of the server.
        ConnectionError: The server has closed the connection at once: it has too many of them, or is ending.
        OSError: The server is of another version (EPROTO), or does not answer in time.
    """
    before, until = peer.gettimeout(), time.monotonic() + within_s
    mine = secrets.token_bytes(_NONCE_BYTES)
    if _exactly(peer, len(MAGIC), until) != MAGIC:
        raise OSError(errno.EPROTO, "what answers there is no holder, or it is of another version")
    theirs = _exactly(peer, _NONCE_BYTES, until)
    _send_until(peer, MAGIC + mine + _proof(token, b"client", theirs, mine), until)
    try:
        proof = _exactly(peer, _PROOF_BYTES, until)
    except ConnectionError:
        raise PermissionError(errno.EACCES, "the token does not match: the holder has refused it") from None
    if not hmac.compare_digest(proof, _proof(token, b"server", mine, theirs)):
        raise PermissionError(errno.EACCES, "the token does not match: what answers there does not know it")
    peer.settimeout(before)


def send_frame(peer: socket.socket, message: dict[str, Any], body: bytes | memoryview = b"") -> None:
    """Sends a frame.

    Args:
        peer: The connection.
        message: Plain values.
        body: Bytes behind it.

    Raises:
        ValueError: The message is longer than ``MOST_HEADER_BYTES``; nothing was sent.
        OSError: The other end is gone.
    """
    num_bytes = memoryview(body).nbytes
    peer.sendall(_header(message, num_bytes), socket.MSG_MORE if num_bytes else 0)
    if num_bytes:
        peer.sendall(body)


def send_file(peer: socket.socket, message: dict[str, Any], fd: int, num_bytes: int, offset: int = 0) -> None:
    """Sends a frame whose body is a part of a file.

    Args:
        peer: The connection; one with a timeout, too.
        message: Plain values.
        fd: The file. Its own position is neither used nor moved.
        num_bytes: Bytes of the body.
        offset: Where the part begins.

    Raises:
        ValueError: The message is longer than ``MOST_HEADER_BYTES``; nothing was sent.
        OSError: The other end is gone, or the file has less: then the connection is of no use any more.
    """
    peer.sendall(_header(message, num_bytes), socket.MSG_MORE if num_bytes else 0)
    at, end = offset, offset + num_bytes
    while at < end:
        try:
            sent = os.sendfile(peer.fileno(), fd, at, min(end - at, _MOST_SENT_AT_ONCE))
        except BlockingIOError:  # a connection with a timeout, whose buffer is full
            _wait_until_writable(peer)
            continue
        if not sent:
            raise OSError(errno.EIO, f"the file ends {end - at:,} bytes before the body does")
        at += sent


def receive_frame(peer: socket.socket, most_header_bytes: int) -> tuple[dict[str, Any], int] | None:
    """Receives the header of a frame; the caller receives the body then.

    Args:
        peer: The connection.
        most_header_bytes: What is longer is no frame.

    Returns:
        The message, and the number of bytes of the body; None if the other end closed the connection between frames.

    Raises:
        ValueError: It is no frame. The connection is of no use any more.
        OSError: The connection failed, or ended within the frame.
    """
    first = peer.recv(1)
    if not first:
        return None
    num_header_bytes, num_bytes = _LENGTHS.unpack(first + _received(peer, _LENGTHS.size - 1))
    if num_header_bytes > most_header_bytes:
        raise ValueError(f"a header of {num_header_bytes:,} bytes, and {most_header_bytes:,} are allowed")
    try:
        message = json.loads(_received(peer, num_header_bytes))
    except RecursionError:
        raise ValueError("a header that is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a header that is no object")
    return message, num_bytes


def receive_into(peer: socket.socket, view: memoryview) -> None:
    """Receives as many bytes as fill a view.

    Args:
        peer: The connection.
        view: Bytes, one after the other.

    Raises:
        ConnectionResetError: The other end went before.
        OSError: The connection failed.
    """
    at = 0
    while at < view.nbytes:
        with view[at:] as rest:
            num_bytes = peer.recv_into(rest, 0, socket.MSG_WAITALL)
        if not num_bytes:
            raise ConnectionResetError(errno.ECONNRESET, "the other end has gone")
        at += num_bytes


def skip_body(peer: socket.socket, num_bytes: int) -> None:
    """Receives the body of a frame that is refused, so that the next frame can be received.

    Args:
        peer: The connection.
        num_bytes: Bytes of the body.

    Raises:
        OSError: The connection failed, or ended.
    """
    view = memoryview(bytearray(min(num_bytes, _MOST_SKIPPED_AT_ONCE)))
    while num_bytes:
        piece = view[:num_bytes]
        receive_into(peer, piece)
        num_bytes -= piece.nbytes


def _header(message: dict[str, Any], num_bytes: int) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {len(data):,} bytes, and {MOST_HEADER_BYTES:,} are allowed")
    return _LENGTHS.pack(len(data), num_bytes) + data


def _proof(token: bytes, side: bytes, nonce: bytes, own_nonce: bytes) -> bytes:
    return hmac.digest(token, side + nonce + own_nonce, "sha256")


def _received(peer: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    with memoryview(data) as view:
        receive_into(peer, view)
    return bytes(data)


def _exactly(peer: socket.socket, num_bytes: int, until: float) -> bytes:
    """Receives so many bytes and no more, before ``until``: a peer that sends one now and then does not prolong it."""
    data = b""
    while len(data) < num_bytes:
        with _within(peer, until):
            received = peer.recv(num_bytes - len(data))
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "the other end has gone")
        data += received
    return data


def _send_until(peer: socket.socket, data: bytes, until: float) -> None:
    with _within(peer, until):
        peer.sendall(data)


@contextmanager
def _within(peer: socket.socket, until: float) -> Iterator[None]:
    late = TimeoutError(errno.ETIMEDOUT, "the other end does not answer in time")
    left = until - time.monotonic()
    if left <= 0:
        raise late
    peer.settimeout(left)
    try:
        yield
    except TimeoutError:
        raise late from None


def _wait_until_writable(peer: socket.socket) -> None:
    waiting = select.poll()
    waiting.register(peer, select.POLLOUT)
    timeout = peer.gettimeout()
    if not waiting.poll(None if timeout is None else timeout * 1000):
        raise TimeoutError(errno.ETIMEDOUT, "the other end does not receive")
