# SPDX-License-Identifier: Apache-2.0
"""``bcp prune`` does what ``prune`` does, and says it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.cli_runs import as_json, run, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Returns a run folder with steps 1 to 5."""
    save(tmp_path / "template")  # not into the run: what this process has committed there last would stay
    for step in range(1, 6):
        shutil.copytree(tmp_path / "template", tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".bcp")


def test_what_is_no_run_is_refused(root: Path) -> None:
    for command in (("prune", "--keep-latest", "1"), ("steps",)):
        said = run(*command, str(root / "nothing"))
        assert said.exit_code == 2
        assert said.output.count("No such file or directory") == 1
        said = run(*command, str(root / "step-2"))
        assert said.exit_code == 2
        assert "this folder is a checkpoint itself" in said.output
    assert len(steps(root)) == 5


def test_the_newest_and_every_second_stay(root: Path) -> None:
    looked = run("prune", str(root), "--keep-latest", "1", "--keep-every", "2", "--dry-run")
    assert looked.exit_code == 0
    assert "would have removed 2, kept 3" in looked.output
    assert len(steps(root)) == 5
    said = as_json("prune", str(root), "--keep-latest", "1", "--keep-every", "2")
    assert said["kept"] == [2, 4, 5]
    assert steps(root) == ["step-2", "step-4", "step-5"]


def test_what_is_damaged_stays_unless_it_is_asked_for(root: Path) -> None:
    (data,) = (root / "step-2").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    left = run("prune", str(root), "--keep-latest", "3")
    assert "left: " in left.output
    assert "step-2" in steps(root)
    run("prune", str(root), "--keep-latest", "3", "--remove-corrupt")
    assert steps(root) == ["step-3", "step-4", "step-5"]


def test_names_and_other_files(root: Path) -> None:
    for step in (1, 2):
        (root / f"step-{step}").rename(root / f"it{step}")
    (root / "it1" / "notes.txt").write_text("keep me")
    assert (
        run("prune", str(root), "--keep-latest", "1", "--pattern", r"it(\d+)", "--keep-others").exit_code == 1
    )  # a warning
    assert [path.name for path in (root / "it1").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("wrong", [[], ["--keep-latest", "0"], ["--keep-latest", "1", "--pattern", "("]])
def test_wrong_use(root: Path, wrong: list[str]) -> None:
    assert run("prune", str(root), *wrong).exit_code == 2
    assert len(steps(root)) == 5
