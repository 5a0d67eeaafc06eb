# SPDX-License-Identifier: Apache-2.0
"""Tests our own entry points for state dicts, on one rank: what a save saves, how it fails, how it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.pausing_planner import PausingPlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import bytecheckpoint
from bytecheckpoint import (
    BcpReader,
    BcpWriter,
    CheckpointError,
    Config,
    async_save_state_dict,
    load_state_dict,
    save_state_dict,
    shutdown,
)
from bytecheckpoint.errors import (
    CheckpointExistsError,
    InvalidPlanError,
    KeyMismatchError,
    SaveCancelledError,
    StagingFullError,
    StorageError,
)
from bytecheckpoint.native import _C
from bytecheckpoint.staging import background as _background

LIMIT_S = 60.0


class Counter:
    """A Stateful, as DCP understands it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": torch.arange(4)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    shutdown(LIMIT_S)


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000, 300), value), "b": torch.full((7,), value)}, "step": int(value)}


def loaded(path: Path) -> dict[str, Any]:
    state = state_of(0)
    load_state_dict(path, state)
    return state


def assert_is(state: dict[str, Any], value: float) -> None:
    wanted = state_of(value)
    assert state["step"] == wanted["step"]
    for name, tensor in wanted["model"].items():
        assert torch.equal(state["model"][name], tensor)


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.name != ".bcp")


def test_what_is_saved_is_loaded_by_both(tmp_path: Path) -> None:
    report = save_state_dict(tmp_path, {**state_of(3), "counter": Counter(5)}, user_metadata={"who": "me"})
    assert report.path == str(tmp_path)
    assert report.bytes_written > 1000 * 300 * 4
    ours: dict[str, Any] = {**state_of(0), "counter": Counter(0)}
    assert load_state_dict(tmp_path, ours).bytes_read > 1000 * 300 * 4
    assert_is(ours, 3)
    assert ours["counter"].count == 5
    stock = {**state_of(0), "counter": Counter(0)}
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert_is(stock, 3)
    assert stock["counter"].count == 5
    assert BcpReader(tmp_path).user_metadata == {"who": "me"}


def test_an_asynchronous_save_is_of_the_state_at_the_call(tmp_path: Path) -> None:
    state = {**state_of(4), "counter": Counter(2), "log": ["a"]}
    handle = async_save_state_dict(tmp_path, state)
    for tensor in state["model"].values():
        tensor.fill_(-1)
    state["counter"].count = 99
    state["log"].append("b")
    handle.staged.result(LIMIT_S)
    report = handle.committed.result(LIMIT_S)
    assert handle.report == report
    assert report.path == handle.path == str(tmp_path)
    got: dict[str, Any] = {**state_of(0), "counter": Counter(0), "log": None}
    load_state_dict(tmp_path, got)
    assert_is(got, 4)
    assert got["counter"].count == 2
    assert got["log"] == ["a"]


def test_saves_follow_one_another_and_the_memory_is_used_again(tmp_path: Path) -> None:
    handles = [async_save_state_dict(tmp_path / str(step), state_of(step)) for step in range(1, 6)]
    for step, handle in enumerate(handles, 1):
        handle.committed.result(LIMIT_S)
        assert_is(loaded(tmp_path / str(step)), step)


def test_errors_are_typed_and_name_what_failed(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "a", state_of(1))
    with pytest.raises(CheckpointExistsError):
        save_state_dict(tmp_path / "a", state_of(2), overwrite=False)
    with pytest.raises(StorageError, match="mkdir"):
        save_state_dict("/proc/nowhere", state_of(2))
    with pytest.raises(KeyMismatchError, match="absent"):
        load_state_dict(tmp_path / "a", {"absent": torch.zeros(3)})
    with pytest.raises(InvalidPlanError, match="lock"):
        async_save_state_dict(tmp_path / "a", {"lock": threading.Lock()})
    with pytest.raises(StagingFullError, match="staging_bytes"):
        async_save_state_dict(tmp_path / "a", state_of(2), config=Config(staging_bytes=1 << 20))
    assert_is(loaded(tmp_path / "a"), 1)


def test_the_future_tells_what_failed(tmp_path: Path) -> None:
    save_state_dict(tmp_path, state_of(1))
    handle = async_save_state_dict(tmp_path, state_of(2), overwrite=False)
    with pytest.raises(CheckpointExistsError):
        handle.committed.result(LIMIT_S)
    assert handle.report is None
    assert_is(loaded(tmp_path), 1)
    save_state_dict(tmp_path, state_of(3))  # the failure was looked at: nothing is raised again


@pytest.mark.parametrize("way", ["save", "async", "shutdown", "registered"])
def test_a_failure_nobody_looked_at_is_raised_once_by_what_comes_next(tmp_path: Path, way: str) -> None:
    save_state_dict(tmp_path, state_of(1))
    if way == "registered":
        with bytecheckpoint.registered():
            failing = dcp.async_save(state_of(2), checkpoint_id="/proc/nowhere", no_dist=True)
            _background.wait_for_saves(LIMIT_S)
            with pytest.raises(CheckpointError, match="its result was not read"):
                dcp.async_save(state_of(2), checkpoint_id=tmp_path, no_dist=True)
            dcp.async_save(state_of(3), checkpoint_id=tmp_path, no_dist=True).result(LIMIT_S)  # type: ignore[union-attr]
            with pytest.raises(BaseException, match="nowhere"):
                failing.result(LIMIT_S)  # type: ignore[union-attr]
    else:
        async_save_state_dict("/proc/nowhere", state_of(2))
        _background.wait_for_saves(LIMIT_S)
        comes_next: dict[str, Callable[[], object]] = {
            "save": lambda: save_state_dict(tmp_path, state_of(2)),
            "async": lambda: async_save_state_dict(tmp_path, state_of(2)),
            "shutdown": shutdown,
        }
        with pytest.raises(CheckpointError, match="its result was not read"):
            comes_next[way]()
        assert_is(loaded(tmp_path), 1)
        save_state_dict(tmp_path, state_of(3))
    assert_is(loaded(tmp_path), 3)


def test_a_save_is_cancelled_while_it_writes(tmp_path: Path) -> None:
    save_state_dict(tmp_path, state_of(1))
    before = names(tmp_path)
    planner = PausingPlanner()
    handle = async_save_state_dict(tmp_path, state_of(2), planner=planner)
    assert planner.arrived.wait(LIMIT_S)
    assert len(names(tmp_path)) > len(before), "it has begun to write"
    ended: list[bool] = []
    canceller = threading.Thread(target=lambda: ended.append(handle.cancel(LIMIT_S)))
    canceller.start()
    while not handle._give_up.__self__._cancelling._is_cancelled:
        pass
    planner.go_on.set()
    canceller.join(LIMIT_S)
    assert ended == [True]
    with pytest.raises(SaveCancelledError):
        handle.committed.result(0)
    assert names(tmp_path) == before
    assert_is(loaded(tmp_path), 1)
    save_state_dict(tmp_path, state_of(3))
    assert_is(loaded(tmp_path), 3)


def test_a_save_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    planner = PausingPlanner()
    config = Config(on_staging_busy="double_buffer")
    first = async_save_state_dict(tmp_path / "first", state_of(1), planner=planner, config=config)
    second = async_save_state_dict(tmp_path / "second", state_of(2), config=config)
    assert planner.arrived.wait(LIMIT_S)
    with pytest.raises(TimeoutError, match="has not ended"):
        second.cancel(0.01)
    planner.go_on.set()
    assert second.cancel(LIMIT_S)
    first.committed.result(LIMIT_S)
    assert_is(loaded(tmp_path / "first"), 1)
    assert not (tmp_path / "second" / ".metadata").exists()


def test_it_is_too_late_to_cancel_what_is_committed(tmp_path: Path) -> None:
    handle = async_save_state_dict(tmp_path, state_of(1))
    handle.committed.result(LIMIT_S)
    assert handle.cancel() is False
    assert_is(loaded(tmp_path), 1)
    assert handle.report is not None


@pytest.mark.parametrize("way", ["own", "registered"])
@pytest.mark.parametrize("cancel", ["cancel", "wait_for"])
def test_the_future_of_a_save_cannot_be_cancelled(tmp_path: Path, way: str, cancel: str) -> None:
    planner = PausingPlanner()
    if way == "own":
        handle = async_save_state_dict(tmp_path, state_of(1), planner=planner)
        future: Any = handle.committed
        assert not handle.staged.cancel()
    else:
        with bytecheckpoint.registered():
            future = dcp.async_save(state_of(1), checkpoint_id=tmp_path, planner=planner, no_dist=True)
    if cancel == "cancel":
        assert not future.cancel()
        assert future.running()
    else:

        async def wait_a_moment() -> None:
            await asyncio.wait_for(asyncio.wrap_future(future), 0.01)

        with pytest.raises(TimeoutError):
            asyncio.run(wait_a_moment())
    planner.go_on.set()
    save_state_dict(tmp_path / "next", state_of(2))
    shutdown(LIMIT_S)
    future.result(LIMIT_S)
    assert_is(loaded(tmp_path), 1)


def test_shutdown_gives_the_memory_back_and_waits(tmp_path: Path) -> None:
    planner = PausingPlanner()
    handle = async_save_state_dict(tmp_path, state_of(1), planner=planner)
    with pytest.raises(TimeoutError, match="under way"):
        shutdown(0.01)
    assert _C.arena_bytes() > 0
    planner.go_on.set()
    shutdown(LIMIT_S)
    assert handle.committed.done()
    assert _C.arena_bytes() == 0
    async_save_state_dict(tmp_path, state_of(2)).committed.result(LIMIT_S)
    assert_is(loaded(tmp_path), 2)


def niceness_of_writers() -> list[int]:
    """Returns the niceness of each thread that writes a save."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end
            if (thread / "comm").read_text().strip() == "bcp-write":
                found.append(os.getpriority(os.PRIO_PROCESS, int(thread.name)))
    return found


def save_by_dcp(path: Path, state: Any, *, planner: Any, config: Config) -> Future[Any]:
    """Saves in DCP's thread a state that DCP's own stager has copied."""
    writer = BcpWriter(path, config=config)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    return dcp.async_save(state, storage_writer=writer, planner=planner, async_stager=stager)


@pytest.mark.parametrize("settings", [{"niceness": 7}, {}], ids=["told", "default"])
@pytest.mark.parametrize("how", ["background", "waited for", "dcp"])
def test_threads_that_write_in_the_background_are_nice(tmp_path: Path, how: str, settings: dict[str, int]) -> None:
    planner = PausingPlanner()
    config = Config(io_threads=3, **settings)
    with ThreadPoolExecutor(1) as waiting:
        if how == "background":
            done = async_save_state_dict(tmp_path, state_of(1), planner=planner, config=config).committed
        elif how == "waited for":
            done = waiting.submit(save_state_dict, tmp_path, state_of(1), planner=planner, config=config)
        else:
            done = save_by_dcp(tmp_path, state_of(1), planner=planner, config=config)
        assert planner.arrived.wait(LIMIT_S)
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        steps = 0 if how == "waited for" else settings.get("niceness", 9)
        while niceness_of_writers() != [min(mine + steps, 19)] * 3:  # one that has begun may not have set it yet
            assert not done.done()
            time.sleep(0.001)
        planner.go_on.set()
        done.result(LIMIT_S)
    assert_is(loaded(tmp_path), 1)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine
