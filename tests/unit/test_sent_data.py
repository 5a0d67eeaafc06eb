# SPDX-License-Identifier: Apache-2.0
"""Data that do not move are told from a receiver that is slow, or that takes nothing for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bytecheckpoint.distributed.sent_data import (
    Sending,
    SentData,
    address_of_bytes,
    address_to_bytes,
    own_sockets,
    plain_address,
)

LIMIT_S = 0.5
SLOW_BYTES_PER_S = 1 << 20


class Said:
    """What TCP says about a connection, as the test sets it."""

    def __init__(self) -> None:
        self.sending: Sending | None = Sending("10.0.0.1", is_on_its_way=False, bytes_acked=0)

    def ask(self, descriptor: int, inode: int) -> Sending | None:
        return self.sending

    def set(self, **fields: object) -> None:
        assert self.sending is not None
        self.sending = replace(self.sending, **fields)  # type: ignore[arg-type]


def test_what_stays_on_its_way_for_longer_than_the_limit_does_not_move() -> None:
    said = Said()
    sent = SentData({3: 1}, said.ask)
    assert sent.stuck(0, 10) == []
    said.set(is_on_its_way=True)
    assert [sent.stuck(now, 10) for now in (1, 6, 11)] == [[], [], []]
    assert sent.stuck(11.1, 10) == ["10.0.0.1"]
    said.set(bytes_acked=1)  # the least that arrives is movement
    assert [sent.stuck(now, 10) for now in (12, 22)] == [[], []]
    assert sent.stuck(22.1, 10) == ["10.0.0.1"]
    sent.forget()
    assert sent.stuck(23, 10) == []
    said.set(is_on_its_way=False)
    assert [sent.stuck(now, 10) for now in (30, 60)] == [[], []]
    said.set(is_on_its_way=True)
    assert [sent.stuck(now, 10) for now in (61, 71)] == [[], []]
    said.sending = None  # closed
    assert [sent.stuck(now, 10) for now in (72, 99)] == [[], []]


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket, SentData]]:
    """Two ends of a connection, and what is sent by the first of them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = own_sockets()
        with socket.create_connection(server.getsockname()) as sender:
            sent = SentData.since(before)
            receiver, _ = server.accept()
            with receiver:
                yield sender, receiver, sent


def looks(sent: SentData, seconds: float) -> list[str]:
    """Looks often for so long, and returns what was found not to move."""
    found: set[str] = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found |= {*sent.stuck(time.monotonic(), LIMIT_S)}
        threading.Event().wait(0.02)
    return sorted(found)


def fill(sender: socket.socket) -> None:
    sender.setblocking(False)
    while True:
        try:
            sender.send(b"\0" * 65536)
        except BlockingIOError:
            return


def test_a_receiver_that_takes_nothing_is_not_accused(
    connection: tuple[socket.socket, socket.socket, SentData],
) -> None:
    """As a healthy rank does in a long fsync of its own, or one that a signal has stopped."""
    sender, _, sent = connection
    fill(sender)
    assert looks(sent, 4 * LIMIT_S) == []


def test_a_receiver_that_is_slow_is_not_accused(connection: tuple[socket.socket, socket.socket, SentData]) -> None:
    sender, receiver, sent = connection
    fill(sender)
    is_over = threading.Event()

    def receive() -> None:
        while not is_over.wait(0.05):
            receiver.recv(SLOW_BYTES_PER_S // 20)

    receiving = threading.Thread(target=receive)
    receiving.start()
    found = looks(sent, 4 * LIMIT_S)
    is_over.set()
    receiving.join()
    assert found == []


def test_a_closed_connection_is_forgotten(connection: tuple[socket.socket, socket.socket, SentData]) -> None:
    sender, _, sent = connection
    fill(sender)
    sender.close()
    assert sent.stuck(0, LIMIT_S) == []
    assert sent.stuck(9, LIMIT_S) == []


@pytest.mark.parametrize("address", ["10.77.0.13", "127.0.0.1", "fd77::11", "::1"])
def test_addresses_travel_as_bytes(address: str) -> None:
    assert address_of_bytes(address_to_bytes(address)) == address
    assert plain_address(f"::ffff:{address}" if "." in address else address) == address
