# SPDX-License-Identifier: Apache-2.0
"""The handshake between a holder and a peer, and frames: what is none, and ends that come too early."""

from __future__ import annotations

import errno
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from support.peer_runs import LIMIT_S, TOKEN, admitted

from bytecheckpoint.storage.memory.peer_frames import (
    MAGIC,
    MOST_REQUEST_BYTES,
    admit,
    enter,
    receive_frame,
    receive_into,
    require_token,
    send_file,
    send_frame,
    skip_body,
)

OTHER = b"another token, which has 32 bytes"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), LIMIT_S)
        theirs, _ = listener.accept()
        theirs.settimeout(LIMIT_S)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("tokens", [(TOKEN,), (OTHER, TOKEN), (TOKEN, OTHER)])
def test_the_right_token(tokens: tuple[bytes, ...]) -> None:
    with admitted(*tokens) as (client, outcome):
        enter(client, TOKEN)
        assert client.gettimeout() == LIMIT_S
        assert outcome.result()


@pytest.mark.parametrize("tokens", [(), (OTHER,), (TOKEN[:-1],)])
def test_a_wrong_token(tokens: tuple[bytes, ...]) -> None:
    with admitted(*tokens) as (client, outcome):
        with pytest.raises(PermissionError, match="the token does not match: the holder has refused it"):
            enter(client, TOKEN)
        assert not outcome.result()


def test_a_server_that_does_not_know_the_token(pair: tuple[socket.socket, socket.socket]) -> None:
    """It sends back what it was sent: the proof of a client is none of a server."""
    client, server = pair
    server.sendall(MAGIC + bytes(32))
    thread = threading.Thread(target=lambda: server.sendall(server.recv(72, socket.MSG_WAITALL)[40:]))
    thread.start()
    with pytest.raises(PermissionError, match="what answers there does not know it"):
        enter(client, TOKEN)
    thread.join()


def test_what_was_sent_is_of_no_use_again() -> None:
    """Neither the token nor what would be accepted another time goes over the network."""
    with admitted(TOKEN) as (client, outcome):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(client.recv(40, socket.MSG_WAITALL))
            with pytest.raises(OSError, match="in time"):
                enter(theirs, TOKEN, 0.1)
            sent = ours.recv(1000)
        client.sendall(sent)
        proof = client.recv(1000)
        assert outcome.result()
    assert len(sent) == 72
    assert len(proof) == 32
    assert TOKEN not in sent + proof
    with admitted(TOKEN) as (client, outcome):
        client.sendall(sent)
        assert not outcome.result()


def test_a_server_of_another_version(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    server.sendall(MAGIC[:-1] + b"\x63" + bytes(32))
    with pytest.raises(OSError, match="it is of another version") as failed:
        enter(client, TOKEN)
    assert failed.value.errno == errno.EPROTO


def test_a_server_that_closes_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    server.close()
    with pytest.raises(ConnectionError):
        enter(client, TOKEN)


@pytest.mark.parametrize(
    "said", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n" * 9, MAGIC[:-1] + b"\x63" + bytes(64), MAGIC, MAGIC + bytes(64)]
)
@pytest.mark.parametrize("ends", [True, False])
def test_a_client_that_says_something_else(said: bytes, ends: bool) -> None:
    with admitted(TOKEN, within_s=0.2) as (client, outcome):
        client.sendall(said)
        if ends:
            client.close()
        assert outcome.result(LIMIT_S) is False


def test_a_client_of_another_version() -> None:
    """All else of its handshake is right."""
    with admitted(TOKEN) as (client, outcome):
        nonce = client.recv(40, socket.MSG_WAITALL)[len(MAGIC) :]
        proof = hmac.digest(TOKEN, b"client" + nonce + bytes(32), "sha256")
        client.sendall(MAGIC[:-1] + b"\x63" + bytes(32) + proof)
        assert not outcome.result()


def test_a_client_that_is_slow_on_purpose() -> None:
    """Each byte comes in time, and all of them do not."""
    begin = time.monotonic()
    with admitted(TOKEN, within_s=0.3) as (client, outcome):
        while not outcome.done():
            assert time.monotonic() - begin < LIMIT_S
            try:
                client.sendall(MAGIC[:1])
            except OSError:
                break
            time.sleep(0.05)
        assert outcome.result(LIMIT_S) is False


def test_a_slow_client_is_not_waited_for_longer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        begin = time.monotonic()
        assert not admit(theirs, [TOKEN], 0.2)
        assert 0.2 <= time.monotonic() - begin < 5


def test_a_token_that_could_be_guessed() -> None:
    require_token(bytes(16))
    with pytest.raises(ValueError, match="needs 16 bytes, and this one has 15"):
        require_token(bytes(15))


@pytest.mark.parametrize("num_bytes", [0, 1, 70_000, 20 << 20])
def test_frames(pair: tuple[socket.socket, socket.socket], num_bytes: int) -> None:
    """Bytes of a body, of a file and of a part of one; what is behind a body that is skipped."""
    ours, theirs = pair
    body = os.urandom(num_bytes)
    fd = os.memfd_create("body")
    os.write(fd, b"12345" + body)

    def send() -> None:
        for _ in range(2):
            send_frame(ours, {"of": "bytes"}, memoryview(body))
        send_file(ours, {"of": "file"}, fd, num_bytes, 5)
        ours.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    assert receive_frame(theirs, 100) == ({"of": "bytes"}, num_bytes)
    skip_body(theirs, num_bytes)
    for message in ({"of": "bytes"}, {"of": "file"}):
        assert receive_frame(theirs, 100) == (message, num_bytes)
        received = bytearray(num_bytes)
        receive_into(theirs, memoryview(received))
        assert received == body
    assert receive_frame(theirs, 100) is None
    thread.join()
    assert os.lseek(fd, 0, os.SEEK_CUR) == 5 + num_bytes
    os.close(fd)


def test_a_file_that_is_too_short(pair: tuple[socket.socket, socket.socket]) -> None:
    fd = os.memfd_create("body")
    os.write(fd, b"12345")
    with pytest.raises(OSError, match="the file ends 7 bytes before the body does"):
        send_file(pair[0], {}, fd, 10, 2)
    os.close(fd)


def test_a_file_that_nobody_receives(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].settimeout(0.1)
    fd = os.memfd_create("body")
    os.ftruncate(fd, 64 << 20)
    with pytest.raises(TimeoutError):
        send_file(pair[0], {}, fd, 64 << 20)
    os.close(fd)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"{", "Expecting"),
        (b"", "Expecting"),
        (b"[]", "no object"),
        (b"1", "no object"),
        (b"\xff\xff", "can't decode|utf"),
        (b"[" * 50_000, "nested too deeply"),
        (b"1" * 5000, "digits"),
    ],
)
def test_headers_that_are_none(pair: tuple[socket.socket, socket.socket], header: bytes, text: str) -> None:
    pair[0].sendall(struct.pack("<IQ", len(header), 0) + header)
    with pytest.raises(ValueError, match=text):
        receive_frame(pair[1], MOST_REQUEST_BYTES)


def test_a_header_that_is_too_long(pair: tuple[socket.socket, socket.socket]) -> None:
    """It is refused before anything of it is received, or memory is taken for it."""
    exact = b'{"a":"' + b"x" * (MOST_REQUEST_BYTES - 8) + b'"}'
    pair[0].sendall(struct.pack("<IQ", len(exact), 7) + exact)
    assert receive_frame(pair[1], MOST_REQUEST_BYTES) == (json.loads(exact), 7)
    pair[0].sendall(struct.pack("<IQ", MOST_REQUEST_BYTES + 1, 0))
    with pytest.raises(ValueError, match="a header of 65,537 bytes, and 65,536 are allowed"):
        receive_frame(pair[1], MOST_REQUEST_BYTES)
    with pytest.raises(ValueError, match="are allowed"):
        send_frame(pair[0], {"a": "x" * (64 << 20)})


def test_ends_within_a_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    whole = struct.pack("<IQ", 2, 3) + b"{}" + b"abc"
    for end in range(len(whole)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(whole[:end])
            ours.close()
            if end == 0:
                assert receive_frame(theirs, 100) is None
            elif end < 14:
                with pytest.raises(ConnectionError):
                    receive_frame(theirs, 100)
            else:
                assert receive_frame(theirs, 100) == ({}, 3)
                with pytest.raises(ConnectionError):
                    receive_into(theirs, memoryview(bytearray(3)))
