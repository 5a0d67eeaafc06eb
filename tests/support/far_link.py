# SPDX-License-Identifier: Apache-2.0
"""Makes a link long: passes each frame between two network devices on, so much later. For kernels without netem.

Usage: far_link.py DEVICE DEVICE SECONDS, in the network namespace of the devices, until it is killed.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

_ALL_FRAMES = 3  # ETH_P_ALL
_MOST_BYTES = 1 << 16
_SO_RCVBUFFORCE = 33
_OUTGOING = 4  # PACKET_OUTGOING: what this program has sent itself


def main(first: str, second: str, seconds: float) -> None:
    sockets = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES)) for _ in range(2)]
    for each, device in zip(sockets, (first, second), strict=True):
        each.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        each.bind((device, 0))
        each.setblocking(False)
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for ready in select.select(sockets, [], [], wait_s)[0]:
            frame, about = ready.recvfrom(_MOST_BYTES)
            if about[2] != _OUTGOING:
                under_way.append((time.monotonic() + seconds, sockets[ready is sockets[0]], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, target, frame = under_way.popleft()
            with suppress(OSError):  # as a link that has no room
                target.send(frame)


main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
