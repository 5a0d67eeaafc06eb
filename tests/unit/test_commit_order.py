# SPDX-License-Identifier: Apache-2.0
"""Tests which step of a run is the newest: the same for ``latest``, the tracker, ``Retention`` and ``bcp steps``.

The times of the commits are set: no test depends on how fast it runs.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.cli_runs import as_json
from support.cli_runs import run as run_command
from torch import nn
from torch.distributed import checkpoint as dcp
from unit.run_folder import RunFolder, save_at, small_state

import bytecheckpoint
from bytecheckpoint import Retention, async_save_state_dict, find_latest_ckpt_path, latest, load_state_dict
from bytecheckpoint.torchtitan._engine import _newest

TRACKER = "latest_checkpointed_iteration.txt"
LIMIT_S = 60.0


def committed(path: Path, at_s: int, *, files_s: int | None = None) -> None:
    """Sets the time of all commits in a step folder, and that of the files that they name: a second before."""
    for entry in path.rglob("*"):
        time_s = at_s if entry.name.endswith(".metadata") else at_s - 1 if files_s is None else files_s
        os.utime(entry, (time_s, time_s))


def run_of(run: RunFolder, steps: Sequence[int], first_s: int = 1000) -> None:
    """Makes steps that were committed in this order."""
    for number, step in enumerate(steps):
        run.complete(step)
        committed(run.path(step), first_s + 10 * number)


def by_stock(run: RunFolder, steps: Sequence[int], first_s: int) -> None:
    """Makes such steps that do not say when their saves began."""
    for number, step in enumerate(steps):
        dcp.save(small_state(), checkpoint_id=run.path(step), no_dist=True)
        committed(run.path(step), first_s + 10 * number)


def newest(root: Path) -> tuple[int, str]:
    """Returns the step that all say is the newest, and the doubts that all have about it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        path = latest(root)
    listed = as_json("steps", str(root))
    dry = Retention(root, keep_latest=1).prune(dry_run=True)
    assert path is not None
    assert listed["newest"] == path
    assert path not in dry.removed
    if Path(path).name.startswith("step-"):  # torchtitan's only names
        assert _newest(str(root)).path == path
    texts = [str(each.message).partition(": ")[2] for each in said]
    assert texts == dry.doubts == [doubt for doubt in [listed["doubts"]] if doubt]
    assert (run_command("steps", str(root)).output.splitlines()[-1] in texts) == bool(texts)
    return int("".join(filter(str.isdigit, Path(path).name))), "; ".join(texts)


# The order.


def test_without_a_doubt_it_is_the_highest(run: RunFolder) -> None:
    run_of(run, [10, 20, 30])
    assert newest(run.root) == (30, "")


def test_of_equal_times_the_highest(run: RunFolder) -> None:
    for step in (30, 200, 10):
        run.complete(step)
        committed(run.path(step), 1000)
    assert newest(run.root) == (200, "")


def test_after_going_back_it_is_what_was_saved_then(run: RunFolder) -> None:
    run_of(run, [10, 20, 30, 15])
    found, doubts = newest(run.root)
    assert found == 15
    assert doubts == (
        "step-15 is the newest, by the time of its commit, but step-20, step-30 have higher numbers: a run went back "
        "to an earlier step and gave that up, or it is of another run"
    )
    report = Retention(run.root, keep_latest=2).prune()
    assert (report.kept, run.steps()) == ([15, 30], [15, 30])
    run_of(run, [16], first_s=2000)
    assert Retention(run.root, keep_latest=2).prune().kept == [15, 16]
    assert newest(run.root) == (16, "")


def test_the_tracker_comes_first(run: RunFolder) -> None:
    run_of(run, [10, 20, 30, 25])
    (run.root / TRACKER).write_text("20")
    found, doubts = newest(run.root)
    assert found == 20
    assert doubts.startswith("step-20 is the newest, because the tracker names it, but step-25, step-30 have higher")
    assert doubts.endswith("and step-25 was committed last")
    report = Retention(run.root, keep_latest=1).prune()
    assert (report.kept, report.protected) == ([20, 25], {str(run.path(20)): "the tracker names it"})


@pytest.mark.parametrize("text", ["", "release", "99", "9" * 30])
def test_a_tracker_that_names_no_step_does_not_count(run: RunFolder, text: str) -> None:
    run_of(run, [10, 30, 20])
    (run.root / TRACKER).write_text(text)
    assert newest(run.root)[0] == 20


def test_of_two_folders_of_a_step_the_tracker_means_its_own(run: RunFolder, template: Path) -> None:
    run_of(run, [10, 20])
    shutil.copytree(template, run.root / "global_step_10")
    committed(run.root / "global_step_10", 500)
    (run.root / TRACKER).write_text("10")
    with pytest.warns(RuntimeWarning, match="global_step_10 is the newest, because the tracker names it, but step-20"):
        assert latest(run.root) == str(run.root / "global_step_10")


def test_a_damaged_newest_is_passed_over_in_this_order(run: RunFolder) -> None:
    run_of(run, [10, 20, 30, 15])
    os.truncate(next(run.path(15).glob("*.distcp")), 100)
    with pytest.warns(RuntimeWarning, match=r"passing over .*step-15, which is corrupt.*; taking .*step-30"):
        assert latest(run.root) == str(run.path(30))
    assert Retention(run.root, keep_latest=1, remove_corrupt=True).prune().kept == [30]
    assert run.path(15).exists(), "no newer one is complete"


# What the time of a commit is.


def test_parts_of_ranks_are_committed_with_the_last_of_them(run: RunFolder) -> None:
    run_of(run, [1, 2])
    mark = (run.path(1) / ".metadata").rename(run.path(1) / "__0.metadata")
    (run.path(1) / "__1.metadata").write_bytes(mark.read_bytes())
    os.utime(run.path(1) / "__1.metadata", (1005, 1005))
    assert newest(run.root)[0] == 2
    os.utime(run.path(1) / "__1.metadata", (1015, 1015))
    assert newest(run.root)[0] == 1


def test_parts_of_a_save_are_committed_with_the_model(tmp_path: Path) -> None:
    for step in (20, 10):
        bytecheckpoint.save(tmp_path, {"model": nn.Linear(3, 2), "extra_state": {"a": 1}}, "ddp", global_steps=step)
    (tmp_path / TRACKER).write_text("20")
    for step, extra_s, model_s in ((10, 1000, 1030), (20, 1010, 1020)):
        committed(tmp_path / f"global_step_{step}" / "extra_state", extra_s)
        committed(tmp_path / f"global_step_{step}" / "model", model_s)
    assert newest(tmp_path)[0] == 20, "the tracker names it"
    with pytest.warns(RuntimeWarning, match="global_step_10 was committed last"):
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_20")
    (tmp_path / TRACKER).unlink()
    assert newest(tmp_path)[0] == 10
    with pytest.warns(RuntimeWarning, match="is not there: taking .*global_step_10"):
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_10")


def test_copies_without_their_times_are_told_by_their_numbers(run: RunFolder) -> None:
    """``cp -r`` writes the files one by one, of some steps the commit mark last."""
    for step, mark_s, files_s in ((30, 1000, 1001), (10, 1003, 1002), (20, 1004, 1005)):
        run.complete(step)
        committed(run.path(step), mark_s, files_s=files_s)
    assert newest(run.root) == (30, "")
    run_of(run, [15], first_s=1100)
    assert newest(run.root)[0] == 15, "it was committed after the copying"
    run_of(run, [40], first_s=900)
    assert newest(run.root)[0] == 15


@pytest.mark.parametrize("mark_comes_last", [True, False])
def test_copies_without_their_times_are_told_by_the_begin_of_their_saves(run: RunFolder, mark_comes_last: bool) -> None:
    """``cp -r`` out of a file system that lists the commit mark last leaves no mark that is older than its files."""
    for step in (10, 20, 30, 15):
        save_at(run.path(step))
    for number, step in enumerate((15, 20, 10, 30)):
        committed(run.path(step), 1000 + 10 * number, files_s=1000 + 10 * number + (-1 if mark_comes_last else 1))
    found, doubts = newest(run.root)
    assert found == 15, "that was saved last"
    report = Retention(run.root, keep_latest=1).prune()
    if mark_comes_last:  # hosts whose clocks differ would leave the same
        assert doubts.startswith("step-15 is the newest, by the begin of its save, but")
        assert doubts.endswith(
            ", and the commit mark of step-30 is younger, though its save began earlier: the steps were copied, or the "
            "clocks of hosts differ"
        )
        assert report.kept == [15, 30]
        assert report.protected == {str(run.path(30)): "its commit mark is the youngest"}
    else:
        assert "clocks" not in doubts
        assert report.kept == [15]
    save_at(run.path(25))
    assert newest(run.root)[0] == 25, "it was committed after the copying"
    assert Retention(run.root, keep_latest=2).prune().kept[-1] == 25


@pytest.mark.parametrize("mark_comes_last", [True, False])
def test_a_copy_in_the_order_of_the_numbers_is_known_by_its_newest_step(run: RunFolder, mark_comes_last: bool) -> None:
    """``rsync -r`` sorts: folders by their names, and the commit mark of each before its data."""
    for step in (10, 20, 30, 15):
        save_at(run.path(step))
    later_s = int(time.time()) + (7200 if mark_comes_last else 0)  # a copy of the mark last shows by the hours between
    for number, step in enumerate((10, 15, 20, 30)):
        at_s = later_s + 10 * number
        committed(run.path(step), at_s, files_s=at_s + (-1 if mark_comes_last else 1))
    found, doubts = newest(run.root)
    assert found == 15, "that was saved last"
    assert "step-20, step-30 have higher numbers" in doubts
    assert 15 in Retention(run.root, keep_latest=1).prune().kept


def test_what_was_not_copied_is_the_newest_beside_copies(run: RunFolder) -> None:
    for step in (10, 20, 15):
        save_at(run.path(step))
    now_s = int(time.time())
    for number, step in enumerate((10, 15, 20)):
        committed(run.path(step), now_s - 100 + 10 * number, files_s=now_s)
    save_at(run.path(30))
    assert newest(run.root) == (30, "")


def test_copies_of_which_some_do_not_say_when_they_began_are_told_by_their_numbers(run: RunFolder) -> None:
    save_at(run.path(10))
    save_at(run.path(30))
    by_stock(run, [20], first_s=1005)
    for step, at_s in ((30, 1000), (10, 1010)):
        committed(run.path(step), at_s)
    assert newest(run.root) == (30, "")


def test_a_copy_that_cannot_be_read_is_no_reason_to_go_by_the_numbers(run: RunFolder) -> None:
    for step in (10, 20, 30, 15):
        save_at(run.path(step))
    for number, step in enumerate((15, 20, 10, 30)):
        committed(run.path(step), 1000 + 10 * number)
    (run.path(20) / ".metadata").write_bytes(b"no metadata")
    os.utime(run.path(20) / ".metadata", (1010, 1010))
    with pytest.warns(RuntimeWarning, match="step-15 is the newest, by the begin of its save"):
        assert latest(run.root) == str(run.path(15))
    assert Retention(run.root, keep_latest=1).prune().kept == [15, 30]


def test_equal_times_are_no_copying(run: RunFolder) -> None:
    """Some storage has times in whole seconds. A run that went back later is not compared with what came before."""
    save_at(run.path(10))
    save_at(run.path(20))
    by_stock(run, [30], first_s=1200)
    for step in (40, 50, 35, 36):
        save_at(run.path(step))
    for step, at_s in ((10, 1100), (20, 1100), (40, 1300), (50, 1350), (35, 1400), (36, 1400)):
        committed(run.path(step), at_s)
    assert newest(run.root)[0] == 36


def test_going_back_is_no_copying(run: RunFolder) -> None:
    for number, step in enumerate((10, 20, 30, 15)):
        save_at(run.path(step))
        committed(run.path(step), 1000 + 10 * number)
    found, doubts = newest(run.root)
    assert found == 15
    assert doubts.endswith("it is of another run")


def test_another_file_that_is_younger_makes_no_copy(run: RunFolder) -> None:
    """A dead save to a folder leaves data files that its checkpoint does not name."""
    run_of(run, [10, 30, 20])
    (run.path(30) / "__0_0.0123456789abcdef.distcp").touch()
    (run.path(30) / "notes.txt").touch()
    assert newest(run.root)[0] == 20


# What retention never removes.


def test_what_this_process_committed_last_stays(run: RunFolder) -> None:
    """Here other steps have times in the future: another host wrote them, whose clock differs."""
    by_stock(run, [4000, 5000], first_s=1 << 33)
    retention = Retention(run.root, keep_latest=2)
    for step in (10, 20):
        save_at(run.path(step))
        report = retention.after_save()
        assert report is not None
        assert report.kept == [step, 4000, 5000]
        assert report.protected == {str(run.path(step)): "this process has committed it last"}
        assert run.steps() == [step, 4000, 5000]


def test_steps_of_another_run_in_the_folder_are_the_older_ones(run: RunFolder) -> None:
    run_of(run, [4000, 5000])
    retention = Retention(run.root, keep_latest=2, keep_every=1000)
    for step, kept in ((10, [10, 4000, 5000]), (20, [10, 20, 4000, 5000]), (30, [20, 30, 4000, 5000])):
        save_at(run.path(step))
        report = retention.after_save()
        assert report is not None
        assert report.kept == run.steps() == kept
        assert "step-4000, step-5000 have higher numbers" in report.doubts[0]


def test_what_was_loaded_stays_until_a_save(run: RunFolder) -> None:
    run_of(run, [10, 20, 30])
    load_state_dict(run.path(10), small_state(), no_dist=True)
    report = Retention(run.root, keep_latest=1).prune()
    assert report.protected == {str(run.path(10)): "this process has loaded it, and has committed none since"}
    assert run.steps() == [10, 30]
    save_at(run.path(15))
    assert Retention(run.root, keep_latest=1).prune().kept == [15]


def test_a_part_that_was_loaded_keeps_its_step(tmp_path: Path) -> None:
    for step in (10, 20):
        bytecheckpoint.save(tmp_path, {"model": nn.Linear(3, 2), "extra_state": {"a": 1}}, "ddp", global_steps=step)
    bytecheckpoint.load(tmp_path / "global_step_10", {"model": nn.Linear(3, 2)}, "ddp")
    report = Retention(tmp_path, keep_latest=1).prune()
    assert report.kept == [10, 20]
    assert list(report.protected) == [str(tmp_path / "global_step_10")]


def test_a_run_behind_a_link_is_the_same(run: RunFolder, tmp_path: Path) -> None:
    by_stock(run, [5000], first_s=1 << 33)
    (tmp_path / "link").symlink_to(run.root)
    save_at(tmp_path / "link" / "step-10")
    assert Retention(run.root, keep_latest=1).prune().kept == [10, 5000]


def test_a_background_save_that_commits_after_the_prune_stays(run: RunFolder) -> None:
    run_of(run, [4000, 5000])
    retention = Retention(run.root, keep_latest=1)
    for step in (10, 20, 30):
        handle = async_save_state_dict(run.path(step), small_state(step), no_dist=True)
        retention.after_save()
        handle.committed.result(LIMIT_S)
        assert latest(run.root) == str(run.path(step))
    retention.after_save()
    assert run.steps() == [30]


def test_what_another_process_committed_last_stays_before_its_tracker_names_it(run: RunFolder) -> None:
    run_of(run, [10, 20, 30])
    (run.root / TRACKER).write_text("20")
    report = Retention(run.root, keep_latest=1).prune()
    assert report.kept == run.steps() == [20, 30]
    assert report.protected == {str(run.path(20)): "the tracker names it"}


def test_what_was_committed_before_the_tracker_moved_on_counts(run: RunFolder) -> None:
    """Two saves ran at once: 24, which the tracker will name, was committed after 25. Until then it names 22."""
    run_of(run, [22, 23, 25, 24])
    (run.root / TRACKER).write_text("22")
    report = Retention(run.root, keep_latest=2).prune()
    assert report.kept == run.steps() == [22, 24, 25]
    assert report.protected == {str(run.path(22)): "the tracker names it"}


def test_a_tracker_that_cannot_be_read_removes_nothing(run: RunFolder) -> None:
    run_of(run, [10, 20])
    (run.root / TRACKER).mkdir()
    (warning,) = Retention(run.root, keep_latest=1).prune().warnings
    assert TRACKER in warning
    assert run.steps() == [10, 20]
    assert "the newest is not known" in run_command("steps", str(run.root)).output


def test_the_doubts_are_logged_once(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    run_of(run, [10, 20, 30, 15])
    for step in (16, 17):
        run_of(run, [step], first_s=2000 + step)
        Retention(run.root, keep_latest=9).prune()
    said = [record.getMessage() for record in caplog.records if "higher numbers" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"prune({run.root}): step-16 is the newest")
