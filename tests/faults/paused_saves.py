# SPDX-License-Identifier: Apache-2.0
"""Saves that stop in the middle until the test lets them go on, and children that the process forks meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from support.fork_server import LIMIT_S, meet
from support.saves import Attempt, SaveRequest, attempt, gloo
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from bytecheckpoint.dcp import _save_session

__all__ = ["save_beside_a_child", "save_paused", "save_while_a_child_ends", "save_while_peer_pauses"]


class PausingPlanner(DefaultSavePlanner):
    """Calls ``pause`` once, before it returns the data of the first item of a kind.

    Objects come last: when the writer asks for the first of them, this rank's file exists and has the tensors.
    """

    def __init__(self, pause: Callable[[], None], at: WriteItemType) -> None:
        super().__init__()
        self._pause: Callable[[], None] | None = pause
        self._at = at

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self._pause is not None and write_item.type == self._at:
            pause, self._pause = self._pause, None
            pause()
        return super().resolve_data(write_item)


def wait_for_deadline() -> None:
    """Waits until the deadlines of the saves that this process coordinates have ended them."""
    sessions = [session for refs in _save_session._coordinating.values() for ref in refs if (session := ref())]
    assert all(session._over.wait(LIMIT_S) for session in sessions)
    for thread in threading.enumerate():
        if thread.name == "bytecheckpoint-save":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def save_paused(address: bytes, request: SaveRequest, at: WriteItemType, past_deadline: bool = False) -> Attempt:
    """Saves, and pauses at the first item of kind ``at``, with ``past_deadline`` until its deadline has passed.

    It then tells the test, and goes on when the test says so.
    """

    def pause() -> None:
        if past_deadline:
            wait_for_deadline()
        test = meet(address)
        test.send("paused")
        test.recv()

    return attempt(request, PausingPlanner(pause, at))


def save_while_peer_pauses(address: bytes, request: SaveRequest) -> Attempt:
    """Saves on two ranks. Rank 1 pauses. Rank 0 waits for it in DCP's gather, and reports that its deadline passed."""

    def say_when_late() -> None:
        wait_for_deadline()
        meet(address).send("late")

    def pause() -> None:
        if dist.get_rank() == 0:
            threading.Thread(target=say_when_late).start()
        else:
            test = meet(address)
            test.send("paused")
            test.recv()

    with gloo(request):
        return attempt(request, PausingPlanner(pause, WriteItemType.TENSOR))


def save_beside_a_child(address: bytes, request: SaveRequest, how: str) -> None:
    """Saves, starts a child meanwhile that lives until the test closes its connection, and waits to be killed."""

    def pause() -> None:
        if how == "fork":
            if os.fork() == 0:
                test = meet(address)
                test.send("child")
                test.poll(None)
                os._exit(0)
        else:
            test = meet(address)
            subprocess.Popen(["cat"], stdin=test.fileno(), stdout=subprocess.DEVNULL)
            test.send("child")
            test.close()
        test = meet(address)
        test.send("parent")
        test.recv()

    attempt(request, PausingPlanner(pause, WriteItemType.BYTE_IO))


def save_while_a_child_ends(request: SaveRequest, how: str) -> tuple[int, Attempt]:
    """Saves in a thread, and forks meanwhile. Returns how the child ended, and what came of the save.

    ``how`` says how the child ends: "_exit" at once; "multiprocessing" as a data loader's worker does; "exit" through
    the interpreter; "raise" and "interrupt" with an exception that passes through the save, whose thread forks.
    """
    parent = os.getpid()
    paused, go_on = threading.Event(), threading.Event()
    status: list[int] = []
    attempts: list[Attempt] = []

    def pause() -> None:
        if how not in ("raise", "interrupt"):
            paused.set()
            go_on.wait()
            return
        child = os.fork()
        if child == 0:
            raise ValueError("in the child") if how == "raise" else KeyboardInterrupt
        status.append(_wait(child))

    def run() -> None:
        attempts.append(attempt(request, PausingPlanner(pause, WriteItemType.BYTE_IO)))

    if how in ("raise", "interrupt"):
        run()
        if os.getpid() != parent:
            sys.exit(0)
        return status[0], attempts[0]
    thread = threading.Thread(target=run)
    thread.start()
    paused.wait(LIMIT_S)
    if how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=sum, args=([],))
        process.start()
        process.join(LIMIT_S)
        status.append(process.exitcode if process.exitcode is not None else -1)
    else:
        child = os.fork()
        if child == 0:
            if how == "_exit":
                os._exit(0)
            sys.exit(0)
        status.append(_wait(child))
    go_on.set()
    thread.join(LIMIT_S)
    return status[0], attempts[0]


def _wait(child: int) -> int:
    """Waits for a child, and kills it if it hangs. Returns its exit code."""
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    if not ended.poll(LIMIT_S / 2 * 1000):
        os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
