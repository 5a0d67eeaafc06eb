# SPDX-License-Identifier: Apache-2.0
"""What the journal has of copies to durable storage, and what ``bcp report`` and ``bcp top`` say of them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import HOSTILE, as_json, run

from bytecheckpoint import Config, Retention, drain, save_state_dict
from bytecheckpoint.checkpoint.keeping import note_drain
from bytecheckpoint.observability import read_journal
from bytecheckpoint.observability.drains import drain_text, drains_in
from bytecheckpoint.observability.journal import read_drains

NOW = 1.75e9


@pytest.fixture
def near(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save_state_dict(tmp_path / f"near/step-{step}", {"w": torch.full((25_000,), float(step))}, no_dist=True)
    return tmp_path / "near"


@pytest.fixture
def durable(tmp_path: Path) -> Path:
    return tmp_path / "durable"


def record(step: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "drain", "at": NOW + step, "path": f"step-{step}", "target": f"s3://b/run/step-{step}", **fields}


# What is noted.


def test_a_copy_is_noted_once(near: Path, durable: Path) -> None:
    for _ in range(2):
        drain(near, durable)
    records = read_drains(near)
    assert [(each["path"], each["step"]) for each in records] == [("step-10", 10), ("step-20", 20), ("step-30", 30)]
    assert [each["target"] for each in records] == [f"{durable}/step-{step}" for step in (10, 20, 30)]
    assert all(each["num_bytes"] > 100_000 and each["total_s"] > 0 and each["save_id"] for each in records)
    assert read_journal(near)[1] == 0  # and no line that cannot be read


def test_what_is_dropped_or_fails_is_noted_once(near: Path, durable: Path) -> None:
    durable.touch()
    for _ in range(2):
        drain(near, durable, most_waiting=1)
    first, *others = read_drains(near)[:3]
    assert (first["path"], first["dropped"]) == ("step-10", "2 newer steps wait")
    assert [each["path"] for each in others] == ["step-20", "step-30"]
    assert all(str(durable) in each["failed"] for each in others)


def test_a_watch_notes_what_fails_again_once(near: Path, durable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable.touch()
    stop = threading.Event()
    looks: list[float] = []
    monkeypatch.setattr(stop, "wait", lambda seconds: looks.append(seconds) or len(looks) == 3)
    drain(near, durable, watch_s=0.5, stop=stop)
    assert [each["path"] for each in read_drains(near)] == ["step-10", "step-20", "step-30"]


def test_without_a_journal_nothing_is_noted(near: Path, durable: Path) -> None:
    drain(near, durable, config=Config(journal="off"))
    assert read_drains(near) == []


def test_a_prune_keeps_the_lines(near: Path, durable: Path) -> None:
    drain(near, durable)
    Retention(near, keep_latest=1).prune()
    assert [each["path"] for each in read_drains(near)] == ["step-10", "step-20", "step-30"]


# What is said.


def test_the_numbers_of_a_run(near: Path) -> None:
    note_drain(str(near / "step-20"), "is being drained")
    note_drain(str(near / "step-30"), "waits to be drained")
    found = drains_in(
        near,
        [
            record(5, num_bytes=3_000_000, total_s=1.5),
            record(6, failed="no space"),
            record(7, dropped="3 newer steps wait"),
            record(6, num_bytes=1_000_000, total_s=0.5),  # a later try
            record(8, failed="no answer", total_s=20.0),
        ],
    )
    assert [(step.name, step.is_under_way) for step in found.waiting] == [("step-20", True), ("step-30", False)]
    size = sum(step.num_bytes for step in found.waiting)
    assert size > 200_000
    copied, waiting, failed = found.summary().split("; ")
    assert copied == "2 steps copied, 4.00 MB in 2.00 s, 2.00 MB/s"
    assert waiting == f"2 steps waiting, {size / 1e3:.2f} kB, of which step-20 is being copied"
    assert failed == "2 failed tries"
    assert [drain_text(each) for each in found.left_out] == [
        "2025-06-15 15:06:47 UTC, copy of step-7 to s3://b/run/step-7: dropped: 3 newer steps wait",
        "2025-06-15 15:06:48 UTC, copy of step-8 to s3://b/run/step-8, after 20.00 s: failed: no answer",
    ]


def test_numbers_that_are_none_do_no_harm(near: Path) -> None:
    wrong: Any = {"kind": "drain", "at": "yesterday", "path": 7, "target": None, "num_bytes": -5, "total_s": "long"}
    found = drains_in(near, [wrong, {**wrong, "num_bytes": 1e400, "total_s": True}])
    assert found.summary() == "2 steps copied, 0 bytes in 0.0 ms"
    assert drain_text(wrong) == "?, copy of ? to ?: 0 bytes in 0.0 ms"


def test_report_says_it(near: Path, durable: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert "to durable storage" not in run("report", str(near)).output
    drain(near, durable, most_waiting=1)
    lines = run("report", str(near)).output.splitlines()
    assert lines[0] == f"{near}: 3 saves, 0 loads"  # no line was skipped
    at = next(at for at, line in enumerate(lines) if line.startswith("to durable storage: 2 steps copied, "))
    assert lines[at + 1].endswith(f"copy of step-10 to {durable}/step-10: dropped: 2 newer steps wait")
    told = as_json("report", str(near))["drains"]
    assert (told["num_copied"], told["num_failed"], told["waiting"]) == (2, 0, [])
    assert told["num_bytes"] == sum(each.get("num_bytes", 0) for each in told["records"]) > 200_000
    assert [each["step"] for each in as_json("report", str(near), "--since", "20")["drains"]["records"]] == [20, 30]


def test_top_says_it(near: Path, durable: Path) -> None:
    assert "to durable storage" not in run("top", str(near), "--once").output
    note_drain(str(near / "step-30"), "waits to be drained")
    assert "to durable storage: 0 steps copied; 1 step waiting, " in run("top", str(near), "--once").output
    drain(near, durable)
    lines = run("top", str(near), "--once").output.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("to durable storage: 3 steps copied, "))
    named = [line.partition(" copy of ")[2].partition(" to ")[0] for line in lines[at + 1 :]]
    assert named == ["step-30", "step-20", "step-10"]
    assert "to durable storage: 1 step copied, " in run("top", str(near / "step-30"), "--once").output
    told = as_json("top", str(near))["drains"]
    assert (told["num_copied"], [each["step"] for each in told["last"]]) == (3, [10, 20, 30])


def test_hostile_lines_stay_text(near: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = drains_in(near, [record(1, failed=HOSTILE)])
    assert found.left_out
    with (near / "step-10/.bcp/journal.jsonl").open("a") as file:
        file.write(json.dumps({"format": 1, **record(1, failed=HOSTILE)}) + "\n")
    for command in (("report",), ("top", "--once")):
        said = run(*command, str(near)).output
        assert "failed: " in said
        assert HOSTILE not in said
