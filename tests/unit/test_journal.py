# SPDX-License-Identifier: Apache-2.0
"""Tests the journal of a run: where it is, what a line says, and that nothing which happens to it harms a save."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter, Config, SaveReport, async_save_state_dict
from bytecheckpoint.errors import StorageError
from bytecheckpoint.observability import journal, read_journal
from bytecheckpoint.observability.observers import flush, observe, stop_observing
from bytecheckpoint.observability.trace_files import read_traces


def state() -> dict[str, Any]:
    return {"w": torch.arange(100_000, dtype=torch.float32), "step": 3}


def save(path: Path | str, **settings: Any) -> SaveReport:
    writer = BcpWriter(path, config=Config(**settings))
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert flush()
    assert writer.last_report is not None
    return writer.last_report


def load(path: Path | str, **settings: Any) -> None:
    dcp.load(state(), storage_reader=BcpReader(path, config=Config(**settings)), no_dist=True)
    assert flush()


def kinds(run: Path) -> list[tuple[str, str, int | None]]:
    records, num_skipped = read_journal(run)
    assert num_skipped == 0
    return [(record["kind"], record["path"], record["step"]) for record in records]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_save_and_load_of_a_run_has_a_line(tmp_path: Path) -> None:
    report = save(tmp_path / "step_7")
    save(tmp_path / "global_step12")
    load(tmp_path / "step_7")
    assert kinds(tmp_path) == [("save", "step_7", 7), ("save", "global_step12", 12), ("load", "step_7", 7)]
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
    assert flush()
    assert sorted(kinds(tmp_path)) == [("save", "step_5/extra_state", 5), ("save", "step_5/model", 5)]


def test_a_background_save_says_what_it_blocked(tmp_path: Path) -> None:
    report = async_save_state_dict(tmp_path / "step_1", state()).committed.result()
    assert flush()
    (record,), _ = read_journal(tmp_path)
    assert record["is_async"] is report.is_async is True
    assert report.blocked_s > 0.0
    assert record["ranks"]["phases"]["stage"] == [round(report.blocked_s, 6)]


def test_a_path_that_names_no_step_has_no_journal(tmp_path: Path) -> None:
    save(tmp_path / "best")
    assert names(tmp_path) == ["best"]
    save(tmp_path / "step_1")
    save(tmp_path / "best")
    load(tmp_path / "best")
    assert kinds(tmp_path) == [("save", "step_1", 1), ("save", "best", None), ("load", "best", None)]


def test_a_load_begins_no_journal(tmp_path: Path) -> None:
    save(tmp_path / "step_1", journal="off")
    load(tmp_path / "step_1")
    assert names(tmp_path) == ["step_1"]


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "Kept"
    save(tmp_path / "a" / "best", journal=str(own))
    save(tmp_path / "a" / "step_3", journal=str(own), journal_hosts=False)
    assert names(tmp_path / "a") == ["best", "step_3"]
    assert kinds(own) == [("save", str(tmp_path / "a" / "best"), None), ("save", "step_3", 3)]
    records, _ = read_journal(own, last=1)
    assert records[0]["hosts"] == ["host 0"]
    assert records[0]["config"] == {"journal": str(own), "journal_hosts": False}


def test_what_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".bcp").write_text("a file stands where the folder would be")
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        for step in (1, 2, 3):
            save(tmp_path / f"step_{step}")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert f"the journal in {tmp_path / '.bcp'} cannot be written" in lines[0]
    assert "said once" in lines[0]
    assert bytecheckpoint.verify(tmp_path / "step_3").is_whole


def test_a_run_that_was_removed_stays_removed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        journal.append(tmp_path / "gone" / ".bcp", {"format": 1, "kind": "save"})
    assert names(tmp_path) == []


def test_lines_that_are_not_whole_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / ".bcp"
    for number in range(3):
        journal.append(folder, {"format": 1, "kind": "save", "number": number})
    path = folder / "journal.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole) + 1):  # a process may die at any byte of its line, and another one goes on
        path.write_bytes(whole[:cut])
        journal.append(folder, {"format": 1, "kind": "load", "number": 9})
        records, num_skipped = read_journal(tmp_path)
        num_whole = max(n for n in range(4) if sum(map(len, lines[:n])) - (n > 0) <= cut)
        assert [record["number"] for record in records] == [*range(num_whole), 9]
        assert num_skipped <= 1
    path.write_bytes(b'[]\n"text"\n{"format":"x","kind":"save"}\n{"format":1}\n\xff\n\n' + whole)
    records, num_skipped = read_journal(tmp_path)
    assert [record["number"] for record in records] == [0, 1, 2]
    assert num_skipped == 5


def test_old_lines_move_to_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_ROTATE_BYTES", 2000)
    for number in range(400):
        journal.append(tmp_path, {"format": 1, "kind": "save", "number": number, "text": "x" * 50})
    assert names(tmp_path) == ["journal.1.jsonl", "journal.2.jsonl", "journal.3.jsonl", "journal.jsonl"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    numbers = [record["number"] for record in read_journal(tmp_path)[0]]
    assert numbers == [*range(numbers[0], 400)]
    assert len(numbers) > 50
    for last in (1, 5, 30, 60, 1000):
        assert [record["number"] for record in read_journal(tmp_path, last=last)[0]] == numbers[-last:]


def test_many_writers_lose_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_ROTATE_BYTES", 20_000)
    write = (
        "import sys\nfrom pathlib import Path\nfrom bytecheckpoint.observability import journal\n"
        "journal._ROTATE_BYTES = 20_000\n"
        "for number in range(100):\n"
        "    journal.append(Path(sys.argv[1]), {'format': 1, 'kind': 'save', 'who': sys.argv[2], 'number': number})\n"
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
    monkeypatch.setattr(journal, "_ROTATE_BYTES", 200)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 199 + b"\n")
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = threading.Thread(target=journal.append, args=(tmp_path, {"format": 1, "kind": "save", "number": 2}))
        waiting.start()
        inode = f":{path.stat().st_ino} "
        while not any("->" in lock and inode in lock for lock in Path("/proc/locks").read_text().splitlines()):
            assert waiting.is_alive()
        journal._rotate(path)  # as another process that has had the lock
        path.write_bytes(b'{"format":1,"kind":"save","number":1}\n')
    waiting.join(60)
    assert names(tmp_path) == ["journal.1.jsonl", "journal.jsonl"]
    assert [record["number"] for record in read_journal(tmp_path)[0]] == [1, 2]


def test_a_journal_that_cannot_be_read(tmp_path: Path) -> None:
    assert read_journal(tmp_path) == ([], 0)
    (tmp_path / ".bcp" / "journal.jsonl").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"read\(.*journal.jsonl\): Is a directory"):
        read_journal(tmp_path)


class _Waiting:
    """Holds the thread that exports."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.reports: list[Any] = []

    def export(self, report: Any, record: dict[str, Any]) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        self.reports.append((report, record))


def test_a_save_does_not_wait_for_what_comes_after(tmp_path: Path) -> None:
    waiting = _Waiting()
    observe(waiting)
    try:
        for step in (1, 2):
            dcp.save(state(), storage_writer=BcpWriter(tmp_path / f"step_{step}"), no_dist=True)
        assert waiting.begun.wait(60)
        assert not flush(0.05)
        waiting.go_on.set()
        assert flush()
    finally:
        waiting.go_on.set()
        stop_observing(waiting)
    assert [record["step"] for _, record in waiting.reports] == [1, 2]
    save(tmp_path / "step_3")
    assert len(waiting.reports) == 2


def test_a_process_that_ends_at_once_has_its_line(tmp_path: Path) -> None:
    script = (
        "import sys, torch\nfrom bytecheckpoint import save_state_dict\n"
        "save_state_dict(sys.argv[1] + '/step_1', {'w': torch.ones(10)}, no_dist=True)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    assert kinds(tmp_path) == [("save", "step_1", 1)]


def test_a_forked_child_has_its_own(tmp_path: Path) -> None:
    save(tmp_path / "step_1")
    child = os.fork()
    if child == 0:
        journal.append(tmp_path / ".bcp", {"format": 1, "kind": "save", "path": "of the child", "step": None})
        os._exit(0 if flush(1.0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [path for _, path, _ in kinds(tmp_path)] == ["step_1", "of the child"]


def test_whole_traces_are_kept_beside_the_journal(tmp_path: Path) -> None:
    for step in range(20):
        save(tmp_path / f"step_{step}", trace="full")
    assert names(tmp_path / ".bcp" / "traces") == sorted(f"save.{step}.0.trace" for step in range(4, 20))
    (of_rank,) = read_traces(tmp_path / ".bcp", "save", 19).values()
    assert {"write", "commit"} <= of_rank.phases.keys()
    (tmp_path / ".bcp" / "traces" / "save.19.0.trace").write_bytes(b"damaged")
    assert read_traces(tmp_path / ".bcp", "save", 19) == {}


def test_a_record_is_plain_json(tmp_path: Path) -> None:
    save(tmp_path / "step_1")
    (line,) = (tmp_path / ".bcp" / "journal.jsonl").read_text().splitlines()
    assert json.loads(line) == read_journal(tmp_path)[0][0]
    assert len(line) < 20_000
