# SPDX-License-Identifier: Apache-2.0
"""Conversions that compute: the average of checkpoints, and a LoRA adapter of peft added to its base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.equality import assert_equal
from support.ranks import run_ranks
from torch import nn

from bytecheckpoint import LoadSpec, read, save_state_dict
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CheckpointError, ConfigError, KeyMismatchError, ShapeMismatchError

pytest.importorskip("peft", reason="peft is not installed: ITS ADAPTERS ARE NOT TESTED")

import peft


def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(1200, 1111, generator=generator).to(dtype)  # more than one slot of the ring with float64
    return {"w": wide, "b": torch.randn(7, generator=generator).double(), "n": torch.arange(4), "step": seed}


def saved(path: Path, value: dict[str, Any]) -> str:
    save_state_dict(path, value, no_dist=True)
    return str(path)


@pytest.mark.parametrize("to", ["bcp", "dcp", "safetensors", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_average(tmp_path: Path, to: Any, dtype: torch.dtype) -> None:
    states = [state(seed, dtype) for seed in range(3)]
    first, *others = (saved(tmp_path / f"{seed}", each) for seed, each in enumerate(states))
    spec = LoadSpec(exclude="step") if to == "safetensors" else None
    report = convert(first, tmp_path / "out", to=to, average=others, spec=spec, verify=True)
    assert report.is_verified
    got = torch.load(tmp_path / "out", weights_only=True) if to == "torch" else dict(read(tmp_path / "out"))
    within = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = sum(each["w"].to(within) / 3 for each in states)
    assert got["w"].dtype == dtype
    near = 8e-3 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(got["w"], wanted.to(dtype), rtol=near, atol=near)
    torch.testing.assert_close(got["b"], sum(each["b"] / 3 for each in states), rtol=1e-15, atol=1e-15)
    assert_equal(got["n"], torch.arange(4))
    assert to == "safetensors" or got["step"] == 0  # that of the source


def test_the_average_is_rounded_once(tmp_path: Path) -> None:
    """With bfloat16 in between, 1 + 2**-8 + 2**-8 would be 1."""
    a = saved(tmp_path / "a", {"w": torch.tensor([1.0, 1.0]).bfloat16()})
    b = saved(tmp_path / "b", {"w": torch.tensor([2.0**-8, 2.0**-8]).bfloat16()})
    convert(a, tmp_path / "out", to="bcp", average=[b, b], weights=[1, 1, 1])
    assert_equal(read(tmp_path / "out")["w"], torch.tensor([1 + 2.0**-7] * 2).bfloat16())
    convert(a, tmp_path / "wide", to="bcp", average=[b], weights=[1, 0.5], dtype="float32")
    assert_equal(read(tmp_path / "wide")["w"], torch.tensor([1 + 2.0**-9] * 2))


def test_average_of_views_of_other_dtypes_and_shards(tmp_path: Path) -> None:
    """The spec is that of all sources; one may be stored in another dtype, or by another writer."""
    a, b = state(1), state(2)
    first = saved(tmp_path / "a", {"model": a})
    weights = {f"model.{name}": each.bfloat16() if name == "w" else each for name, each in b.items() if name != "step"}
    save_file({**weights, "model.step": torch.zeros(1)}, tmp_path / "b.safetensors")
    spec = LoadSpec(include=["model.w", "model.n"], rename={"model": ""})
    average = [tmp_path / "b.safetensors"]
    convert(first, tmp_path / "out", to="bcp", average=average, spec=spec, workers=2, shard_size="1MB")
    wanted = a["w"] * 0.5 + b["w"].bfloat16().float() * 0.5
    assert_equal(read(tmp_path / "out")["w"], wanted)


@pytest.mark.parametrize(
    ("other", "kind", "said"),
    [
        ({"w": torch.ones(3)}, KeyMismatchError, "it lacks n"),
        (
            {"w": torch.ones(3), "n": torch.arange(2), "x": torch.ones(1)},
            KeyMismatchError,
            "it has x, which the",
        ),
        (
            {"w": torch.ones(4), "n": torch.arange(2)},
            ShapeMismatchError,
            r"'w' is float32 \[3\], but there float32 \[4",
        ),
        ({"w": torch.ones(3).int(), "n": torch.arange(2)}, ShapeMismatchError, "but there int32"),
        (
            {"w": torch.ones(3), "n": torch.arange(2) + 1},
            ConfigError,
            "'n' is int64, which has no average",
        ),
    ],
)
def test_what_has_no_average(tmp_path: Path, other: dict[str, Any], kind: type[CheckpointError], said: str) -> None:
    a = saved(tmp_path / "a", {"w": torch.ones(3), "n": torch.arange(2)})
    b = saved(tmp_path / "b", other)
    with pytest.raises(kind, match=said):
        convert(a, tmp_path / "out", to="bcp", average=[b])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        {"average": ["b"], "weights": [1.0]},
        {"average": ["b"], "weights": [1.0, float("nan")]},
        {"weights": [1.0]},
        {"average": ["b"], "adapter": "c"},
        {"lora_alpha": 3.0},
        {"average": "b"},
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, arguments: dict[str, Any]) -> None:
    a = saved(tmp_path / "a", {"w": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"weights|average|lora_alpha"):
        convert(a, tmp_path / "out", to="bcp", **arguments)


def test_resume_knows_the_other_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun with one average does not go on with another."""
    a, b = (saved(tmp_path / name, state(seed)) for name, seed in (("a", 1), ("b", 2)))

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("bytecheckpoint.convert.local_destination._publish", fail)
        with pytest.raises(KeyboardInterrupt):
            convert(a, tmp_path / "out", to="bcp", average=[b])
    with pytest.raises(ConfigError, match="another source or other arguments"):
        convert(a, tmp_path / "out", to="bcp", average=[b], weights=[0.5, 0.25], resume=True)
    saved(tmp_path / "b", state(3))
    with pytest.raises(ConfigError, match="another source or other arguments"):
        convert(a, tmp_path / "out", to="bcp", average=[b], resume=True)
    shutil.rmtree(tmp_path / ".out.converting")
    convert(a, tmp_path / "out", to="bcp", average=[b])


def average_together(folder: Path) -> None:
    import torch.distributed as dist

    convert(
        folder / "a", folder / "out", to="bcp", average=[folder / "b"], shard_size="1MB", process_group=dist.group.WORLD
    )


def test_ranks_share_it(tmp_path: Path) -> None:
    a, b = state(1), state(2)
    saved(tmp_path / "a", a)
    saved(tmp_path / "b", b)
    run_ranks(2, average_together, tmp_path)
    assert_equal(read(tmp_path / "out")["w"], a["w"] * 0.5 + b["w"] * 0.5)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.ModuleDict({"q": nn.Linear(6, 9), "k": nn.Linear(6, 3)}) for _ in range(2)])
        self.head = nn.Linear(3, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["q"](x)[..., :6]
        out: torch.Tensor = self.head(self.layers[0]["k"](x))
        return out


def adapted(tmp_path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> dict[str, torch.Tensor]:
    """Saves base and adapter as people do. Returns what peft makes of both."""
    torch.manual_seed(5)
    base = Base().to(dtype)
    save_state_dict(tmp_path / "base", base.state_dict(), no_dist=True)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ["q", "k"], **settings})
    model = peft.get_peft_model(base, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    save_state_dict(tmp_path / "training", model.state_dict(), no_dist=True)
    merged: dict[str, torch.Tensor] = model.merge_and_unload().state_dict()
    return merged


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["q", "embed"]},
        {"modules_to_save": ["head"]},
        {"rank_pattern": {"layers.1.q": 2}, "alpha_pattern": {"layers.1.q": 7, "k": 3}},
        {"bias": "lora_only"},
        {"bias": "all"},
        {"target_modules": ["q", "head"], "modules_to_save": ["embed"]},
        {"init_lora_weights": "orthogonal", "r": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_adapter_becomes_part_of_its_base(tmp_path: Path, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    wanted = adapted(tmp_path, dtype, **settings)
    convert(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter", verify=True)
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6)
    assert not got["layers.0.q.weight"].equal(read(tmp_path / "base")["layers.0.q.weight"])


def test_an_adapter_is_rounded_once(tmp_path: Path) -> None:
    """Of a base in bfloat16 it is the nearest value to the exact sum."""
    adapted(tmp_path, torch.bfloat16)
    convert(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter")
    base, factors = read(tmp_path / "base"), load_file(tmp_path / "adapter/adapter_model.safetensors")
    a, b = (factors[f"base_model.model.layers.1.q.lora_{which}.weight"].double() for which in "AB")
    exact = base["layers.1.q.weight"].double() + b @ a * (5 / 3)
    assert_equal(load_file(tmp_path / "out/model.safetensors")["layers.1.q.weight"], exact.bfloat16())


def test_factors_in_a_training_checkpoint(tmp_path: Path) -> None:
    """Base and adapter are in one checkpoint, under the names of peft's model."""
    wanted = adapted(tmp_path, modules_to_save=["head"])
    spec = LoadSpec(
        exclude=["*.lora_?", "*.original_module"],
        rename={
            r"re:base_model\.model\.(.*)\.base_layer\.(.*)": r"\1.\2",
            r"re:base_model\.model\.(.*)\.modules_to_save\.default\.(.*)": r"\1.\2",
            "base_model.model": "",
        },
    )
    training = tmp_path / "training"
    convert(training, tmp_path / "out", adapter=training, lora_alpha=5, spec=spec)
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match=r"it has no adapter_config.json: pass lora_alpha"):
        convert(training, tmp_path / "again", adapter=training, spec=spec)


def change_config(folder: Path, **settings: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "IA3"}, "is of no LoRA adapter"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
    ],
)
def test_adapters_that_are_more_than_a_product_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    adapted(tmp_path)
    change_config(tmp_path / "adapter", **settings)
    with pytest.raises(ConfigError, match=said):
        convert(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_base(tmp_path: Path) -> None:
    adapted(tmp_path)
    spec = LoadSpec(rename={"": "model"})
    with pytest.raises(KeyMismatchError, match=r"the base has no layers.0.k.weight.*LoadSpec\(rename"):
        convert(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter", spec=spec)
    save_state_dict(tmp_path / "other", {k: v[:2] for k, v in Base().state_dict().items()}, no_dist=True)
    with pytest.raises(ShapeMismatchError, match=r"factors \[3, 6\] and \[3, 3\] do not fit 'layers.0.k.weight'"):
        convert(tmp_path / "other", tmp_path / "out", adapter=tmp_path / "adapter")
    with pytest.raises(KeyMismatchError, match="no factors lora_A and lora_B"):
        convert(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "base", lora_alpha=1)


def test_an_adapter_at_a_url(tmp_path: Path) -> None:
    """Of the store only that URL is known."""
    wanted = adapted(tmp_path)
    url = f"memory://adapters/{tmp_path.name}/deep/adapter"
    save_state_dict(url, load_file(tmp_path / "adapter/adapter_model.safetensors"), no_dist=True)
    convert(tmp_path / "base", tmp_path / "out", adapter=url, lora_alpha=5)
    got = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6)
