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
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import (
    BcpSavePlanner,
    BcpWriter,
    Config,
    Retention,
    async_save_state_dict,
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
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.in_use import reading
from bytecheckpoint.storage.names import is_data
from bytecheckpoint.storage.paths import below, location

__all__ = ["READING", "WRITING", "Place"]

# Whole blocks, an end that is none, one element, and more than a request.
_NUMELS = {"blocks": 1 << 18, "odd": (1 << 16) + 3, "one": 1, "long": (3 << 18) + 77}
_MARK = ".metadata"
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Place:
    """A folder of a kind of storage, that no other case uses.

    Attributes:
        text: Its path or URL.
        config: Settings that it needs.
        written: Path or URL through which it is written, if ``text`` can only be read.
    """

    text: str
    config: Config = dataclasses.field(default_factory=Config)
    written: str = ""

    def at(self, *names: str) -> str:
        """Returns the path or URL to read at, of a folder in it."""
        return str(below(location(self.text), *names))

    def to_write(self, *names: str) -> str:
        """Returns the path or URL to write to, of a folder in it."""
        return str(below(location(self.written or self.text), *names))

    def folder(self, *names: str) -> Folder:
        """Returns a folder in it, as it is read."""
        known(location(self.text), self.config)
        return folder_at(self.at(*names))

    def writable(self, *names: str) -> Folder:
        """Returns a folder in it, as it is written."""
        known(location(self.written or self.text), self.config)
        return folder_at(self.to_write(*names))


def _state(generation: int) -> dict[str, Any]:
    values: dict[str, Any] = {name: torch.arange(float(numel)) + generation for name, numel in _NUMELS.items()}
    return values | {"generation": generation}


def _save(place: Place, generation: int, *names: str) -> None:
    save_state_dict(place.to_write(*names), _state(generation), no_dist=True, config=place.config)


def _loaded(place: Place, *names: str) -> int:
    """Returns the generation of the checkpoint there, after all of its values were compared."""
    got = _state(-1)
    load_state_dict(place.at(*names), got, no_dist=True, config=place.config)
    generation: int = got["generation"]
    for name, wanted in _state(generation).items():
        assert torch.equal(got[name], wanted) if isinstance(wanted, torch.Tensor) else got[name] == wanted, name
    return generation


def _data_files(folder: Folder) -> list[str]:
    return sorted(filter(is_data, folder.names()))


def _flip(folder: Folder) -> str:
    """Changes a bit of a data file, and returns its name."""
    name = _data_files(folder)[0]
    data = bytearray(folder.read_file(name, 1 << 30) or b"")
    data[len(data) // 2] ^= 1
    folder.write_file(name, bytes(data))
    return name


def _names(folder: Folder) -> list[str]:
    """Returns the names in a folder, but for that of journals and notes: some stores list a folder that was emptied."""
    return sorted(name for name in folder.names() if name != ".bcp")


def _assert_nothing_left(place: Place) -> None:
    """Fails unless there are only the mark, the data files that it names, and the journal of saves."""
    folder = place.folder()
    assert not [name for name in _names(folder) if name != _MARK and not is_data(name)]
    assert not verify(place.text, config=place.config).problems


# Reading.


def what_was_saved_is_loaded(place: Place) -> None:
    _save(place, 1, "step-1")
    assert _loaded(place, "step-1") == 1
    report = verify(place.at("step-1"), config=place.config)
    assert report.problems == []
    assert report.bytes_checked > sum(_NUMELS.values()) * 4
    assert disk_usage(place.at("step-1"), config=place.config).num_bytes >= report.bytes_checked


def values_are_read_without_a_state(place: Place) -> None:
    _save(place, 1, "step-1")
    stored = read(place.at("step-1"), config=place.config)
    assert sorted(stored) == sorted(_state(1))
    for name, wanted in _state(1).items():
        assert torch.equal(stored[name], wanted) if isinstance(wanted, torch.Tensor) else stored[name] == wanted, name


def a_place_without_a_checkpoint_is_named(place: Place) -> None:
    for ask in (_loaded, lambda place, *names: verify(place.at(*names), config=place.config)):
        with pytest.raises(CheckpointNotFoundError) as raised:
            ask(place, "step-1")
        assert place.at("step-1") in str(raised.value)


def a_flipped_bit_is_noticed(place: Place) -> None:
    _save(place, 1, "step-1")
    name = _flip(place.writable("step-1"))
    with pytest.raises(CorruptCheckpointError, match=name) as raised:
        _loaded(place, "step-1")
    assert "offset=" in str(raised.value)
    (problem,) = verify(place.at("step-1"), config=place.config).problems
    assert problem.file == name
    assert problem.fqns


def a_run_is_resumed(place: Place) -> None:
    assert resume(place.text, _state(-1), no_dist=True, config=place.config) is None
    for step in (1, 2):
        _save(place, step, f"step-{step}")
    for step, is_damaged in ((2, False), (1, True)):
        if is_damaged:
            _flip(place.writable("step-2"))
        got = _state(-1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            resumed = resume(place.text, got, no_dist=True, config=place.config)
        assert resumed is not None
        assert (resumed.step, got["generation"]) == (step, step)
        assert torch.equal(got["long"], _state(step)["long"])
        assert [str(each.message) for each in said if "step-2 is damaged" in str(each.message)] != [] or not is_damaged


def a_missing_file_is_named(place: Place) -> None:
    _save(place, 1, "step-1")
    folder = place.writable("step-1")
    name = _data_files(folder)[0]
    folder.write_file(name, b"")
    with pytest.raises(CheckpointError, match=name):
        _loaded(place, "step-1")


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
        report = save_state_dict(place.text, _state(generation), no_dist=True, config=place.config)
        assert report.files_swept == generation - 1
        assert _loaded(place) == generation
        _assert_nothing_left(place)
    changing = _state(3)
    handle = async_save_state_dict(place.text, changing, no_dist=True, config=place.config)
    changing["long"].fill_(9.0)
    handle.committed.result(_LIMIT_S)
    assert _loaded(place) == 3
    _assert_nothing_left(place)


class _Fails(BcpSavePlanner):
    """Fails when the data are written."""

    def resolve_data(self, write_item: Any) -> Any:
        raise ZeroDivisionError("on purpose")


def a_save_that_fails_changes_nothing(place: Place) -> None:
    _save(place, 1)
    before = place.folder().names()
    writer = BcpWriter(place.text, config=place.config)
    with pytest.raises(CheckpointException) as raised:
        dcp.save(_state(2), storage_writer=writer, planner=_Fails(), no_dist=True)
    assert [type(error) for error, _ in raised.value.failures.values()] == [SaveFailedError]
    assert sorted(place.folder().names()) == sorted(before)
    assert _loaded(place) == 1
    _save(place, 3)
    assert _loaded(place) == 3


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
    _save(place, 1)
    assert _loaded(place) == 1
    _assert_nothing_left(place)


def of_saves_at_once_each_is_whole_or_refused(place: Place) -> None:
    _save(place, 0)
    committed: list[int] = []
    refused: list[BaseException] = []

    def save(generation: int) -> None:
        try:
            _save(place, generation)
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
    assert _loaded(place) in committed
    _save(place, 4)  # sweeps what a refused one could not remove while another one ran
    assert _loaded(place) == 4
    _assert_nothing_left(place)


def a_save_that_may_not_overwrite_is_refused(place: Place) -> None:
    def save(generation: int) -> None:
        writer = BcpWriter(place.text, overwrite=False, config=place.config)
        dcp.save(_state(generation), storage_writer=writer, no_dist=True)

    save(1)
    with pytest.raises(CheckpointException) as raised:
        save(2)
    assert [type(error) for error, _ in raised.value.failures.values()] == [CheckpointExistsError]
    assert _loaded(place) == 1
    _assert_nothing_left(place)


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
    assert _names(run) == ["step-1", "step-2", "tracker"]
    assert not run.is_absent()
    assert not run.is_removed()
    step = place.folder("step-1")
    names = {_MARK, "note", *_data_files(step)}
    assert names <= {*step.names()} <= names | {".bcp"}
    assert names == step.file_times().keys()
    assert all(time == step.changed(name) for name, time in step.file_times().items())
    sizes = {file.name: file.num_bytes for file in run.files()}
    assert sizes["tracker"] == 1
    assert sizes["step-1/note"] == 3
    assert {f"step-2/{name}" for name in (_MARK, *_data_files(place.folder("step-2")))} <= sizes.keys()
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
    assert _names(run) == ["small", "step-1"]


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
        _save(place, step, f"step-{step}")
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
    assert [_loaded(place, f"step-{step}") for step in complete] == complete
    with pytest.raises(CheckpointNotFoundError):
        _loaded(place, "step-2")


def steps_go_in_a_loop(place: Place) -> None:
    keep = Retention(place.text, keep_latest=2, config=place.config)
    for step in range(1, 5):
        _save(place, step, f"step-{step}")
        keep.after_save(step, rank=0)
        steps = [(folder.step, folder.state) for folder in scan_steps(place.text, config=place.config)]
        assert steps == [(kept, "complete") for kept in (step - 1, step) if kept > 0]


def a_step_that_is_read_stays(place: Place) -> None:
    for step in (1, 2):
        _save(place, step, f"step-{step}")
    with reading(place.at("step-1")):
        report = Retention(place.text, keep_latest=1, config=place.config).prune()
        assert report.removed == []
        assert [*report.skipped] == [place.at("step-1")]
        assert _loaded(place, "step-1") == 1
    _save(place, 3, "step-3")  # else the step that this process has loaded last stays
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
    a_save_that_fails_changes_nothing,
    a_save_that_gives_up_leaves_nothing,
    of_saves_at_once_each_is_whole_or_refused,
    a_save_that_may_not_overwrite_is_refused,
    names_are_listed,
    small_files_are_removed_and_pins_are_such,
    small_files_are_replaced_whole,
    a_folder_is_itself,
    the_newest_steps_stay,
    steps_go_in_a_loop,
    a_step_that_is_read_stays,
    what_is_no_checkpoint_is_an_error_of_ours,
)
