# SPDX-License-Identifier: Apache-2.0
"""Steps of torch_checkpointing: read as one checkpoint each, and what everything that knows steps says of them."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import run
from support.goldens import GOLDEN

import bytecheckpoint
from bytecheckpoint import Retention, latest, scan_steps
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, UnsupportedError

FOLDER = GOLDEN / "torch_checkpointing-0.1.1"
BOTH = pytest.mark.parametrize("kind", ["reshard", "mesh"])


def expected(kind: str) -> dict[str, torch.Tensor]:
    values = torch.load(FOLDER / kind / "expected.pt", weights_only=True)
    return {name: value for name, value in values.items() if name.partition(".")[0] in ("model", "optim")}


def put(step: Path, kind: str, time: int) -> Path:
    """Copies a step, as if it had been written at ``time``."""
    shutil.copytree(FOLDER / kind / "checkpoint", step)
    for path in step.iterdir():
        os.utime(path, (time, time))
    return step


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        put(tmp_path / f"run/step-{number}", "reshard", 1_000_000 + number)
    return tmp_path / "run"


@BOTH
def test_a_step_is_one_checkpoint(kind: str, tmp_path: Path) -> None:
    step, wanted = FOLDER / kind / "checkpoint", expected(kind)
    stored = bytecheckpoint.read(step)
    assert {name for name in stored if not name.startswith("trainer.")} >= {*wanted}
    assert all(torch.equal(stored[name], value) for name, value in wanted.items())
    assert (stored["trainer.step"], stored["trainer.rank"]) == (7, 0)
    report = bytecheckpoint.verify(step)
    assert not report.problems
    assert report.bytes_unchecked == 0
    ours = tmp_path / "ours"
    convert(step, ours, to="dcp")
    assert run("diff", str(step), str(ours)).exit_code == 0
    convert(step, tmp_path / "all.pt", to="torch")
    nested = torch.load(tmp_path / "all.pt", weights_only=True)
    assert {*nested} == {name.partition(".")[0] for name in stored}
    assert nested["trainer"]["step"] == 7


def test_an_item_may_be_anything(tmp_path: Path) -> None:
    step = put(tmp_path / "step", "reshard", 1)
    for rank in (0, 1):
        torch.save(1000 + rank, step / f"count_{rank}.pt")
        torch.save(torch.arange(3), step / f"numbers_{rank}.pt")
    torch.save({"only": "here"}, step / "of.one_1.pt")
    stored = bytecheckpoint.read(step)
    assert (stored["count"], stored["of.one.only"]) == (1000, "here")
    state: dict[str, Any] = {"count": 0, "numbers": torch.zeros(3, dtype=torch.int64), "of.one": {"only": ""}}
    bytecheckpoint.load_state_dict(step, state, no_dist=True, spec=bytecheckpoint.LoadSpec(strict="model"))
    assert state["count"] == 1000
    assert state["numbers"].tolist() == [0, 1, 2]
    assert state["of.one"] == {"only": "here"}


def test_the_newest_is_found_and_resumed(steps: Path) -> None:
    assert [folder.state for folder in scan_steps(steps)] == ["complete"] * 3
    folder = scan_steps(steps)[0]
    assert (folder.is_foreign, folder.num_files) == (True, 6)
    assert folder.num_bytes == sum(path.stat().st_size for path in (steps / "step-1").glob("*.pt"))
    assert latest(steps) == str(steps / "step-3")
    os.utime(steps / "step-1/metadata.pkl", (2_000_000, 2_000_000))
    with pytest.warns(RuntimeWarning, match="step-2, step-3 have higher numbers"):
        assert latest(steps) == str(steps / "step-1")
    os.utime(steps / "step-1/metadata.pkl", (1, 1))
    wanted = expected("reshard")
    state = {
        "model": {name[6:]: torch.zeros_like(value) for name, value in wanted.items() if name.startswith("model.")}
    }
    resumed = bytecheckpoint.resume(steps, state, no_dist=True, spec=bytecheckpoint.LoadSpec(strict="model"))
    assert resumed is not None
    assert (resumed.step, resumed.user_metadata) == (3, None)
    assert all(torch.equal(value, wanted[f"model.{name}"]) for name, value in state["model"].items())
    said = run("steps", str(steps))
    assert said.exit_code == 0
    assert "3 step folders: 3 complete" in said.stdout


def test_a_missing_file_is_named_and_the_step_before_is_taken(steps: Path) -> None:
    (steps / "step-3/optim_1.pt").unlink()
    folder = scan_steps(steps)[-1]
    assert folder.state == "corrupt"
    assert "optim_1.pt): the file of rank 1 is missing: 1 of 2 are there" in folder.reason
    with pytest.warns(RuntimeWarning, match="passing over .*step-3, which is corrupt"):
        assert latest(steps) == str(steps / "step-2")
    with pytest.raises(CorruptCheckpointError, match=r"optim_1\.pt"):
        bytecheckpoint.read(steps / "step-3")


def test_a_cut_file_is_seen_without_reading_elements(steps: Path) -> None:
    path = steps / "step-3/model_1.pt"
    os.truncate(path, path.stat().st_size // 2)
    folder = scan_steps(steps)[-1]
    assert folder.state == "corrupt"
    assert "model_1.pt" in folder.reason


def test_without_its_mark_a_step_does_not_count(steps: Path) -> None:
    (steps / "step-3/metadata.pkl").unlink()
    folder = scan_steps(steps)[-1]
    assert (folder.state, folder.has_mark) == ("unknown", True)
    assert "without metadata.pkl" in folder.reason
    with pytest.warns(RuntimeWarning, match="passing over .*step-3"):
        assert latest(steps) == str(steps / "step-2")
    for number in (1, 2):
        shutil.rmtree(steps / f"step-{number}")
    with pytest.raises(CheckpointError, match="there are checkpoints, but none is whole: step-3 is unknown"):
        latest(steps)


def test_files_of_a_user_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run/step-1").mkdir(parents=True)
    torch.save(7, tmp_path / "run/step-1/rng_0.pt")
    assert not scan_steps(tmp_path / "run")[0].has_mark
    assert latest(tmp_path / "run") is None


def _layout(metadata: dict[str, Any]) -> None:
    metadata["metadata"]["model"]["rank_to_layout_info"][1] = {"file_path": "rank_1/model.safetensors"}


def _no_paths(metadata: dict[str, Any]) -> None:
    del metadata["metadata"]["model"]["nested_path_to_metadata"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_layout, r"the item 'model' is in files that an ItemSpec\(layout=...\) names"),
        (_no_paths, "the item 'model' has no dict of paths"),
        (lambda metadata: metadata.pop("metadata"), "it has no dict 'metadata'"),
    ],
)
def test_other_metadata_are_refused(steps: Path, change: Callable[[dict[str, Any]], object], why: str) -> None:
    path = steps / "step-3/metadata.pkl"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsupportedError, match=rf"read\({path}\): {why}"):
        bytecheckpoint.read(steps / "step-3")
    assert [folder.state for folder in scan_steps(steps)] == ["complete", "complete", "unknown"]


def test_damaged_metadata(steps: Path) -> None:
    path = steps / "step-3/metadata.pkl"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=rf"read\({path}\): "):
        bytecheckpoint.read(steps / "step-3")
    assert latest_without_warning(steps) == str(steps / "step-2")


def test_any_bytes_in_the_place_of_metadata(tmp_path: Path) -> None:
    path = put(tmp_path / "step", "mesh", 1) / "metadata.pkl"
    good, draw = path.read_bytes(), random.Random(7)
    num_opened = 0
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        path.write_bytes(bad[: draw.choice([len(bad), draw.randrange(len(bad))])])
        with contextlib.suppress(CheckpointError):
            bytecheckpoint.read(tmp_path / "step")
            num_opened += 1
    assert 0 < num_opened < 400


def latest_without_warning(run: Path) -> str | None:
    with pytest.warns(RuntimeWarning):
        return latest(run)


def test_a_prune_removes_them_only_if_asked(steps: Path) -> None:
    (steps / "step-1/notes.json").write_text("{}")
    report = Retention(steps, keep_latest=1).prune()
    assert (report.kept, report.removed) == ([3], [])
    assert "only remove_foreign=True removes" in report.skipped[str(steps / "step-1")]
    would = Retention(steps, keep_latest=1, remove_foreign=True).prune(dry_run=True)
    report = Retention(steps, keep_latest=1, remove_foreign=True).prune()
    assert report.removed == would.removed == [str(steps / "step-1"), str(steps / "step-2")]
    assert report.bytes_freed == would.bytes_freed > 0
    assert [path.name for path in steps.iterdir()] == ["step-3"]


def test_what_a_prune_has_left_half_never_loads_and_goes(steps: Path) -> None:
    """The mark goes first. A prune that dies then leaves the tmp of its removal."""
    (steps / "step-1/metadata.pkl").unlink()
    (steps / f"step-1/.metadata.{'0' * 32}.tmp").touch()
    assert scan_steps(steps)[0].state == "half"
    report = Retention(steps, keep_latest=1).prune()
    assert "remove_foreign=True" in report.skipped[str(steps / "step-1")]  # a save of DCP may have left the tmp, too
    report = Retention(steps, keep_latest=1, remove_foreign=True).prune()
    assert report.swept == [str(steps / "step-1")]


@pytest.mark.parametrize("stray", ["__0_0.distcp", f".metadata.{'0' * 32}.tmp"])
def test_a_file_of_dcp_beside_it_makes_it_nothing_less(steps: Path, stray: str) -> None:
    (steps / "step-1" / stray).write_bytes(b"a save of DCP that died")
    assert scan_steps(steps)[0].is_complete
    assert "remove_foreign=True" in Retention(steps, keep_latest=1).prune().skipped[str(steps / "step-1")]
    report = Retention(steps, keep_latest=1, remove_foreign=True, remove_others=False).prune()
    assert str(steps / "step-1") in report.removed
    assert not (steps / "step-1").exists()


def test_files_of_a_user_and_of_more_ranks_are_not_of_the_step(steps: Path) -> None:
    """The step says which ranks saved."""
    step = steps / "step-1"
    stored = bytecheckpoint.read(step)
    torch.save({"weight": torch.zeros(3)}, step / "notes_7.pt")
    shutil.copy(next(step.glob("model_*.pt")), step / "model_99.pt")
    assert {*bytecheckpoint.read(step)} == {*stored}
    Retention(steps, keep_latest=1, remove_foreign=True, remove_others=False).prune()
    assert sorted(path.name for path in step.iterdir()) == ["model_99.pt", "notes_7.pt"]


def test_files_of_some_ranks_are_said(tmp_path: Path) -> None:
    step = put(tmp_path / "step", "mesh", 1)
    for name in ("trainer_0.pt", "trainer_2.pt"):
        (step / name).unlink()
    with pytest.warns(RuntimeWarning, match=r"of 'trainer' there are no files of all 4 ranks that saved"):
        bytecheckpoint.read(step)


def test_an_empty_file_is_damage(steps: Path) -> None:
    path = next((steps / "step-1").glob("model_0.pt"))
    path.write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"model_0\.pt\): the file is empty \(0 bytes\)"):
        bytecheckpoint.read(steps / "step-1")
    assert scan_steps(steps)[0].state == "corrupt"


def test_a_step_of_dcp_with_such_a_file_beside_it_is_no_other_format(tmp_path: Path) -> None:
    for number in (1, 2):
        step = tmp_path / f"run/step-{number}"
        torch.distributed.checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=step, no_dist=True)
        torch.save(7, step / "rng_0.pt")
    assert Retention(tmp_path / "run", keep_latest=1).prune().removed == [str(tmp_path / "run/step-1")]
