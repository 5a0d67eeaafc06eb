# SPDX-License-Identifier: Apache-2.0
"""Connections between the first rank of a process group and each of the others, for signs of life alone."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import struct
import time

import torch.distributed as dist

from bytecheckpoint.distributed.collectives import all_gather, broadcast
from bytecheckpoint.distributed.sent_data import is_loopback, plain_address
from bytecheckpoint.errors import CheckpointError, sendable
from bytecheckpoint.runtime.place import Place, name_own_address, own_place

__all__ = ["address_of", "connect_star", "own_addresses"]

_TOKEN_BYTES = 16
_RANK = struct.Struct("<I")
_WELCOME = b"\1"
_ALL_CONNECTED_S = 60.0
# For one address; a firewall may drop packets without an answer.
_ONE_ADDRESS_S = 5.0
_SIOCGIFADDR = 0x8915


def connect_star(group: dist.ProcessGroup) -> tuple[dict[int, socket.socket], list[Place]]:
    """Connects rank 0 of ``group`` with each other rank. Collective over ``group``.

    It does not use the sockets of the group: gloo cannot tell whether a peer is still there without waiting for it, and
    a wait that reaches its timeout ends the whole group.

    Returns:
        On rank 0 the connections to all others, by rank; on the others the connection to rank 0. And where each rank
        runs, by rank.

    Raises:
        CheckpointError: Some rank cannot reach rank 0; raised on all ranks.
    """
    links: dict[int, socket.socket] = {}
    failure: BaseException | None = None
    listener: socket.socket | None = None
    offer: tuple[int, list[str], bytes] | None = None
    if group.rank() == 0:
        with contextlib.suppress(OSError):  # then `offer` stays None, which all ranks report
            listener = _listen(group.size())
            offer = listener.getsockname()[1], own_addresses(), secrets.token_bytes(_TOKEN_BYTES)
    offer = broadcast(group, offer, 0)
    try:
        if offer is None:
            raise CheckpointError("rank 0 cannot listen for connections")
        port, addresses, token = offer
        if listener is not None:
            _accept(listener, token, group.size(), links)
        else:
            links[0] = _connect(addresses, port, token, group.rank())
    except Exception as error:
        failure = error
    finally:
        if listener is not None:
            listener.close()
    for link in links.values():
        _note_address(link)
    answers = all_gather(group, (None if failure is None else sendable(failure), own_place()))
    said = [f"rank {rank} on {place}: {error}" for rank, (error, place) in enumerate(answers) if error is not None]
    if said:
        for link in links.values():
            link.close()
        raise CheckpointError(
            f"ranks cannot connect to rank 0 of their process group, on {answers[0][1]}: {'; '.join(said)}"
        )
    return links, [place for _, place in answers]


def _note_address(link: socket.socket) -> None:
    """Notes the address of this process in a connection to another machine."""
    with contextlib.suppress(OSError):
        address = plain_address(str(link.getsockname()[0]))
        if not own_place().address and not is_loopback(address):
            name_own_address(address)


def _listen(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def address_of(interface: str) -> str:
    """Returns the IPv4 address of a network interface; an address is returned as it is.

    Raises:
        OSError: There is no such interface, or it has none.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def own_addresses() -> list[str]:
    """Returns addresses at which others may find this host, the likeliest first.

    These are the address of the interface that gloo was told to use, those that the host name resolves to, the one from
    which this host reaches the master, and the loopback address for ranks on this host.
    """
    found = []
    with contextlib.suppress(OSError):
        name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        found += [address_of(name)] if name else []
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    master = os.environ.get("MASTER_ADDR")
    if master:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing
            found.append(probe.getsockname()[0])
    found.append("127.0.0.1")
    return sorted(dict.fromkeys(found), key=is_loopback)


def _accept(listener: socket.socket, token: bytes, size: int, links: dict[int, socket.socket]) -> None:
    """Accepts connections until all ranks have come. Refuses whoever does not know the token."""
    end = time.monotonic() + _ALL_CONNECTED_S
    while len(links) < size - 1:
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            link, _ = listener.accept()
        except TimeoutError:
            missing = [rank for rank in range(1, size) if rank not in links]
            raise TimeoutError(f"ranks {missing} have not connected within {_ALL_CONNECTED_S:g} s") from None
        try:
            link.settimeout(_ONE_ADDRESS_S)
            hello = _receive(link, _TOKEN_BYTES + _RANK.size)
            if not secrets.compare_digest(hello[:_TOKEN_BYTES], token):
                raise ConnectionError("not of this group")
            link.sendall(_WELCOME)
        except OSError:
            link.close()
            continue
        links[_RANK.unpack(hello[_TOKEN_BYTES:])[0]] = link


def _connect(addresses: list[str], port: int, token: bytes, rank: int) -> socket.socket:
    reasons = []
    for address in addresses:
        try:
            link = socket.create_connection((address, port), timeout=_ONE_ADDRESS_S)
        except OSError as error:
            reasons.append(f"{address}: {error}")
            continue
        try:
            link.sendall(token + _RANK.pack(rank))
            if _receive(link, len(_WELCOME)) == _WELCOME:
                return link
        except OSError as error:
            reasons.append(f"{address}: {error}")
        link.close()
    raise ConnectionError(f"rank 0 cannot be reached at any of its addresses, port {port} ({'; '.join(reasons)})")


def _receive(link: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        piece = link.recv(num_bytes - len(received))
        if not piece:
            raise ConnectionError("the connection was closed")
        received += piece
    return received
