# SPDX-License-Identifier: Apache-2.0
"""Tests commands on a step folder of ``bytecheckpoint.save``, which holds several checkpoints, and on a run folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.cli_runs import as_json, run, save
from torch import nn
from unit.reference_run import save_as_reference

import bytecheckpoint

NAMES = [("model", "bias"), ("model", "weight"), ("optimizer", "param_groups.bias.lr"), ("extra_state", "rank_0.step")]


def save_step(root: Path, step: int, value: float = 1.0) -> Path:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "extra_state": {"step": step}}
    bytecheckpoint.save(root, state, "ddp", global_steps=step)
    return root / f"global_step_{step}"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return save_step(tmp_path / "run", 7)


def test_ls(step: Path) -> None:
    listed = as_json("ls", str(step))
    items = [(item["part"], item["name"]) for item in listed["items"]]
    assert items[:2] == NAMES[:2]
    assert NAMES[2] in items
    assert {part for part, _ in items} == {"model", "optimizer", "extra_state"}
    assert (listed["files"], len(listed["save_ids"])) == (3, 3)
    assert [item["name"] for item in as_json("ls", str(step), "weigh*")["items"]] == ["weight"]
    lines = run("ls", str(step)).output.splitlines()
    assert lines[1].split()[:3] == ["model:", "bias", "float32"]
    assert any(line.startswith("optimizer: param_groups.bias.lr  ") for line in lines)
    assert lines[-1].endswith("checkpoint of 3 files by bytecheckpoint")
    assert as_json("ls", str(step / "model"))["items"][0]["part"] is None


def test_verify(step: Path) -> None:
    said = run("verify", str(step))
    assert said.exit_code == 0
    assert [line.split(":")[0] for line in said.output.splitlines()] == [
        str(step / part) for part in ("model", "optimizer", "extra_state")
    ]
    (data,) = (step / "optimizer").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[4200] ^= 1
    data.write_bytes(content)
    told = as_json("verify", str(step), code=1)
    assert (told["findings"], told["is_whole"], told["mismatch"]) == (1, False, "")
    assert {part: report["findings"] for part, report in told["parts"].items()} == {
        "model": 0,
        "optimizer": 1,
        "extra_state": 0,
    }
    assert f"{data.name}: " in run("verify", str(step)).output


def test_verify_compares_what_the_parts_say_of_their_save(step: Path) -> None:
    other = save_step(step.parent, 8)
    shutil.rmtree(step / "optimizer")
    assert as_json("verify", str(step), code=1)["mismatch"] == "there is no optimizer"
    shutil.copytree(other / "optimizer", step / "optimizer")
    said = run("verify", str(step))
    assert said.exit_code == 1
    assert said.output.splitlines()[-1].startswith(f"{step}: parts of different saves: ")


def test_show(step: Path) -> None:
    for name in ("weight", "model: weight"):
        assert run("show", str(step), name).output.startswith("model: weight  float32 [2, 3]")
        assert as_json("show", str(step), name, "--slice", ":1")["slice"] == [[1.0] * 3]
    assert run("show", str(step), "extra_state: weight").exit_code == 2
    save(step / "optimizer", {"weight": torch.ones(1)})
    said = run("show", str(step), "weight")
    assert said.exit_code == 2
    assert "'weight' is in the parts model, optimizer; name one of them, as in 'model: weight'" in said.stderr
    assert as_json("show", str(step), "optimizer: weight")["part"] == "optimizer"


def test_diff(step: Path) -> None:
    assert run("diff", str(step), str(step)).exit_code == 0
    other = save_step(step.parent, 8, 2.0)
    told = as_json("diff", str(step), str(other), code=1)
    different = {(each["part"], each["name"]) for each in told["differences"]}
    assert different == {NAMES[0], NAMES[1], NAMES[3]}
    assert (told["only_in_a"], told["only_in_b"]) == ([], [])
    assert "model: weight: 6 of 6 elements differ" in run("diff", str(step), str(other)).output
    shutil.rmtree(other / "optimizer")
    told = as_json("diff", str(step), str(other), "--structure-only", code=1)
    assert {each["part"] for each in told["only_in_a"]} == {"optimizer"}


@pytest.mark.parametrize("command", ["ls", "verify", "show", "diff"])
def test_a_run_folder_says_which_steps_there_are(step: Path, command: str) -> None:
    save_step(step.parent, 10)
    more = {"show": ["weight"], "diff": [str(step)]}.get(command, [])
    said = run(command, str(step.parent), *more)
    assert said.exit_code == 2
    assert said.stderr.startswith(
        f"bcp: open({step.parent}): it is a run folder with the steps 7, 10: pass the folder "
    )
    assert len(said.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["ls", "verify", "show", "diff"])
def test_what_bytecheckpoint_wrote_is_named(tmp_path: Path, command: str) -> None:
    theirs = save_as_reference(tmp_path, 5)
    for path in (tmp_path, theirs):
        more = {"show": ["weight"], "diff": [str(path)]}.get(command, [])
        said = run(command, str(path), *more)
        assert said.exit_code == 2
        assert "ByteCheckpoint 0.0.2 or 0.0.3 wrote it" in said.stderr
    assert "0.0.3" in run("steps", str(tmp_path)).output
    more = {"show": ["module.embed.weight"], "diff": [str(theirs / "model")], "verify": ["--allow-unchecked"]}
    assert run(command, str(theirs / "model"), *more.get(command, [])).exit_code == 0
