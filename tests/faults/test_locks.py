# SPDX-License-Identifier: Apache-2.0
"""Tests who may save at a path: only one live save at a time, and no dead or stuck save holds the path for ever."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support.fork_server import ForkServer, Meeting
from support.saves import (
    BOTH_RANKS,
    CONFIG,
    Attempt,
    SaveRequest,
    assert_only_own_files,
    data_files,
    generation_on_disk,
    names_in,
    save,
)
from torch.distributed.checkpoint.planner import WriteItemType

from bytecheckpoint.errors import CheckpointBusyError, CheckpointSupersededError
from faults.paused_saves import save_beside_a_child, save_paused, save_while_a_child_ends, save_while_peer_pauses

OLD, NEW, NEXT = 1, 2, 3
# The stuck save stops before it has made a file, or when its file is there.
STAGES = [WriteItemType.TENSOR, WriteItemType.BYTE_IO]


@pytest.fixture
def path(server: ForkServer, tmp_path: Path) -> Path:
    """Returns a directory with generation OLD."""
    path = tmp_path / "ckpt"
    assert server.run(save, SaveRequest(path, OLD)).unwrap() == Attempt({}, ())
    return path


def save_next(server: ForkServer, path: Path, *, take_over: bool = False) -> dict[int, BaseException]:
    """Saves generation NEXT from a process of its own; returns the errors."""
    config = replace(CONFIG, take_over=take_over)
    attempt: Attempt = server.run(save, SaveRequest(path, NEXT, config=config)).unwrap()
    return attempt.errors


def error_of(attempt: Attempt) -> BaseException:
    (error,) = attempt.errors.values()
    return error


def assert_superseded(error: BaseException) -> None:
    assert type(error) is CheckpointSupersededError


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_child_of_a_killed_save_holds_nothing(how: str, path: Path, server: ForkServer, meeting: Meeting) -> None:
    pid = server.start(save_beside_a_child, meeting.address, SaveRequest(path, NEW), how)
    connections = {meeting.receive(connection): connection for connection in (meeting.accept(), meeting.accept())}
    child, parent = connections["child"], connections["parent"]
    assert type(save_next(server, path)[0]) is CheckpointBusyError
    os.kill(pid, signal.SIGKILL)
    assert server.wait(pid).was_killed
    parent.close()
    assert save_next(server, path) == {}
    assert not child.poll(0), "the child has ended, so this test shows nothing"
    child.close()
    assert generation_on_disk(path) == NEXT
    assert_only_own_files(path)


@pytest.mark.parametrize("at", STAGES, ids=lambda at: at.name)
def test_hanging_save_loses_its_right(at: WriteItemType, path: Path, server: ForkServer, meeting: Meeting) -> None:
    request = SaveRequest(path, NEW, config=replace(CONFIG, commit_deadline_s=0.1))
    pid = server.start(save_paused, meeting.address, request, at, True)
    process = meeting.accept()
    assert meeting.receive(process) == "paused"
    assert save_next(server, path) == {}
    process.send("go")
    error = error_of(server.wait(pid).unwrap())
    assert generation_on_disk(path) == NEXT
    assert_only_own_files(path)
    assert_superseded(error)


@pytest.mark.parametrize("at", STAGES, ids=lambda at: at.name)
def test_save_past_its_deadline_is_undone(at: WriteItemType, path: Path, server: ForkServer, meeting: Meeting) -> None:
    """It is undone even if no other save wants the path."""
    request = SaveRequest(path, NEW, config=replace(CONFIG, commit_deadline_s=0.1))
    pid = server.start(save_paused, meeting.address, request, at, True)
    process = meeting.accept()
    assert meeting.receive(process) == "paused"
    process.send("go")
    assert type(error_of(server.wait(pid).unwrap())) is CheckpointSupersededError
    assert generation_on_disk(path) == OLD
    assert_only_own_files(path)


def test_save_whose_peer_hangs_loses_its_right(path: Path, server: ForkServer, meeting: Meeting) -> None:
    """Both ranks get the error in the end, and the file of the late rank is removed too."""
    config = replace(CONFIG, commit_deadline_s=0.5)
    store = str(path.parent / "store")
    requests = [SaveRequest(path, NEW, rank, 2, store, config) for rank in BOTH_RANKS]
    pids = [server.start(save_while_peer_pauses, meeting.address, request) for request in requests]
    says = {meeting.receive(process): process for process in (meeting.accept(), meeting.accept())}
    assert set(says) == {"late", "paused"}
    assert save_next(server, path) == {}
    says["paused"].send("go")
    errors = [error_of(server.wait(pid).unwrap()) for pid in pids]
    assert generation_on_disk(path) == NEXT
    assert_only_own_files(path)
    for error in errors:
        assert_superseded(error)


@pytest.mark.parametrize("at", STAGES, ids=lambda at: at.name)
def test_take_over(at: WriteItemType, path: Path, server: ForkServer, meeting: Meeting) -> None:
    """Other saves fail with a busy error and leave nothing behind; one with ``take_over`` wins over the live save."""
    pid = server.start(save_paused, meeting.address, SaveRequest(path, NEW), at)
    process = meeting.accept()
    assert meeting.receive(process) == "paused"
    before = names_in(path)
    assert type(save_next(server, path)[0]) is CheckpointBusyError
    assert names_in(path) == before
    assert generation_on_disk(path) == OLD
    assert save_next(server, path, take_over=True) == {}
    process.send("go")
    error = error_of(server.wait(pid).unwrap())
    assert generation_on_disk(path) == NEXT
    # The loser's file may stay, because the loser may have attempted its rename; the next sweep removes it.
    assert set(names_in(path)) >= {".metadata", *data_files(path)}
    assert not any(name.endswith(".tmp") for name in names_in(path))
    assert save_next(server, path) == {}
    assert_only_own_files(path)
    assert_superseded(error)


@pytest.mark.parametrize("how", ["_exit", "multiprocessing", "exit"])
def test_child_that_ends_disturbs_nothing(how: str, path: Path, server: ForkServer) -> None:
    status, attempt = server.run(save_while_a_child_ends, SaveRequest(path, NEW), how).unwrap()
    assert (status, attempt) == (0, Attempt({}, ()))
    assert generation_on_disk(path) == NEW
    assert_only_own_files(path)


@pytest.mark.parametrize("how", ["raise", "interrupt"])
def test_child_that_leaves_the_save(how: str, path: Path, server: ForkServer) -> None:
    """The save belongs to the process that began it. Its copy in a child ends with an error and touches no file."""
    status, attempt = server.run(save_while_a_child_ends, SaveRequest(path, NEW), how).unwrap()
    assert attempt.errors == {}
    assert status == 0
    assert generation_on_disk(path) == NEW
    assert_only_own_files(path)
