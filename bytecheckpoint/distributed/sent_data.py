# SPDX-License-Identifier: Apache-2.0
"""Whether what this process has sent to the other ranks of a group arrives, as TCP says.

Signs of life are small. Where a network drops large packets alone, as behind a switch with a smaller MTU, they pass
and data do not, and every rank waits for every other. TCP knows: bytes that were sent stay without an acknowledgement.
A receiver that is slow or has stopped is another case, because its kernel acknowledges what it has taken, and then
closes the window: nothing is on its way.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Sending", "SentData", "address_of_bytes", "address_to_bytes", "is_loopback", "own_sockets", "plain_address"]

_FDS = Path("/proc/self/fd")
# Of struct tcp_info of Linux: the size of a segment, segments on their way, and bytes acknowledged since the beginning;
# and from Linux 5.4 on bytes that wait to be sent, and how many the receiver has room for.
_MSS_AND_UNACKED = struct.Struct("<16xI4xI")
_BYTES_ACKED = struct.Struct("<120xQ")
_NOT_SENT_AND_WINDOW = struct.Struct("<144xI80xI")
_MOST_INFO_BYTES = 256


@dataclass(frozen=True)
class Sending:
    """What TCP says about one connection.

    Attributes:
        peer: Address of the other end.
        is_on_its_way: Whether something was sent that is not acknowledged yet, or should be on its way by now.
        bytes_acked: Bytes acknowledged since the connection began.
    """

    peer: str
    is_on_its_way: bool
    bytes_acked: int


def own_sockets() -> dict[int, int]:
    """Returns the sockets of this process: their inodes, by descriptor. Empty where the system does not tell."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in _FDS.iterdir():
            with contextlib.suppress(OSError):
                kind, _, inode = str(entry.readlink()).partition(":[")
                if kind == "socket":
                    found[int(entry.name)] = int(inode.rstrip("]"))
    return found


def _ask(descriptor: int, inode: int) -> Sending | None:
    """Returns what TCP says about a socket; None if it is no such connection, or is closed by now."""
    try:
        own = os.dup(descriptor)  # the owner may close it at any moment
    except OSError:
        return None
    try:
        with socket.socket(fileno=own) as connection:
            if os.fstat(own).st_ino != inode:
                return None
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MOST_INFO_BYTES)
            peer = plain_address(str(connection.getpeername()[0]))
    except (OSError, ValueError):
        return None
    if len(info) < _BYTES_ACKED.size:
        return None
    segment_bytes, unacked = _MSS_AND_UNACKED.unpack_from(info)
    is_held_back = False
    if len(info) >= _NOT_SENT_AND_WINDOW.size and unacked == 0:
        # A filter of this machine drops what TCP sends: it has room at the receiver, and still nothing is on its way.
        not_sent, window = _NOT_SENT_AND_WINDOW.unpack_from(info)
        is_held_back = not_sent > 0 and window >= segment_bytes
    return Sending(peer, unacked > 0 or is_held_back, _BYTES_ACKED.unpack_from(info)[0])


class SentData:
    """Looks at the connections of one group, from time to time.

    Args:
        sockets: Inodes of the sockets of the group, by descriptor.
        ask: Returns what TCP says about a socket; None for one that is closed.
    """

    def __init__(
        self, sockets: Mapping[int, int] | None = None, ask: Callable[[int, int], Sending | None] = _ask
    ) -> None:
        self._ask = ask
        self._sockets = {fd: inode for fd, inode in (sockets or {}).items() if ask(fd, inode) is not None}
        self._since: dict[int, tuple[float, int]] = {}  # since when nothing of what is on its way was acknowledged

    @classmethod
    def since(cls, before: Mapping[int, int]) -> SentData:
        """Returns the connections that this process has made since it had the sockets ``before``."""
        return cls({fd: inode for fd, inode in own_sockets().items() if before.get(fd) != inode})

    def forget(self) -> None:
        """Forgets what was seen: this process itself stood still."""
        self._since.clear()

    def stuck(self, now: float, limit_s: float) -> list[str]:
        """Looks once. Returns the addresses to which data do not move.

        Args:
            now: Time of the look, in seconds.
            limit_s: Data do not move if for longer than so many seconds something was on its way, and nothing of it was
                acknowledged.
        """
        addresses = []
        for fd, inode in list(self._sockets.items()):
            sending = self._ask(fd, inode)
            if sending is None:
                del self._sockets[fd]
            if sending is None or not sending.is_on_its_way:
                self._since.pop(fd, None)
                continue
            since, acked = self._since.setdefault(fd, (now, sending.bytes_acked))
            if acked != sending.bytes_acked:
                self._since[fd] = (now, sending.bytes_acked)
            elif now - since > limit_s:
                addresses.append(sending.peer)
        return sorted({*addresses})

    def own_address(self) -> str:
        """Returns the address of this process in its connections to other machines; "" if there are none."""
        for fd, inode in self._sockets.items():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode:
                    address = plain_address(str(connection.getsockname()[0]))
                    if not is_loopback(address):
                        return address
        return ""


def plain_address(address: str) -> str:
    """Returns an address in the form in which all ranks write it."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def is_loopback(address: str) -> bool:
    """Whether an address leads to the same machine from everywhere."""
    return address.startswith("127.") or address == "::1"


def address_to_bytes(address: str) -> bytes:
    """Returns an address as the 16 bytes of IPv6."""
    found = ipaddress.ip_address(address)
    return b"\0" * 10 + b"\xff\xff" + found.packed if found.version == 4 else found.packed


def address_of_bytes(packed: bytes) -> str:
    """Returns the address of what ``address_to_bytes`` returned."""
    return plain_address(str(ipaddress.IPv6Address(packed)))
