# SPDX-License-Identifier: Apache-2.0
"""Ports of this machine for servers that are told their port."""

from __future__ import annotations

import itertools
import random
import socket

__all__ = ["free_port", "new_address"]

# Below those that systems give to connections by themselves, one of which could take the port before the server does.
_PORTS = range(10_000, 22_000)
_numbers = itertools.count()


def new_address() -> str:
    """Returns a loopback address that no other server of this process has had.

    What this process keeps of a server, by its address, is then never taken for that of a later one on the same port.
    """
    number = next(_numbers) % (1 << 16)
    return f"127.1.{number >> 8}.{number & 255}"


def free_port(*offsets: int) -> int:
    """Returns a port on which nobody listens, drawn at random, so that tests at the same time get others.

    Args:
        offsets: Nobody listens on the ports that are so much higher, either.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.choice(_PORTS)
        try:
            for offset in (0, *offsets):
                with socket.socket() as free:
                    free.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        return port
