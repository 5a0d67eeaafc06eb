# SPDX-License-Identifier: Apache-2.0
"""Quantized models of Hugging Face, dequantized here and by transformers: the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bytecheckpoint import LoadSpec, load_state_dict
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.training_state.stored import Stored
from bytecheckpoint.transforms import Dequantize, DequantizeMXFP4, dequantizing

transformers = pytest.importorskip("transformers")

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


def codes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    same_nan = torch.equal(got.isnan(), wanted.isnan())
    assert same_nan
    as_int = torch.int16 if got.itemsize == 2 else torch.int32
    assert torch.equal(got.nan_to_num(7.0).view(as_int), wanted.nan_to_num(7.0).contiguous().view(as_int))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_fp8_as_its_dequantizer(tmp_path: Path, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = codes(1, 3, 256, 384).view(torch.float8_e4m3fn)
    scales = codes(2, 3, 2, 3)
    scales = (
        scales
        if scale_dtype == torch.uint8
        else scales.view(scale_dtype)
        if scale_dtype.itemsize == 1
        else (scales / 977).to(scale_dtype)
    )
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scales, dtype)
    save_file({"w": weight, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    state = {"w": torch.zeros(3, 256, 384, dtype=dtype)}
    for block in ([128, 128], None):
        spec = LoadSpec(transforms=[Dequantize("w", "w_scale_inv", block=block, dtype=str(dtype))])
        load_state_dict(tmp_path, state, no_dist=True, spec=spec)
        assert_same(state["w"], wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mxfp4_as_its_dequantizer(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = codes(3, 4, 96, 5, 16), codes(4, 4, 96, 5)
    scales[scales == 255] = 254  # torch has changed what it makes of 2 ** 128
    save_file({"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}, tmp_path / "model.safetensors")
    spec = LoadSpec(transforms=[DequantizeMXFP4("{p}_blocks", "{p}_scales", "{p}", dtype=str(dtype))])
    state = {"gate_up_proj": torch.zeros(4, 160, 96, dtype=dtype)}
    load_state_dict(tmp_path, state, no_dist=True, spec=spec)
    assert_same(state["gate_up_proj"], convert_moe_packed_tensors(blocks, scales, dtype=dtype))


SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 16,
}  # fmt: skip


def write_gpt_oss(folder: Path) -> None:
    """A small GPT-OSS whose experts are MXFP4, with the names, shapes and config of the published ones."""
    config = transformers.GptOssConfig(**SMALL, num_local_experts=4, dtype="bfloat16")
    torch.manual_seed(0)
    state = transformers.GptOssForCausalLM(config).bfloat16().state_dict()
    tensors = {}
    for number, (name, value) in enumerate(state.items()):
        if not name.endswith("_proj") or "experts" not in name:
            tensors[name] = value.contiguous()
            continue
        experts, inputs, outputs = value.shape
        tensors[f"{name}_blocks"] = codes(number, experts, outputs, inputs // 32, 16)
        tensors[f"{name}_scales"] = codes(number + 99, experts, outputs, inputs // 32) % 8 + 118
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "quantization_config": quantization}))


def write_llama(folder: Path) -> None:
    """A small Llama whose linear layers are FP8 in blocks, quantized by transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = transformers.LlamaConfig(**SMALL, dtype="bfloat16")
    torch.manual_seed(0)
    state = transformers.LlamaForCausalLM(config).bfloat16().state_dict()
    quantize = Fp8Quantize(
        SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=[16, 16], scale_fmt="float"))
    )
    tensors = {}
    for name, value in state.items():
        tensors |= quantize.convert({name: value}) if "_proj" in name else {name: value.contiguous()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "quantization_config": FP8}))


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_a_model_as_from_pretrained_dequantizes_it(tmp_path: Path, family: str) -> None:
    pytest.importorskip("accelerate")
    folder = tmp_path / "model"
    folder.mkdir()
    model_class: Any
    if family == "gpt_oss":
        write_gpt_oss(folder)
        model_class, how = transformers.GptOssForCausalLM, transformers.Mxfp4Config(dequantize=True)
        transform: Any = DequantizeMXFP4("*_blocks", "*_scales", "*")
    else:
        write_llama(folder)
        how = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
        model_class = transformers.LlamaForCausalLM
        transform = Dequantize("*.weight", "*.weight_scale_inv", block=[16, 16])
    wanted = model_class.from_pretrained(folder, quantization_config=how, dtype=torch.bfloat16).state_dict()
    spec = LoadSpec(transforms=[transform])
    state = {key: torch.zeros_like(value) for key, value in wanted.items()}
    load_state_dict(folder, state, no_dist=True, spec=spec)
    for key, value in wanted.items():
        assert_same(state[key], value)
    # The way of most: converted once, and then an ordinary model.
    convert(folder, tmp_path / "plain", spec=spec, verify=True)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain/config.json").write_text(json.dumps(config))
    again = model_class.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    assert again.keys() == wanted.keys()
    for key, value in wanted.items():
        assert_same(again[key], value)


def deepseek_v4(packed: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns tensors as DeepSeek names and stores them: fp8 in blocks, experts of 4 bits, both with exponents."""
    return {
        "layers.0.attn.wq_a.weight": codes(11, 200, 300).view(torch.float8_e4m3fn),
        "layers.0.attn.wq_a.scale": (codes(12, 2, 3) % 20 + 117).to(torch.uint8).view(torch.float8_e8m0fnu),
        "layers.0.ffn.experts.0.w1.weight": codes(13, 24, 32).view(packed),
        "layers.0.ffn.experts.0.w1.scale": (codes(14, 24, 2) % 20 + 117).to(torch.uint8).view(torch.float8_e8m0fnu),
        "layers.0.ffn_norm.weight": torch.ones(300),
        "layers.0.hc_attn_scale": torch.ones(3),
        "embed.weight": torch.ones(5, 300).bfloat16(),
    }


@pytest.mark.parametrize("packed", [torch.int8, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_folder_of_two_quantizations(tmp_path: Path, packed: torch.dtype, dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors = deepseek_v4(packed)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {name: value.clone() for name, value in tensors.items() if not name.endswith(".scale")}
    query, expert = "layers.0.attn.wq_a", "layers.0.ffn.experts.0.w1"
    state |= {
        f"{query}.weight": torch.zeros(200, 300, dtype=dtype),
        f"{expert}.weight": torch.zeros(24, 64, dtype=dtype),
    }
    load_state_dict(tmp_path, state, no_dist=True, spec=dequantizing(tmp_path, str(dtype)))
    packed_codes, scales = tensors[f"{expert}.weight"], tensors[f"{expert}.scale"]
    wanted = Fp8Dequantize(None)._dequantize_one(packed_codes.view(torch.int8), scales, dtype)
    assert_same(state[f"{expert}.weight"], wanted)
    spread = tensors[f"{query}.scale"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    assert_same(state[f"{query}.weight"], (tensors[f"{query}.weight"].float() * spread).to(dtype))
    assert torch.equal(state["layers.0.ffn_norm.weight"], torch.ones(300))


def test_whole_numbers_with_scales_that_are_no_exponents_are_refused(tmp_path: Path) -> None:
    """They are of 8 bits each, as in W8A8: nothing here is to take them for pairs of 4."""
    save_file(
        {"w.weight": codes(1, 4, 64).view(torch.int8), "w.scale": torch.ones(4, 1)}, tmp_path / "model.safetensors"
    )
    spec = LoadSpec(transforms=[Dequantize("*.weight", "*.scale")])
    with pytest.raises(ConfigError, match="int8 is no dtype of quantized elements"):
        load_state_dict(tmp_path, {"w.weight": torch.zeros(4, 64)}, no_dist=True, spec=spec)


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 8, "strategy": strategy, **more}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("quantization", "scales"),
    [
        (FP8, {"w.weight_scale_inv": (3, 2)}),
        ({"quant_method": "fp8", "weight_block_size": None}, {"w.weight_scale_inv": (), "w.activation_scale": ()}),
        ({"quant_method": "fbgemm_fp8"}, {"w.weight_scale": (40, 1), "w.input_scale_ub": (1,)}),
        (compressed("channel"), {"w.weight_scale": (40, 1)}),
        (compressed("tensor"), {"w.weight_scale": (1,), "w.input_scale": (1,)}),
        (compressed("block", block_structure=[16, 16]), {"w.weight_scale": (3, 2)}),
        (compressed("group", group_size=8), {"w.weight_scale": (40, 4)}),
    ],
)
def test_what_config_json_says(
    tmp_path: Path, quantization: dict[str, Any], scales: dict[str, tuple[int, ...]]
) -> None:
    tensors = {name: torch.rand(shape) + 0.1 for name, shape in scales.items()}
    weight = codes(6, 40, 32).view(torch.float8_e4m3fn)
    save_file(tensors | {"w.weight": weight, "norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    state = {"w.weight": torch.zeros(40, 32, dtype=torch.float16), "norm.weight": torch.zeros(3)}
    load_state_dict(tmp_path, state, no_dist=True, spec=dequantizing(tmp_path, "float16"))
    scale = next(iter(tensors.values()))
    rows, columns = scale.shape if scale.dim() == 2 else (1, 1)
    spread = scale.reshape(rows, columns).repeat_interleave(-(-40 // rows) if rows != 3 else 16, 0)
    spread = spread.repeat_interleave(32 // columns, 1)[:40]
    assert_same(state["w.weight"], (weight.float() * spread).half())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, "config.json"),
        ("{", "config.json"),
        ("[]", "no quantization_config"),
        ('{"quantization_config": {"quant_method": "awq"}}', "'awq' is not supported"),
        ('{"quantization_config": {"quant_method": "fp8", "weight_block_size": "big"}}', "size of a block is 'big'"),
        ('{"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}', "size of a block"),
        ('{"quantization_config": {"quant_method": "compressed-tensors"}}', "floats of 8 bits"),
        ('{"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}}', "config.json"),
        (
            json.dumps({"quantization_config": compressed("channel", num_bits=4) | {"format": "pack-quantized"}}),
            r"weights of 4-bit float \(pack-quantized\) are not supported: only weights that are floats of 8 bits",
        ),
        ('{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}', "modelopt' with NVFP4 is not"),
    ],
)  # fmt: skip
def test_a_config_that_says_nothing_known(tmp_path: Path, config: str | None, text: str) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=text):
        dequantizing(tmp_path)


def test_all_of_it_with_bytecheckpoint_load(tmp_path: Path) -> None:
    """``load`` makes the tensors itself, of the size of the values."""
    write_llama(tmp_path)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, dtype="bfloat16")).bfloat16()
    state = model.state_dict()
    load_state_dict(tmp_path, state, no_dist=True, spec=dequantizing(tmp_path))
    stored = Stored(tmp_path, spec=dequantizing(tmp_path))
    for key, value in state.items():
        made = stored.empty(key)
        assert made is not None
        assert (made.shape, made.dtype) == (value.shape, value.dtype)
