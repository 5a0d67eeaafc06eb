# SPDX-License-Identifier: Apache-2.0
"""Tests ``latest``, which finds the newest whole step of a run to resume from, and the loads that take its result."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from unit.reference_run import save_as_reference
from unit.run_folder import RunFolder, save_at, small_state

import bytecheckpoint
from bytecheckpoint import BcpReader, find_latest_ckpt_path, latest, load_state_dict, scan_steps, verify
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError, StorageError, UnsupportedError


def passing_over(run: Path, **arguments: Any) -> tuple[str | None, list[str]]:
    """Returns what ``latest`` returns, and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = latest(run, **arguments)
    assert all(warning.category is RuntimeWarning for warning in said)
    assert {warning.filename for warning in said} <= {__file__}
    return found, [str(warning.message) for warning in said]


def save_parts(root: Path, step: int, value: float = 1.0, **parts: Any) -> Path:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    bytecheckpoint.save(root, {"model": model, **parts}, "ddp", global_steps=step)
    return root / f"global_step_{step}"


# Which step is the latest.


@pytest.mark.parametrize("name", ["step-{}", "step_{}", "step{}", "global_step_{}", "checkpoint-{}", "{}"])
def test_the_highest_step_of_every_layout(run: RunFolder, template: Path, name: str) -> None:
    for step in (9, 100, 20):
        shutil.copytree(template, run.root / name.format(step))
    assert passing_over(run.root) == (str(run.root / name.format(100)), [])
    assert latest(str(run.root)) == str(run.root / name.format(100))


def test_it_may_be_of_stock_or_of_parts(tmp_path: Path) -> None:
    save_at(tmp_path / "step-1")
    dcp.save(small_state(), checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert latest(tmp_path) == str(tmp_path / "step-2")
    assert latest(tmp_path) != str(save_parts(tmp_path, 3).parent)
    assert latest(tmp_path) == str(tmp_path / "global_step_3")


def test_each_newer_folder_that_is_passed_over_is_told_once(run: RunFolder) -> None:
    run.complete(1, 2, 4)
    run.corrupt(3)
    run.corrupt(5)
    run.half(6)
    run.path(7).mkdir()
    run.path(8).mkdir()
    (run.path(8) / "notes.txt").touch()
    run.path(9).symlink_to(run.root / "nowhere")
    found, said = passing_over(run.root)
    assert found == str(run.path(4))
    reasons = ["leads to no folder", "no files of a checkpoint", "half: empty", "half: files of a save", "corrupt: "]
    assert len(said) == len(reasons)
    for step, reason, text in zip((9, 8, 7, 6, 5), reasons, said, strict=True):
        assert text.startswith(f"latest({run.root}): passing over {run.path(step)}, which is ")
        assert reason in text
        assert text.endswith(f"; taking {found}")


def test_a_step_behind_a_link_is_one(run: RunFolder, template: Path) -> None:
    run.complete(1)
    run.path(2).symlink_to(template)
    assert passing_over(run.root) == (str(run.path(2)), [])


def test_where_a_save_overwrote_only_some_parts(tmp_path: Path) -> None:
    first = save_parts(tmp_path, 1, extra_state={"a": 1})
    second = save_parts(tmp_path, 2, extra_state={"a": 1})
    shutil.copytree(first / "model", second / "model", dirs_exist_ok=True)
    found, (said,) = passing_over(tmp_path)
    assert found == str(first)
    assert "parts of different saves" in said
    shutil.rmtree(first)
    with pytest.raises(CheckpointError, match=r"none is whole: global_step_2 is half: parts of different saves"):
        latest(tmp_path)


# When it returns None, and when it raises.


def test_none_where_training_may_begin(tmp_path: Path, run: RunFolder) -> None:
    assert passing_over(tmp_path / "nowhere" / "run") == (None, [])
    assert passing_over(run.root) == (None, [])
    (run.root / "logs").mkdir()
    assert passing_over(run.root) == (None, [])


def test_none_where_nothing_was_ever_committed(run: RunFolder) -> None:
    run.path(1).mkdir()
    run.half(2)
    (run.root / "2024").mkdir()
    (run.root / "2024" / "rank_0.log").touch()
    # Step 3: a save of several parts died before the last of them. Step 4: a save of ranks without collectives.
    save_parts(run.root, 3, extra_state={"a": 1})
    shutil.rmtree(run.root / "global_step_3" / "model")
    run.complete(4)
    (run.path(4) / ".metadata").rename(run.path(4) / "__1.metadata")
    found, said = passing_over(run.root)
    assert found is None
    assert len(said) == 5
    assert all(text.endswith("; there is no whole one") for text in said)


def test_an_error_where_something_was_committed(run: RunFolder) -> None:
    run.corrupt(1)
    run.half(2)
    with pytest.raises(
        CheckpointError, match=r"none is whole: step-1 is corrupt: .* file must have .*another folder"
    ) as told:
        latest(run.root)
    assert not isinstance(told.value, FileNotFoundError)
    assert "step-2" not in str(told.value)


def test_checkpoints_in_folders_that_are_not_known(run: RunFolder) -> None:
    """OLMo-core makes such folders. There are checkpoints, so to begin at step 0 would be wrong."""
    save_at(run.path(3) / "model_and_optim")
    with pytest.raises(
        CheckpointError, match=r"step-3 is unknown: it holds checkpoints in an unknown layout: model_and_optim"
    ):
        latest(run.root)
    with pytest.raises(
        CheckpointNotFoundError, match=rf"holds the checkpoint model_and_optim: pass '{run.path(3)}/model"
    ):
        load_state_dict(run.path(3), small_state(), no_dist=True)


def test_what_is_no_run_folder(run: RunFolder) -> None:
    run.complete(1)
    with pytest.raises(ConfigError, match="this folder is a checkpoint itself"):
        latest(run.path(1))
    save_parts(run.root, 2)
    with pytest.raises(ConfigError, match="this folder is a checkpoint itself"):
        latest(run.root / "global_step_2")
    (run.root / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        latest(run.root / "file")
    (run.root / "link").symlink_to(run.root / "not_mounted")
    with pytest.raises(StorageError, match="No such file"):
        latest(run.root / "link")
    for url in ("hdfs://bucket/secret", "ftp://bucket/secret"):
        with pytest.raises(ConfigError, match=r"://\.\.\.: unknown kind of store") as told:
            latest(url)
        assert "secret" not in str(told.value)
    with pytest.raises(ConfigError, match="role='judge'"):
        latest(run.root, role="judge")


def test_needs_no_torch(run: RunFolder) -> None:
    run.complete(1, 2)
    script = f"import sys; from bytecheckpoint import latest; print(latest({str(run.root)!r}), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(run.path(2)), "False"]


# Loads that take its result.


def test_the_loads_take_what_it_gives(tmp_path: Path) -> None:
    save_at(tmp_path / "plain" / "step-3", 5)
    path = latest(tmp_path / "plain")
    state = small_state()
    load_state_dict(path, state, no_dist=True)
    assert state["step"] == 5
    state = small_state()
    dcp.load(state, storage_reader=BcpReader(path), no_dist=True)
    assert torch.equal(state["weight"], small_state(5)["weight"])
    assert verify(path).is_whole
    save_parts(tmp_path / "run", 7, 4.0)
    model = nn.Linear(3, 2)
    bytecheckpoint.load(latest(tmp_path / "run"), {"model": model}, "ddp")
    assert model.weight.tolist() == [[4.0] * 3] * 2
    bytecheckpoint.save(tmp_path / "roles", {"model": model}, "ddp", global_steps=8, role="actor")
    assert latest(tmp_path / "roles", "actor") == str(tmp_path / "roles" / "actor" / "global_step_8")
    bytecheckpoint.load(latest(tmp_path / "roles", "Actor"), {"model": nn.Linear(3, 2)}, "ddp", role="actor")


def test_none_is_a_sentence_for_all_of_them(tmp_path: Path) -> None:
    path = latest(tmp_path)
    for call in (
        lambda: load_state_dict(path, small_state(), no_dist=True),
        lambda: BcpReader(path),
        lambda: bytecheckpoint.load(path, {"model": nn.Linear(3, 2)}, "ddp"),
        lambda: verify(path),
    ):
        with pytest.raises(CheckpointNotFoundError, match=r"load\(None\): there is no checkpoint"):
            call()


def test_the_wrong_kind_of_load_says_the_right_one(tmp_path: Path) -> None:
    step = save_parts(tmp_path, 7, extra_state={"a": 1})
    for call in (
        lambda path: load_state_dict(path, small_state(), no_dist=True),
        lambda path: BcpReader(path).read_metadata(),
        lambda path: verify(path),
    ):
        with pytest.raises(CheckpointNotFoundError) as told:
            call(step)
        assert str(told.value) == (
            f"open({step}): it holds the parts extra_state, model of bytecheckpoint.save: load them by "
            f"bytecheckpoint.load('{step}', ...), or one by load_state_dict or BcpReader, as '{step}/model'"
        )
        with pytest.raises(
            CheckpointNotFoundError, match=r"a run folder with the step 7: pass .*global_step_7'.*latest"
        ):
            call(tmp_path)
    save_at(tmp_path / "plain" / "step-3")
    with pytest.raises(CheckpointNotFoundError, match="but one of a state dict, which load_state_dict loads"):
        bytecheckpoint.load(tmp_path / "plain" / "step-3", {"model": nn.Linear(3, 2)}, "ddp")


# Runs of ByteCheckpoint.


def test_a_run_of_the_reference_is_refused_by_name(tmp_path: Path) -> None:
    step = save_as_reference(tmp_path, 100)
    model = {"model": nn.Linear(3, 2)}
    for call in (
        lambda: latest(tmp_path),
        lambda: find_latest_ckpt_path(tmp_path),
        lambda: load_state_dict(tmp_path, small_state(), no_dist=True),
        lambda: load_state_dict(step, small_state(), no_dist=True),
        lambda: bytecheckpoint.load(tmp_path, model, "ddp"),
        lambda: bytecheckpoint.load(step, model, "ddp"),
        lambda: verify(step),
    ):
        with pytest.raises(UnsupportedError, match=r"ByteCheckpoint 0\.0\.2 or 0\.0\.3 wrote it"):
            call()
    (folder,) = scan_steps(tmp_path)
    assert (folder.state, folder.is_faulty) == ("unknown", True)
    assert "0.0.3" in folder.reason


def test_steps_of_the_reference_below_ours_are_no_matter(tmp_path: Path) -> None:
    save_as_reference(tmp_path, 100)
    save_parts(tmp_path, 200)
    save_as_reference(tmp_path, 300)
    found, (said,) = passing_over(tmp_path)
    assert found == str(tmp_path / "global_step_200")
    assert "0.0.3 wrote it" in said
    shutil.rmtree(tmp_path / "global_step_300")
    assert passing_over(tmp_path) == (found, [])


def test_a_folder_of_other_names_is_left_alone(tmp_path: Path) -> None:
    """A number of more than 18 digits is not the number of a step."""
    save_at(tmp_path / "step-5")
    save_at(tmp_path / f"step-{'9' * 200}")
    save_at(tmp_path / f"step-{'9' * 19}")
    assert latest(tmp_path) == str(tmp_path / "step-5")
    assert [folder.step for folder in scan_steps(tmp_path)] == [5]
    save_at(tmp_path / f"step-{'9' * 18}")
    assert os.path.basename(latest(tmp_path) or "") == f"step-{'9' * 18}"  # noqa: PTH119
