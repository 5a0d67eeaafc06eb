# SPDX-License-Identifier: Apache-2.0
"""Tests what runs saves in the background, and what these saves leave behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bytecheckpoint import BcpWriter, Config, registered
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.staging.background import raise_unseen, submit, wait_for_queue
from bytecheckpoint.staging.save_executor import SaveExecutor

LIMIT_S = 20.0


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_wait_that_ran_out_has_not_seen_the_failure() -> None:
    go_on = threading.Event()

    def fail() -> NoReturn:
        assert go_on.wait(LIMIT_S)
        raise CheckpointError("of the save")

    future = submit("/there", fail, "of this test")
    with pytest.raises(TimeoutError):
        future.result(0)
    go_on.set()
    wait_for_queue("of this test")
    with pytest.raises(CheckpointError, match="save to /there failed, and its result was not read: of the save"):
        raise_unseen()


def test_a_failure_that_somebody_looked_at_is_not_told_again() -> None:
    def fail() -> NoReturn:
        raise CheckpointError("of the save")

    assert isinstance(submit("/there", fail, "of this test").exception(LIMIT_S), CheckpointError)
    raise_unseen()


def test_what_was_saved_is_destroyed_when_the_future_is_done() -> None:
    """Freeing a tensor releases the GIL. Beside a busy loop 20,000 tensors took a second; nobody should wait for it."""

    class State:
        pass

    state, was_done, is_destroyed = State(), [], threading.Event()

    def note() -> None:
        was_done.append(future.done())
        is_destroyed.set()

    weakref.finalize(state, note)
    executor = SaveExecutor("/there", state, lambda: None, Config(exit_timeout_s=LIMIT_S))
    submitted = threading.Event()
    future = executor.submit(lambda kept: submitted.wait(LIMIT_S), state)
    del state
    submitted.set()
    assert future.result(LIMIT_S)
    assert is_destroyed.wait(LIMIT_S)
    assert was_done == [True]


def test_ctrl_c_in_a_save_without_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    def no_thread(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(KeyboardInterrupt):
            submit("/there", interrupted, "of this test")
    assert submit("/there", lambda: 7, "of this test").result(LIMIT_S) == 7
    with pytest.raises(CheckpointError, match="its result was not read"):
        raise_unseen()


@pytest.mark.usefixtures("world")
def test_a_writer_that_is_kept_keeps_no_group(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path / "ckpt")
    dcp.save({"weight": torch.ones(3)}, storage_writer=writer)
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None


@pytest.mark.usefixtures("world")
def test_a_save_without_writer_and_path_is_refused_by_dcp() -> None:
    told = []
    for is_ours in (False, True):
        if is_ours:
            with registered():
                future = dcp.async_save({"weight": torch.ones(3)})
        else:
            future = dcp.async_save({"weight": torch.ones(3)})
        error = future.exception(LIMIT_S)  # type: ignore[union-attr]
        told.append((type(error), str(error)))
    assert told[0] == told[1]
