# SPDX-License-Identifier: Apache-2.0
"""Tests the memory of staged states: how many there may be, and how long they stay."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from staged_states import (
    HOWS,
    LIMIT_S,
    MARKS,
    RAISES,
    frozen,
    one,
    save_async,
    start,
)
from support.equality import assert_loads
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bytecheckpoint import BcpSavePlanner, BcpStager, BcpWriter, Config, async_save_state_dict, registered, shutdown
from bytecheckpoint.errors import CheckpointError, StagingBusyError, StagingFullError
from bytecheckpoint.native import _C
from bytecheckpoint.staging import leases as _leases

pytestmark = MARKS


class Gate:
    """Keeps a save in flight until ``go`` is set."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def planner(self) -> DefaultSavePlanner:
        gate = self

        class Gated(DefaultSavePlanner):
            def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
                gate.reached.set()
                assert gate.go.wait(LIMIT_S)
                return super().resolve_data(write_item)

        return Gated()


class Announces:
    """Sets ``event`` when it is copied: staging has begun then."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        self.event.set()


@contextlib.contextmanager
def in_flight(how: str, path: Path, config: Config) -> Iterator[tuple[Gate, Future[Any]]]:
    gate = Gate()
    first = start(how, one(1), path, gate.planner(), config)
    try:
        assert gate.reached.wait(LIMIT_S)
        yield gate, first
    finally:
        gate.go.set()
        first.exception(LIMIT_S)


class Waiting(threading.Thread):
    """Begins a save that must wait, in a thread of its own."""

    def __init__(self, how: str, state: dict[str, Any], path: Path, config: Config, log: list[str]) -> None:
        super().__init__()
        self.begun, self.returned = threading.Event(), threading.Event()
        self.arguments = how, {**state, "announces": Announces(self.begun)}, path, None, config
        self.log = log
        self.start()
        assert self.begun.wait(LIMIT_S)

    def run(self) -> None:
        self.future = start(*self.arguments)
        self.log.append("returned")
        self.returned.set()


@pytest.mark.parametrize("how", HOWS)
def test_wait(tmp_path: Path, how: str) -> None:
    config = Config(on_staging_busy="wait")
    log: list[str] = []
    with in_flight(how, tmp_path / "1", config) as (gate, first):
        second = Waiting(how, one(2), tmp_path / "2", config, log)
        assert not second.returned.wait(0.1)
        log.append("let go")
        gate.go.set()
        first.result(LIMIT_S)
        second.join(LIMIT_S)
    assert log == ["let go", "returned"]
    second.future.result(LIMIT_S)
    assert_loads(tmp_path / "1", one(1))
    assert_loads(tmp_path / "2", {**one(2), "announces": None})


@pytest.mark.parametrize("how", HOWS)
def test_raise(tmp_path: Path, how: str) -> None:
    with in_flight(how, tmp_path / "1", RAISES) as (_, first):
        with pytest.raises(StagingBusyError, match=r'cannot be staged while the one before is saved.*"raise"'):
            save_async(how, one(2), tmp_path / "2")
        assert not first.done()
    first.result(LIMIT_S)
    assert_loads(tmp_path / "1", one(1))
    assert not (tmp_path / "2" / ".metadata").exists()
    start(how, one(2), tmp_path / "2").result(LIMIT_S)
    assert_loads(tmp_path / "2", one(2))


@pytest.mark.parametrize("how", HOWS)
def test_double_buffer(tmp_path: Path, how: str) -> None:
    config = Config(on_staging_busy="double_buffer")
    log: list[str] = []
    with (
        in_flight(how, tmp_path / "1", config) as (first_gate, first),
        in_flight(how, tmp_path / "2", config) as (_, second),
    ):
        third = Waiting(how, one(3), tmp_path / "3", config, log)
        assert not third.returned.wait(0.1)
        assert not first.done()
        assert not second.done()
        log.append("let go")
        first_gate.go.set()
        third.join(LIMIT_S)
        assert not second.done(), "the end of one is enough"
    assert log == ["let go", "returned"]
    third.future.result(LIMIT_S)
    assert_loads(tmp_path / "1", one(1))
    assert_loads(tmp_path / "2", one(1))
    assert_loads(tmp_path / "3", {**one(3), "announces": None})


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [DefaultSavePlanner, BcpSavePlanner])
def test_a_planner_that_is_kept_keeps_no_memory(tmp_path: Path, how: str, kind: Callable[[], Any]) -> None:
    """A planner knows the state dict of its last save."""
    planner = kind()
    try:
        for number in range(3):
            start(how, one(number), tmp_path, planner).result(LIMIT_S)
            assert_loads(tmp_path, one(number))
    finally:
        vars(planner).clear()


class FailingPlanner(DefaultSavePlanner):
    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if self.hook == "set_up_planner":
            raise ZeroDivisionError(self.hook)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self.hook == "finish_plan":
            raise ZeroDivisionError(self.hook)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if self.hook == "resolve_data":
            raise ZeroDivisionError(self.hook)
        return super().resolve_data(write_item)


@pytest.mark.parametrize("hook", ["set_up_planner", "finish_plan", "resolve_data"])
@pytest.mark.parametrize("how", HOWS)
def test_a_failed_save_that_is_kept_keeps_no_memory(tmp_path: Path, how: str, hook: str) -> None:
    failed = start(how, one(1), tmp_path, FailingPlanner(hook))
    error = failed.exception(LIMIT_S)
    assert error is not None
    assert hook in str(error)
    start(how, one(2), tmp_path).result(LIMIT_S)
    assert_loads(tmp_path, one(2))
    assert failed.exception() is error


def test_a_state_that_nobody_has_keeps_no_memory() -> None:
    stager = BcpStager(config=RAISES)
    for number in range(3):
        staged: Any = stager.stage(one(number))
        assert frozen(staged) == frozen(one(number))
        del staged


def test_one_tensor_keeps_the_memory_of_its_state() -> None:
    stager = BcpStager(config=RAISES)
    staged: Any = stager.stage(one(1))
    tensor = staged["w"][3:]
    del staged
    with pytest.raises(StagingBusyError):
        stager.stage(one(2))
    assert torch.equal(tensor, one(1)["w"][3:])
    del tensor
    stager.stage(one(2))


class OnceStager(BcpStager):
    """A user's own stager: it stages the first state that it gets, for two saves of it."""

    kept: Any = None

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        if self.kept is None:
            self.kept = super().stage(state_dict, **kwargs)
        return self.kept


def save_once_staged(path: Path, stager: AsyncStager, planner: DefaultSavePlanner | None = None) -> Future[Any]:
    future = dcp.async_save(one(1), storage_writer=BcpWriter(path), async_stager=stager, planner=planner, no_dist=True)
    assert isinstance(future, Future)
    return future


def stage_the_next(number: int) -> None:
    """Stages another state, into memory of its own or into memory that was given back."""
    staged: Any = BcpStager(config=Config(on_staging_busy="double_buffer")).stage(one(number))
    staged.release()


def test_a_state_that_a_stager_keeps_is_saved_twice(tmp_path: Path) -> None:
    stager = OnceStager(config=RAISES)
    save_once_staged(tmp_path / "1", stager).result(LIMIT_S)
    with pytest.raises(StagingBusyError):
        BcpStager(config=RAISES).stage(one(2))
    stage_the_next(2)
    save_once_staged(tmp_path / "2", stager).result(LIMIT_S)
    stage_the_next(3)
    dcp.save(stager.kept, storage_writer=FileSystemWriter(tmp_path / "3"), no_dist=True)
    for number in (1, 2, 3):
        assert_loads(tmp_path / str(number), one(1))
    stager.kept = None
    BcpStager(config=RAISES).stage(one(2))


def test_a_state_is_saved_to_two_places_at_the_same_time(tmp_path: Path) -> None:
    stager, gate = OnceStager(config=RAISES), Gate()
    later = save_once_staged(tmp_path / "later", stager, gate.planner())
    assert gate.reached.wait(LIMIT_S)
    save_once_staged(tmp_path / "sooner", stager).result(LIMIT_S)
    stager.kept = None
    stage_the_next(2)
    gate.go.set()
    later.result(LIMIT_S)
    assert_loads(tmp_path / "sooner", one(1))
    assert_loads(tmp_path / "later", one(1))
    gc.collect()
    BcpStager(config=RAISES).stage(one(2))


def test_a_writer_that_keeps_what_it_stages(tmp_path: Path) -> None:
    kept = []

    class Keeping(BcpWriter):
        def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
            kept.append(super().stage(state_dict, **kwargs))
            return kept[-1]

    future: Any = dcp.async_save(one(1), storage_writer=Keeping(tmp_path / "1"), no_dist=True)
    future.result(LIMIT_S)
    stage_the_next(2)
    dcp.save(kept[0], storage_writer=FileSystemWriter(tmp_path / "2"), no_dist=True)
    assert_loads(tmp_path / "2", one(1))
    kept.clear()


def test_a_failed_save_of_a_users_stager_keeps_no_memory(tmp_path: Path) -> None:
    """While ``register`` keeps the failed save, its error refers to no frame that holds the state."""

    class Wrapping(BcpStager):
        def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
            return super().stage(state_dict, **kwargs)

    with registered():
        failed: Any = dcp.async_save(
            one(1),
            checkpoint_id=tmp_path,
            async_stager=Wrapping(config=RAISES),
            planner=FailingPlanner("resolve_data"),
            no_dist=True,
        )
    assert failed.exception(LIMIT_S) is not None
    gc.collect()
    start("stager", one(2), tmp_path).result(LIMIT_S)


def test_memory_that_is_kept_for_no_save_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_leases, "_UNUSED_WAIT_S", 0.1)
    kept: Any = BcpStager().stage(one(1))
    wanted = (
        rf"though no save of that state is under way: {kept['w'].nbytes} bytes for \d+ s, "
        rf"staged at {__file__}:\d+\. Something"
    )
    with pytest.raises(StagingBusyError, match=wanted):
        BcpStager().stage(one(2))
    assert frozen(kept) == frozen(one(1))


class Staging:
    """A part of a state that stages itself when it is asked for its state, and keeps what was staged."""

    kept: Any = None

    def state_dict(self) -> dict[str, Any]:
        self.kept = BcpStager().stage(one(1))
        return dict(self.kept)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


class TwiceStager(BcpStager):
    """A user's own stager: it stages two parts, and the second waits for the first."""

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        first = super().stage({"part": one(1)}, **kwargs)
        return {**first, **super().stage(state_dict, **kwargs)}  # type: ignore[dict-item]


@pytest.mark.parametrize("way", ["stateful", "stager"])
@pytest.mark.parametrize("is_registered", [True, False])
def test_what_the_thread_itself_keeps_within_async_save_is_an_error_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, is_registered: bool
) -> None:
    monkeypatch.setattr(_leases, "_UNUSED_WAIT_S", 0.1)
    monkeypatch.setattr(_leases, "_BEGIN_WITHIN_S", 0.1)
    state: dict[str, Any] = {"part": Staging()} if way == "stateful" else one(2)
    stager = BcpStager() if way == "stateful" else TwiceStager()
    wanted = rf"staged at {__file__}:\d+ for the save to {tmp_path}\. Something still holds it"
    with registered() if is_registered else contextlib.nullcontext(), pytest.raises(StagingBusyError, match=wanted):
        dcp.async_save(
            state, checkpoint_id=tmp_path, storage_writer=BcpWriter(tmp_path), async_stager=stager, no_dist=True
        )
    state.clear()
    start("stager", one(3), tmp_path).result(LIMIT_S)
    assert_loads(tmp_path, one(3))


def test_a_save_within_a_hook_of_a_save_in_the_same_thread_is_an_error_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_leases, "_UNUSED_WAIT_S", 0.1)

    class Saving(BcpSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            BcpStager().stage(one(2))
            return super().resolve_data(write_item)

    handle = async_save_state_dict(tmp_path, one(1), planner=Saving())
    error = handle.committed.exception(LIMIT_S)
    assert "for the save to " + str(tmp_path) in str(error)


def test_a_state_of_an_error_of_async_save_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_leases, "_BEGIN_WITHIN_S", 0.1)
    with pytest.raises(ValueError, match="process group") as raised:  # a save in a process needs a process group
        dcp.async_save(
            one(1), storage_writer=BcpWriter(tmp_path), async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
    start("writer", one(2), tmp_path, config=Config()).result(LIMIT_S)
    assert_loads(tmp_path, one(2))
    assert raised.value is not None
    shutdown(LIMIT_S)


def test_release() -> None:
    stager = BcpStager(config=RAISES)
    first: Any = stager.stage(one(1))
    first.release()
    first.release()
    second: Any = stager.stage(one(2))
    first.release()
    with pytest.raises(StagingBusyError):
        stager.stage(one(3))
    assert frozen(second) == frozen(one(2))


@pytest.mark.parametrize("how", HOWS)
def test_memory_is_used_again(tmp_path: Path, how: str) -> None:
    gc.collect()
    _C.close_arena()
    taken = []
    for number in range(5):
        start(how, one(number, 900_000), tmp_path).result(LIMIT_S)
        taken.append(_C.arena_bytes())
    assert taken[0] >= 3_600_000
    assert set(taken) == {taken[0]}


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_state_larger_than_allowed(is_taken: bool) -> None:
    small = BcpStager(config=Config(staging_bytes=4096))
    kept = small.stage(one(1, 1000)) if is_taken else None
    with pytest.raises(StagingFullError, match=r"takes 4100 bytes, but may take at most 4096 \(staging_bytes\)"):
        small.stage(one(2, 1025))
    assert kept is None or frozen(kept) == frozen(one(1, 1000))
    del kept
    for count in (1024, 0):
        staged = small.stage(one(3, count))
        assert frozen(staged) == frozen(one(3, count))
        del staged
    BcpStager(config=RAISES).stage(one(4, 1025))


def test_staging_bytes_are_ready_ahead_of_time(tmp_path: Path) -> None:
    gc.collect()
    _C.close_arena()
    assert _C.arena_bytes() == 0
    BcpStager(config=Config(staging_bytes=5 << 20))
    ready = _C.arena_bytes()
    assert ready >= 5 << 20
    for number in range(2):
        config = Config(staging_bytes=5 << 20, on_staging_busy="raise")
        start("writer", one(number, 1_000_000), tmp_path, config=config).result(LIMIT_S)
    assert _C.arena_bytes() == ready
    _C.close_arena()
    assert _C.arena_bytes() == 0


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_forked_child_is_refused(is_taken: bool) -> None:
    stager = BcpStager()
    staged: Any = stager.stage(one(1))
    if not is_taken:
        staged.release()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(10)
            stager.stage(one(2))
        except CheckpointError as error:
            code = 0 if "is a forked child" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if is_taken:
        assert frozen(staged) == frozen(one(1))
    del staged
    assert frozen(stager.stage(one(3))) == frozen(one(3))
