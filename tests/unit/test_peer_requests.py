# SPDX-License-Identifier: Apache-2.0
"""What a holder makes of bytes that no peer of ours sends: it refuses them, serves the others, and keeps nothing."""

from __future__ import annotations

import contextlib
import socket
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support.peer_runs import DAMAGED, TOKEN, Peer, Served, descriptors, header_of
from support.tier_runs import wait_until

from bytecheckpoint.storage.memory.peer_frames import MAGIC

KEPT = ["kept-for-good/.metadata", "kept-for-good/a"]  # longer than any text that is drawn
NAMES = ("a", "b/a.distcp", "b/.metadata", "kept-for-good/b")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(NAMES),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3),
    max_leaves=6,
)
OPS = ("reserve", "put", "get", "head", "list", "discard", "stop", "delete", "hello", "done", "spare", "listen")
FIELDS = ("name", "names", "below", "bytes", "offset", "e_tag", "crc", "stays", "if", "spares", "address", "token")
BODIES = st.sampled_from((b"", b"1", b"x" * 3000, DAMAGED)) | st.binary(max_size=40)


@dataclass(frozen=True)
class Sent:
    message: dict[str, Any]
    body: bytes
    num_bytes: int  # that the frame says

    @property
    def data(self) -> bytes:
        return header_of(self.message, self.num_bytes) + self.body


def put(name: str, body: bytes, stays: bool, is_whole: bool) -> Sent:
    return Sent({"op": "put", "name": name, "stays": stays, "crc": zlib.crc32(body) ^ (not is_whole)}, body, len(body))


AT_RANDOM = st.builds(
    lambda op, fields, body: Sent({"op": op, **fields}, body, len(body)),
    st.sampled_from(OPS) | VALUES,
    st.dictionaries(st.sampled_from(FIELDS), VALUES),
    BODIES,
)
SIZES = st.integers(0, 4000) | st.integers(0, 1 << 62)
WELL_FORMED = st.one_of(
    st.builds(put, st.sampled_from(NAMES), BODIES, st.booleans(), st.sampled_from((True, True, False))),
    st.builds(
        lambda name, size: Sent({"op": "reserve", "name": name, "bytes": size}, b"", 0), st.sampled_from(NAMES), SIZES
    ),
    st.builds(
        lambda name, at, size: Sent({"op": "get", "name": name, "e_tag": None, "offset": at, "bytes": size}, b"", 0),
        st.sampled_from(NAMES),
        SIZES,
        SIZES,
    ),
    st.builds(
        lambda op, below: Sent({"op": op, "below": below}, b"", 0),
        st.sampled_from(("list", "discard")),
        st.text(max_size=1),
    ),
)
WRONG_LENGTH = st.builds(
    lambda sent, size: Sent(sent.message, sent.body, size), WELL_FORMED, st.integers(0, (1 << 64) - 1)
)
FRAMES = st.builds(
    lambda first, wrong, last: first + wrong + last,  # what is wrong may end the connection: not always at once
    st.lists(WELL_FORMED, max_size=5),
    st.lists(AT_RANDOM | WRONG_LENGTH, max_size=2),
    st.lists(WELL_FORMED, max_size=2),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    made.holder._most_bytes = 1 << 20  # so that no example takes memory
    for name in KEPT:
        made.put(name, b"kept")
    yield made
    made.close()


def exchange(connection: socket.socket, data: bytes) -> bytes:
    """Sends all of it, and returns what comes until the service ends the connection, which it may do at any time."""
    answered = b""
    with contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionError):
        while received := connection.recv(1 << 16):
            answered += received
    return answered


def may_stay(sent: list[Sent]) -> set[str]:
    """Returns what an honest peer could have put for ever with these requests, and no more."""
    puts = [each.message for each in sent if each.message.get("op") == "put"]
    folders = {str(each.get("name")).rpartition("/")[0] for each in puts if str(each.get("name")).endswith(".metadata")}
    names = {str(each.get("name")) for each in puts if each.get("stays")}
    return names | {str(each.get("name")) for each in puts if str(each.get("name")).rpartition("/")[0] in folders}


def test_frames_at_random(served: Served) -> None:
    outcomes: Counter[str] = Counter()
    before = descriptors()

    @settings(max_examples=250, deadline=None)
    @given(frames=FRAMES, noise=st.binary(max_size=60), cut=st.none() | st.integers(1, 40))
    def look(frames: list[Sent], noise: bytes, cut: int | None) -> None:
        data = b"".join(each.data for each in frames) + noise
        with Peer(served.service) as peer:
            exchange(peer.socket, data[:-cut] if cut else data)
        wait_until(lambda: served.service.num_connections == 0)
        stayed = {*served.names()} - {*KEPT}
        outcomes["stayed"] += bool(stayed)
        assert stayed <= may_stay(frames)
        assert [*served.holder._peers] == [0]
        assert served.service.promised_bytes == 0
        with Peer(served.service) as peer:
            assert [peer.get(name) for name in KEPT] == [b"kept", b"kept"]
        served.ask("delete", names=[*stayed], spares=False)
        wait_until(lambda: served.service.num_connections == 0)
        assert descriptors() <= before  # what earlier tests have left may go meanwhile

    look()
    assert outcomes["stayed"] >= 20, "the examples do not reach the objects"


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200), starts=st.sampled_from((b"", MAGIC, MAGIC + bytes(31), MAGIC + bytes(64))))
def test_bytes_of_nobody(served: Served, data: bytes, starts: bytes) -> None:
    """Of who has no token: nothing is put, nothing is told, and it does not count as a peer."""
    before = descriptors()
    with socket.create_connection((served.service.address, served.service.port), 30) as plain:
        answered = exchange(plain, starts + data)
    assert len(answered) <= 40
    assert TOKEN not in answered
    wait_until(lambda: served.service.num_connections == 0)
    assert served.names() == KEPT
    assert [*served.holder._peers] == [0]
    assert descriptors() <= before  # what earlier tests have left may go meanwhile
