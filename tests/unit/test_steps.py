# SPDX-License-Identifier: Apache-2.0
"""Tests what a scan of a run folder says of each step folder."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from unit.run_folder import DEAD_TMP, RunFolder, save_at, small_state

from bytecheckpoint import Retention, StepFolder, latest, scan_steps
from bytecheckpoint.errors import CheckpointBusyError, ConfigError, StorageError
from bytecheckpoint.native import _core


def only(run: RunFolder, **options: object) -> StepFolder:
    (folder,) = scan_steps(run.root, **options)  # type: ignore[arg-type]
    return folder


@pytest.fixture
def live_save(run: RunFolder) -> Iterator[Path]:
    """Returns the folder of step 5, which a live save holds."""
    run.path(5).mkdir()
    path = run.path(5) / f".metadata.{'a' * 32}.tmp"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield run.path(5)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-100", 100),
        ("step_100", 100),
        ("step100", 100),
        ("global_step_100", 100),
        ("global_step100", 100),
        ("checkpoint-100", 100),
        ("100", 100),
        ("step-0", 0),
        ("step-007", 7),
    ],
)
def test_names_of_step_folders(run: RunFolder, template: Path, name: str, step: int) -> None:
    shutil.copytree(template, run.root / name)
    folder = only(run)
    assert (folder.step, folder.name, folder.path) == (step, name, str(run.root / name))


@pytest.mark.parametrize("name", ["step-100.tmp", "step-", "step100-tmp", "best", "a-step-1", "step-1x", "1.5", "-1"])
def test_other_names_are_no_steps(run: RunFolder, template: Path, name: str) -> None:
    shutil.copytree(template, run.root / name)
    assert scan_steps(run.root) == []


def test_files_and_links_are_no_steps(run: RunFolder, template: Path) -> None:
    (run.root / "step-1").symlink_to(template)
    (run.root / "step-2").touch()
    assert scan_steps(run.root) == []


def test_a_pattern_of_ones_own(run: RunFolder, template: Path) -> None:
    for name in ("epoch=3", "epoch=12", "step-1"):
        shutil.copytree(template, run.root / name)
    assert [folder.step for folder in scan_steps(run.root, pattern=r"epoch=(\d+)")] == [3, 12]
    for pattern in ("(", r"epoch=\d+"):
        with pytest.raises(ConfigError, match="pattern"):
            scan_steps(run.root, pattern=pattern)


def test_order_is_by_number(run: RunFolder) -> None:
    run.complete(1000, 9, 20)
    assert run.steps() == [9, 20, 1000]


def test_a_root_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        scan_steps(tmp_path / "none")
    assert caught.value.errno == 2


def test_complete(run: RunFolder) -> None:
    run.complete(1)
    folder = only(run)
    (data,) = run.path(1).glob("*.distcp")
    assert folder.is_complete
    assert (folder.reason, folder.is_being_saved, folder.is_foreign, folder.parts) == ("", False, False, ())
    assert (folder.num_files, folder.num_bytes) == (1, data.stat().st_size)
    assert [len(save_id) for save_id in folder.save_ids] == [32]
    assert folder.summary() == f"step-1: complete, {data.stat().st_size / 1e3:.2f} kB in 1 file"
    assert (
        StepFolder(**{**json.loads(folder.to_json()), "save_ids": folder.save_ids, "parts": (), "components": ()})
        == folder
    )


def test_complete_beside_what_a_dead_save_left(run: RunFolder) -> None:
    run.complete(1)
    (run.path(1) / DEAD_TMP).touch()
    (run.path(1) / "__0_0.00000000deadbeef.distcp").touch()
    assert only(run).is_complete


def test_of_stock(run: RunFolder) -> None:
    dcp.save(small_state(), checkpoint_id=run.path(1), no_dist=True)
    folder = only(run, deep=True)
    assert (folder.state, folder.is_foreign, folder.num_files) == ("complete", True, 1)
    (data,) = run.path(1).glob("*.distcp")
    os.truncate(data, data.stat().st_size - 1)
    assert only(run).state == "corrupt"
    data.unlink()
    assert only(run).state == "corrupt"


def test_half(run: RunFolder) -> None:
    run.half(1)
    run.half(2, tmp=False)
    run.path(3).mkdir()
    run.path(4).mkdir()
    (run.path(4) / "__3_0.distcp").touch()
    assert run.steps("half") == [1, 2, 3, 4]
    assert [folder.reason for folder in scan_steps(run.root)][1:3] == [
        "files of a save that was not committed",
        "empty",
    ]


def test_corrupt(run: RunFolder) -> None:
    run.corrupt(1)
    run.complete(2, 3, 4, 5)
    next(run.path(2).glob("*.distcp")).unlink()
    os.truncate(run.path(3) / ".metadata", 200)
    # The data file of another save, with the same size.
    other = run.root / "other"
    save_at(other)
    next(run.path(4).glob("*.distcp")).write_bytes(next(other.glob("*.distcp")).read_bytes())
    (run.path(5) / ".metadata").write_bytes(b"")
    folders = scan_steps(run.root)
    assert [folder.state for folder in folders] == ["corrupt"] * 5
    for folder, reason in zip(
        folders, ["file must have", "No such file", "trailer", "not the file", "empty"], strict=True
    ):
        assert reason in folder.reason
        assert folder.path in folder.reason


def test_deep_sees_what_lies_within(run: RunFolder) -> None:
    run.complete(1, 2)
    (data,) = run.path(1).glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[4200] ^= 1
    data.write_bytes(content)
    assert run.steps() == [1, 2]
    first, second = scan_steps(run.root, deep=True)
    assert (first.state, second.state) == ("corrupt", "complete")
    assert data.name in first.reason


def test_unknown(run: RunFolder) -> None:
    run.path(1).mkdir()
    (run.path(1) / "notes.txt").touch()
    run.path(2).mkdir()
    (run.path(2) / "model").mkdir()
    run.complete(3)
    (run.path(3) / ".metadata").write_bytes(b"\x80\x04cos\nsystem\n.")
    folders = scan_steps(run.root)
    assert [folder.state for folder in folders][:2] == ["unknown"] * 2
    assert folders[0].reason == "it holds no files of a checkpoint"
    assert folders[2].state in ("unknown", "corrupt")


@pytest.mark.parametrize("within", [False, True])
def test_names_that_are_no_text(run: RunFolder, template: Path, within: bool) -> None:
    run.complete(1)
    name = os.fsdecode(b"caf\xe9-2")
    folder = run.path(2) / name if within else run.root / name
    shutil.copytree(template, folder)
    whole, odd = scan_steps(run.root, pattern=r".*-(\d+)")
    assert (whole.state, odd.step, odd.state) == ("complete", 2, "unknown")
    assert odd.reason.encode()
    report = Retention(run.root, keep_latest=1, pattern=r".*-(\d+)").prune()
    assert (report.warnings, report.skipped) == ([], {odd.path: f"it cannot be looked at: {odd.reason}"})
    run.complete(3)
    (run.path(1) / name).mkdir()
    (run.path(1) / name / name).touch()
    report = Retention(run.root, keep_latest=1, pattern=r".*-(\d+)").prune()
    assert (report.removed, report.warnings) == ([str(run.path(1))], [])
    assert (folder / ".metadata").exists()


def test_parts_without_collectives(run: RunFolder, template: Path) -> None:
    run.complete(1)
    mark = (run.path(1) / ".metadata").rename(run.path(1) / "__0.metadata")
    folder = only(run)
    assert (folder.state, folder.parts) == ("complete", (0,))
    shutil.copy(mark, run.path(1) / "__1.metadata")
    folder = only(run)
    assert (folder.state, folder.parts, len(folder.save_ids)) == ("complete", (0, 1), 2)
    dead = run.path(1) / f"__2{DEAD_TMP}"
    dead.touch()
    assert only(run).state == "half"
    dead.unlink()
    mark.unlink()
    folder = only(run)
    assert (folder.state, folder.reason) == ("half", "rank 0 has no part, but rank 1 has one")


def test_a_live_save(run: RunFolder, live_save: Path, template: Path) -> None:
    folder = only(run)
    assert (folder.state, folder.is_being_saved) == ("saving", True)
    shutil.copytree(template, live_save, dirs_exist_ok=True)
    folder = only(run)
    assert (folder.state, folder.is_being_saved) == ("complete", True)


def test_a_removal_holds_the_path(run: RunFolder) -> None:
    run.complete(1)
    removal = _core.Removal(_core.Directory(str(run.path(1))))
    assert only(run).is_being_saved
    with pytest.raises(CheckpointBusyError):
        _core.Removal(_core.Directory(str(run.path(1))))
    del removal
    assert not only(run).is_being_saved
    assert only(run).is_complete


def test_a_scan_takes_no_lock(run: RunFolder, live_save: Path) -> None:
    """It takes not even a shared lock for a moment: a save that begins would find its own tmp locked."""
    script = f"from bytecheckpoint import scan_steps; print(scan_steps({str(run.root)!r})[0].state)"
    log = run.root / "log"
    command = ["strace", "-f", "-e", "trace=%file,flock,fcntl", "-o", str(log), sys.executable, "-c", script]
    if shutil.which("strace") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("LOCKS NOT WATCHED: strace is not installed")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ptrace" in ran.stderr:
        pytest.skip(f"LOCKS NOT WATCHED: {ran.stderr}")
    assert ran.stdout.strip() == "saving", ran.stderr
    calls = log.read_text().splitlines()
    assert any(".tmp" in call for call in calls), "nothing was watched"
    taken = ("flock(", "SETLK", "unlink", "rename", "rmdir", "O_CREAT")
    assert [call for call in calls if str(run.root) in call and any(word in call for word in taken)] == []
    assert [call for call in calls if "flock(" in call or "SETLK" in call] == []


def test_needs_no_torch(run: RunFolder) -> None:
    run.complete(1, 2)
    script = (
        "import sys; from bytecheckpoint import Retention, scan_steps\n"
        f"print(len(scan_steps({str(run.root)!r})), len(Retention({str(run.root)!r}, keep_latest=1).prune().removed),"
        " 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["2", "1", "False"]


def test_a_pattern_whose_group_is_no_number_is_no_empty_run(tmp_path: Path) -> None:
    """A job would begin at 0 beside its checkpoints."""
    (tmp_path / "epoch_7").mkdir()
    for pattern in (r"(epoch)_\d+", r"(?:step_(\d+)|epoch_(\d+))"):
        with pytest.raises(ConfigError, match=r"its first group is .*, which is no number of a step"):
            latest(tmp_path, pattern=pattern)
    assert latest(tmp_path / "none", pattern=r"(epoch)_\d+") is None
