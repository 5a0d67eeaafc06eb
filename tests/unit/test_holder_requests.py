# SPDX-License-Identifier: Apache-2.0
"""What a holder makes of requests that no process of ours sends: it refuses them, and keeps what it has."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from bytecheckpoint.storage.memory.holder import Holder
from bytecheckpoint.storage.memory.messages import receive, send

OPS = ("hello", "spare", "reserve", "put", "get", "head", "list", "delete", "discard", "done", "nothing")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(("a", "a/.metadata")),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3),
    max_leaves=6,
)
FIELDS = ("name", "names", "below", "bytes", "stays", "if", "spares", "is_done", "version", "most_bytes")
REQUESTS = st.builds(
    lambda op, fields: {"op": op, **fields},
    st.sampled_from(OPS) | VALUES,
    st.dictionaries(st.sampled_from(FIELDS), VALUES),
)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def put(holder: Holder, peer: int, name: str, *, stays: bool) -> None:
    fd = os.memfd_create("object")
    os.write(fd, b"kept")
    assert "errno" not in holder.answer(peer, {"op": "put", "name": name, "stays": stays}, fd)[0]


@settings(max_examples=300, deadline=None)
@given(requests=st.lists(st.tuples(REQUESTS, st.booleans()), max_size=12))
def test_requests_at_random(requests: list[tuple[dict[str, Any], bool]]) -> None:
    before = descriptors()
    holder = Holder()
    holder.connected(0)
    holder.connected(1)
    put(holder, 0, "kept/.metadata", stays=True)
    for request, has_fd in requests:
        fd = os.memfd_create("sent") if has_fd else None
        answer, came = holder.answer(1, request, fd)
        if came is not None:
            os.close(came)
        json.dumps(answer)
        if "errno" in answer:
            assert isinstance(answer["why"], str)
    holder.left(1)
    names = [each["path"] for each in holder.answer(0, {"op": "list", "below": ""}, None)[0]["objects"]]
    holder.answer(0, {"op": "delete", "names": names, "spares": False}, None)
    assert holder.num_bytes == 0
    holder.close()
    assert descriptors() <= before  # what earlier tests have left may go meanwhile


def test_times_are_in_the_order_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder()
    holder.connected(0)
    clock = [1000.0, 10.0, 10.0, 2000.0]
    monkeypatch.setattr("time.time", lambda: clock.pop(0))
    for name in "abcd":
        put(holder, 0, name, stays=True)
    times = [each["last_modified"] for each in holder.answer(0, {"op": "list", "below": ""}, None)[0]["objects"]]
    assert times == sorted({*times})
    assert times[3] == 2000.0
    holder.close()


def test_messages_that_are_none() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = descriptors()
        for data in (b"{", b"[]", b"1", b"\xff", b"in a file", b"[" * 20_000, b'{"op": "put"', b"x" * 70_000):
            ours.send(data)
            with pytest.raises((ValueError, RecursionError)):
                receive(theirs)
        fds = [os.memfd_create("sent") for _ in range(3)]
        socket.send_fds(ours, [b"{}"], fds)
        with pytest.raises(ValueError, match="cut"):
            receive(theirs)
        for fd in fds:
            os.close(fd)
        assert descriptors() <= before  # what earlier tests have left may go meanwhile
        send(ours, {"op": "x" * 100_000})
        received = receive(theirs)
        assert received is not None
        assert received == ({"op": "x" * 100_000}, None)
        ours.close()
        assert receive(theirs) is None


def test_files_whose_mark_was_freed_go_with_the_process_that_freed_it() -> None:
    """It frees the files next; if it is killed in between, nobody would look for them."""
    holder = Holder()
    holder.connected(0)
    holder.connected(1)
    for name in ("step-1/__0_0.0123456789abcdef.distcp", "step-1/.metadata", "step-2/.metadata"):
        put(holder, 0, name, stays=name.endswith("a"))
    holder.answer(1, {"op": "delete", "names": ["step-1/.metadata"], "spares": False}, None)
    assert holder.num_bytes == 8
    holder.left(1)
    assert holder.num_bytes == 4
    holder.left(0)
    assert holder.num_bytes == 4
    holder.close()
