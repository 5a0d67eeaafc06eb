# SPDX-License-Identifier: Apache-2.0
"""``resume`` loads the newest step that really loads, goes back over damage alone, and says what it did."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import bytecheckpoint
from bytecheckpoint import Config, LoadSpec, latest, resume, save_state_dict
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    KeyMismatchError,
    ShapeMismatchError,
    StorageError,
)
from bytecheckpoint.native import _core


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100_000,), value), "nested": {"b": torch.full((7,), value)}, "step": int(value)}


def save(run: Path, step: int, **options: Any) -> Path:
    save_state_dict(run / f"step_{step}", state(step), no_dist=True, **options)
    return run / f"step_{step}"


def damage(step: Path) -> None:
    """Changes the last element of ``w``, so that a load has filled the others by then."""
    checkpoint = _core.Checkpoint.open(str(step))
    offset, num_bytes = checkpoint.elements("w")[0]
    (file,) = step.glob("*.distcp")
    with file.open("r+b") as opened:
        opened.seek(offset + num_bytes - 1)
        opened.write(b"\x55")


def holds(got: dict[str, Any], value: float) -> bool:
    tensors = [got["w"], got["nested"]["b"]]
    return all(bool((each == value).all()) for each in tensors) and got["step"] == int(value)


def said_by(run: Path, into: dict[str, Any], **options: Any) -> tuple[bytecheckpoint.Resumed | None, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = resume(run, into, no_dist=True, **options)
    assert {Path(each.filename) for each in caught} <= {Path(__file__)}
    assert {each.category for each in caught} <= {RuntimeWarning}
    return resumed, [str(each.message) for each in caught]


def test_the_newest_step_is_loaded(tmp_path: Path) -> None:
    for step in (1, 20, 3):
        save(tmp_path, step, user_metadata={"seen": step * 10})
    into = state(0)
    weights = into["w"]
    resumed, said = said_by(tmp_path, into)
    assert resumed is not None
    assert (resumed.step, resumed.path, resumed.user_metadata) == (3, str(tmp_path / "step_3"), {"seen": 30})
    assert (resumed.passed_over, resumed.report.path) == ((), resumed.path)
    assert holds(into, 3)
    assert into["w"] is weights
    assert len(said) == 1  # of the step with the higher number
    assert "step_20" in said[0]


def test_steps_without_their_marks_are_named(tmp_path: Path) -> None:
    """A copy that leaves out hidden files makes such a run, and training begins anew there."""
    for step in (1, 2):
        (save(tmp_path, step) / ".metadata").unlink()
    resumed, said = said_by(tmp_path, state(0))
    assert resumed is None
    assert [f"step_{step}" in text for step, text in zip((2, 1), said, strict=True)] == [True, True]


@pytest.mark.parametrize("made", [False, True])
def test_a_run_that_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture, made: bool, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if made:
        (tmp_path / "run").mkdir()
    into = state(5)
    with caplog.at_level(logging.INFO, "bytecheckpoint"):
        assert resume("run", into, no_dist=True) is None
    assert holds(into, 5)
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "run") in line
    with pytest.raises(CheckpointNotFoundError, match=f"{tmp_path / 'run'}.*must_exist"):
        resume("run", into, no_dist=True, must_exist=True)


def test_damage_goes_back_a_step_and_says_why(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step_3")
    into = state(0)
    resumed, said = said_by(tmp_path, into)
    assert resumed is not None
    assert (resumed.step, resumed.passed_over) == (2, (str(tmp_path / "step_3"),))
    assert holds(into, 2)
    (text,) = said
    assert "step_3 is damaged, so step_2 is loaded" in text
    assert "__0_0" in text
    assert (tmp_path / "step_3" / ".metadata").exists()  # nothing was removed
    damage(tmp_path / "step_2")
    with pytest.raises(CorruptCheckpointError, match="step_2"):
        resume(tmp_path, into, no_dist=True)
    with pytest.raises(CorruptCheckpointError, match="step_3"):
        resume(tmp_path, into, no_dist=True, max_steps_back=0)
    resumed, said = said_by(tmp_path, into, max_steps_back=5)
    assert resumed is not None
    assert (resumed.step, len(resumed.passed_over), len(said)) == (1, 2, 2)
    assert holds(into, 1)


def test_damage_without_a_step_before(tmp_path: Path) -> None:
    damage(save(tmp_path, 1))
    with pytest.raises(CorruptCheckpointError) as caught:
        resume(tmp_path, state(0), no_dist=True)
    assert "no whole checkpoint before" in "".join(caught.value.__notes__)


def test_only_damage_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step before would not mend is raised, though it would load."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    with pytest.raises(KeyMismatchError):
        resume(tmp_path, {**state(0), "new": torch.ones(1)}, no_dist=True)
    with pytest.raises(ShapeMismatchError):
        resume(tmp_path, {**state(0), "w": torch.ones(3)}, no_dist=True)
    tried: list[str] = []

    def failing(path: str, *args: Any, **settings: Any) -> Any:
        tried.append(path)
        raise StorageError(f"read({path}): Input/output error", path, 5)

    monkeypatch.setattr("bytecheckpoint.training_state.resuming.load_state_dict", failing)
    with pytest.raises(StorageError):
        resume(tmp_path, state(0), no_dist=True)
    assert tried == [str(tmp_path / "step_2")]


def test_keys_that_only_the_damaged_step_has(tmp_path: Path) -> None:
    """A spec that allows keys to be missing would keep what the failed load has put there."""
    save_state_dict(tmp_path / "step_1", {"w": torch.ones(100_000)}, no_dist=True)
    save(tmp_path, 2)
    damage(tmp_path / "step_2")
    with pytest.raises(CorruptCheckpointError) as caught:
        resume(tmp_path, state(0), no_dist=True, spec=LoadSpec(strict=False))
    assert "lacks nested.b" in "".join(caught.value.__notes__)
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path / "step_2")
    into = state(0)
    resumed, _ = said_by(tmp_path, into, spec=LoadSpec(strict=False))
    assert resumed is not None
    assert resumed.step == 1
    assert holds(into, 1)


def test_steps_that_are_not_whole_are_passed_over_as_by_latest(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / ".metadata").write_bytes(b"damaged")
    resumed, said = said_by(tmp_path, state(0))
    assert resumed is not None
    assert (resumed.step, resumed.passed_over) == (1, ())
    assert "passing over" in said[0]
    shutil.rmtree(tmp_path / "step_1")
    with pytest.raises(CheckpointError, match="none is whole"):
        resume(tmp_path, state(0), no_dist=True)


def test_checkpoints_of_stock_and_of_save(tmp_path: Path) -> None:
    dcp.save(state(4), checkpoint_id=tmp_path / "stock" / "step-4", no_dist=True)
    into = state(0)
    resumed, _ = said_by(tmp_path / "stock", into)
    assert resumed is not None
    assert (resumed.step, resumed.user_metadata) == (4, None)
    assert holds(into, 4)

    model = nn.Linear(3, 2)
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        bytecheckpoint.save(tmp_path / "parts", {"model": model}, "ddp", global_steps=step)
    fresh = nn.Linear(3, 2)
    resumed = resume(tmp_path / "parts", {"model": fresh}, framework="ddp")
    assert resumed is not None
    assert resumed.step == 2
    assert bool((fresh.weight == 2).all())


def test_arguments(tmp_path: Path) -> None:
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(ConfigError, match="max_steps_back"):
            resume(tmp_path, {}, no_dist=True, max_steps_back=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no_dist"):
        resume(tmp_path, {}, framework="ddp", no_dist=True)
    with pytest.raises(ConfigError, match="a checkpoint itself"):
        resume(save(tmp_path, 1), state(0), no_dist=True, config=Config())


def test_a_launcher_without_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="init_process_group"):
        resume(tmp_path, {})


def test_the_newest_before_a_step(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert latest(tmp_path, before=3) == str(tmp_path / "step_2")
    assert latest(tmp_path, before=tmp_path / "step_2") == str(tmp_path / "step_1")
    assert latest(tmp_path, before=f"{tmp_path}/step_2/") == str(tmp_path / "step_1")
    assert latest(tmp_path, before=1) is None
    with pytest.raises(ConfigError, match="before=7 is no step"):
        latest(tmp_path, before=7)
