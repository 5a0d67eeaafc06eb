# SPDX-License-Identifier: Apache-2.0
"""Tests the journal: where a line goes, what it says, and that nothing which happens to it harms a save."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import run as run_bcp

import bytecheckpoint
from bytecheckpoint import (
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    Config,
    Retention,
    SaveReport,
    async_save_state_dict,
    observe,
    stop_observing,
)
from bytecheckpoint.errors import CheckpointExistsError, SaveFailedError
from bytecheckpoint.journal.lines import append
from bytecheckpoint.observability import flush, read_failures, read_journal
from bytecheckpoint.observability.run_folder import trace_folders
from bytecheckpoint.observability.trace_files import read_traces, with_whole_traces
from bytecheckpoint.storage import journal_files


def state() -> dict[str, Any]:
    return {"w": torch.arange(100_000, dtype=torch.float32), "step": 3}


def save(path: Path | str, **settings: Any) -> SaveReport:
    writer = BcpWriter(path, config=Config(**settings))
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert writer.last_report is not None
    return writer.last_report


def load(path: Path | str, **settings: Any) -> None:
    dcp.load(state(), storage_reader=BcpReader(path, config=Config(**settings)), no_dist=True)


def kinds(run: Path) -> list[tuple[str, str, int | None]]:
    records, num_skipped = read_journal(run)
    assert num_skipped == 0
    return [(record["kind"], record["path"], record["step"]) for record in records]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_save_has_a_line_in_its_checkpoint(tmp_path: Path) -> None:
    report = save(tmp_path / "step_7")
    save(tmp_path / "global_step12")
    load(tmp_path / "step_7")
    assert names(tmp_path) == ["global_step12", "step_7"]
    assert names(tmp_path / "step_7" / ".bcp") == ["journal.jsonl"]
    assert kinds(tmp_path) == [("save", "step_7", 7), ("save", "global_step12", 12)]
    assert kinds(tmp_path / "step_7") == [("save", ".", 7)]
    record = read_journal(tmp_path)[0][0]
    assert record["format"] == 1
    assert record["save_id"] == report.save_id
    assert record["at"] == pytest.approx(report.began_at, abs=0.002)
    assert record["report"]["total_s"] == pytest.approx(report.total_s, abs=1e-6)
    assert record["report"]["total_bytes"] == report.total_bytes
    assert record["ranks"]["num_bytes"] == [report.bytes_written]
    assert record["ranks"]["phases"]["write"] == [pytest.approx(report.trace.phases["write"], abs=1e-6)]
    assert record["world_size"] == len(record["hosts"]) == 1
    assert record["config"] == {}
    assert record["versions"]["torch"] == torch.__version__
    assert [lane["name"] for lane in record["timelines"]["0"]["lanes"]][:2] == ["call", "fill"]
    whole = sum(record["report"][name] for name in ("plan_s", "global_plan_s", "begin_s", "exchange_s", "write_s"))
    assert record["ranks"]["ended_s"][0] == pytest.approx(whole, abs=1e-5)


def test_parts_of_a_step_are_in_the_journal_of_the_run(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "step_5", {"model": torch.nn.Linear(2, 2), "extra_state": {"a": 1}}, "ddp")
    assert names(tmp_path) == ["step_5"]
    assert ".bcp" not in names(tmp_path / "step_5")
    assert sorted(kinds(tmp_path)) == [("save", "step_5/extra_state", 5), ("save", "step_5/model", 5)]


def test_a_background_save_says_what_it_blocked(tmp_path: Path) -> None:
    report = async_save_state_dict(tmp_path / "step_1", state()).committed.result()
    (record,), _ = read_journal(tmp_path)
    assert record["is_async"] is report.is_async is True
    assert report.blocked_s > 0.0
    assert record["ranks"]["phases"]["stage"] == [round(report.blocked_s, 6)]


def test_a_path_that_names_no_step_has_a_line_in_itself(tmp_path: Path) -> None:
    save(tmp_path / "best")
    save(tmp_path / "step_1")
    save(tmp_path / "best")
    save(tmp_path / "kept" / "model")
    assert names(tmp_path) == ["best", "kept", "step_1"]
    assert names(tmp_path / "kept") == ["model"]
    saved = [("save", "best", None), ("save", "step_1", 1), ("save", "best", None), ("save", "kept/model", None)]
    assert kinds(tmp_path) == saved


def test_a_load_writes_nothing(tmp_path: Path) -> None:
    save(tmp_path / "step_1", journal="off")
    load(tmp_path / "step_1", trace="full")
    assert names(tmp_path) == ["step_1"]
    assert ".bcp" not in names(tmp_path / "step_1")


def test_the_journal_of_an_older_version_is_read_and_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "step_1")
    (tmp_path / "step_1" / ".bcp").rename(tmp_path / ".bcp")
    save(tmp_path / "step_2")
    load(tmp_path / "step_2")
    assert kinds(tmp_path) == [("save", "step_1", 1), ("save", "step_2", 2)]
    assert len((tmp_path / ".bcp" / "journal.jsonl").read_bytes().splitlines()) == 1


def test_a_run_beside_is_another_one(tmp_path: Path) -> None:
    save(tmp_path / "first" / "step_1")
    (tmp_path / "first" / "step_1" / ".bcp").rename(tmp_path / "first" / ".bcp")
    save(tmp_path / "step_2")
    assert kinds(tmp_path) == [("save", "step_2", 2)]


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "Kept"
    save(tmp_path / "a" / "best", journal=str(own))
    save(tmp_path / "a" / "step_3", journal=str(own), journal_hosts=False)
    load(tmp_path / "a" / "step_3", journal=str(own))
    assert names(tmp_path / "a") == ["best", "step_3"]
    assert ".bcp" not in names(tmp_path / "a" / "step_3")
    saved = [("save", str(tmp_path / "a" / "best"), None), ("save", "step_3", 3)]
    assert kinds(own) == [*saved, ("load", "step_3", 3)]
    records, _ = read_journal(own, last=2)
    assert records[0]["hosts"] == ["host 0"]
    assert records[0]["config"] == {"journal": str(own), "journal_hosts": False}


def test_what_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "step_1", journal="off")
    (tmp_path / "step_1" / ".bcp").write_text("a file stands where the folder would be")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        for _ in range(3):
            save(tmp_path / "step_1")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert f"the journal in {tmp_path / 'step_1' / '.bcp'} cannot be written" in lines[0]
    assert "said once" in lines[0]
    assert bytecheckpoint.verify(tmp_path / "step_1").is_whole


def test_storage_that_hangs_does_not_keep_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lock that somebody holds stands for it."""
    (tmp_path / "step_1" / ".bcp").mkdir(parents=True)
    with (tmp_path / "step_1" / ".bcp" / "journal.jsonl").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with caplog.at_level(logging.WARNING, "bytecheckpoint"):
            for _ in range(2):
                save(tmp_path / "step_1", io_timeout_s=0.2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cannot be written: no answer of the storage in 0.2 s" in line
    assert bytecheckpoint.verify(tmp_path / "step_1").is_whole
    assert flush()
    assert len(kinds(tmp_path)) >= 1
    save(tmp_path / "step_2")
    assert kinds(tmp_path / "step_2") == [("save", ".", 2)]


def test_the_run_can_be_removed_when_a_save_has_returned(tmp_path: Path) -> None:
    """Nothing is written behind the call: a file that comes meanwhile makes `rmtree` fail."""
    for number in range(60):
        run = tmp_path / "run"
        if number % 3 == 0:
            save(run / "step_1", trace="full")
        elif number % 3 == 1:
            async_save_state_dict(run / "step_1", state(), config=Config(trace="full")).committed.result()
        else:
            dcp.async_save(state(), storage_writer=BcpWriter(run / "step_1"), no_dist=True).result()
        shutil.rmtree(run)
        assert not run.exists()
    async_save_state_dict(tmp_path / "run" / "step_1", state())
    bytecheckpoint.shutdown()
    shutil.rmtree(tmp_path / "run")
    assert names(tmp_path) == []


class _NoPlan(BcpSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        raise ValueError("no plan")


def test_the_folder_can_be_removed_when_a_save_has_raised(tmp_path: Path) -> None:
    """The right to commit is given back in the call, even if it fails where no hook of the writer runs."""
    for _ in range(3):
        with pytest.raises(SaveFailedError, match="no plan"):
            bytecheckpoint.save_state_dict(tmp_path / "run" / "step_1", state(), planner=_NoPlan(), no_dist=True)
        assert names(tmp_path) == []
        failed = async_save_state_dict(tmp_path / "run" / "step_1", state(), planner=_NoPlan())
        with pytest.raises(SaveFailedError, match="no plan"):
            failed.committed.result()
        assert names(tmp_path) == []


def test_shutdown_waits_for_exporters(tmp_path: Path) -> None:
    waiting = _Waiting()
    observe(waiting)
    try:
        save(tmp_path / "step_1")
        assert waiting.begun.wait(60)
        ending = threading.Thread(target=bytecheckpoint.shutdown)
        ending.start()
        assert waiting.reports == []
        waiting.go_on.set()
        ending.join(60)
        assert len(waiting.reports) == 1
    finally:
        waiting.go_on.set()
        stop_observing(waiting)


def fail_to_save(path: Path, **settings: Any) -> None:
    with pytest.raises(CheckpointExistsError):
        bytecheckpoint.save_state_dict(path, state(), no_dist=True, overwrite=False, config=Config(**settings))


def test_a_save_that_failed_is_in_the_folder_that_it_was_to_replace(tmp_path: Path) -> None:
    save(tmp_path / "a" / "step_1")
    save(tmp_path / "b" / "step_1")
    for _ in range(2):
        fail_to_save(tmp_path / "a" / "step_1", trace="full")
    failed = read_failures(tmp_path / "a")
    save(tmp_path / "a" / "step_3")
    save(tmp_path / "a" / "step_4")
    assert read_failures(tmp_path / "a") == failed
    assert read_failures(tmp_path / "b") == []
    assert [(each["of"], each["path"], each["step"]) for each in failed] == [("save", "step_1", 1)] * 2
    assert {each["error_type"] for each in failed} == {"CheckpointExistsError"}
    assert "step_1" in failed[0]["message"]
    assert read_failures(tmp_path / "a" / "step_1") == [{**each, "path": "."} for each in failed]
    assert kinds(tmp_path / "a") == [("save", f"step_{step}", step) for step in (1, 3, 4)]
    assert names(tmp_path / "a") == ["step_1", "step_3", "step_4"]
    fail_to_save(tmp_path / "a" / "step_1", journal=str(tmp_path / "own"))
    assert len(read_failures(tmp_path / "own")) == 1


def test_a_process_that_ends_logs_the_saves_that_failed_last(tmp_path: Path) -> None:
    script = (
        "import sys, torch\nfrom bytecheckpoint import save_state_dict\n"
        "for _ in range(2):\n"
        "    try: save_state_dict(sys.argv[1], {'w': torch.ones(10, device='meta')}, no_dist=True)\n"
        "    except Exception: pass\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "step_1")]
    ended = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert f"{tmp_path}: no journal has the saves that failed last: step_1: InvalidPlanError: " in ended.stderr
    assert kinds(tmp_path) == []


def test_a_run_folder_holds_only_step_folders(tmp_path: Path) -> None:
    run = tmp_path / "run"
    bytecheckpoint.register(config=Config(trace="full"))
    try:
        for step in range(1, 5):
            dcp.save(state(), checkpoint_id=run / f"step-{step}", no_dist=True)
            dcp.load(state(), checkpoint_id=run / f"step-{step}", no_dist=True)
            fail_to_save(run / f"step-{step}")
            Retention(run, keep_latest=2).after_save(step)
            assert all(re.fullmatch(r"step-(\d+)", name) for name in names(run)), names(run)
        dcp.async_save(state(), checkpoint_id=run / "step-5", no_dist=True).result()
    finally:
        bytecheckpoint.unregister()
    assert names(run) == ["step-3", "step-4", "step-5"]
    assert kinds(run) == [("save", f"step-{step}", step) for step in range(1, 6)]
    assert len(read_failures(run)) == 4
    for step in (3, 4, 5):
        assert bytecheckpoint.verify(run / f"step-{step}").is_whole
        assert [*dcp.FileSystemReader(run / f"step-{step}").read_metadata().state_dict_metadata] == ["w", "step"]


def test_a_run_that_was_removed_stays_removed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        append(tmp_path / "gone" / ".bcp", {"format": 1, "kind": "save"})
    assert names(tmp_path) == []


def test_lines_that_are_not_whole_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / ".bcp"
    for number in range(3):
        append(folder, {"format": 1, "kind": "save", "number": number})
    path = folder / "journal.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole) + 1):  # a process may die at any byte of its line, and another one goes on
        path.write_bytes(whole[:cut])
        append(folder, {"format": 1, "kind": "load", "number": 9})
        records, num_skipped = read_journal(tmp_path)
        num_whole = max(n for n in range(4) if sum(map(len, lines[:n])) - (n > 0) <= cut)
        assert [record["number"] for record in records] == [*range(num_whole), 9]
        assert num_skipped <= 1
    path.write_bytes(b'[]\n"text"\n{"format":"x","kind":"save"}\n{"format":1}\n\xff\n\n' + whole)
    records, num_skipped = read_journal(tmp_path)
    assert [record["number"] for record in records] == [0, 1, 2]
    assert num_skipped == 5


def test_old_lines_move_to_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_files, "_ROTATE_BYTES", 2000)
    for number in range(400):
        append(tmp_path, {"format": 1, "kind": "save", "number": number, "text": "x" * 50})
    assert names(tmp_path) == ["journal.1.jsonl", "journal.2.jsonl", "journal.3.jsonl", "journal.jsonl"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    numbers = [record["number"] for record in read_journal(tmp_path)[0]]
    assert numbers == [*range(numbers[0], 400)]
    assert len(numbers) > 50
    for last in (1, 5, 30, 60, 1000):
        assert [record["number"] for record in read_journal(tmp_path, last=last)[0]] == numbers[-last:]


def test_many_writers_lose_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_files, "_ROTATE_BYTES", 20_000)
    write = (
        "import sys\nfrom pathlib import Path\nfrom bytecheckpoint.storage import journal_files\n"
        "from bytecheckpoint.journal.lines import append\njournal_files._ROTATE_BYTES = 20_000\n"
        "for number in range(100):\n"
        "    append(Path(sys.argv[1]), {'format': 1, 'kind': 'save', 'who': sys.argv[2], 'number': number})\n"
    )
    folder = tmp_path / ".bcp"
    writers = [subprocess.Popen([sys.executable, "-c", write, str(folder), str(who)]) for who in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    records, num_skipped = read_journal(tmp_path)
    assert num_skipped == 0
    for who in range(4):
        assert [r["number"] for r in records if r["who"] == str(who)] == [*range(100)]


def test_a_file_that_is_moved_while_a_writer_waits_for_it_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_files, "_ROTATE_BYTES", 200)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 199 + b"\n")
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = threading.Thread(target=append, args=(tmp_path, {"format": 1, "kind": "save", "number": 2}))
        waiting.start()
        inode = f":{path.stat().st_ino} "
        while not any("->" in lock and inode in lock for lock in Path("/proc/locks").read_text().splitlines()):
            assert waiting.is_alive()
        journal_files._make_room(path)  # as another process that has had the lock
        path.write_bytes(b'{"format":1,"kind":"save","number":1}\n')
    waiting.join(60)
    assert names(tmp_path) == ["journal.1.jsonl", "journal.jsonl"]
    assert [record["number"] for record in read_journal(tmp_path)[0]] == [1, 2]


def test_a_journal_that_cannot_be_read(tmp_path: Path) -> None:
    """The others are read, and a pipe in its place is not waited for."""
    assert read_journal(tmp_path) == ([], 0)
    for step in (1, 2):
        save(tmp_path / f"step_{step}")
    there = tmp_path / "step_1" / ".bcp" / "journal.jsonl"
    there.unlink()
    for make, what in ((os.mkfifo, "a FIFO"), (os.mkdir, "a directory")):
        make(there)
        with pytest.warns(RuntimeWarning, match=rf"journal.jsonl\): must be a regular file, but it is {what}"):
            assert kinds(tmp_path) == [("save", "step_2", 2)]
        said = run_bcp("why", str(tmp_path))
        assert said.exit_code == 0
        assert "no save failed or died" in said.output
        assert "bcp: warning: a journal is left out: " in said.output
        save(tmp_path / "step_1")
        Path(there).rmdir() if what == "a directory" else there.unlink()


class _Waiting:
    """Holds the thread that exports."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.reports: list[Any] = []

    def export(self, report: Any, record: dict[str, Any]) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        self.reports.append((report, record))


def test_a_save_waits_for_its_line_and_not_for_exporters(tmp_path: Path) -> None:
    waiting = _Waiting()
    observe(waiting)
    try:
        for step in (1, 2):
            dcp.save(state(), storage_writer=BcpWriter(tmp_path / f"step_{step}"), no_dist=True)
        assert kinds(tmp_path) == [("save", "step_1", 1), ("save", "step_2", 2)]
        assert waiting.begun.wait(60)
        assert not flush(0.05)
        waiting.go_on.set()
        assert flush()
    finally:
        waiting.go_on.set()
        stop_observing(waiting)
    assert [record["step"] for _, record in waiting.reports] == [1, 2]
    save(tmp_path / "step_3")
    assert flush()
    assert len(waiting.reports) == 2


def test_a_process_that_ends_at_once_has_its_line(tmp_path: Path) -> None:
    script = (
        "import sys, torch\nfrom bytecheckpoint import save_state_dict\n"
        "save_state_dict(sys.argv[1] + '/step_1', {'w': torch.ones(10)}, no_dist=True)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    assert kinds(tmp_path) == [("save", "step_1", 1)]


def test_a_forked_child_has_its_own(tmp_path: Path) -> None:
    save(tmp_path / "step_1", journal=str(tmp_path / ".bcp"))
    child = os.fork()
    if child == 0:
        append(tmp_path / ".bcp", {"format": 1, "kind": "save", "path": "of the child", "step": None})
        os._exit(0 if flush(1.0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [path for _, path, _ in kinds(tmp_path)] == ["step_1", "of the child"]


def test_whole_traces_are_kept_in_the_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"step_{step}", trace="full")
    assert names(tmp_path) == ["step_1", "step_2"]
    folder = tmp_path / "step_2" / ".bcp"
    assert names(folder / "traces") == ["save.2.0.trace"]
    (record,) = read_journal(tmp_path, last=1)[0]
    plain = {**record, "timelines": {}}
    assert with_whole_traces(plain, trace_folders(tmp_path, record))["timelines"].keys() == {"0"}
    assert with_whole_traces(plain, [tmp_path / "step_1" / ".bcp"]) == plain
    (of_rank,) = read_traces(folder, "save", 2).values()
    assert {"write", "commit"} <= of_rank.phases.keys()
    (folder / "traces" / "save.2.0.trace").write_bytes(b"damaged")
    assert read_traces(folder, "save", 2) == {}


def test_a_rank_keeps_its_last_traces_where_all_go_to_one_folder(tmp_path: Path) -> None:
    for step in range(20):
        save(tmp_path / f"step_{step}", trace="full", journal=str(tmp_path / "own"))
    assert names(tmp_path / "own" / "traces") == sorted(f"save.{step}.0.trace" for step in range(4, 20))


def test_a_record_is_plain_json(tmp_path: Path) -> None:
    save(tmp_path / "step_1")
    (line,) = (tmp_path / "step_1" / ".bcp" / "journal.jsonl").read_text().splitlines()
    assert json.loads(line) == read_journal(tmp_path)[0][0]
    assert len(line) < 20_000
