# SPDX-License-Identifier: Apache-2.0
"""``bcp extract``, ``bcp rename`` and ``bcp merge`` on what training code saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import bytecheckpoint
from bytecheckpoint import save_state_dict
from bytecheckpoint.cli.app import bcp


def run(*arguments: object) -> Result:
    return CliRunner().invoke(bcp, [*map(str, arguments)])


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_is(file: Path, model: nn.Module) -> None:
    got, wanted = load_file(file), model.state_dict()
    assert got.keys() == wanted.keys()
    assert all(got[key].equal(value) for key, value in wanted.items())


def save_in_parts(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    bytecheckpoint.save(folder, {"model": model, "optimizer": optimizer}, "ddp")


def save_under_one_key(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    save_state_dict(folder, {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}, no_dist=True)


def save_beside(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As torchtitan: the keys of the model have no prefix."""
    of_optimizer = {f"optimizer.{key}": value for key, value in {"lr": 0.1, "m": torch.ones(3)}.items()}
    save_state_dict(folder, {**model.state_dict(), **of_optimizer, "train_state": {"step": 3}}, no_dist=True)


def save_as_olmo(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    save_state_dict(folder / "model_and_optim", {**state, "optim.m": torch.ones(3)}, no_dist=True)


@pytest.mark.parametrize("save", [save_in_parts, save_under_one_key, save_beside, save_as_olmo])
def test_extract_finds_the_model(tmp_path: Path, save: Any) -> None:
    model, optimizer = model_and_optimizer()
    save(tmp_path / "ckpt", model, optimizer)
    result = run("extract", tmp_path / "ckpt", tmp_path / "hf", "--verify")
    assert result.exit_code == 0, result.output
    assert_is(tmp_path / "hf/model.safetensors", model)


def test_extract_of_what_has_no_model(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ckpt", {"optimizer": {"m": torch.ones(3)}}, no_dist=True)
    result = run("extract", tmp_path / "ckpt", tmp_path / "hf")
    assert (result.exit_code, "no model" in result.output) == (2, True)


def test_rename(tmp_path: Path) -> None:
    save_state_dict(
        tmp_path / "ckpt", {"h.0.attn.w": torch.ones(2), "h.1.attn.w": torch.zeros(2), "n": 4}, no_dist=True
    )
    result = run("rename", tmp_path / "ckpt", tmp_path / "out", "h.{i}.attn=layers.{i}.attention", "--json")
    assert result.exit_code == 0, result.output
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert sorted(whole) == ["layers.0.attention.w", "layers.1.attention.w", "n"]
    assert whole["layers.0.attention.w"].equal(torch.ones(2))
    assert run("rename", tmp_path / "ckpt", tmp_path / "other", "h").exit_code == 2
    result = run("rename", tmp_path / "ckpt", tmp_path / "other", "h.{i}.attn=one")
    assert (result.exit_code, "two sources for one key" in result.output) == (2, True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("safetensors", [False, True])
def test_merge(tmp_path: Path, safetensors: bool) -> None:
    model, optimizer = model_and_optimizer()
    save_in_parts(tmp_path / "ckpt", model, optimizer)
    result = run("merge", tmp_path / "ckpt", tmp_path / "out", *["--safetensors"] * safetensors)
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors" if safetensors else "model.pt", "optimizer.pt"}
    if safetensors:
        assert_is(tmp_path / "out/model.safetensors", model)
    else:
        model.load_state_dict(torch.load(tmp_path / "out/model.pt", weights_only=True))
    merged = torch.load(tmp_path / "out/optimizer.pt", weights_only=True)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(a["exp_avg"].equal(b) for a, b in zip(merged["state"].values(), moments, strict=True))
    result = run("merge", tmp_path / "ckpt", tmp_path / "out", "--model-only", "--optimizer-only")
    assert result.exit_code == 2


def test_merge_lists_what_it_wrote(tmp_path: Path) -> None:
    """Files of an earlier merge, and of others, are not its own."""
    model, optimizer = model_and_optimizer()
    save_in_parts(tmp_path / "ckpt", model, optimizer)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other.pt").write_bytes(b"of somebody else")

    def listed(*options: str) -> list[str]:
        result = run("merge", tmp_path / "ckpt", tmp_path / "out", *options, "--json", "--no-progress")
        assert result.exit_code == 0, result.output
        return [*json.loads(result.output)["files"]]

    assert listed() == ["model.pt", "optimizer.pt"]
    assert listed("--safetensors", "--model-only") == ["model.safetensors"]
    assert listed("--optimizer-only") == ["optimizer.pt"]
    of_shards = listed("--safetensors", "--model-only", "--shard-size", "100")
    assert of_shards[-1] == "model.safetensors.index.json"
    assert all(name.startswith("model-") for name in of_shards[:-1])
