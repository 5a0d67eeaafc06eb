# SPDX-License-Identifier: Apache-2.0
"""What every place of checkpoints must do, on whatever storage it is.

Each case is a function of a ``Place``. ``READING`` need only a place that can be read; ``WRITING`` one of its own, in
which nothing is. A new kind of place is tested by one line in ``tests/storage/test_contract.py``; the file systems of
``tests/ground`` run the same cases.
"""

from __future__ import annotations

import dataclasses
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import (
    BcpSavePlanner,
    BcpWriter,
    Retention,
    async_save_state_dict,
    copy_checkpoint,
    latest,
    load_state_dict,
    pin,
    read,
    resume,
    save_state_dict,
    scan_steps,
    unpin,
    verify,
)
from bytecheckpoint.checkpoint.disk_usage import disk_usage
from bytecheckpoint.dcp import _save_steps
from bytecheckpoint.dcp.last_saves import _last_saves
from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSupersededError,
    CorruptCheckpointError,
    SaveFailedError,
)
from bytecheckpoint.storage.folder import Folder
from bytecheckpoint.storage.in_use import reading
from storage.places import (
    NUMELS,
    Place,
    assert_nothing_left,
    data_files,
    flip_a_bit,
    loaded_generation,
    names_in,
    save_generation,
    state_of,
)

__all__ = ["READING", "WRITING", "Place"]

_MARK = ".metadata"
_LIMIT_S = 60.0


# Reading.


def what_was_saved_is_loaded(place: Place) -> None:
    save_generation(place, 1, "step-1")
    assert loaded_generation(place, "step-1") == 1
    report = verify(place.at("step-1"), config=place.config)
    assert report.problems == []
    assert report.bytes_checked > sum(NUMELS.values()) * 4
    assert disk_usage(place.at("step-1"), config=place.config).num_bytes >= report.bytes_checked


def values_are_read_without_a_state(place: Place) -> None:
    save_generation(place, 1, "step-1")
    stored = read(place.at("step-1"), config=place.config)
    assert sorted(stored) == sorted(state_of(1))
    for name, wanted in state_of(1).items():
        assert torch.equal(stored[name], wanted) if isinstance(wanted, torch.Tensor) else stored[name] == wanted, name


def a_place_without_a_checkpoint_is_named(place: Place) -> None:
    for ask in (loaded_generation, lambda place, *names: verify(place.at(*names), config=place.config)):
        with pytest.raises(CheckpointNotFoundError) as raised:
            ask(place, "step-1")
        assert place.at("step-1") in str(raised.value)


def a_flipped_bit_is_noticed(place: Place) -> None:
    save_generation(place, 1, "step-1")
    name = flip_a_bit(place.writable("step-1"))
    with pytest.raises(CorruptCheckpointError, match=name) as raised:
        loaded_generation(place, "step-1")
    assert "offset=" in str(raised.value)
    (problem,) = verify(place.at("step-1"), config=place.config).problems
    assert problem.file == name
    assert problem.fqns


def a_run_is_resumed(place: Place) -> None:
    assert resume(place.text, state_of(-1), no_dist=True, config=place.config) is None
    for step in (1, 2):
        save_generation(place, step, f"step-{step}")
    for step, is_damaged in ((2, False), (1, True)):
        if is_damaged:
            flip_a_bit(place.writable("step-2"))
        got = state_of(-1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            resumed = resume(place.text, got, no_dist=True, config=place.config)
        assert resumed is not None
        assert (resumed.step, got["generation"]) == (step, step)
        assert torch.equal(got["long"], state_of(step)["long"])
        assert [str(each.message) for each in said if "step-2 is damaged" in str(each.message)] != [] or not is_damaged


def a_missing_file_is_named(place: Place) -> None:
    save_generation(place, 1, "step-1")
    folder = place.writable("step-1")
    name = data_files(folder)[0]
    folder.write_file(name, b"")
    with pytest.raises(CheckpointError, match=name):
        loaded_generation(place, "step-1")


def small_files_are_read_whole(place: Place) -> None:
    save_state_dict(place.to_write("step-1"), {"step": 1}, no_dist=True, config=place.config)
    place.writable("step-1").write_file("note", b"12345")
    folder = place.folder("step-1")
    assert folder.read_file("note", 5) == b"12345"
    assert folder.read_file("no such", 5) is None
    assert (folder.has("note"), folder.has("no such"), folder.has(_MARK)) == (True, False, True)
    assert (folder.changed("note") or 0) > 0
    assert folder.changed("no such") is None
    assert folder.file("no such") is None
    found = folder.file("note")
    assert found is not None
    assert (found.name, found.num_bytes) == ("note", 5)
    assert folder.is_there()
    assert not folder.is_gone()


# Writing.


def checkpoints_replace_one_another(place: Place) -> None:
    for generation in (1, 2):
        report = save_state_dict(place.text, state_of(generation), no_dist=True, config=place.config)
        assert report.files_swept == generation - 1
        assert loaded_generation(place) == generation
        assert_nothing_left(place)
    changing = state_of(3)
    handle = async_save_state_dict(place.text, changing, no_dist=True, config=place.config)
    changing["long"].fill_(9.0)
    handle.committed.result(_LIMIT_S)
    assert loaded_generation(place) == 3
    assert_nothing_left(place)


class _Fails(BcpSavePlanner):
    """Fails when the data are written."""

    def resolve_data(self, write_item: Any) -> Any:
        raise ZeroDivisionError("on purpose")


def what_has_not_changed_is_linked_or_copied_there(place: Place) -> None:
    """And a step that has it is whole when the others are gone; also behind a restart, when stored hashes count."""
    config = dataclasses.replace(place.config, link_unchanged=True)
    state = state_of(1)

    def save(step: int) -> int:
        state["odd"] += 1
        state["generation"] = step
        there = place.to_write(f"step-{step}")
        return save_state_dict(there, state, no_dist=True, config=config).bytes_linked

    assert save(1) == 0
    linked = [save(2)]
    _last_saves.get().by_run.clear()  # as in a new process
    linked.append(save(3))
    if place.writable().is_of_one_machine:
        assert linked == [0, 0]
    else:
        assert all(num_bytes > NUMELS["long"] * 4 for num_bytes in linked)
    assert len(Retention(place.text, keep_latest=1, config=place.config).prune().removed) == 2
    got = state_of(-1)
    load_state_dict(place.at("step-3"), got, no_dist=True, config=place.config)
    assert all(torch.equal(got[name], state[name]) for name in NUMELS)
    assert got["generation"] == 3
    assert not verify(place.at("step-3"), config=place.config).problems


def a_save_that_fails_leaves_what_another_one_has_linked(place: Place) -> None:
    config = dataclasses.replace(place.config, link_unchanged=True)
    for step in (1, 2):
        save_state_dict(place.to_write(f"step-{step}"), state_of(1), no_dist=True, config=config)
    _last_saves.get().by_run.clear()  # the next save takes step-1 for the last one, and names files as step-2 does
    with patch.object(_save_steps, "assemble", side_effect=ZeroDivisionError("on purpose")), pytest.raises(Exception):  # noqa: B017, PT011
        save_state_dict(place.to_write("step-2"), state_of(1), no_dist=True, config=config)
    assert loaded_generation(place, "step-2") == 1


def a_save_that_fails_changes_nothing(place: Place) -> None:
    save_generation(place, 1)
    before = place.folder().names()
    writer = BcpWriter(place.text, config=place.config)
    with pytest.raises(CheckpointException) as raised:
        dcp.save(state_of(2), storage_writer=writer, planner=_Fails(), no_dist=True)
    assert [type(error) for error, _ in raised.value.failures.values()] == [SaveFailedError]
    assert sorted(place.folder().names()) == sorted(before)
    assert loaded_generation(place) == 1
    save_generation(place, 3)
    assert loaded_generation(place) == 3


def a_save_that_gives_up_leaves_nothing(place: Place) -> None:
    folder = place.writable()
    settings = {"rank": None, "overwrite": True, "sync": True, "reserve_bytes": 1 << 20}
    commit = folder.begin_commit(place.config, save_id="0" * 32, **settings)
    assert commit.directory_id == folder.key()
    commit.check_right()
    assert not commit.is_over()
    commit.abandon()
    assert commit.is_over()
    assert not folder.has(_MARK)
    save_generation(place, 1)
    assert loaded_generation(place) == 1
    assert_nothing_left(place)


def of_saves_at_once_each_is_whole_or_refused(place: Place) -> None:
    save_generation(place, 0)
    committed: list[int] = []
    refused: list[BaseException] = []

    def save(generation: int) -> None:
        try:
            save_generation(place, generation)
            committed.append(generation)
        except CheckpointError as error:
            refused.append(error)

    threads = [threading.Thread(target=save, args=(generation,)) for generation in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT_S)
        assert not thread.is_alive()
    assert len(committed) + len(refused) == 3
    assert committed
    assert all(isinstance(error, CheckpointBusyError | CheckpointSupersededError) for error in refused), refused
    assert loaded_generation(place) in committed
    save_generation(place, 4)  # sweeps what a refused one could not remove while another one ran
    assert loaded_generation(place) == 4
    assert_nothing_left(place)


def a_save_that_may_not_overwrite_is_refused(place: Place) -> None:
    def save(generation: int) -> None:
        writer = BcpWriter(place.text, overwrite=False, config=place.config)
        dcp.save(state_of(generation), storage_writer=writer, no_dist=True)

    save(1)
    with pytest.raises(CheckpointException) as raised:
        save(2)
    assert [type(error) for error, _ in raised.value.failures.values()] == [CheckpointExistsError]
    assert loaded_generation(place) == 1
    assert_nothing_left(place)


def small_files_are_removed_and_pins_are_such(place: Place) -> None:
    for step in (1, 2):
        save_state_dict(place.at(f"step-{step}"), {"step": step}, no_dist=True, config=place.config)
    folder = place.folder("step-1")
    folder.write_file("note", b"123")
    for _ in range(2):
        folder.remove_file("note")
        assert folder.read_file("note", 10) is None
    pin(place.at("step-1"), "it is kept", config=place.config)
    report = Retention(place.text, keep_latest=1, config=place.config).prune()
    assert (report.removed, [*report.protected.values()]) == ([], ["pinned: it is kept"])
    assert unpin(place.at("step-1"), config=place.config)
    assert not unpin(place.at("step-1"), config=place.config)
    assert len(Retention(place.text, keep_latest=1, config=place.config).prune().removed) == 1


def names_are_listed(place: Place) -> None:
    run = place.folder()
    assert run.is_absent() or run.names() == []
    for step in (1, 2):
        save_state_dict(place.at(f"step-{step}"), {"step": step}, no_dist=True, config=place.config)
    run.write_file("tracker", b"2")
    place.folder("step-1").write_file("note", b"123")
    assert {*run.folders()} - {".bcp"} == {"step-1", "step-2"}
    assert names_in(run) == ["step-1", "step-2", "tracker"]
    assert not run.is_absent()
    assert not run.is_removed()
    step = place.folder("step-1")
    names = {_MARK, "note", *data_files(step)}
    assert names <= {*step.names()} <= names | {".bcp"}
    assert names == step.file_times().keys()
    assert all(time == step.changed(name) for name, time in step.file_times().items())
    sizes = {file.name: file.num_bytes for file in run.files()}
    assert sizes["tracker"] == 1
    assert sizes["step-1/note"] == 3
    assert {f"step-2/{name}" for name in (_MARK, *data_files(place.folder("step-2")))} <= sizes.keys()
    assert not any(file.name.startswith("step-1/") for file in run.files(without={"step-1"}))
    assert not place.folder("step-3").is_there()


def small_files_are_replaced_whole(place: Place) -> None:
    save_state_dict(place.at("step-1"), {"step": 1}, no_dist=True, config=place.config)
    run = place.folder()
    contents = [bytes([number]) * 3000 for number in range(20)]
    seen: set[bytes] = set()
    over = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not over.is_set():
                seen.add(run.read_file("small", 1 << 20) or b"")
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for content in contents:
        run.write_file("small", content)
    over.set()
    reader.join(_LIMIT_S)
    if failures:
        raise failures[0]
    assert seen <= {b"", *contents}
    assert run.read_file("small", 1 << 20) == contents[-1]
    assert names_in(run) == ["small", "step-1"]


def a_folder_is_itself(place: Place) -> None:
    for step in (1, 2):
        save_state_dict(place.at(f"step-{step}"), {"step": step}, no_dist=True, config=place.config)
    one, other = place.folder("step-1"), place.folder("step-2")
    assert one.key() == place.folder("step-1").key()
    elsewhere: Folder = pickle.loads(pickle.dumps(one))
    assert (elsewhere.place, elsewhere.key()) == (one.place, one.key())
    assert one.key() != other.key()
    assert one.is_same(place.at("step-1")) is True
    assert not one.is_same(place.at("step-2"))
    assert one.sees(one.names())
    assert place.config.ring_bytes <= one.tuned(place.config).ring_bytes


def the_newest_steps_stay(place: Place) -> None:
    assert latest(place.text, config=place.config) is None
    for step in (1, 2, 3, 10):
        save_generation(place, step, f"step-{step}")
    place.folder("step-1").write_file("config.json", b"{}")
    assert latest(place.text, config=place.config) == place.at("step-10")
    kept = Retention(place.text, keep_latest=3, remove_others=False, config=place.config).prune()
    assert kept.removed == [place.at("step-1")]
    assert "not" in kept.warnings[0]
    assert place.folder("step-1").names() == ["config.json"]
    dry = Retention(place.text, keep_latest=2, config=place.config).prune(dry_run=True)
    report = Retention(place.text, keep_latest=2, config=place.config).prune()
    assert dry.removed == report.removed == [place.at("step-2")]
    assert dry.bytes_freed == report.bytes_freed > 0
    assert report.kept == [3, 10]
    assert report.warnings == []
    complete = [folder.step for folder in scan_steps(place.text, config=place.config) if folder.is_complete]
    assert complete == [3, 10]
    assert [loaded_generation(place, f"step-{step}") for step in complete] == complete
    with pytest.raises(CheckpointNotFoundError):
        loaded_generation(place, "step-2")


def steps_go_in_a_loop(place: Place) -> None:
    keep = Retention(place.text, keep_latest=2, config=place.config)
    for step in range(1, 5):
        save_generation(place, step, f"step-{step}")
        keep.after_save(step, rank=0)
        steps = [(folder.step, folder.state) for folder in scan_steps(place.text, config=place.config)]
        assert steps == [(kept, "complete") for kept in (step - 1, step) if kept > 0]


def a_step_that_is_read_stays(place: Place) -> None:
    for step in (1, 2):
        save_generation(place, step, f"step-{step}")
    with reading(place.at("step-1")):
        report = Retention(place.text, keep_latest=1, config=place.config).prune()
        assert report.removed == []
        assert [*report.skipped] == [place.at("step-1")]
        assert loaded_generation(place, "step-1") == 1
    save_generation(place, 3, "step-3")  # else the step that this process has loaded last stays
    assert Retention(place.text, keep_latest=1, config=place.config).prune().removed == [
        place.at("step-1"),
        place.at("step-2"),
    ]
    assert latest(place.text, config=place.config) == place.at("step-3")


def what_is_no_checkpoint_is_an_error_of_ours(place: Place) -> None:
    save_state_dict(place.at("step-1"), {"step": 1}, no_dist=True, config=place.config)
    place.folder("step-1").write_file("note", b"123")
    for call in (
        lambda: load_state_dict(place.at("step-1", "note"), {"step": 0}, no_dist=True, config=place.config),
        lambda: verify(place.at("step-1", "note"), config=place.config),
    ):
        with pytest.raises(CheckpointError, match="note"):
            call()


def a_copy_is_the_same_checkpoint(place: Place) -> None:
    """Within the place: a copy is committed whole, again and in place of another; damage is not copied."""
    save_generation(place, 1, "step-1")
    copied = copy_checkpoint(place.at("step-1"), place.at("copy"), config=place.config)
    assert copied.is_new
    assert loaded_generation(place, "copy") == 1
    ours, theirs = place.folder("step-1"), place.folder("copy")
    assert data_files(theirs) == data_files(ours)
    for name in (_MARK, *data_files(ours)):
        assert theirs.read_file(name, 1 << 30) == ours.read_file(name, 1 << 30)
    assert not copy_checkpoint(place.at("step-1"), place.at("copy"), config=place.config).is_new
    save_generation(place, 2, "step-2")
    with pytest.raises(CheckpointExistsError):
        copy_checkpoint(place.at("step-2"), place.at("copy"), config=place.config)
    assert loaded_generation(place, "copy") == 1
    copy_checkpoint(place.at("step-2"), place.at("copy"), overwrite=True, config=place.config)
    assert loaded_generation(place, "copy") == 2
    assert not verify(place.at("copy"), config=place.config).problems
    name = flip_a_bit(place.folder("step-1"))
    with pytest.raises(CorruptCheckpointError, match=name):
        copy_checkpoint(place.at("step-1"), place.at("damaged"), config=place.config)
    assert not place.folder("damaged").has(_MARK)


READING: tuple[Callable[[Place], None], ...] = (
    what_was_saved_is_loaded,
    values_are_read_without_a_state,
    a_place_without_a_checkpoint_is_named,
    a_flipped_bit_is_noticed,
    a_missing_file_is_named,
    small_files_are_read_whole,
)
WRITING: tuple[Callable[[Place], None], ...] = (
    checkpoints_replace_one_another,
    a_run_is_resumed,
    what_has_not_changed_is_linked_or_copied_there,
    a_save_that_fails_leaves_what_another_one_has_linked,
    a_save_that_fails_changes_nothing,
    a_save_that_gives_up_leaves_nothing,
    of_saves_at_once_each_is_whole_or_refused,
    a_save_that_may_not_overwrite_is_refused,
    a_copy_is_the_same_checkpoint,
    names_are_listed,
    small_files_are_removed_and_pins_are_such,
    small_files_are_replaced_whole,
    a_folder_is_itself,
    the_newest_steps_stay,
    steps_go_in_a_loop,
    a_step_that_is_read_stays,
    what_is_no_checkpoint_is_an_error_of_ours,
)
