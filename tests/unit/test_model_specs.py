# SPDX-License-Identifier: Apache-2.0
"""Specs of known models, by what ``config.json`` says. ``tests/frameworks`` compares them with the real models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import bytecheckpoint
from bytecheckpoint import LoadSpec, load_state_dict, model_specs, save_state_dict
from bytecheckpoint.errors import ConfigError, KeyMismatchError
from bytecheckpoint.transforms import dequantizing

HEADS, KV_HEADS, SIZE, DIM = 4, 2, 8, 12
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "hidden_size": DIM,
    "num_hidden_layers": 2,
}


def of_llama(*, is_tied: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = {"model.embed_tokens.weight": draw(30, DIM), "model.norm.weight": draw(DIM)}
    if not is_tied:
        weights["lm_head.weight"] = draw(30, DIM)
    for layer in range(2):
        rows = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
        of_layer = {f"self_attn.{name}_proj": draw(count, DIM) for name, count in rows.items()}
        of_layer |= {"self_attn.o_proj": draw(DIM, HEADS * SIZE), "mlp.gate_proj": draw(20, DIM)}
        of_layer |= {"mlp.up_proj": draw(20, DIM), "mlp.down_proj": draw(DIM, 20)}
        of_layer |= {"input_layernorm": draw(DIM), "post_attention_layernorm": draw(DIM)}
        weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in of_layer.items()}
    return weights


def folder_of(path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("reads", ["folder", "file", "dict"])
def test_llama_both_ways(tmp_path: Path, reads: str, is_tied: bool) -> None:
    config, weights = {**LLAMA, "tie_word_embeddings": is_tied}, of_llama(is_tied=is_tied)
    hf = folder_of(tmp_path / "hf", config, weights)
    given: Any = {"folder": hf, "file": str(hf / "config.json"), "dict": config}[reads]
    ours = dict(bytecheckpoint.read(hf, spec=model_specs.llama(given)))
    head = weights["model.embed_tokens.weight" if is_tied else "lm_head.weight"]
    assert ours["lm_head.weight"].equal(head)
    assert ours["tok_embeddings.weight"].equal(weights["model.embed_tokens.weight"])
    for name, count in (("q", HEADS), ("k", KV_HEADS)):  # rows 0 and SIZE/2 of a head become neighbours
        theirs = weights[f"model.layers.1.self_attn.{name}_proj.weight"].reshape(count, SIZE, DIM)
        rows = [row for pair in range(SIZE // 2) for row in (pair, pair + SIZE // 2)]
        assert ours[f"layers.1.attention.qkv_linear.w{name}.weight"].equal(theirs[:, rows].reshape(-1, DIM))
    save_state_dict(tmp_path / "ckpt", {**ours, "optimizer": {"lr": 0.1}}, no_dist=True)
    back = {name: torch.zeros_like(value) for name, value in weights.items()}
    load_state_dict(tmp_path / "ckpt", back, no_dist=True, spec=model_specs.of_config(given, to="hugging_face"))
    assert all(back[name].equal(value) for name, value in weights.items())


def test_inverted_is_the_way_back(tmp_path: Path) -> None:
    hf = folder_of(tmp_path / "hf", LLAMA, of_llama())
    ours = dict(bytecheckpoint.read(hf, spec=model_specs.llama(hf)))
    save_state_dict(tmp_path / "ckpt", ours, no_dist=True)
    model_specs.llama(hf, to="hugging_face").to_file(tmp_path / "spec.toml")
    assert LoadSpec.from_file(tmp_path / "spec.toml") == model_specs.llama(hf, to="hugging_face")
    for spec in (model_specs.llama(hf).inverted(), model_specs.llama(hf).inverted().inverted().inverted()):
        back = bytecheckpoint.read(tmp_path / "ckpt", spec=spec)
        assert {*back} == {*of_llama()}
        assert all(back[name].equal(value) for name, value in of_llama().items())


def test_tensors_that_torchtitan_does_not_have(tmp_path: Path) -> None:
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.2.eh_proj.weight": torch.ones(3),
        "lm_head.weight": torch.zeros(30, DIM),
    }
    config = {**LLAMA, "tie_word_embeddings": True}
    hf = folder_of(tmp_path / "hf", config, of_llama() | more)
    ours = bytecheckpoint.read(hf, spec=model_specs.llama(hf))
    assert {*ours} == {
        *bytecheckpoint.read(folder_of(tmp_path / "b", LLAMA, of_llama()), spec=model_specs.llama(LLAMA))
    }
    assert ours["lm_head.weight"].eq(0).all()  # the file's own goes before the tied one
    with pytest.raises(KeyMismatchError, match="lm_head"):
        bytecheckpoint.read(hf, spec=model_specs.llama(config))


def test_quantized_weights(tmp_path: Path) -> None:
    weights, codes = of_llama(), {}
    for name in [name for name in weights if "_proj" in name]:
        codes[name] = weights[name].to(torch.float8_e4m3fn)
        codes[f"{name}_scale_inv"] = torch.ones(-(-codes[name].shape[0] // 4), -(-codes[name].shape[1] // 4)) * 2
        weights[name] = (codes[name].float() * 2).bfloat16()
    config = {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    hf = folder_of(tmp_path / "hf", config, weights | codes)
    spec = model_specs.llama(hf)
    spec = dataclasses.replace(spec, transforms=[*dequantizing(hf).transforms, *spec.transforms])
    got = bytecheckpoint.read(hf, spec=spec)
    wanted = bytecheckpoint.read(folder_of(tmp_path / "plain", LLAMA, weights), spec=model_specs.llama(LLAMA))
    assert {*got} == {*wanted}
    assert all(value.equal(wanted[name]) for name, value in got.items())


def test_layers_with_and_without_experts() -> None:
    qwen = {"model_type": "qwen3_moe", "num_hidden_layers": 4}
    dense, gate = "model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.gate.weight"
    for more, has_dense, has_experts in (
        ({}, False, True),
        ({"decoder_sparse_step": 2}, True, True),
        ({"mlp_only_layers": [1]}, True, True),
        ({"mlp_only_layers": [0, 1, 2, 3]}, True, False),
    ):
        spec = model_specs.qwen3({**qwen, **more})
        assert (dense in spec.rename, gate in spec.rename, bool(spec.transforms)) == (
            *(has_dense, has_experts, has_experts),
        )
        assert spec.strict == "checkpoint"
    deepseek = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "n_shared_experts": 1}
    for number, wanted in ((0, (False, True)), (3, (True, True)), (4, (True, False))):
        spec = model_specs.deepseek_v3({**deepseek, "first_k_dense_replace": number})
        assert (dense in spec.rename, gate in spec.rename) == wanted
    assert "model.layers.{i}.self_attn.q_proj" in spec.rename
    spec = model_specs.of_config({**deepseek, "first_k_dense_replace": 0, "q_lora_rank": 64})
    assert "model.layers.{i}.self_attn.q_a_proj" in spec.rename


@pytest.mark.parametrize(
    ("call", "config", "why"),
    [
        (model_specs.of_config, {"model_type": "mixtral"}, "'mixtral', and must be one of deepseek_v3, llama, qwen3"),
        (model_specs.llama, {"model_type": "qwen3"}, "'qwen3', and must be one of llama"),
        (model_specs.llama, {"model_type": "llama"}, "num_attention_heads=None"),
        (model_specs.llama, {**LLAMA, "attention_bias": True}, "attention_bias=true"),
        (model_specs.qwen3, {"model_type": "qwen3", "attention_bias": True}, "attention_bias=true"),
        (model_specs.deepseek_v3, {"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave"),
        (model_specs.of_config, "absent", "No such file"),
    ],
)
def test_what_torchtitan_does_not_have_is_refused(call: Any, config: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        call(config)


def test_the_other_side_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be 'torchtitan' or 'hugging_face'"):
        model_specs.llama(LLAMA, to="huggingface")  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        model_specs.llama(tmp_path)
    assert isinstance(model_specs.of_config(LLAMA), LoadSpec)
