# SPDX-License-Identifier: Apache-2.0
"""Tests which checkpoints of a run a prune keeps, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from unit.run_folder import DEAD_TMP, RunFolder, save_at, small_state

from bytecheckpoint import BcpReader, Retention, StepFolder, load_state_dict, scan_steps
from bytecheckpoint.checkpoint import retention
from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError
from bytecheckpoint.native import _core
from bytecheckpoint.report.text import size_text

DAY_S = 86_400.0


def left_by(run: RunFolder, **rules: Any) -> list[int]:
    report = Retention(run.root, **rules).prune()
    assert report.warnings == []
    return [folder.step for folder in scan_steps(run.root)]


def test_the_newest_are_kept(run: RunFolder) -> None:
    run.complete(100, 200, 300, 1000, 2000)
    sizes = sum(file.stat().st_size for step in (100, 200, 300) for file in run.path(step).iterdir())
    report = Retention(run.root, keep_latest=2).prune()
    assert run.names() == {"step-1000", "step-2000"}
    assert report.kept == [1000, 2000]
    assert report.removed == [str(run.path(step)) for step in (100, 200, 300)]
    assert report.bytes_freed == sizes
    assert "removed 3, kept 2" in report.summary()
    assert json.loads(report.to_json())["kept"] == [1000, 2000]
    assert Retention(run.root, keep_latest=2).prune().removed == []


def test_every_nth_is_kept(run: RunFolder) -> None:
    run.complete(*range(0, 1100, 100))
    assert left_by(run, keep_latest=1, keep_every=500) == [0, 500, 1000]


def test_a_dry_run_removes_nothing(run: RunFolder) -> None:
    run.complete(1, 2, 3)
    run.half(0)
    before = sorted(run.root.rglob("*"))
    report = Retention(run.root, keep_latest=1).prune(dry_run=True)
    assert (report.removed, report.swept) == ([str(run.path(1)), str(run.path(2))], [str(run.path(0))])
    assert sorted(run.root.rglob("*")) == before
    assert report.summary().startswith(f"pruned {run.root}: would have removed 2")
    assert report.bytes_freed == sum(file.stat().st_size for step in (0, 1, 2) for file in run.path(step).iterdir())
    assert report.summary().endswith(f"; would have freed {size_text(report.bytes_freed)}")


@pytest.mark.parametrize("remove_others", [False, True])
def test_a_dry_run_says_what_a_prune_frees(run: RunFolder, remove_others: bool) -> None:
    """Files of others count if they are removed. A checkpoint inside, and what links lead to, does not count."""
    run.complete(1, 2, 3)
    (run.path(1) / "logs" / "deep").mkdir(parents=True)
    (run.path(1) / "logs" / "deep" / "log").write_bytes(bytes(1000))
    (run.path(1) / "logs" / "link").symlink_to(run.path(3))
    (run.path(1) / "notes").write_bytes(bytes(10_000))
    save_at(run.path(2) / "best")
    run.half(0)
    rules: dict[str, Any] = {"keep_latest": 1, "remove_others": remove_others}
    would = Retention(run.root, **rules).prune(dry_run=True).bytes_freed
    assert would == Retention(run.root, **rules).prune().bytes_freed
    assert would > 3000


def test_a_step_with_too_little_in_it_is_no_reason_to_remove_another(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ``incomplete`` step does not count. It stays, also with ``remove_corrupt``, if no newer step is complete."""
    run.complete(1, 2, 3)

    def scan(*arguments: Any, **options: Any) -> list[StepFolder]:
        *others, last = scan_steps(*arguments, **options)
        return [*others, dataclasses.replace(last, state="incomplete", reason="weight: rows 3 to 4 are in no chunk")]

    monkeypatch.setattr(retention, "scan_steps", scan)
    report = Retention(run.root, keep_latest=1, grace_s=0).prune()
    assert report.kept == [2]
    assert report.skipped == {str(run.path(3)): "incomplete: weight: rows 3 to 4 are in no chunk"}
    report = Retention(run.root, keep_latest=1, grace_s=0, remove_corrupt=True).prune()
    assert "no newer one is complete" in report.skipped[str(run.path(3))]
    assert run.names() == {"step-2", "step-3"}


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_latest": 0},
        {"keep_latest": -1},
        {"keep_latest": True},
        {"keep_latest": 1.0},
        {"keep_latest": 1, "keep_every": 0},
        {"keep_latest": 1, "grace_s": -1.0},
        {"keep_latest": 1, "grace_s": float("nan")},
        {"keep_latest": 1, "pattern": "step"},
    ],
    ids=str,
)
def test_bad_arguments_raise(run: RunFolder, rules: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Retention(run.root, **rules).prune()
    with pytest.raises(ConfigError):
        Retention(run.root, **rules)


def test_settings_of_saves_that_are_wrong_are_no_matter(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may be that of another program: a prune of a directory needs none of them."""
    run.complete(1, 2)
    monkeypatch.setenv("BYTECHECKPOINT_IO_THREADS", "abc")
    report = Retention(run.root, keep_latest=1).prune()
    assert (report.kept, report.warnings) == ([2], [])


def test_a_root_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    (warning,) = Retention(tmp_path / "none", keep_latest=1).prune().warnings
    assert "No such file" in warning


def test_only_complete_ones_count(run: RunFolder) -> None:
    run.complete(1, 2)
    run.corrupt(3)
    run.half(4)
    assert left_by(run, keep_latest=2) == [1, 2, 3, 4]
    assert left_by(run, keep_latest=1) == [2, 3, 4]


def test_nothing_goes_where_nothing_is_complete(run: RunFolder) -> None:
    run.corrupt(1)
    run.half(2, age_s=DAY_S)
    assert left_by(run, keep_latest=1, remove_corrupt=True) == [1, 2]


def test_half_ones(run: RunFolder) -> None:
    """Half steps that show that their save is dead go once a newer step is complete.

    The others go once nothing in them has changed for ``grace_s``.
    """
    run.half(1)
    run.half(2, tmp=False)
    run.half(3, tmp=False, age_s=DAY_S)
    run.path(4).mkdir()
    run.complete(5)
    run.half(6)
    run.half(7, age_s=DAY_S)
    run.path(8).mkdir()
    report = Retention(run.root, keep_latest=1).prune()
    assert report.swept == [str(run.path(step)) for step in (1, 3, 4, 7)]
    assert set(report.skipped) == {str(run.path(step)) for step in (2, 6, 8)}
    assert left_by(run, keep_latest=1, grace_s=0) == [5]


def test_a_file_deep_down_that_changed_is_a_change(run: RunFolder) -> None:
    path = run.half(1, tmp=False)
    (path / "sub").mkdir()
    run.age(1, DAY_S)
    (path / "sub" / "log").touch()
    run.complete(2)
    assert left_by(run, keep_latest=1) == [1, 2]


def test_corrupt_ones_stay_unless_asked(run: RunFolder) -> None:
    run.corrupt(1)
    run.complete(2)
    run.corrupt(3)
    assert left_by(run, keep_latest=1) == [1, 2, 3]
    assert left_by(run, keep_latest=1, remove_corrupt=True) == [2, 3]


def test_what_is_no_checkpoint_is_never_touched(run: RunFolder, tmp_path: Path, template: Path) -> None:
    run.path(1).mkdir()
    (run.path(1) / "model.safetensors").touch()
    run.age(1, DAY_S)
    run.path(2).symlink_to(template)
    (run.root / "notes").touch()
    run.complete(3, 4)
    report = Retention(run.root, keep_latest=1, grace_s=0).prune()
    assert report.skipped == {}
    assert run.names() == {"step-1", "step-2", "step-4", "notes"}
    assert (template / ".metadata").exists()


def test_all_of_a_folder_goes_but_what_is_elsewhere(run: RunFolder, tmp_path: Path) -> None:
    run.complete(1, 2)
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "file").touch()
    (run.path(1) / "config.json").touch()
    (run.path(1) / "hf" / "sharded").mkdir(parents=True)
    (run.path(1) / "hf" / "sharded" / "model").touch()
    (run.path(1) / "hf" / "link").symlink_to(outside / "deep")
    (run.path(1) / "link").symlink_to(outside)
    assert left_by(run, keep_latest=1) == [2]
    assert (outside / "deep" / "file").exists()


@pytest.mark.parametrize("mark", [".metadata", "__1.metadata"])
def test_a_checkpoint_in_a_checkpoint_stays(run: RunFolder, mark: str) -> None:
    run.complete(1, 2)
    inner = run.path(1) / "extra" / "inner"
    inner.mkdir(parents=True)
    (inner / mark).touch()
    (run.path(1) / "other").touch()
    report = Retention(run.root, keep_latest=1).prune()
    assert report.removed == [str(run.path(1))]
    assert report.warnings == ["step-1 was removed, except for extra: it is a checkpoint of its own"]
    assert [path.name for path in run.path(1).iterdir()] == ["extra"]
    assert Retention(run.root, keep_latest=1).prune().warnings == []
    assert (inner / mark).exists()


OF_OTHERS = [
    "model.safetensors",
    "pytorch_model.bin",
    "mp_rank_00_model_states.pt",
    "model_world_size_2_rank_0.pt",
    "metadata.pkl",
    "_METADATA",
    "manifest.ocdbt",
    "w/.zarray",
    "zero/embed.weight/fp32.pt",
    "mp_rank_00/model_optim_rng.pt",
]


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_checkpoint_of_another_library_in_a_checkpoint_stays(run: RunFolder, name: str) -> None:
    run.complete(1, 2)
    theirs = run.path(1) / "export" / name
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    (run.path(1) / "logs").mkdir()
    report = Retention(run.root, keep_latest=1).prune()
    assert report.warnings == ["step-1 was removed, except for export: it is a checkpoint of its own"]
    assert theirs.exists()
    assert Retention(run.root, keep_latest=1, grace_s=0).prune().removed == []
    shutil.move(run.path(1), run.root / "kept")
    run.complete(1)
    shutil.move(run.root / "kept/export", run.path(1))
    assert left_by(run, keep_latest=1, remove_foreign=True) == [2]


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.parametrize("left", ["__0_0.distcp", DEAD_TMP])
def test_a_sweep_leaves_a_checkpoint_of_another_library(run: RunFolder, name: str, left: str) -> None:
    """What a save of DCP has left beside it tells nothing of it."""
    theirs = run.path(1) / name
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    (run.path(1) / left).touch()
    run.complete(2)
    report = Retention(run.root, keep_latest=1, grace_s=0).prune()
    assert theirs.exists()
    assert "which only remove_foreign=True removes" in report.skipped[str(run.path(1))]
    assert left_by(run, keep_latest=1, grace_s=0, remove_foreign=True) == [2]


def test_a_checkpoint_of_another_library_in_a_part_of_a_step_stays(run: RunFolder) -> None:
    model = run.path(1) / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()
    (model / "__0_0.distcp").touch()
    run.complete(2)
    report = Retention(run.root, keep_latest=1, grace_s=0).prune()
    assert "model/model.safetensors of another library is in it" in report.skipped[str(run.path(1))]
    assert left_by(run, keep_latest=1, grace_s=0, remove_foreign=True) == [2]


def test_a_removal_that_was_interrupted_goes_on_whatever_is_there(run: RunFolder) -> None:
    """What lay beside a checkpoint of ours had been given up with it."""
    run.half(1)
    (run.path(1) / "model.safetensors").touch()
    run.complete(2)
    assert left_by(run, keep_latest=1, grace_s=0) == [1, 2]
    (run.path(1) / DEAD_TMP).write_bytes(_core.REMOVAL_NOTE)
    assert left_by(run, keep_latest=1) == [2]


def test_a_file_beside_a_step_of_dcp_keeps_no_checkpoint(run: RunFolder) -> None:
    run.complete(1, 2)
    dcp.save(small_state(), checkpoint_id=run.path(1), no_dist=True)
    run.age(1, DAY_S)
    for name in ("trainer_state.json", "model.safetensors", "commit_success.txt"):
        (run.path(1) / name).touch()
    assert left_by(run, keep_latest=1) == [2]


def test_others_stay_if_asked(run: RunFolder) -> None:
    run.complete(1, 2)
    (run.path(1) / "config.json").touch()
    report = Retention(run.root, keep_latest=1, remove_others=False).prune()
    assert report.warnings == ["step-1 was removed, except for config.json: it is not a file of a checkpoint"]
    assert [path.name for path in run.path(1).iterdir()] == ["config.json"]


def test_of_stock_and_parts(run: RunFolder) -> None:
    dcp.save(small_state(), checkpoint_id=run.path(1), no_dist=True)
    run.age(1, DAY_S)  # the others are copies of an older one
    run.complete(2, 3)
    mark = (run.path(2) / ".metadata").rename(run.path(2) / "__0.metadata")
    shutil.copy2(mark, run.path(2) / "__1.metadata")
    assert left_by(run, keep_latest=1) == [3]


@pytest.mark.parametrize("complete", [True, False])
def test_a_live_save_is_left_alone(run: RunFolder, complete: bool) -> None:
    run.complete(1, 2)
    if not complete:
        (run.path(1) / ".metadata").unlink()
    removal = _core.Removal(_core.Directory(str(run.path(1))))  # has the right to commit, as a save has
    report = Retention(run.root, keep_latest=1).prune()
    assert report.skipped == {str(run.path(1)): "a save is under way"}
    del removal
    if not complete:
        (run.path(1) / DEAD_TMP).touch()
    assert left_by(run, keep_latest=1) == [2]


def test_what_changed_since_the_scan_is_left_alone(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.complete(1, 2)
    sync = _core.sync_directory

    def save_again(directory: str) -> None:  # a save of step 1 that commits after the scan
        if directory == str(run.root):
            save_at(run.path(1), 1)
        sync(directory)

    monkeypatch.setattr(_core, "sync_directory", save_again)
    report = Retention(run.root, keep_latest=1).prune()
    assert report.removed == []
    assert "has changed" in report.skipped[str(run.path(1))]
    assert run.steps() == [1, 2]


class TestLoads:
    def test_one_under_way_keeps_its_checkpoint(self, run: RunFolder) -> None:
        run.complete(1, 2)
        reports = []

        class Looking(DefaultLoadPlanner):
            def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
                reports.append(Retention(run.root, keep_latest=1).prune())
                super().commit_tensor(read_item, tensor)

        state = small_state(7)
        dcp.load(state, storage_reader=BcpReader(run.path(1)), planner=Looking(), no_dist=True)
        assert reports[0].skipped == {str(run.path(1)): "a load in this process is reading it"}
        assert torch.equal(state["weight"], small_state()["weight"])
        assert left_by(run, keep_latest=1) == [1, 2], "what was loaded stays until this process saves"
        save_at(run.path(3))
        assert left_by(run, keep_latest=1) == [3]

    def test_a_link_to_it_is_the_same(self, run: RunFolder, tmp_path: Path) -> None:
        run.complete(1, 2)
        (tmp_path / "latest").symlink_to(run.path(1))
        reader = BcpReader(tmp_path / "latest")
        reader.set_up_storage_reader(reader.read_metadata(), True)
        assert left_by(run, keep_latest=1) == [1, 2]
        del reader  # a caller of the hooks by hand may stop anywhere
        assert left_by(run, keep_latest=1) == [2]

    def test_one_that_failed_keeps_nothing(self, run: RunFolder) -> None:
        run.complete(1, 2)
        reader = BcpReader(run.path(1))
        with pytest.raises(BaseException, match="missing"):
            dcp.load({"missing": torch.zeros(1)}, storage_reader=reader, no_dist=True)
        assert left_by(run, keep_latest=1) == [2]

    def test_metadata_keep_nothing_afterwards(self, run: RunFolder) -> None:
        run.complete(1, 2)
        reader = BcpReader(run.path(1))
        reader.read_metadata()
        del reader
        assert left_by(run, keep_latest=1) == [2]

    def test_one_that_begins_while_the_mark_goes_finds_none(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run.complete(1, 2)
        errors: list[BaseException] = []

        def load() -> None:
            try:
                load_state_dict(run.path(1), small_state(7), no_dist=True)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=load)

        remove_marks = _core.Removal.remove_marks

        def begin_then_remove(right: _core.Removal) -> int:
            thread.start()
            return remove_marks(right)

        monkeypatch.setattr(_core.Removal, "remove_marks", begin_then_remove)
        assert left_by(run, keep_latest=1) == [2]
        thread.join()
        assert [type(error) for error in errors] == [CheckpointNotFoundError]


class TestAfterSave:
    def test_in_a_loop(self, run: RunFolder) -> None:
        retention = Retention(run.root, keep_latest=2)
        for step in range(1, 6):
            run.complete(step)
            retention.after_save(step)
        assert run.steps() == [4, 5]

    def test_what_was_just_saved_stays(self, run: RunFolder) -> None:
        run.complete(50, 100, 110)
        report = Retention(run.root, keep_latest=1).after_save(50)
        assert report is not None
        assert report.kept == [50, 110]
        assert run.steps() == [50, 110]

    def test_other_ranks_do_nothing(self, run: RunFolder) -> None:
        run.complete(1, 2)
        assert Retention(run.root, keep_latest=1).after_save(2, rank=1) is None
        assert run.steps() == [1, 2]
        assert Retention(run.root, keep_latest=1, all_ranks=True).after_save(2, rank=1) is not None
        assert run.steps() == [2]


def test_after_the_first_save_of_a_run_has_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A background save makes the folder of the run only when it writes."""
    report = Retention(tmp_path / "run", keep_latest=1).after_save()
    assert report is not None
    assert (report.warnings, report.removed, caplog.records) == ([], [], [])
    assert "No such file" in Retention(tmp_path / "run", keep_latest=1).prune().warnings[0]
