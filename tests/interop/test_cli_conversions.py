# SPDX-License-Identifier: Apache-2.0
"""``bcp convert`` on what training code saves: the model alone, other names, files of torch."""

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
def test_the_model_alone(tmp_path: Path, save: Any) -> None:
    model, optimizer = model_and_optimizer()
    save(tmp_path / "ckpt", model, optimizer)
    result = run("convert", tmp_path / "ckpt", tmp_path / "hf", "--model-only", "--verify")
    assert result.exit_code == 0, result.output
    assert_is(tmp_path / "hf/model.safetensors", model)


@pytest.mark.parametrize("save", [save_in_parts, save_under_one_key])
def test_average_of_models(tmp_path: Path, save: Any) -> None:
    """--model-only says it of all checkpoints."""
    models = [model_and_optimizer() for _ in range(2)]
    for number, (model, optimizer) in enumerate(models):
        save(tmp_path / f"{number}", model, optimizer)
    result = run("convert", tmp_path / "0", tmp_path / "out", "--model-only", "--average", tmp_path / "1")
    assert result.exit_code == 0, result.output
    one, other = (model.state_dict() for model, _ in models)
    got = load_file(tmp_path / "out/model.safetensors")
    assert all(got[key].equal(value * 0.5 + other[key] * 0.5) for key, value in one.items())
    weighted = ("--weights", "1,2", "--average", tmp_path / "1")
    assert run("convert", tmp_path / "0", tmp_path / "sum", "--model-only", *weighted).exit_code == 0
    for wrong in ("1", "1,x"):
        assert (
            run("convert", tmp_path / "0", tmp_path / "no", "--average", tmp_path / "1", "--weights", wrong).exit_code
            == 2
        )


@pytest.mark.parametrize("prefix", ["model", "state_dict", "module"])
def test_the_prefix_of_a_model(tmp_path: Path, prefix: str) -> None:
    weights = {"layers.0.weight": torch.ones(3), "norm": torch.zeros(2)}
    beside = {"optimizer_states.0.m": torch.ones(3), "epoch": 3, "ema.x": torch.ones(1)}
    save_state_dict(tmp_path / "ckpt", {f"{prefix}.{name}": it for name, it in weights.items()} | beside, no_dist=True)
    assert run("convert", tmp_path / "ckpt", tmp_path / "hf", "--model-only").exit_code == 0
    assert {*load_file(tmp_path / "hf/model.safetensors")} == {*weights}


def test_a_model_of_hugging_face_keeps_its_names(tmp_path: Path) -> None:
    """Its keys begin with "model.", but for the head's."""
    weights = {"model.layers.0.weight": torch.ones(3), "lm_head.weight": torch.zeros(2)}
    save_state_dict(tmp_path / "ckpt", weights | {"optimizer.m": torch.ones(3), "step": 3}, no_dist=True)
    assert run("convert", tmp_path / "ckpt", tmp_path / "hf", "--model-only").exit_code == 0
    assert {*load_file(tmp_path / "hf/model.safetensors")} == {*weights}


def test_tensors_beside_a_model_that_nobody_knows(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ckpt", {"model.w": torch.ones(3), "teacher.w": torch.ones(3)}, no_dist=True)
    result = run("convert", tmp_path / "ckpt", tmp_path / "hf", "--model-only")
    assert result.exit_code == 2
    assert "tensors of teacher beside those of model" in result.output


def test_a_checkpoint_without_a_model(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ckpt", {"optimizer": {"m": torch.ones(3)}}, no_dist=True)
    result = run("convert", tmp_path / "ckpt", tmp_path / "hf", "--model-only")
    assert (result.exit_code, "no model" in result.output) == (2, True)


def test_rename(tmp_path: Path) -> None:
    def rename(source: str, target: str, rule: str, *options: str) -> Result:
        return run("convert", tmp_path / source, tmp_path / target, "--to", "bcp", "--rename", rule, *options)

    save_state_dict(
        tmp_path / "ckpt", {"h.0.attn.w": torch.ones(2), "h.1.attn.w": torch.zeros(2), "n": 4}, no_dist=True
    )
    result = rename("ckpt", "out", "h.{i}.attn=layers.{i}.attention", "--json")
    assert result.exit_code == 0, result.output
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert sorted(whole) == ["layers.0.attention.w", "layers.1.attention.w", "n"]
    assert whole["layers.0.attention.w"].equal(torch.ones(2))
    assert rename("ckpt", "other", "h").exit_code == 2
    result = rename("ckpt", "other", "h.{i}.attn=one")
    assert (result.exit_code, "two sources for one key" in result.output) == (2, True)
    assert not (tmp_path / "other").exists()


def test_a_step_becomes_files_of_torch(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    save_in_parts(tmp_path / "ckpt", model, optimizer)
    (tmp_path / "out").mkdir()  # empty
    result = run("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "torch", "--json", "--no-progress")
    assert result.exit_code == 0, result.output
    assert [*json.loads(result.output)["files"]] == ["model.pt", "optimizer.pt"]
    model.load_state_dict(torch.load(tmp_path / "out/model.pt", weights_only=True))
    merged = torch.load(tmp_path / "out/optimizer.pt", weights_only=True)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(a["exp_avg"].equal(b) for a, b in zip(merged["state"].values(), moments, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]


@pytest.mark.parametrize(("option", "name"), [("--model-only", "model.pt"), ("--optimizer-only", "optimizer.pt")])
def test_one_file_of_a_step(tmp_path: Path, option: str, name: str) -> None:
    save_in_parts(tmp_path / "ckpt", *model_and_optimizer())
    result = run("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "torch", option, "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    if name == "model.pt":
        assert torch.load(tmp_path / "out/model.pt", weights_only=True)["0.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "torch", "--model-only", "--optimizer-only"), "pass one of them"),
        (("--to", "torch", "--resume"), "--resume: not for a step --to torch"),
        (("--to", "torch", "--workers", "2"), "--workers: not for a step --to torch"),
        (("--optimizer-only",), "only for a step that bytecheckpoint.save saved, with --to torch"),
        (("--model-only", "--include", "0"), "not beside a spec"),
    ],
)
def test_options_that_do_not_fit_a_step(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    save_in_parts(tmp_path / "ckpt", *model_and_optimizer())
    result = run("convert", tmp_path / "ckpt", tmp_path / "out", *options)
    assert (result.exit_code, said in result.output) == (2, True), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_files_of_torch_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with something in it is refused; a failure behind the first file leaves nothing."""
    save_in_parts(tmp_path / "ckpt", *model_and_optimizer())
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model.pt").write_bytes(b"of somebody else")
    result = run("convert", tmp_path / "ckpt", tmp_path / "full", "--to", "torch")
    assert (result.exit_code, "nothing is changed in place" in result.output) == (2, True)
    assert (tmp_path / "full/model.pt").read_bytes() == b"of somebody else"

    def fail(*arguments: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("bytecheckpoint.training_state.merging._write_optimizer", fail)
    result = run("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "torch")
    assert (result.exit_code, "no space left" in result.output) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "full"]


@pytest.mark.parametrize("name", ["extract", "merge", "rename"])
def test_commands_that_went_name_the_new_one(name: str) -> None:
    result = run(name, "ckpt", "out")
    assert (result.exit_code, f"no bcp {name} any more: use bcp convert" in result.output) == (2, True)
