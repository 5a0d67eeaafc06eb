# SPDX-License-Identifier: Apache-2.0
"""Tests children that are forked while another thread is anywhere in the package."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint
from bytecheckpoint import BcpWriter
from bytecheckpoint.runtime.fork_locks import ForkSafeLock, _all
from bytecheckpoint.runtime.gil_interval import quick_switches
from bytecheckpoint.runtime.per_process import HomeProcess, PerProcess

LIMIT_S = 20


def run_in_child(work: Callable[[], object]) -> None:
    """Runs ``work`` in a child that is forked while another thread holds every lock of the package."""
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in list(_all):
                stack.enter_context(lock)
            held.set()
            let_go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    let_go.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_takes_over_a_writer(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path / "ckpt")
    dcp.save({"weight": torch.ones(3)}, storage_writer=writer, no_dist=True)
    run_in_child(lambda: dcp.save({"weight": torch.ones(3)}, storage_writer=writer, no_dist=True))
    run_in_child(writer.cancel)


def test_a_child_takes_no_quick_turns_because_its_parent_does() -> None:
    before = sys.getswitchinterval()

    def look_in_child() -> None:
        assert sys.getswitchinterval() == before
        with quick_switches():
            assert sys.getswitchinterval() < before
        assert sys.getswitchinterval() == before

    with quick_switches():
        run_in_child(look_in_child)
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


def modules() -> list[ModuleType]:
    names = [
        name
        for _, name, _ in pkgutil.walk_packages(bytecheckpoint.__path__, "bytecheckpoint.")
        if not re.search(r"\.torchtitan|\.olmo|\.megatron|__main__", name)  # these need their libraries
    ]
    return [importlib.import_module(name) for name in names]


def test_no_module_has_a_lock_that_a_child_could_not_take() -> None:
    kinds = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)
    named = [(of.__name__, name, value) for of in modules() for name, value in vars(of).items()]
    assert not [(module, name) for module, name, value in named if isinstance(value, kinds)]
    assert any(isinstance(value, ForkSafeLock) for _, _, value in named)


def test_a_child_makes_its_own_of_what_is_made_once_per_process() -> None:
    made: PerProcess[list[int]] = PerProcess(list)
    home = HomeProcess()
    assert made.if_made() is None
    of_parent = made.get()
    of_parent.append(1)
    assert made.get() is of_parent
    assert made.if_made() is of_parent
    assert home.is_here()

    def in_child() -> None:
        assert not home.is_here()
        assert made.if_made() is None
        assert made.get() == []
        assert made.get() is not of_parent
        assert made.if_made() is made.get()

    run_in_child(in_child)
    assert made.get() is of_parent


def test_threads_that_come_at_once_get_one_object() -> None:
    made = PerProcess(object)
    barrier = threading.Barrier(8)
    got: list[object] = []

    def get() -> None:
        barrier.wait()
        got.append(made.get())

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [made.get()] * 8
