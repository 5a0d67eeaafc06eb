# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp steps``: it says which step folders of a run are complete, half or corrupt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.cli_runs import as_json, run, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Returns a run folder with two complete steps, a folder that is no step, and a file."""
    save(tmp_path / "run" / "step-9")
    shutil.copytree(tmp_path / "run" / "step-9", tmp_path / "run" / "step-10")
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "step-11").touch()
    return tmp_path / "run"


def test_all_complete(root: Path) -> None:
    result = run("steps", str(root))
    assert result.exit_code == 0
    first, second, last = result.output.splitlines()
    assert first.split()[0] == "step-9"
    assert second.split()[0] == "step-10"
    assert first.endswith("complete")
    assert last == f"{root}: 2 step folders: 2 complete"


def test_half_and_corrupt(root: Path) -> None:
    (root / "step-10" / ".metadata").unlink()
    shutil.copytree(root / "step-9", root / "step-12")
    (data,) = (root / "step-12").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    said = as_json("steps", str(root), code=1)
    assert said["findings"] == 2
    assert [(step["step"], step["state"]) for step in said["steps"]] == [(9, "complete"), (10, "half"), (12, "corrupt")]
    assert data.name in run("steps", str(root)).output


def test_deep_reads_what_a_look_does_not(root: Path) -> None:
    (data,) = (root / "step-10").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[5000] ^= 1
    data.write_bytes(content)
    assert run("steps", str(root)).exit_code == 0
    assert run("steps", str(root), "--deep").exit_code == 1


def test_other_names(root: Path) -> None:
    (root / "step-9").rename(root / "iter9")
    assert [step["step"] for step in as_json("steps", str(root))["steps"]] == [10]
    assert [step["step"] for step in as_json("steps", str(root), "--pattern", r"iter(\d+)")["steps"]] == [9]
    assert run("steps", str(root), "--pattern", "(").exit_code == 2


def test_nothing_there(tmp_path: Path) -> None:
    assert run("steps", str(tmp_path)).output == f"{tmp_path}: 0 step folders: 0 complete\n"
    result = run("steps", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "No such file" in result.output


def test_what_cannot_be_looked_at_is_a_finding(root: Path) -> None:
    """A folder with nothing of a checkpoint in it is not a finding."""
    (root / "2024").mkdir()
    (root / "2024" / "rank_0.log").touch()
    said = as_json("steps", str(root))
    assert [(step["state"], step["has_mark"]) for step in said["steps"]] == [("complete", True)] * 2 + [
        ("unknown", False)
    ]
    (root / "step-12").mkdir()
    (root / "step-12" / ".metadata").write_bytes(b"\x80\x04cmodule\nname\n.")
    assert as_json("steps", str(root), code=1)["findings"] == 1
    for name in ("step-9", "step-10", "2024"):
        shutil.rmtree(root / name)
    assert run("steps", str(root)).exit_code == 1


def test_help_says_what_the_states_and_the_exit_code_mean() -> None:
    said = " ".join(run("steps", "--help").output.split())
    assert "unknown: it cannot be looked at" in said
    assert "Ends with 1 if any is half, corrupt, incomplete, or cannot be looked at" in said
