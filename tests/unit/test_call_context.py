# SPDX-License-Identifier: Apache-2.0
"""Tests what hooks know of the call of DCP that they run in, and which calls count as a save of a staged state."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from staged_states import LIMIT_S, RAISES, one
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpStager,
    BcpWriter,
    async_save_state_dict,
    load_state_dict,
    registered,
    save_state_dict,
)
from bytecheckpoint.calls import of_dcp
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.staging import leases as _leases

STATE = {"w": torch.arange(4.0), "deep": {"step": 7}}


class Noting(BcpSavePlanner):
    """Notes what its hooks know of their save."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[CallContext] = []

    def create_local_plan(self) -> Any:
        self.seen.append(CallContext.of_save(self))
        return super().create_local_plan()


class OwnSavePlanner(DefaultSavePlanner):
    """Not DCP's own, so that a save keeps it."""


class OwnLoadPlanner(DefaultLoadPlanner):
    """Not DCP's own, so that a load keeps it."""


def empty() -> dict[str, Any]:
    return {"w": torch.zeros(4), "deep": {"step": 0}}


def bare_save(path: Path, planner: Any) -> None:
    dcp.save(dict(STATE), storage_writer=BcpWriter(path), planner=planner, no_dist=True)


def registered_save(path: Path, planner: Any) -> None:
    with registered():
        dcp.save(dict(STATE), checkpoint_id=path, planner=planner, no_dist=True)


def own_save(path: Path, planner: Any) -> None:
    save_state_dict(path, dict(STATE), planner=planner, no_dist=True)


def background_save(path: Path, planner: Any) -> None:
    async_save_state_dict(path, dict(STATE), planner=planner, no_dist=True).committed.result(LIMIT_S)


SAVES = [(bare_save, False), (registered_save, True), (own_save, True), (background_save, True)]


@pytest.mark.parametrize(("save", "is_explicit"), SAVES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_hook_knows_its_save(tmp_path: Path, save: Callable[[Path, Any], None], is_explicit: bool) -> None:
    planner = Noting()
    save(tmp_path, planner)
    (context,) = planner.seen
    assert (context.is_explicit, context.size, context.use_collectives) == (is_explicit, 1, True)
    assert context.planner is planner
    assert context.peers is None
    assert context.call is not None
    assert not context.call.is_running()


class FailingPlanner(Noting):
    def finish_plan(self, new_plan: Any) -> Any:
        raise ZeroDivisionError("finish_plan")


@pytest.mark.parametrize(("save", "is_explicit"), SAVES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_call_that_fails_has_ended(tmp_path: Path, save: Callable[[Path, Any], None], is_explicit: bool) -> None:
    planner = FailingPlanner()
    with pytest.raises(BaseException, match="finish_plan") as kept:
        save(tmp_path, planner)
    (context,) = planner.seen
    assert context.call is not None
    assert not context.call.is_running()
    own_save(tmp_path, None)  # nobody holds the path
    assert kept.value is not None


def test_nothing_is_known_of_hooks_that_are_called_by_hand(tmp_path: Path) -> None:
    own_save(tmp_path, None)
    context = CallContext.of_save(BcpWriter(tmp_path))
    assert (context.call, context.size, context.planner, context.peers) == (None, 0, None, None)
    assert (context.rank_or({"rank": 3}), context.is_over_its_group()) == (3, True)
    reader, planner = BcpReader(tmp_path), BcpLoadPlanner()
    got = empty()
    metadata = reader.read_metadata()
    planner.set_up_planner(got, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    assert torch.equal(got["w"], STATE["w"])  # type: ignore[arg-type]


def test_what_a_hook_is_told_counts_where_the_call_is_not_known(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path)
    for use_collectives, gaps in ((True, "refuse"), (False, "ignore")):
        writer.storage_meta()
        writer.set_up_storage_writer(True, rank=0, use_collectives=use_collectives)
        assert writer._options.gaps_of(writer._session) == gaps


def test_where_we_begin_a_call_nobody_looks_at_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*functions: Any, outermost: Any = ()) -> None:
        raise AssertionError(f"looked for {functions}")

    monkeypatch.setattr(of_dcp, "find_calls", refuse)
    own_save(tmp_path / "own", None)
    background_save(tmp_path / "own", None)
    load_state_dict(tmp_path / "own", empty())
    with pytest.raises(BaseException, match="looked for"):
        bare_save(tmp_path / "bare", None)


def test_another_thread_is_in_no_call(tmp_path: Path) -> None:
    seen = []

    class Threading(Noting):
        def create_local_plan(self) -> Any:
            thread = threading.Thread(target=lambda: seen.append(CallContext.of_save(self)))
            thread.start()
            thread.join()
            return super().create_local_plan()

    own_save(tmp_path, Threading())
    assert [context.call for context in seen] == [None]


def test_a_frame_where_an_earlier_one_was_is_another_call(tmp_path: Path) -> None:
    """The save before failed, and nobody has told its coordinator, which holds the path until its session ends."""
    writer = BcpWriter(tmp_path)
    for planner in (FailingPlanner(), Noting(), FailingPlanner(), Noting()):
        with pytest.raises(BaseException, match="finish_plan") if type(planner) is FailingPlanner else nullcontext():
            dcp.save(dict(STATE), storage_writer=writer, planner=planner, no_dist=True)


class Keeping(BcpReader):
    """Reads the metadata once."""

    kept: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self.kept = self.kept or super().read_metadata(*args, **kwargs)
        return self.kept


def test_metadata_that_a_reader_keeps_belong_to_no_later_call(tmp_path: Path) -> None:
    own_save(tmp_path, None)
    reader, seen = Keeping(tmp_path), []
    for _ in range(3):
        planner = BcpLoadPlanner()
        _load_state_dict(empty(), reader, no_dist=True, planner=planner)
        seen.append((reader._call.planner is planner, reader._call.size))
    assert seen == [(True, 1)] * 3


def test_who_looks_at_a_staged_state_does_not_begin_a_save() -> None:
    staged: Any = BcpStager(config=RAISES).stage(one(1))
    for look in (dict.items, lambda state: state.items(), pickle.dumps, dict):
        look(staged)
        assert _leases._uses == []
        assert not _leases.is_any_saved()
    again: Any = pickle.loads(pickle.dumps(staged))
    assert type(again) is dict
    assert torch.equal(again["w"], one(1)["w"])


def test_a_staged_state_is_claimed_for_the_time_of_the_save(tmp_path: Path) -> None:
    staged: Any = BcpStager(config=RAISES).stage(one(1))
    claims: list[int] = []

    class Counting(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            _leases._end_what_is_over()
            claims.append(len(_leases._uses))
            return super().finish_plan(new_plan)

    dcp.save(staged, storage_writer=BcpWriter(tmp_path / "1"), planner=Counting(), no_dist=True)
    save_state_dict(tmp_path / "2", staged, planner=Counting(), no_dist=True)
    with registered():
        dcp.save(staged, checkpoint_id=tmp_path / "3", planner=Counting(), no_dist=True)
    _leases._end_what_is_over()
    assert (claims, _leases._uses) == ([1, 1, 1], [])


@pytest.mark.parametrize("of", [FileSystemWriter, BcpWriter])
def test_the_future_of_async_save_ends_the_stay_whoever_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: type
) -> None:
    monkeypatch.setattr(_leases, "_BEGIN_WITHIN_S", 1000.0)
    kept = []
    for number in (1, 2, 3):
        planner = DefaultSavePlanner()  # keeps the state that it has planned
        future: Any = dcp.async_save(
            one(number),
            storage_writer=of(tmp_path / str(number)),
            async_stager=BcpStager(config=RAISES),
            planner=planner,
            no_dist=True,
        )
        future.result(LIMIT_S)
        kept.append((future, planner))
    for number in (1, 2, 3):
        got = one(0)
        load_state_dict(tmp_path / str(number), got)
        assert torch.equal(got["w"], one(number)["w"])
    for _, planner in kept:  # its state refers to memory that later states use by now
        vars(planner).clear()


def test_a_load_within_the_save_of_a_staged_state_claims_nothing(tmp_path: Path) -> None:
    own_save(tmp_path / "ready", None)
    reader = BcpReader(tmp_path / "ready")

    class Loading(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            dcp.load(empty(), storage_reader=reader, no_dist=True)
            return super().finish_plan(new_plan)

    staged: Any = BcpStager(config=RAISES).stage(one(1))
    dcp.save(staged, storage_writer=BcpWriter(tmp_path / "saved"), planner=Loading(), no_dist=True)
    assert reader.last_report is not None
    assert reader._call.staging is None


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that have looked at their frames for calls of DCP, one after the other."""
    noted: list[str] = []
    look = of_dcp.find_calls

    def find_calls(*functions: Any, **outermost: Any) -> Any:
        noted.append("main" if threading.current_thread() is threading.main_thread() else "other")
        return look(*functions, **outermost)

    monkeypatch.setattr(of_dcp, "find_calls", find_calls)
    return noted


@pytest.mark.parametrize("planner", [lambda: None, BcpSavePlanner, DefaultSavePlanner, OwnSavePlanner])
@pytest.mark.parametrize("writer", [BcpWriter, FileSystemWriter])
def test_the_first_hook_hands_the_call_on(tmp_path: Path, looks: list[str], writer: Any, planner: Any) -> None:
    """Nobody looks for the call again: each look goes through frames of the thread."""
    state = {"a": torch.ones(3), "nested": {"b": 1}}
    given = planner()
    is_ours = writer is BcpWriter or isinstance(given, BcpSavePlanner)
    for _ in range(2):  # with one planner, one call after the other
        dcp.save(state, storage_writer=writer(tmp_path), planner=given, no_dist=True)
        assert looks == ["main"] * is_ours
        looks.clear()


@pytest.mark.parametrize("planner", [lambda: None, BcpLoadPlanner, DefaultLoadPlanner, OwnLoadPlanner])
def test_the_first_hook_of_a_load_hands_it_on(tmp_path: Path, looks: list[str], planner: Any) -> None:
    save_state_dict(tmp_path, empty(), no_dist=True)
    looks.clear()
    dcp.load(empty(), storage_reader=BcpReader(tmp_path), planner=planner(), no_dist=True)
    assert looks == ["main"]


def test_a_call_within_a_call_is_looked_for_once(tmp_path: Path, looks: list[str]) -> None:
    class Saving(BcpSavePlanner):
        def create_local_plan(self) -> Any:
            dcp.save(empty(), storage_writer=BcpWriter(tmp_path / "inner"), no_dist=True)
            return super().create_local_plan()

    dcp.save(empty(), storage_writer=BcpWriter(tmp_path / "outer"), planner=Saving(), no_dist=True)
    assert looks == ["main"] * 2
    assert all((tmp_path / name / ".metadata").exists() for name in ("inner", "outer"))


def test_a_save_in_the_background_is_looked_for_once_in_each_thread(tmp_path: Path, looks: list[str]) -> None:
    """But for two moments at which DCP says more: the future of the save, and the ranks with which it begins."""
    writer = BcpWriter(tmp_path)
    saved: Any = dcp.async_save(empty(), storage_writer=writer, async_stager=BcpStager(), no_dist=True)
    saved.result(LIMIT_S)
    assert sorted(looks) == ["main"] * 2 + ["other"] * 2


def test_a_registered_save_looks_once_what_is_around_it(tmp_path: Path, looks: list[str]) -> None:
    with registered():
        for _ in range(2):
            dcp.save(empty(), checkpoint_id=tmp_path, planner=Noting())
            assert looks == ["main"]
            looks.clear()
            dcp.load(empty(), checkpoint_id=tmp_path)
            assert looks == []


def test_a_copy_of_a_planner_is_in_no_call(tmp_path: Path) -> None:
    planner = BcpSavePlanner()
    dcp.save({"a": torch.ones(3)}, storage_writer=BcpWriter(tmp_path), planner=planner, no_dist=True)
    planner.set_up_planner({"b": torch.ones(3)})
    for again in (copy.deepcopy(planner), pickle.loads(pickle.dumps(planner))):
        assert again._call_context.call is None
        assert again.state_dict.keys() == {"b"}
