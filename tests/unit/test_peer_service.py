# SPDX-License-Identifier: Apache-2.0
"""What a holder does for processes of other machines: over TCP, as long as they know a token, and for nobody else."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.peer_runs import DAMAGED, Peer, Served, descriptors, header_of, listening_holder, served
from support.ports import new_address
from support.tier_runs import wait_until

from bytecheckpoint.native import _core
from bytecheckpoint.storage.memory.connection import disconnect, holders
from bytecheckpoint.storage.memory.messages import VERSION
from bytecheckpoint.storage.memory.peer_frames import send_frame

__all__ = ["listening_holder", "served"]

MIB = 1 << 20
DATA = os.urandom(20 * MIB + 5)  # more than two pieces


def refused(answer: dict[str, Any], number: int) -> str:
    """Returns why."""
    assert answer.keys() == {"errno", "why"}, answer
    assert answer["errno"] == number, answer["why"]
    return str(answer["why"])


def mapped_files(pid: int) -> list[str]:
    """Returns the files in memory that a process has mapped."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:" in line]


def test_objects(served: Served) -> None:
    served.put("run/local", b"local")
    with Peer(served.service) as peer, Peer(served.service) as other:
        put = peer.put("run/step-1/__0_0.0123456789abcdef.distcp", DATA, reserves=True)
        assert put["size"] == len(DATA)
        assert peer.put("run/step-1/empty", b"", stays=True)["size"] == 0
        assert other.ask("head", name=put["path"]) == put == served.ask("head", name=put["path"])[0]
        assert other.names("run/") == served.names() == sorted([put["path"], "run/step-1/empty", "run/local"])
        assert other.names("run/step") == [put["path"], "run/step-1/empty"]
        assert other.get(put["path"]) == DATA
        assert other.get(put["path"], e_tag=put["e_tag"]) == DATA
        assert other.get("run/local", 1, 3) == b"oca"
        assert [other.get("run/local", *part) for part in ((5, 9), (99, 9), (3, 0), (3, 99))] == [b"", b"", b"", b"al"]
        assert other.get("run/step-1/empty") == b""
        answer, _ = other.ask_for_bytes("get", name="run/local", e_tag=None, offset=0, bytes=1)
        assert answer == {"size": 5, "e_tag": other.ask("head", name="run/local")["e_tag"]}
        assert other.ask("discard", below="run/") == {}  # what others have put stays
        assert len(other.names()) == 3
        assert peer.ask("discard", below="run/") == {}
        assert other.names() == ["run/local", "run/step-1/empty"]
        refused(other.get(put["path"]), errno.ENOENT)
        refused(other.ask("head", name=put["path"]), errno.ENOENT)


def test_another_version(served: Served) -> None:
    with Peer(served.service) as peer:
        first = peer.put("a", b"first")
        second = peer.put("a", b"second")
        assert refused(peer.get("a", e_tag=first["e_tag"]), errno.ESTALE) == "there is another version"
        assert peer.get("a", e_tag=second["e_tag"]) == b"second"
        assert peer.get("a") == b"second"


def test_the_most_that_one_answer_has(served: Served) -> None:
    fd = os.memfd_create("object")
    os.ftruncate(fd, 65 * MIB)
    served.ask("put", fd, name="large", stays=True)
    with Peer(served.service) as peer:
        assert len(peer.get("large", most=1 << 40)) == 64 * MIB
        assert len(peer.get("large", 64 * MIB, 1 << 40)) == MIB


@pytest.mark.parametrize(("reserved", "size"), [(9, 10), (0, 1), (None, MIB + 1), (9, (1 << 64) - 1)])
def test_more_than_was_reserved(served: Served, reserved: int | None, size: int) -> None:
    """It ends the connection, and with it what that had put. The service waits for nothing of the body."""
    with Peer(served.service) as peer, Peer(served.service) as other:
        peer.put("before", b"1")
        if reserved is not None:
            assert peer.ask("reserve", name="a", bytes=reserved) == {}
        peer.socket.sendall(header_of({"op": "put", "name": "a", "stays": True, "crc": 0}, size))
        assert peer.has_ended()
        wait_until(lambda: other.names() == [])


def test_as_much_as_was_reserved(served: Served) -> None:
    with Peer(served.service) as peer:
        assert peer.put("a", bytes(MIB), stays=True)["size"] == MIB  # so much needs no reservation
        assert peer.ask("reserve", name="b", bytes=9) == {}
        assert peer.put("b", b"01234567", stays=True)["size"] == 8  # less is no fault
        assert peer.put("c", bytes(MIB + 1), stays=True, reserves=True)["size"] == MIB + 1


@pytest.mark.parametrize("size", [0, 100, MIB])
def test_bytes_that_changed_on_their_way(served: Served, size: int) -> None:
    before = descriptors()
    with Peer(served.service) as peer:
        body = bytes(size)
        for name, sent, crc, text in (
            ("a", body, zlib.crc32(body) ^ 1, "its CRC-32 is 0x.{8}, and that of what was sent is 0x.{8}$"),
            ("b.distcp", DAMAGED + body, None, "block 0: the CRC is another one"),
        ):
            peer.ask("reserve", name=name, bytes=len(sent))
            answer = peer.ask("put", sent, name=name, stays=True, crc=crc)
            why = refused(answer, errno.EBADMSG)
            assert re.match(f"what arrived of '{name}' is damaged: .*{text}", why)
        assert peer.names() == []
        assert served.service.promised_bytes == 0
        assert descriptors() == before + 2
        assert peer.put("a", body, stays=True, reserves=True)["size"] == size
        assert peer.put("b.distcp", body, stays=True, reserves=True)["size"] == size


def test_puts_that_are_none(served: Served) -> None:
    """They are refused, and the connection is as good as before."""
    with Peer(served.service) as peer:
        peer.ask("reserve", name="a", bytes=3 * MIB)
        assert "crc" in refused(peer.ask("put", bytes(3 * MIB), name="a", stays=True), errno.EINVAL)
        refused(peer.ask("put", b"1", stays=True, crc=0), errno.EINVAL)
        refused(peer.ask("put", b"1", name="a", crc=0), errno.EINVAL)
        refused(peer.ask("put", b"1", name="a", stays=True, crc="x"), errno.EINVAL)
        why = refused(peer.ask("put", b"1", name="a", stays=True, crc=0, **{"if": None}), errno.EOPNOTSUPP)
        assert "condition" in why
        assert peer.names() == []


@pytest.mark.parametrize("name", ["a", "b.distcp"])
def test_a_peer_that_dies_while_it_puts(listening_holder: Any, name: str) -> None:
    """In a process of its own, of which all descriptors and mappings are seen."""
    pid = listening_holder.pid
    with Peer(listening_holder) as other:
        before = descriptors(pid)
        for sent in (0, 1, 9 * MIB, len(DATA) - 1):
            peer = Peer(listening_holder)
            assert peer.put("whole", b"1")["size"] == 1
            assert peer.ask("reserve", name=name, bytes=len(DATA)) == {}
            header = header_of({"op": "put", "name": name, "stays": True, "crc": zlib.crc32(DATA)}, len(DATA))
            peer.socket.sendall(header + DATA[:sent])
            wait_until(lambda: mapped_files(pid))
            peer.reset()
            wait_until(lambda: descriptors(pid) == before)
            assert (mapped_files(pid), other.names()) == ([], [])


def test_what_is_not_committed_goes_with_its_connection(listening_holder: Any) -> None:
    with Peer(listening_holder) as other:
        with Peer(listening_holder) as peer:
            for name in ("step-1/a", "step-1/.metadata", "step-1/b", "step-2/a", "step-2/.other"):
                assert "errno" not in peer.put(name, b"1")
            peer.put("step-2/stays", b"1", stays=True)
            other.put("step-2/mine", b"1")
            # Of another one: a mark is for all that stands beside it.
            other.put("step-3/.metadata", b"1", stays=True)
            peer.put("step-3/late", b"1")
            other.put("step-3/.metadata", b"2", stays=True)
            assert len(other.names()) == 9
        stay = ["step-1/.metadata", "step-1/a", "step-2/mine", "step-2/stays", "step-3/.metadata", "step-3/late"]
        wait_until(lambda: other.names() == sorted(stay))
    wait_until(lambda: "step-2/mine" not in [each.name for each in listening_holder.client.everything("")])
    assert listening_holder.client.get("step-1/a") == b"1"


def test_the_limit_of_the_holder(served: Served) -> None:
    served.ask("hello", version=VERSION, most_bytes=1000)
    with Peer(served.service) as peer, Peer(served.service) as other:
        peer.put("a", bytes(300), stays=True)
        assert peer.ask("reserve", name="b", bytes=400) == {}
        answer = other.ask("reserve", name="c", bytes=301)
        why = "301 bytes more would be above the limit of 1,000: it holds 300, and 400 are promised"
        assert refused(answer, errno.ENOMEM) == why
        assert peer.ask("reserve", name="b", bytes=399) == {}  # in place of the other one
        assert other.ask("reserve", name="c", bytes=301) == {}
        refused(other.ask("reserve", name="c", bytes=302), errno.ENOMEM)
        assert peer.ask("discard", below="b") == {}
        assert other.ask("reserve", name="c", bytes=700) == {}
        refused(other.ask("reserve", name="d", bytes=-1), errno.EINVAL)
        assert other.put("c", bytes(700), stays=True)["size"] == 700


def test_the_limit_of_the_machine(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one peer was promised, and has not sent yet, is not promised to another one."""
    monkeypatch.setattr(_core, "available_memory_bytes", lambda: 276 * MIB)
    with Peer(served.service) as peer, Peer(served.service) as other:
        why = refused(peer.ask("reserve", name="a", bytes=20 * MIB + 1), errno.ENOMEM)
        assert why.startswith(
            "20,971,521 bytes are needed, and 268,435,456 for what else the machine does, but 289,406,976 "
        )
        assert peer.ask("reserve", name="a", bytes=15 * MIB) == {}
        why = refused(other.ask("reserve", name="b", bytes=5 * MIB + 1), errno.ENOMEM)
        assert "5,242,881 bytes are needed, 15,728,640 are promised to others, and" in why
        assert other.ask("reserve", name="b", bytes=5 * MIB) == {}
        assert served.service.promised_bytes == 20 * MIB
        assert peer.put("a", bytes(15 * MIB), stays=True)["size"] == 15 * MIB
        assert served.service.promised_bytes == 5 * MIB
        assert other.ask("discard", below="") == {}
        assert served.service.promised_bytes == 0
        monkeypatch.setattr(_core, "available_memory_bytes", lambda: -1)
        assert peer.ask("reserve", name="a", bytes=1 << 50) == {}
    wait_until(lambda: served.service.promised_bytes == 0)


def test_memory_is_used_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an object that was removed: it counts as there, and is given back with a promise."""
    with Peer(served.service) as peer:
        for step, size in ((1, 8 * MIB), (2, 9 * MIB)):  # each time the file is larger
            peer.put(f"step-{step}/__0_0.{step}.distcp", bytes(size), reserves=True, stays=True)
            inodes = {os.fstat(each.fd).st_ino for each in served.holder._objects.values()}
            served.ask("delete", names=served.names(), spares=True)
        assert {os.fstat(fd).st_ino for _, fd in served.holder._spares} == inodes
        assert len(served.holder._spares) == 1
        monkeypatch.setattr(_core, "available_memory_bytes", lambda: 257 * MIB)
        refused(peer.ask("reserve", name="step-3/__0_0.3.distcp", bytes=11 * MIB), errno.ENOMEM)
        assert served.holder._spares == []  # the machine needs it more
        monkeypatch.undo()
        peer.put("step-3/__0_0.3.distcp", bytes(9 * MIB), reserves=True, stays=True)
        inodes = {os.fstat(each.fd).st_ino for each in served.holder._objects.values()}
        served.ask("delete", names=served.names(), spares=True)
        monkeypatch.setattr(_core, "available_memory_bytes", lambda: 257 * MIB)
        name, body = "step-4/__0_0.4.distcp", os.urandom(10 * MIB)
        assert peer.ask("reserve", name=name, bytes=10 * MIB) == {}
        assert served.service.promised_bytes == MIB
        assert peer.put(name, body, stays=True)["size"] == 10 * MIB
        assert {os.fstat(each.fd).st_ino for each in served.holder._objects.values()} == inodes
        assert peer.get(name) == body


def test_nobody_writes_over_what_is_sent(served: Served) -> None:
    """An object that is removed while a peer reads it is no spare; a peer that has read it is in nobody's way."""
    with Peer(served.service) as peer:
        peer.put("step-1/a", b"1")  # it made an object beside it, and reads nevertheless
        fd = os.memfd_create("object")
        os.write(fd, bytes(64 * MIB))
        served.ask("put", fd, name="step-1/large", stays=True)
        send_frame(peer.socket, {"op": "get", "name": "step-1/large", "e_tag": None, "offset": 0, "bytes": 64 * MIB})
        wait_until(lambda: served.holder._objects["step-1/large"].readers)
        served.ask("delete", names=["step-1/large"], spares=True)
        assert served.holder._spares == []
        assert peer.receive()[1] == bytes(64 * MIB)
        served.put("step-1/b", b"read")
        assert peer.get("step-1/b") == b"read"
        wait_until(lambda: not served.holder._objects["step-1/b"].readers)
        served.ask("delete", names=["step-1/b"], spares=True)
        assert len(served.holder._spares) == 1


@pytest.mark.parametrize(
    "op", ["stop", "hello", "spare", "done", "delete", "listen", "nothing", None, [], {"a": 1}, "x" * 9999]
)
def test_requests_that_are_not_for_peers(served: Served, op: Any) -> None:
    served.put("kept", b"1")
    fields = {"names": ["kept"], "name": "kept", "spares": True, "is_done": True, "version": VERSION, "most_bytes": 1}
    with Peer(served.service) as peer:
        why = refused(peer.ask(op, address="127.0.0.1", token="00" * 32, **fields), errno.EOPNOTSUPP)
        assert why.startswith("a process of another machine may not ask for ")
        assert len(why) < 200
        assert peer.names() == ["kept"]


def test_a_body_that_belongs_to_nothing(served: Served) -> None:
    with Peer(served.service) as peer, Peer(served.service) as other:
        send_frame(peer.socket, {"op": "list", "below": ""}, b"body")
        assert peer.has_ended()
        assert other.names() == []


def test_a_slow_peer_delays_nobody(served: Served) -> None:
    with Peer(served.service) as slow, Peer(served.service) as peer:
        assert slow.ask("reserve", name="slow", bytes=len(DATA)) == {}
        slow.socket.sendall(header_of({"op": "put", "name": "slow", "stays": True, "crc": zlib.crc32(DATA)}, len(DATA)))
        slow.socket.sendall(DATA[: 10 * MIB])
        wait_until(lambda: served.service.promised_bytes == len(DATA) - 8 * MIB)  # a piece has arrived
        assert peer.put("quick", b"1")["size"] == 1
        assert served.names() == peer.names() == ["quick"]
        slow.socket.sendall(DATA[10 * MIB :])
        assert slow.receive()[0]["size"] == len(DATA)
        assert peer.get("slow") == DATA


def test_many_peers_at_once(listening_holder: Any) -> None:
    bodies = [os.urandom(100_000 + number) for number in range(64)]
    gate = threading.Barrier(len(bodies))

    def save_and_load(number: int) -> bool:
        with Peer(listening_holder) as peer:
            gate.wait()
            for step in range(3):
                peer.put(f"step-{step}/{number}", bodies[number], stays=True, reserves=True)
            gate.wait()
            other = (number + 1) % len(bodies)
            assert len(peer.names("step-1/")) == len(bodies)
            return all(peer.get(f"step-{step}/{other}") == bodies[other] for step in range(3))

    with ThreadPoolExecutor(len(bodies)) as pool:
        assert all(pool.map(save_and_load, range(len(bodies))))
    assert len(listening_holder.client.everything("")) == 3 * len(bodies)


def test_too_many_peers() -> None:
    served = Served(most_connections=2)
    with Peer(served.service), Peer(served.service) as last:
        with pytest.raises(ConnectionError):
            Peer(served.service)
        last.socket.close()
        wait_until(lambda: served.service.num_connections == 1)
        with Peer(served.service) as another:
            assert another.names() == []
    served.close()


def test_strangers_keep_nobody_out() -> None:
    """Those who connect and say nothing make room for others, the oldest first."""
    served = Served(most_connections=10, most_strangers=3, handshake_s=60.0)
    place = served.service.address, served.service.port
    silent = [socket.create_connection(place, timeout=10) for _ in range(3)]
    for _ in range(3):
        with Peer(served.service) as peer:
            assert peer.names() == []
    more = [socket.create_connection(place, timeout=10) for _ in range(3)]
    for stranger in silent:
        while stranger.recv(100):  # what the service says first, and then the end
            pass
        stranger.close()
    with Peer(served.service) as peer:
        assert peer.names() == []
    for stranger in more:
        stranger.close()
    served.close()


def test_no_token(served: Served) -> None:
    with pytest.raises(PermissionError, match="does not match"):
        Peer(served.service, b"another token, which has 32 bytes")
    wait_until(lambda: served.service.num_connections == 0)


def test_who_says_nothing_is_dropped() -> None:
    served = Served(handshake_s=0.1)
    with socket.create_connection((served.service.address, served.service.port), 30) as silent:
        assert len(silent.recv(1000)) == 40
        assert silent.recv(1) == b""
    wait_until(lambda: served.service.num_connections == 0)
    with Peer(served.service) as peer:  # who has shown a token may be silent for longer
        assert not threading.Event().wait(0.3)
        assert peer.names() == []
    served.close()


def test_tokens_and_addresses(listening_holder: Any) -> None:
    first, port = listening_holder.address, listening_holder.port
    tokens = [bytes([number]) * 32 for number in range(5)]
    with Peer(listening_holder) as peer:
        for token in tokens[:3] + tokens[:1]:
            assert listening_holder.listen(first, token) == port
        Peer(listening_holder).__exit__()
        listening_holder.listen(first, tokens[3])
        with pytest.raises(PermissionError):
            Peer(listening_holder)
        for token in tokens[:4]:
            Peer(listening_holder, token).__exit__()
        peer.put("a", b"1")
        for address, token, text in (
            ("nowhere", tokens[0].hex(), "'nowhere' is no IP address"),
            ("", tokens[0].hex(), "no IP address"),
            ("203.0.113.1", tokens[0].hex(), "listen on 203.0.113.1, port 0: Cannot assign"),
            (new_address(), "00" * 15, "a token needs 16 bytes"),
            (new_address(), "xy", "non-hexadecimal"),
        ):
            with pytest.raises(OSError, match=text):
                listening_holder.client._asked({"op": "listen", "address": address, "token": token})
        assert peer.get("a") == b"1"  # what was refused has changed nothing
        listening_holder.listen(new_address())
        assert peer.has_ended()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((first, port), 30)
    with Peer(listening_holder) as peer:
        wait_until(lambda: peer.names() == [])
        with pytest.raises(PermissionError):
            Peer(listening_holder, tokens[3])


@pytest.mark.parametrize("says_so", [True, False])
def test_a_peer_does_not_keep_a_holder(listening_holder: Any, says_so: bool) -> None:
    with Peer(listening_holder) as peer:
        peer.put("a", b"1", stays=True)
        if says_so:
            listening_holder.client._to.end()
        disconnect(listening_holder.run)
        assert peer.has_ended()
    wait_until(lambda: listening_holder.run not in holders())
