# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp digest``: its lines, its JSON, comparisons with what it has printed before, and step folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.cli_runs import HOSTILE, as_json, run, save, state
from unit.partial_states import save_incomplete

import bytecheckpoint


def test_lines(tmp_path: Path) -> None:
    path = save(tmp_path / "a")
    found = bytecheckpoint.digest(path)
    assert run("digest", path).output == f"{found.total}  {path}\n"
    shown = run("digest", path, "--keys").output.splitlines()
    assert len(shown) == len(found.keys) + 1
    assert shown[-1] == f"{found.total}  {path}"
    assert f"{found.keys['step']}  step" in shown
    assert all(line.isprintable() for line in shown)
    assert as_json("digest", path) == {
        "path": path,
        "total": found.total,
        "keys": dict(found.keys),
        "as_stored": [],
        "stored": None,
        "bytes": found.num_bytes,
    }
    assert HOSTILE in found.keys


def test_any_source(tmp_path: Path) -> None:
    path = save(tmp_path / "a")
    save_file(state()["model"], tmp_path / "m.safetensors")
    of_file = run("digest", str(tmp_path / "m.safetensors")).output.split()[0]
    assert run("digest", path, "--include", "model", "--rename", "model=").output.split()[0] == of_file
    (tmp_path / "spec.toml").write_text('include = ["model"]\n[rename]\nmodel = ""\n')
    assert run("digest", path, "--spec", str(tmp_path / "spec.toml")).output.split()[0] == of_file


def test_compare(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a"), save(tmp_path / "b", {**state(), "step": 8})
    kept = tmp_path / "kept.json"
    kept.write_text(run("digest", a, "--json").output)
    assert run("digest", a, "--compare", str(kept)).output.endswith(f"{a}: equal to {kept}\n")
    shown = run("digest", b, "--compare", str(kept))
    assert shown.exit_code == 1
    assert shown.output.endswith(f"{b}: differs from {kept}: step\n")
    told = as_json("digest", b, "--compare", str(kept), code=1)
    assert (told["equal"], told["differing"]) == (False, ["step"])
    assert as_json("digest", a, "--compare", str(kept))["equal"]
    partly = as_json("digest", a, "--exclude", "step", "--compare", str(kept), code=1)
    assert partly["differing"] == ["step"]


@pytest.mark.parametrize("content", ["", "[]", '{"total": 3}', "[" * 100_000, "{}", "\0"])
def test_what_cannot_be_compared_with(tmp_path: Path, content: str) -> None:
    (tmp_path / "kept").write_text(content)
    shown = run("digest", save(tmp_path / "a"), "--compare", str(tmp_path / "kept"))
    assert shown.exit_code == 2
    assert f"--compare {tmp_path / 'kept'}" in shown.stderr
    assert shown.stdout == ""


@pytest.mark.parametrize("keys", ["3", "null", "{}", '{"model.bias": 3}'])
def test_a_file_that_somebody_has_changed(tmp_path: Path, keys: str) -> None:
    (tmp_path / "kept").write_text(f'{{"total": "x", "keys": {keys}}}')
    assert as_json("digest", save(tmp_path / "a"), "--compare", str(tmp_path / "kept"), code=1)["differing"]
    (tmp_path / "kept").write_text(f'{{"total": "x", "parts": {keys}}}')
    assert as_json("digest", save(tmp_path / "a"), "--compare", str(tmp_path / "kept"), code=1)["differing"]


def test_step_folder(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    for name in "ab":
        bytecheckpoint.save(tmp_path / name, {"model": model, "extra_state": {"epoch": 3}}, "ddp")
    a, b = (as_json("digest", str(tmp_path / name)) for name in "ab")
    assert a["parts"].keys() == {"model", "extra_state"}
    assert a["parts"]["model"]["total"] == bytecheckpoint.digest(tmp_path / "a" / "model").total
    assert {**a, "path": ""} == {**b, "path": ""}
    shown = run("digest", str(tmp_path / "a"), "--keys").output
    assert f"{a['parts']['model']['keys']['weight']}  model: weight\n" in shown
    assert shown.endswith(f"{a['total']}  {tmp_path / 'a'}\n")
    with torch.no_grad():
        model.weight[0, 0] += 1
    bytecheckpoint.save(tmp_path / "b", {"model": model, "extra_state": {"epoch": 3}}, "ddp")
    (tmp_path / "kept").write_text(json.dumps(a))
    assert as_json("digest", str(tmp_path / "b"), "--compare", str(tmp_path / "kept"), code=1)["differing"] == [
        "model: weight"
    ]
    assert "several parts" in run("digest", str(tmp_path / "a"), "--include", "weight").stderr


def test_refusals(tmp_path: Path) -> None:
    save_incomplete(tmp_path / "gap")
    assert "'w': some of its elements are in no chunk" in run("digest", str(tmp_path / "gap")).stderr
    assert "no checkpoint there" in run("digest", str(tmp_path / "none")).stderr


def test_no_torch_is_needed(tmp_path: Path) -> None:
    """Nothing but the extension module `_core` computes a digest of tensors and objects."""
    path = save(tmp_path / "a")
    code = (
        f"import sys; sys.modules['torch'] = None; import bytecheckpoint; print(bytecheckpoint.digest({path!r}).total)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == bytecheckpoint.digest(path).total
