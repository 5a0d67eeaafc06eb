# SPDX-License-Identifier: Apache-2.0
"""What a prune keeps besides the newest: pinned checkpoints, the best by a metric, young ones. And ``bcp info``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import as_json, run
from torch import nn

import bytecheckpoint
from bytecheckpoint import Retention, pin, save_state_dict, unpin
from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError

LOSSES: dict[int, Any] = {1: 0.5, 2: 0.2, 3: None, 4: 0.9, 5: 0.4, 6: float(7)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step, loss in LOSSES.items():
        metadata = None if loss is None else {"eval": {"loss": loss}, "acc": -loss}
        save_state_dict(tmp_path / f"step_{step}", {"step": step}, no_dist=True, user_metadata=metadata)
    return tmp_path


def test_a_pin_keeps_prunes_off(root: Path) -> None:
    pin(root / "step_2", "released\nas v2 \U0001f680")
    pin(root / "step_3")
    report = Retention(root, keep_latest=1).prune()
    assert report.kept == [2, 3, 6]
    assert report.protected == {
        str(root / "step_2"): "pinned: released as v2 \U0001f680",
        str(root / "step_3"): "pinned",
    }
    assert unpin(root / "step_2")
    assert not unpin(root / "step_2")
    assert Retention(root, keep_latest=1).prune().kept == [3, 6]
    assert bytecheckpoint.verify(root / "step_3").is_whole


def test_a_pinned_one_that_is_damaged_stays(root: Path) -> None:
    pin(root / "step_2")
    (data,) = (root / "step_2").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    report = Retention(root, keep_latest=1, remove_corrupt=True).prune()
    assert (root / "step_2").is_dir()
    assert report.protected[str(root / "step_2")] == "pinned"


def test_a_pin_that_cannot_be_read_removes_nothing(root: Path) -> None:
    (root / "step_2" / ".bcp" / "pin.txt").mkdir()
    report = Retention(root, keep_latest=1).prune()
    assert report.removed == []
    assert "pin.txt" in report.warnings[0]


def test_what_is_no_checkpoint_is_not_pinned(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint there"):
        pin(tmp_path)
    assert not (tmp_path / ".bcp").exists()


@pytest.mark.parametrize(
    ("keep_best", "kept"),
    [
        (("eval.loss", 1), [2, 6]),
        (("eval.loss", 2), [2, 5, 6]),
        (("eval.loss", 99, "min"), [1, 2, 4, 5, 6]),
        (("eval.loss", 2, "max"), [4, 6]),
        (("acc", 1, "max"), [2, 6]),
        (("nothing", 3), [6]),
        (("eval", 3), [6]),
    ],
)
def test_the_best_stay(root: Path, keep_best: Any, kept: list[int]) -> None:
    assert Retention(root, keep_latest=1, keep_best=keep_best).prune(dry_run=True).kept == kept
    assert Retention(root, keep_latest=1, keep_best=keep_best).prune().kept == kept


def test_of_equal_ones_the_newer(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_state_dict(tmp_path / f"step_{step}", {"step": step}, no_dist=True, user_metadata={"loss": 1})
    save_state_dict(tmp_path / "step_4", {"step": 4}, no_dist=True)
    assert Retention(tmp_path, keep_latest=1, keep_best=("loss", 1)).prune().kept == [3, 4]


def test_the_young_stay(root: Path) -> None:
    for step in (1, 2, 3):
        os.utime(root / f"step_{step}" / ".metadata", (10**9 + step, 10**9 + step))
    assert Retention(root, keep_latest=1, keep_within_s=3600.0).prune(dry_run=True).kept == [4, 5, 6]
    assert Retention(root, keep_latest=1, keep_within_s=0).prune(dry_run=True).kept == [6]


@pytest.mark.parametrize(
    "arguments",
    [
        {"keep_best": "loss"},
        {"keep_best": ("loss",)},
        {"keep_best": ("loss", 0)},
        {"keep_best": ("loss", True)},
        {"keep_best": ("loss", 1, "low")},
        {"keep_best": (1, 1)},
        {"keep_within_s": -1.0},
        {"keep_within_s": "day"},
        {"keep_within_s": float("nan")},
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="keep_"):
        Retention(tmp_path, keep_latest=1, **arguments).prune()


def test_the_command_line(root: Path) -> None:
    assert run("pin", str(root / "step_1"), "--why", "v1").output == f"{root}/step_1: pinned: v1\n"
    said = as_json("prune", str(root), "--keep-latest", "1", "--keep-best", "eval.loss:1", "--dry-run")
    assert said["kept"] == [1, 2, 6]
    assert said["protected"] == {f"{root}/step_1": "pinned: v1"}
    assert as_json("prune", str(root), "--keep-latest", "1", "--keep-days", "1", "--dry-run")["kept"] == [*LOSSES]
    assert as_json("prune", str(root), "--keep-latest", "1", "--keep-best", "acc:1:max", "--dry-run")["kept"] == [
        1,
        2,
        6,
    ]
    for wrong in ("loss", "loss:x", ":3", "loss:0", "loss:1:low"):
        assert run("prune", str(root), "--keep-latest", "1", "--keep-best", wrong).exit_code == 2
    assert as_json("pin", str(root / "step_1"), "--remove") == {
        "path": f"{root}/step_1",
        "was_pinned": True,
        "is_pinned": False,
    }
    assert "it was not pinned" in run("pin", str(root / "step_1"), "--remove").output
    assert run("pin", str(root)).exit_code == 2


def test_what_info_says(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000), "step": 3}
    save_state_dict(tmp_path / "a\x1b", state, no_dist=True, user_metadata={"loss": 0.25, "x": "\x1b"}, digest=True)
    pin(tmp_path / "a\x1b", "v1")
    said = as_json("info", str(tmp_path / "a\x1b"))
    assert (said["tensors"], said["objects"], said["files"], said["ranks"]) == (1, 1, 1, 1)
    assert (said["pinned"], said["user_metadata"]) == ("pinned: v1", {"loss": 0.25, "x": "\x1b"})
    assert said["digest"] == bytecheckpoint.digest(tmp_path / "a\x1b").total
    assert said["seconds"] > 0
    assert abs(said["committed_at"] - said["began_at"]) < 60
    text = run("info", str(tmp_path / "a\x1b")).output
    assert "\x1b" not in text
    for line in (
        "holds          1 tensor, 1 object",
        "pinned         pinned: v1",
        "versions       python",
        '"loss": 0.25',
    ):
        assert line in text


def test_info_of_parts_of_others_and_without_a_journal(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    bytecheckpoint.save(tmp_path, state, "ddp", global_steps=7)
    step = tmp_path / "global_step_7"
    said = as_json("info", str(step))
    assert (said["parts"], said["step"], said["framework"], said["user_metadata"]) == (
        ["model", "optimizer"],
        7,
        "ddp",
        None,
    )
    assert said["seconds"] > 0
    (step / "optimizer" / ".bcp" / "journal.jsonl").write_text('{"format": 1, "kind": "save", "at": []}\n')
    assert as_json("info", str(step))["seconds"] is None
    torch.distributed.checkpoint.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    said = as_json("info", str(tmp_path / "stock"))
    assert (said["format"], said["tensors"], said["seconds"], said["versions"]) == ("dcp", 1, None, None)
    assert run("info", str(tmp_path / "nothing")).exit_code == 2


def test_long_steps(root: Path) -> None:
    (root / "step_4" / ".metadata").unlink()
    pin(root / "step_2", "v2")
    lines = run("steps", str(root), "--long").output.splitlines()
    assert "UTC" in lines[0]
    assert "1 rank" in lines[0]
    assert '{"eval": {"loss": 0.5}' in lines[0]
    assert "pinned: v2" in lines[1]
    assert "UTC" not in lines[3]
    steps = as_json("steps", str(root), "--long", code=1)["steps"]
    assert steps[3]["info"] is None
    assert steps[1]["info"]["user_metadata"] == {"eval": {"loss": 0.2}, "acc": -0.2}
    assert "info" not in as_json("steps", str(root), code=1)["steps"][0]
    assert json.dumps(steps)
