# SPDX-License-Identifier: Apache-2.0
"""Reads what Megatron-Core writes (torch_dist), and takes weights to Hugging Face's names and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import run
from support.goldens import GOLDEN

import bytecheckpoint
from bytecheckpoint import model_specs
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import ConfigError, UnsafeObjectError

VERSIONS = ["0.16.1", "0.19.2"]
KINDS = ["state", "parallel", "gpt", "moe"]  # chosen shards; saved in parallel; a GPT with its optimizer; with experts
GPT: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
}
# The older one is of version 0.19.2.
OLDER_MOE = GPT | {"model_type": "mixtral", "attention_bias": True}
MOE = GPT | {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
# What transformers needs besides.
COMMON = {
    "hidden_act": "silu",
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "use_sliding_window": False,
}
CONFIGS = [("0.16.1", "gpt", GPT), ("0.16.1", "moe", MOE), ("0.19.2", "gpt", GPT), ("0.19.2", "moe", OLDER_MOE)]


def folder(version: str, kind: str) -> Path:
    return GOLDEN / f"megatron-{version}" / kind


def expected(version: str, kind: str) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = torch.load(folder(version, kind) / "expected.pt", weights_only=True)
    return values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_tensors_and_objects(version: str, kind: str) -> None:
    path, wanted = folder(version, kind) / "checkpoint", expected(version, kind)
    stored = bytecheckpoint.read(path)
    assert all(torch.equal(stored[name], value) for name, value in wanted.items())
    target = {name: torch.zeros_like(value) for name, value in wanted.items()}
    bytecheckpoint.load_state_dict(path, target, no_dist=True)
    assert all(torch.equal(target[name], value) for name, value in wanted.items())
    objects = {*stored} - {*wanted}
    assert objects
    assert all("/shard_" in name for name in objects)
    said = run("ls", str(path)).stdout
    assert all(name in said for name in stored)
    assert not bytecheckpoint.verify(path).problems


def test_objects_of_classes_are_not_run() -> None:
    stored = bytecheckpoint.read(folder("0.19.2", "gpt") / "checkpoint")
    with pytest.raises(UnsafeObjectError, match=r"argparse\.Namespace"):
        stored["common_state/shard_0_1"]


@pytest.mark.parametrize(("version", "kind", "config"), CONFIGS)
def test_to_hugging_face_and_back(version: str, kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    spec = model_specs.megatron(config, to="hugging_face", is_local=True)
    convert(folder(version, kind) / "checkpoint", tmp_path / "hf", to="safetensors", spec=spec)
    written = bytecheckpoint.read(tmp_path / "hf")
    wanted = expected(version, kind)
    assert not [name for name in written if "optimizer" in name or "extra_state" in name]
    qkv = wanted["decoder.layers.self_attention.linear_qkv.weight"].view(2, 2, 4, 8, 32)  # layer, group, head of it
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        assert torch.equal(written[f"{attention}.q_proj.weight"], qkv[layer, :, :2].reshape(32, 32))
        assert torch.equal(written[f"{attention}.k_proj.weight"], qkv[layer, :, 2].reshape(16, 32))
        assert torch.equal(written[f"{attention}.v_proj.weight"], qkv[layer, :, 3].reshape(16, 32))
    convert(tmp_path / "hf", tmp_path / "back", to="bcp", spec=model_specs.megatron(config, is_local=True))
    back = bytecheckpoint.read(tmp_path / "back")
    weights = {name for name in wanted if not name.startswith("optimizer.")}
    assert {*back} == weights
    assert all(torch.equal(back[name], wanted[name]) for name in weights)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "config"), [("gpt", GPT), ("moe", MOE)])
def test_the_logits_are_those_of_megatron(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: NO LOGITS ARE COMPARED")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config | COMMON))
    spec = model_specs.megatron(tmp_path / "config", to="hugging_face", is_local=True)
    source = folder("0.16.1", kind) / "checkpoint"
    convert(source, tmp_path / "hf", to="safetensors", spec=spec, hf_config=tmp_path / "config")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    wanted = torch.load(folder("0.16.1", kind) / "logits.pt", weights_only=True)
    with torch.no_grad():
        logits = model(wanted["tokens"]).logits
    assert (logits - wanted["logits"]).abs().max() < 1e-4 < wanted["logits"].abs().max() / 1000


def _hugging_face(config: dict[str, Any], names: list[str]) -> dict[str, torch.Tensor]:
    rows, columns = (48, 32), (32, 48)
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj": (32, 32),
        "k_proj": (16, 32),
        "v_proj": (16, 32),
        "o_proj": (32, 32),
    }
    shapes |= {"gate_proj": rows, "up_proj": rows, "down_proj": columns, "w1": rows, "w3": rows, "w2": columns}
    shapes |= {"gate": (4, 32), "embed_tokens": (60, 32), "lm_head": (60, 32), "q_norm": (8,), "k_norm": (8,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shapes.get(name.split(".")[-2], (32,)), generator=generator) for name in names}


def _names(*of_layer: str) -> list[str]:
    attention = [f"self_attn.{each}_proj.weight" for each in "qkvo"]
    layer = [*attention, "input_layernorm.weight", "post_attention_layernorm.weight", *of_layer]
    return [
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(f"model.layers.{number}.{each}" for number in range(2) for each in layer),
    ]


DENSE = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
MIXTRAL = [
    "block_sparse_moe.gate.weight",
    *(f"block_sparse_moe.experts.{expert}.{each}.weight" for expert in range(4) for each in ("w1", "w2", "w3")),
]
NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
HEAD = ["lm_head.weight"]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model_type": "llama"}, _names(*DENSE) + HEAD),
        ({"model_type": "mistral", "tie_word_embeddings": True}, _names(*DENSE)),
        ({"model_type": "qwen3", "head_dim": 8}, _names(*DENSE, *NORMS) + HEAD),
        ({"model_type": "mixtral"}, _names(*MIXTRAL) + HEAD),
    ],
)
def test_other_families_there_and_back(config: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    config = GPT | {"vocab_size": 60} | config
    weights = _hugging_face(config, names)
    bytecheckpoint.save_state_dict(tmp_path / "hf", dict(weights), no_dist=True)
    to = model_specs.megatron(config, vocabulary_rows=64)
    convert(tmp_path / "hf", tmp_path / "megatron", to="bcp", spec=to)
    there = bytecheckpoint.read(tmp_path / "megatron")
    assert there["embedding.word_embeddings.weight"].shape == (64, 32)  # padded, as for ranks of tensor parallelism
    assert all(value.shape[0] == 2 for name, value in there.items() if name.startswith("decoder.layers."))
    assert ("output_layer.weight" in there) == ("lm_head.weight" in names)
    back = model_specs.megatron(config, to="hugging_face", vocabulary_rows=64)
    convert(tmp_path / "megatron", tmp_path / "back", to="bcp", spec=back)
    stored = bytecheckpoint.read(tmp_path / "back")
    assert {*stored} == {*weights}
    assert all(torch.equal(stored[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        ({"model_type": "gemma"}, {}, "must be one of llama, mistral"),
        ({"mlp_bias": True}, {}, "mlp_bias=true, which Megatron-Core's specs here does not have"),
        ({"decoder_sparse_step": 2}, {}, "layers of two kinds"),
        ({}, {"to": "torchtitan"}, "must be 'megatron' or 'hugging_face'"),
        ({"vocab_size": 0}, {"vocabulary_rows": 64}, "must say vocab_size"),
    ],
)
def test_what_is_refused(config: dict[str, Any], options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        model_specs.megatron(GPT | config, **options)


def test_a_spec_goes_through_a_file(tmp_path: Path) -> None:
    spec = model_specs.megatron(GPT, to="hugging_face")
    spec.to_file(tmp_path / "spec.toml")
    (tmp_path / "config.json").write_text(json.dumps(GPT))
    checkpoint = folder("0.16.1", "gpt") / "checkpoint"
    done = run("convert", str(checkpoint), str(tmp_path / "hf"), "--spec", str(tmp_path / "spec.toml"))
    assert done.exit_code == 0, done.stderr
    assert len(bytecheckpoint.read(tmp_path / "hf")) == 27
