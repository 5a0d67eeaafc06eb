# SPDX-License-Identifier: Apache-2.0
"""Tests what other threads see of a call that a thread is in."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from bytecheckpoint.calls.frames import Found, FoundCall, find_calls


def numbers() -> Iterator[int]:
    yield from range(20)


class Caller(threading.Thread):
    """A thread that is in ``stay`` until ``ends`` is set. There it enters and leaves generators."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.call: FoundCall | None = None
        self.began, self.ends, self.left, self.may_exit = (threading.Event() for _ in range(4))

    def stay(self) -> None:
        self.call = find_calls((__name__, "stay")).calls[__name__, "stay"]
        self.began.set()
        while not self.ends.is_set():
            sum(numbers())

    def run(self) -> None:
        self.stay()
        self.left.set()
        self.may_exit.wait()


@pytest.fixture
def quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_turns")
def test_a_call_is_seen_to_run_until_it_has_returned() -> None:
    caller = Caller()
    caller.start()
    assert caller.began.wait(30)
    assert caller.call is not None
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert caller.call.is_running()  # whatever generator the thread enters and leaves meanwhile
    caller.ends.set()
    assert caller.left.wait(30)
    assert caller.is_alive()
    assert not caller.call.is_running()
    caller.may_exit.set()
    caller.join()
    assert not caller.call.is_running()


def test_a_function_that_the_thread_is_not_in_is_no_call() -> None:
    assert find_calls((__name__, "stay")) == Found({}, {}, None)
