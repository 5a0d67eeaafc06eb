# SPDX-License-Identifier: Apache-2.0
"""Messages between a holder and the processes of its machine: JSON, and at most one descriptor.

They go over a socket of the machine (AF_UNIX, SOCK_SEQPACKET) in the abstract namespace, which keeps their bounds. What
is too long for one goes as a file in memory. Bytes of objects are never in a message.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from typing import Any

__all__ = ["PREFIX", "VERSION", "address_of", "is_of_this_user", "receive", "refusal", "send"]

VERSION = 2
PREFIX = "bytecheckpoint-holder"

_MOST_BYTES = 32 << 10
_IN_A_FILE = b"in a file"
_CREDENTIALS = struct.Struct("3i")


def address_of(run: str) -> str:
    """Returns the address of the holder of a run, for this user."""
    return f"\0{PREFIX}-{os.getuid()}-{run}"


def is_of_this_user(peer: socket.socket) -> bool:
    """Whether the process at the other end of a socket belongs to the user of this process."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid == os.getuid()


def refusal(error: Exception) -> dict[str, Any]:
    """Returns the answer to a request that failed."""
    if isinstance(error, OSError):
        return {"errno": error.errno or errno.EIO, "why": str(error.strerror or error)}
    return {"errno": errno.EINVAL, "why": f"{type(error).__name__}: {error}"}


def send(peer: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    """Sends a message.

    Args:
        peer: The socket.
        message: Plain values.
        fd: A descriptor to go along; not with a message that may be long.

    Raises:
        OSError: The other end is gone.
    """
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) <= _MOST_BYTES:
        socket.send_fds(peer, [data], [] if fd is None else [fd])
        return
    file = os.memfd_create("bytecheckpoint-message", os.MFD_CLOEXEC)
    try:
        with os.fdopen(file, "wb", closefd=False) as out:
            out.write(data)
        socket.send_fds(peer, [_IN_A_FILE], [file])
    finally:
        os.close(file)


def receive(peer: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """Receives a message, and the descriptor that came along, which the caller closes; None at the end.

    Raises:
        OSError: The socket failed.
        ValueError: It is no message.
    """
    data, fds, flags, _ = socket.recv_fds(peer, 2 * _MOST_BYTES, 4)
    if not data:
        return None
    fd = fds[0] if fds else None
    for other in fds[1:]:
        os.close(other)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > 1:
            raise ValueError("a message is cut")
        if data == _IN_A_FILE:
            if fd is None:
                raise ValueError("a message without its file")
            with os.fdopen(fd, "rb", closefd=False) as file:
                file.seek(0)
                data = file.read()
            os.close(fd)
            fd = None
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise
    return message, fd
