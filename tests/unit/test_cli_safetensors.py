# SPDX-License-Identifier: Apache-2.0
"""Tests that every command that looks into checkpoints looks into safetensors, too, and compares them with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli_runs import as_json, run, save
from unit.dcp_by_hand import save_by_hand

import bytecheckpoint
from bytecheckpoint import LoadSpec
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CheckpointNotFoundError
from bytecheckpoint.transforms import Transpose


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "wide": torch.randn(300, 400, generator=generator),
        "half": torch.randn(30, 4, generator=generator).to(torch.float16),
        "ids": torch.arange(7),
        "none": torch.zeros(0, 2),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as from_pretrained reads it, with three files and an index."""
    save(tmp_path / "saved", {"model": weights(), "step": 3})
    spec = LoadSpec(include="model", rename={"model": ""})
    convert(tmp_path / "saved", tmp_path / "hf", spec=spec, shard_size=256)
    assert len([*(tmp_path / "hf").glob("*.safetensors")]) == 3
    return tmp_path / "hf"


def test_ls_and_show(folder: Path) -> None:
    told = as_json("ls", str(folder))
    assert (told["format"], told["files"], told["save_ids"]) == ("safetensors", 3, [])
    assert [item["name"] for item in told["items"]] == ["half", "ids", "none", "wide"]
    assert run("ls", str(folder)).output.splitlines()[-1].endswith(" bytes in 4 shards; safetensors in 3 files")
    file = next(folder.glob("*-of-00003.safetensors"))
    assert as_json("ls", str(file))["format"] == "safetensors"
    shown = as_json("show", str(folder), "wide", "--slice", ":1,:2")
    assert shown["slice"] == weights()["wide"][:1, :2].tolist()


def test_verify(folder: Path) -> None:
    told = as_json("verify", str(folder), "--allow-unchecked")
    assert (told["is_whole"], told["findings"], told["num_files"], told["num_records"]) == (True, 0, 3, 4)
    assert told["bytes_checked"] == 0
    assert told["bytes_unchecked"] == sum(tensor.nbytes for tensor in weights().values())
    shown = run("verify", str(folder)).output
    assert (
        "note: files of safetensors have no checksums: headers, sizes and the index were checked, the elements" in shown
    )
    assert f"{folder}: whole; 4 records in 3 files, 0 bytes compared with their checksums" in shown
    for file in folder.glob("*.safetensors"):
        assert run("verify", str(file), "--allow-unchecked").exit_code == 0
    nothing = run("verify", str(folder))
    assert (nothing.exit_code, nothing.stderr) == (
        1,
        f"bcp: {folder}: nothing was compared: no byte has a checksum; --allow-unchecked accepts that\n",
    )


def damage(folder: Path, how: str) -> str:
    """Damages a file, and returns its name."""
    file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "grown":
        file.write_bytes(file.read_bytes() + b"\0")
    elif how == "missing":
        file.unlink()
    else:
        index = folder / "model.safetensors.index.json"
        known: dict[str, Any] = json.loads(index.read_text())
        known["weight_map"]["more"] = file.name
        index.write_text(json.dumps(known))
        return index.name
    return file.name


@pytest.mark.parametrize("how", ["cut", "grown", "missing", "index"])
def test_damage_is_a_finding(folder: Path, how: str) -> None:
    name = damage(folder, how)
    told = as_json("verify", str(folder), code=1)
    (problem,) = told["problems"]
    assert name in problem["file"] or name in problem["message"] or "'more'" in problem["message"]
    assert run("verify", str(folder)).output.splitlines()[-1].startswith(f"{folder}: 1 problem;")
    assert not bytecheckpoint.verify(folder).is_whole


def test_verify_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointNotFoundError):
        bytecheckpoint.verify(tmp_path)
    assert run("verify", str(tmp_path / "file")).exit_code == 2
    assert run("verify", str(tmp_path / "none")).exit_code == 2


def test_diff_with_what_it_was_converted_from(folder: Path, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    options = ["--include", "model", "--rename", "model="]
    assert run("diff", saved, str(folder), *options).output == "4 keys equal, 0 not\n"
    assert (
        run("diff", saved, str(folder), *options, "--structure-only").output == "4 keys of the same structure, 0 not\n"
    )
    assert as_json("diff", saved, str(folder), code=1)["only_in_b"][0]["name"] == "half"
    (tmp_path / "a.toml").write_text('include = ["model"]\n[rename]\nmodel = ""\n')
    (tmp_path / "b.toml").write_text('[rename]\n"" = "model"\n')
    assert run("diff", saved, str(folder), "--spec", str(tmp_path / "a.toml")).exit_code == 0
    assert run("diff", saved, str(folder), "--exclude", "step", "--spec-b", str(tmp_path / "b.toml")).exit_code == 0
    assert run("diff", str(folder), saved, "--rename", "=model").output == (
        f"only in {saved}: step\n4 keys equal, 1 not\n"
    )
    changed = load_file(next(folder.glob("*-of-00003.safetensors")))
    for file in folder.glob("*.safetensors"):
        changed = load_file(file)
        if "wide" in changed:
            changed["wide"][2, 3] += 1
            save_file(changed, file)
    told = as_json("diff", saved, str(folder), *options, code=1)
    (difference,) = told["differences"]
    assert (difference["name"], difference["different"], difference["elements"]) == ("wide", 1, 120_000)


def test_diff_of_shards_transposed_and_cast(tmp_path: Path) -> None:
    state = weights()
    save_by_hand([state, state, state], tmp_path / "a")
    spec = LoadSpec(transforms=[Transpose("wide", dim0=0, dim1=1)])
    convert(tmp_path / "a", tmp_path / "hf", spec=spec, dtype="bfloat16")
    (tmp_path / "spec.toml").write_text('[[transforms]]\nkind = "transpose"\nfrom = "wide"\ndim0 = 0\ndim1 = 1\n')
    arguments = ["diff", str(tmp_path / "a"), str(tmp_path / "hf"), "--spec", str(tmp_path / "spec.toml")]
    dtypes = {each["name"] for each in as_json(*arguments, code=1)["differences"] if each["what"] == "dtype"}
    assert dtypes == {"half", "none", "wide"}
    for dtype in ("bfloat16", "bf16"):
        assert run(*arguments, "--dtype", dtype).output == "4 keys equal, 0 not\n"
    assert as_json(*arguments, "--dtype", "float16", code=1)["differences"]


def test_refusals_of_diff(tmp_path: Path) -> None:
    path = save(tmp_path / "a")
    model = torch.nn.Linear(2, 2)
    bytecheckpoint.save(tmp_path / "step", {"model": model, "extra_state": {"epoch": 3}}, "ddp")
    for arguments, text in {
        (path, path, "--include", "typo"): "'typo' matches no key",
        (path, path, "--rename", "x"): "--rename x: must be PATTERN=NAME",
        (path, path, "--spec", str(tmp_path / "none.toml")): "none.toml",
        (str(tmp_path / "step"), path, "--exclude", "x"): "has several parts: pass the path of one",
        (path, path, "--dtype", "int8"): "int8",
    }.items():
        for options in ([], ["--structure-only"]):
            shown = run("diff", *arguments, *options)
            assert shown.exit_code == 2
            assert text in shown.stderr, shown.stderr
