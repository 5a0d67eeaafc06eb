# SPDX-License-Identifier: Apache-2.0
"""Saves that failed or died leave a record, which the journal, ``bcp why``, ``report`` and ``top`` show."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from support.cli_runs import run as run_bcp
from support.fork_server import ForkServer
from support.pausing_planner import PausingPlanner
from torch.distributed.checkpoint.api import CheckpointException
from unit.ending_saves import Ending, die, save, state

from bytecheckpoint import BcpWriter, Retention, observe, stop_observing
from bytecheckpoint.errors import CheckpointError, SaveFailedError
from bytecheckpoint.native import _C, _core
from bytecheckpoint.observability import CallFailure, flush, read_failures, read_journal
from bytecheckpoint.runtime.place import own_place
from bytecheckpoint.storage.save_records import UNENDED, about_save
from bytecheckpoint.storage.unended_saves import unended_saves

LIMIT_S = 60.0


def fail(path: Path, hook: str = "resolve_data", **settings: Any) -> None:
    with pytest.raises(SaveFailedError):
        save(path, Ending(hook, ValueError), **settings)


def killed(server: ForkServer, path: Path, hook: str = "write_data", **settings: Any) -> None:
    assert server.run(die, path, hook, settings).was_killed


class Hearing:
    def __init__(self) -> None:
        self.failures: list[CallFailure] = []

    def export(self, report: Any, record: dict[str, Any]) -> None:
        pass

    def export_failure(self, failure: CallFailure) -> None:
        self.failures.append(failure)


@pytest.fixture
def heard() -> Iterator[list[CallFailure]]:
    exporter = Hearing()
    observe(exporter)
    yield exporter.failures
    stop_observing(exporter)


def texts(run: Path) -> list[tuple[str, int | None, str]]:
    return [(each["path"], each["step"], each["error_type"]) for each in read_failures(run)]


# Errors.


@pytest.mark.parametrize("hook", ["finish_plan", "resolve_data"])
def test_a_save_that_failed_is_known_at_once_and_leaves_no_folder(tmp_path: Path, hook: str) -> None:
    save(tmp_path / "step_1")
    fail(tmp_path / "step_2", hook)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    (failed,) = read_failures(tmp_path)
    assert (failed["of"], failed["path"], failed["step"]) == ("save", "step_2", 2)
    assert (failed["error_type"], len(failed["save_id"])) == ("ValueError", 32)
    assert "the disk of the planner is full" in failed["message"]
    assert "ValueError" in (tmp_path / "step_1" / ".bcp" / "journal.jsonl").read_text()


def test_lines_go_to_the_step_that_was_written_last(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step_{step}")
        os.utime(tmp_path / f"step_{step}" / ".bcp" / "journal.jsonl", (step, step))
    fail(tmp_path / "step_4")
    assert [len(read_failures(tmp_path / f"step_{step}")) for step in (1, 2, 3)] == [0, 0, 1]
    fail(tmp_path / "step_2")
    assert [len(read_failures(tmp_path / f"step_{step}")) for step in (1, 2, 3)] == [0, 1, 1]
    assert texts(tmp_path) == [("step_4", 4, "ValueError"), ("step_2", 2, "ValueError")]


def test_the_first_saves_of_a_run_wait_for_one_that_commits(tmp_path: Path) -> None:
    fail(tmp_path / "run" / "step_1")
    fail(tmp_path / "run" / "step_2")
    assert not (tmp_path / "run").exists()
    save(tmp_path / "run" / "step_3")
    assert texts(tmp_path / "run") == [("step_1", 1, "ValueError"), ("step_2", 2, "ValueError")]


def test_folders_that_are_no_steps_are_not_told_of_one_another(tmp_path: Path) -> None:
    save(tmp_path / "llama")
    fail(tmp_path / "qwen")
    assert read_failures(tmp_path / "llama") == []
    assert not (tmp_path / "qwen").exists()


def test_a_save_that_fails_where_no_hook_hears_it(tmp_path: Path) -> None:
    class Outer(BcpWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            raise ValueError("around the writer")

    save(tmp_path / "step_1")
    with pytest.raises((ValueError, CheckpointException)):
        dcp.save(state(), storage_writer=Outer(tmp_path / "step_2"), no_dist=True)
    for _ in range(200):
        if read_failures(tmp_path):
            break
        threading.Event().wait(0.05)
    (failed,) = read_failures(tmp_path)
    assert failed["path"] == "step_2"
    assert "was not committed" in failed["message"]
    assert not (tmp_path / "step_2").exists()


def test_exporters_hear_of_saves_that_failed_and_died(
    tmp_path: Path, server: ForkServer, heard: list[CallFailure]
) -> None:
    fail(tmp_path / "step_1")
    killed(server, tmp_path / "step_2")
    save(tmp_path / "step_2")
    assert flush()
    assert [(each.path, each.error_type) for each in heard] == [
        (str(tmp_path / "step_1"), "ValueError"),
        (str(tmp_path / "step_2"), UNENDED),
    ]
    assert all(len(each.save_id) == 32 for each in heard)


# Deaths.


@pytest.mark.parametrize(("hook", "phase", "last_rank"), [("finish_plan", "begin", None), ("write_data", "write", 0)])
def test_a_killed_save_is_known_by_what_it_left(
    tmp_path: Path, server: ForkServer, hook: str, phase: str, last_rank: int | None
) -> None:
    save(tmp_path / "step_1")
    killed(server, tmp_path / "step_2", hook)
    (died,) = read_failures(tmp_path)
    assert (died["path"], died["step"], died["error_type"], died["phase"]) == ("step_2", 2, UNENDED, phase)
    assert (died["rank"], died["last_rank"], died["world_size"]) == (0, last_rank, 1)
    assert f"in phase {phase}" in died["message"]
    assert f"rank 0 on {own_place().host}" in died["message"]
    assert read_failures(tmp_path / "step_2") == [{**died, "path": "."}]
    # The next save to the folder sweeps what is left, and the record is a line of the journal by then.
    save(tmp_path / "step_2")
    (line,) = read_failures(tmp_path)
    assert line == died
    assert unended_saves(tmp_path / "step_2") == []
    assert [record["path"] for record in read_journal(tmp_path)[0]] == ["step_1", "step_2"]


def test_a_save_that_fails_after_one_that_died_keeps_both(tmp_path: Path, server: ForkServer) -> None:
    killed(server, tmp_path / "step_1")
    fail(tmp_path / "step_1")
    assert texts(tmp_path) == [("step_1", 1, UNENDED), ("step_1", 1, "ValueError")]
    killed(server, tmp_path / "step_1")
    assert [kind for _, _, kind in texts(tmp_path)] == [UNENDED, "ValueError", UNENDED]


def test_a_prune_keeps_what_is_known_of_a_save_that_died(tmp_path: Path, server: ForkServer) -> None:
    killed(server, tmp_path / "step_1")
    for step in (2, 3):
        save(tmp_path / f"step_{step}")
    before = read_failures(tmp_path)
    report = Retention(tmp_path, keep_latest=1).prune()
    assert [Path(each).name for each in report.swept + report.removed] == ["step_1", "step_2"]
    assert read_failures(tmp_path) == before
    assert [name.name for name in tmp_path.iterdir()] == ["step_3"]


def test_a_part_of_a_step_that_died(tmp_path: Path, server: ForkServer) -> None:
    killed(server, tmp_path / "step_1" / "model")
    assert texts(tmp_path) == [("step_1/model", 1, UNENDED)]
    save(tmp_path / "step_2")
    Retention(tmp_path, keep_latest=1, grace_s=0).prune()
    assert texts(tmp_path) == [("step_1/model", 1, UNENDED)]


def test_without_a_journal_nothing_is_left_of_who_saved(tmp_path: Path, server: ForkServer) -> None:
    killed(server, tmp_path / "step_1", journal="off")
    (tmp,) = (tmp_path / "step_1").glob(".metadata.*.tmp")
    assert tmp.read_bytes().strip(b"\0") == b""
    assert read_failures(tmp_path) == []


def test_without_the_names_of_hosts(tmp_path: Path, server: ForkServer) -> None:
    killed(server, tmp_path / "step_1", journal_hosts=False)
    (tmp,) = (tmp_path / "step_1").glob(".metadata.*.tmp")
    assert own_place().host.encode() not in tmp.read_bytes()


def test_a_save_that_lives_is_not_told(tmp_path: Path) -> None:
    planner = PausingPlanner()
    saving = threading.Thread(target=save, args=(tmp_path / "step_1", planner))
    saving.start()
    try:
        assert planner.arrived.wait(LIMIT_S)
        assert read_failures(tmp_path) == []
    finally:
        planner.go_on.set()
        saving.join(LIMIT_S)
    assert read_failures(tmp_path) == []


def test_a_named_journal_gets_the_line_of_a_save_that_died(tmp_path: Path, server: ForkServer) -> None:
    own = str(tmp_path / "own")
    killed(server, tmp_path / "step_1", journal=own)
    save(tmp_path / "step_1", journal=own)
    assert texts(tmp_path / "own") == [("step_1", 1, UNENDED)]


def left_by(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True)
    tmp = folder / f".metadata.{'5e' * 16}.tmp"
    tmp.write_bytes(content)
    return tmp


def test_a_save_that_died_in_its_commit(tmp_path: Path) -> None:
    save(tmp_path / "step_1")
    left_by(tmp_path / "step_2", (tmp_path / "step_1" / ".metadata").read_bytes())
    os.utime(tmp_path / "step_2" / f".metadata.{'5e' * 16}.tmp", (1000, 1000))
    (died,) = unended_saves(tmp_path / "step_2")
    assert (died["phase"], died["at"], died["save_id"]) == ("commit", 1000, "5e" * 16)


def test_a_save_of_another_machine_counts_once_it_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "is_local", lambda path, io_timeout_s: False)
    about = json.loads(about_save(rank=0, world_size=2, began_at=1e9, is_async=False, with_host=True))
    elsewhere = json.dumps({**about, "host": "node-7", "processes": "another machine"}).encode()
    tmp = left_by(tmp_path / "step_1", elsewhere)
    assert unended_saves(tmp.parent) == []
    assert len(unended_saves(tmp.parent, silence_s=0.0)) == 1
    os.utime(tmp, (1e9, 1e9))
    (died,) = unended_saves(tmp.parent)
    assert died["ranks_without_files"] == [0, 1]
    assert "node-7" in died["message"]
    assert "no file of ranks 0, 1" in died["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(100),
        b"{}",
        b"[" * 100_000,
        b'{"at":1e400,"rank":0,"world_size":1,"is_async":0,"pid":1,"host":"","processes":""}',
        b'{"at":NaN,"rank":0,"world_size":1,"is_async":0,"pid":1,"host":"","processes":""}',
        b'{"at":5,"rank":0,"world_size":4294967296,"is_async":0,"pid":1,"host":"","processes":""}',
        b'{"at":5,"rank":-1,"world_size":1,"is_async":0,"pid":1,"host":"","processes":""}',
        b"\xff\xfe",
    ],
)
def test_what_anybody_may_have_written(tmp_path: Path, content: bytes) -> None:
    """It is no save, or one of which no more is known than that it was."""
    tmp = left_by(tmp_path / "step_1", content)
    os.utime(tmp, (1000, 1000))
    for died in unended_saves(tmp.parent):
        assert (died["phase"], died["at"], died["world_size"]) == ("commit", 1000, 0)
    save(tmp_path / "step_1")


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(about_save(rank=0, world_size=1, began_at=5.0, is_async=False, with_host=True))
    for step, make in enumerate((lambda path: path.symlink_to(secret), os.mkfifo, os.mkdir)):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        make(folder / f".metadata.{'5e' * 16}.tmp")
        assert unended_saves(folder) == []


# What people see.


def test_the_command_line_shows_failures_first(
    tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without a folder of the run, the page is written here
    killed(server, tmp_path / "step_1")
    only_dead = run_bcp("report", str(tmp_path))
    assert only_dead.exit_code == 0
    assert "failed: 1 call, the newest first:" in only_dead.output
    assert not list(tmp_path.glob("**/report.html"))
    save(tmp_path / "step_2")
    fail(tmp_path / "step_3")
    lines = run_bcp("why", str(tmp_path)).output.splitlines()
    assert len(lines) == 2
    assert "save of step_3" in lines[0]
    assert "ValueError: " in lines[0]
    assert "save of step_1" in lines[1]
    assert "in phase write" in lines[1]
    report = run_bcp("report", str(tmp_path)).output.splitlines()
    assert report[1].startswith("failed: 2 calls")
    assert "step_3" in report[2]
    top = run_bcp("top", str(tmp_path), "--once").output
    assert "last that failed:" in top
    assert top.index("step_3") < top.index("step_1") < top.index("last calls:")
    of_json = json.loads(run_bcp("why", str(tmp_path), "--json").output)
    assert [each["path"] for each in of_json["failures"]] == ["step_3", "step_1"]


def test_a_run_without_failures_says_so(tmp_path: Path) -> None:
    save(tmp_path / "step_1")
    assert "no save failed or died" in run_bcp("why", str(tmp_path)).output
    assert run_bcp("why", str(tmp_path / "none")).exit_code == 2


def test_what_a_save_writes_of_itself_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "step_1")
    content = (tmp_path / "step_1" / ".metadata").read_bytes()
    assert b'"processes"' not in content
    with pytest.raises(CheckpointError):
        _C.Checkpoint.open(str(tmp_path))
