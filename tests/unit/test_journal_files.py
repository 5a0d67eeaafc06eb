# SPDX-License-Identifier: Apache-2.0
"""Tests how the lines of steps that are removed get to a step that stays: all of them, in bounds, whatever happens."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.run_folder import RunFolder, save_at

import bytecheckpoint
from bytecheckpoint import Retention
from bytecheckpoint.observability import read_journal
from bytecheckpoint.storage import journal_files
from bytecheckpoint.storage.journal_files import append, carry_lines

LINE = len(b'{"format":1,"kind":"save","at":0,"save_id":"00000"}\n')


def line(number: int) -> bytes:
    return json.dumps({"format": 1, "kind": "save", "at": 0, "save_id": f"{number:05}"}, separators=(",", ":")).encode()


def step(run: Path, number: int, lines: range) -> Path:
    path = run / f"step_{number}"
    path.mkdir(exist_ok=True)
    for each in lines:
        append(path / ".bcp", line(each) + b"\n")
    return path


def carried(removed: list[Path], into: Path) -> list[str]:
    run = os.open(into.parent, os.O_RDONLY)
    try:
        return carry_lines(run, [path.name for path in removed], into.name)
    finally:
        os.close(run)


def lines_of(folder: Path) -> list[int]:
    """Returns the numbers of the lines of one journal, the oldest first."""
    contents = [path.read_bytes() for path in journal_files.journal_paths(folder / ".bcp") if path.exists()]
    return [int(json.loads(each)["save_id"]) for content in reversed(contents) for each in content.splitlines()]


def steps_of(run: Path) -> list[int]:
    return [record["step"] for record in read_journal(run)[0]]


@pytest.mark.parametrize(("few", "many"), [(1, 9), (9, 1), (0, 3), (3, 0)])
def test_lines_go_before_those_of_the_step_that_stays(tmp_path: Path, few: int, many: int) -> None:
    old, new = step(tmp_path, 1, range(many)), step(tmp_path, 2, range(many, many + few))
    assert carried([old], new) == []
    assert lines_of(new) == [*range(many + few)]
    assert lines_of(old) == []
    assert carried([old, tmp_path / "gone"], new) == []
    assert lines_of(new) == [*range(many + few)]


def test_a_torn_line_swallows_none(tmp_path: Path) -> None:
    old, new = step(tmp_path, 1, range(1)), step(tmp_path, 2, range(1, 2))
    with (old / ".bcp" / "journal.jsonl").open("ab") as file:
        file.write(b'{"format":1,"ki')
    assert carried([old], new) == []
    records, num_skipped = read_journal(tmp_path)
    assert ([record["save_id"] for record in records], num_skipped) == (["00000", "00001"], 1)


def test_what_has_no_lines_makes_no_folder(tmp_path: Path) -> None:
    old, new = step(tmp_path, 1, range(0)), step(tmp_path, 2, range(0))
    (old / ".bcp" / "traces").mkdir(parents=True)
    assert carried([old], new) == []
    assert [*new.iterdir()] == []


def test_a_journal_that_is_carried_on_and_on_stays_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_files, "_ROTATE_BYTES", 10 * LINE)
    before = step(tmp_path, 0, range(1))
    for number in range(1, 100):
        after = step(tmp_path, number, range(number, number + 1))
        assert carried([before], after) == []
        kept = lines_of(after)
        assert kept == [*range(number + 1 - len(kept), number + 1)], "the newest lines, in their order"
        assert len(kept) >= min(number + 1, 30)
        files = [path for path in journal_files.journal_paths(after / ".bcp") if path.exists()]
        assert all(path.stat().st_size <= 10 * LINE for path in files)
        before = after
    assert len(lines_of(before)) <= 40


def test_a_step_on_another_file_system(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("A STEP ON ANOTHER FILE SYSTEM IS NOT TESTED: there is no other one here")
    elsewhere = shared / f"bcp-test-{os.getpid()}"
    elsewhere.mkdir()
    try:
        old, new = step(elsewhere, 1, range(5)), step(tmp_path, 2, range(5, 6))
        journal_files._carry(old, new)
        assert (lines_of(old), lines_of(new)) == ([], [*range(6)])
        assert [path.name for path in (new / ".bcp").iterdir()] == ["journal.jsonl"]
    finally:
        subprocess.run(["rm", "-r", str(elsewhere)], check=True)


def test_a_journal_that_a_save_writes_now_is_left_to_it(tmp_path: Path) -> None:
    old, new = step(tmp_path, 1, range(2)), step(tmp_path, 2, range(2, 3))
    with (old / ".bcp" / "journal.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert carried([old], new) == []
        assert (lines_of(old), lines_of(new)) == ([0, 1], [2])
    assert carried([old], new) == []
    assert lines_of(new) == [0, 1, 2]


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    old, new = step(tmp_path, 1, range(1)), step(tmp_path, 2, range(0))
    (new / ".bcp").write_text("a file stands where the folder would be")
    (failure,) = carried([old], new)
    assert failure.startswith("the journal of step_1 is not kept: ")
    assert os.strerror(errno.ENOTDIR) in failure


def test_a_crash_leaves_a_line_twice_at_most(tmp_path: Path) -> None:
    """The process dies between the two steps of the move; readers see each line once, and the next prune goes on."""
    old, new = step(tmp_path, 1, range(4)), step(tmp_path, 2, range(4, 5))
    script = (
        "import os, sys\nfrom bytecheckpoint.storage import journal_files\n"
        "journal_files._move = lambda *_: os._exit(9)\n"
        "journal_files.carry_lines(os.open(sys.argv[1], os.O_RDONLY), ['step_1'], 'step_2')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert ended.returncode == 9
    assert (lines_of(old), lines_of(new)) == ([0, 1, 2, 3, 4], [4])

    def ids(last: int | None = None) -> list[str]:
        return [record["save_id"] for record in read_journal(tmp_path, last)[0]]

    assert ids() == [f"{number:05}" for number in range(5)]
    for last in range(1, 6):
        assert len(ids(last)) == last
    assert carried([old], new) == []
    assert ids() == [f"{number:05}" for number in range(5)]


def test_a_prune_keeps_the_lines(run: RunFolder) -> None:
    for number in range(1, 7):
        save_at(run.path(number), number)
    run.half(7)
    report = Retention(run.root, keep_latest=2, remove_others=False, grace_s=0).prune()
    assert (report.kept, report.warnings) == ([5, 6], [])
    assert sorted(path.name for path in run.root.iterdir()) == ["step-5", "step-6"]
    assert steps_of(run.root) == [1, 2, 3, 4, 5, 6]
    save_at(run.path(8), 8)
    assert Retention(run.root, keep_latest=1).prune().warnings == []
    assert steps_of(run.root) == [1, 2, 3, 4, 5, 6, 8]
    assert steps_of(run.path(8)) == [1, 2, 3, 4, 5, 6, 8]


def test_a_dry_run_moves_nothing_and_says_what_a_prune_frees(run: RunFolder) -> None:
    for number in (1, 2, 3):
        save_at(run.path(number), number, config=bytecheckpoint.Config(trace="full"))
    rules: dict[str, Any] = {"keep_latest": 1}
    would_free = Retention(run.root, **rules).prune(dry_run=True).bytes_freed
    assert [len(read_journal(run.path(number))[0]) for number in (1, 2, 3)] == [1, 1, 1]
    assert Retention(run.root, **rules).prune().bytes_freed == would_free


def test_the_parts_of_a_step(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        bytecheckpoint.save(tmp_path, {"model": torch.nn.Linear(2, 2), "extra_state": {}}, "ddp", global_steps=number)
        report = Retention(tmp_path, keep_latest=1, remove_others=False).after_save(number)
        assert report is not None
        assert report.warnings == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["global_step_3"]
    wanted = [f"global_step_{number}/{part}" for number in (1, 2, 3) for part in ("extra_state", "model")]
    assert [record["path"] for record in read_journal(tmp_path)[0]] == wanted
    assert bytecheckpoint.find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_3")


def test_what_a_failed_save_traced_is_an_empty_step(run: RunFolder) -> None:
    save_at(run.path(2))
    (run.path(1) / ".bcp" / "traces").mkdir(parents=True)
    (folder, _) = bytecheckpoint.scan_steps(run.root)
    assert (folder.state, folder.reason) == ("half", "empty")
    assert Retention(run.root, keep_latest=1).prune().swept == [str(run.path(1))]
    assert [path.name for path in run.root.iterdir()] == ["step-2"]


@pytest.mark.parametrize("link", ["step_1", "step_1/.bcp", "step_1/.bcp/journal.jsonl", "step_2", "step_2/.bcp"])
def test_links_are_not_followed(tmp_path: Path, link: str) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    old, new = step(run, 1, range(2)), step(run, 2, range(2, 3))
    (run / link).rename(outside)
    (run / link).symlink_to(outside)

    def contents() -> list[bytes]:
        return [path.read_bytes() for path in (outside, *sorted(outside.rglob("*"))) if path.is_file()]

    before = contents()
    (failure,) = carried([old], new)
    assert failure.startswith("the journal of step_1 is not kept: ")
    assert contents() == before
    assert lines_of(old) == [0, 1]
