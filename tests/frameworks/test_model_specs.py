# SPDX-License-Identifier: Apache-2.0
"""Specs of known models: what they make of Hugging Face's weights is what torchtitan's adapters make, and back.

The models are transformers' and torchtitan's own, made small.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import run_ranks
from support.titan import on_cpu

from bytecheckpoint import load_state_dict, model_specs, save_state_dict
from bytecheckpoint.convert import convert
from frameworks.titan_marks import needs_trainer

pytest.importorskip("torchtitan", reason="torchtitan is not installed: THE SPECS OF ITS MODELS ARE NOT TESTED")
pytest.importorskip("transformers", reason="transformers is not installed: THE SPECS OF ITS MODELS ARE NOT TESTED")
pytestmark = [needs_trainer, pytest.mark.usefixtures("ranks_with_torchtitan")]

LAYERS, VOCABULARY, DIM = 3, 2048, 256


def _registry(family: str, flavor: str) -> Any:
    """Returns torchtitan's spec of a debug model, with fewer layers and an attention that works on CPUs."""
    import importlib

    from torchtitan.models.common.attention import ScaledDotProductAttention

    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry(flavor)
    del spec.model.layers[LAYERS:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def _common(model: Any, **more: Any) -> dict[str, Any]:
    """What transformers' config of a model of torchtitan says in any family."""
    rope = model.layers[0].attention.rope
    return {
        "hidden_size": DIM,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": model.layers[0].attention.n_heads,
        "rms_norm_eps": model.norm.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "tie_word_embeddings": model.enable_weight_tying,
        **more,
    }


def _dense(model: Any) -> int:
    return int(next(layer.feed_forward.w1.out_features for layer in model.layers if layer.feed_forward is not None))


def llama3() -> tuple[Any, Any]:
    """Returns torchtitan's spec and transformers' config, with fewer heads of keys than of queries."""
    import dataclasses

    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.config_utils import make_gqa_config
    from transformers import LlamaConfig

    spec = _registry("llama3", "debugmodel")
    for layer in spec.model.layers:
        ours = layer.attention
        rope = ComplexRoPE.Config(dim=ours.rope.dim, max_seq_len=64, theta=10000.0)
        init = {"weight": torch.nn.init.normal_}
        layer.attention = make_gqa_config(
            dim=DIM,
            n_heads=ours.n_heads,
            n_kv_heads=4,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=dataclasses.replace(ours.inner_attention),
            rope=rope,
        )
    heads = {"num_key_value_heads": 4, "intermediate_size": _dense(spec.model), "max_position_embeddings": 64}
    return spec, LlamaConfig(**_common(spec.model, **heads))


def qwen3() -> tuple[Any, Any]:
    """Returns torchtitan's spec and transformers' config. Their embedding is tied, and heads are larger than usual."""
    from transformers import Qwen3Config

    spec = _registry("qwen3", "debugmodel")
    attention = spec.model.layers[0].attention
    more = {"num_key_value_heads": attention.n_kv_heads, "head_dim": attention.head_dim}
    return spec, Qwen3Config(**_common(spec.model, intermediate_size=_dense(spec.model), **more))


def qwen3_moe() -> tuple[Any, Any]:
    """Returns torchtitan's spec and transformers' config."""
    from transformers import Qwen3MoeConfig

    spec = _registry("qwen3", "debugmodel_moe")
    attention, moe = spec.model.layers[0].attention, spec.model.layers[0].moe
    more = {"num_key_value_heads": attention.n_kv_heads, "head_dim": attention.head_dim}
    more |= {"num_experts_per_tok": moe.router.top_k, "norm_topk_prob": moe.router.route_norm}
    more |= {"num_experts": moe.num_experts, "moe_intermediate_size": moe.routed_experts.inner_experts.hidden_dim}
    return spec, Qwen3MoeConfig(**_common(spec.model, **more))


def deepseek_v3() -> tuple[Any, Any]:
    """Returns torchtitan's spec and transformers' config: a dense layer, and layers with shared and other experts."""
    from transformers import DeepseekV3Config

    spec = _registry("deepseek_v3", "debugmodel")
    attention, moe = spec.model.layers[0].attention, spec.model.layers[-1].moe
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    more = {name: getattr(attention, name) for name in sizes}
    hidden = moe.routed_experts.inner_experts.hidden_dim
    more |= {
        "n_routed_experts": moe.num_experts,
        "moe_intermediate_size": hidden,
        "intermediate_size": _dense(spec.model),
    }
    more |= {"n_shared_experts": moe.shared_experts.w1.out_features // hidden, "first_k_dense_replace": 1}
    more |= {"q_lora_rank": attention.q_lora_rank or None, "n_group": 1, "topk_group": 1}
    # The debug model routes as DeepSeek V2 does.
    for layer in spec.model.layers:
        layer.attention.rope.scaling = "none"
        if layer.moe is not None:
            router = layer.moe.router
            router.score_func, router.route_norm, router.route_scale = "sigmoid", True, 2.5
            more |= {"num_experts_per_tok": router.top_k, "routed_scaling_factor": router.route_scale}
    return spec, DeepseekV3Config(**_common(spec.model, **more))


def deepseek_v3_with_small_queries() -> tuple[Any, Any]:
    """Returns the same, with queries that go through fewer dims, as in the published model."""
    from torchtitan.models.deepseek_v3 import make_mla_attention_config

    spec, config = deepseek_v3()
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_heads")
    init = {"weight": torch.nn.init.normal_}
    for number, layer in enumerate(spec.model.layers):
        inner = layer.attention.inner_attention
        layer.attention = make_mla_attention_config(
            layer_id=number,
            dim=DIM,
            q_lora_rank=64,
            attn_backend="flex",
            linear_init=init,
            norm_init={"weight": torch.nn.init.ones_},
            depth_init=lambda _: init,
            rope=layer.attention.rope,
            **{name: getattr(layer.attention, name) for name in sizes},
        )
        layer.attention.inner_attention = inner
    config.q_lora_rank = 64
    return spec, config


def _of_hugging_face(folder: Path, config: Any) -> Any:
    """Writes a model of transformers with random weights, also where it begins with equal ones."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor) * 0.02)
    model.save_pretrained(folder, max_shard_size="2MB")
    return model.eval()


def _both_ways(folder: str, family: Callable[[], tuple[Any, Any]]) -> None:
    on_cpu()
    hf, ckpt, back = Path(folder, "hf"), Path(folder, "ckpt"), Path(folder, "back")
    spec, config = family()
    theirs = _of_hugging_face(hf, config)
    stored = {name: value for file in hf.glob("*.safetensors") for name, value in load_file(file).items()}
    ours = spec.model.build()
    ours.init_states(buffer_device=None)

    state = ours.state_dict()
    report = load_state_dict(hf, state, no_dist=True, spec=model_specs.of_config(hf))
    wanted = spec.state_dict_adapter(spec.model, None).from_hf(dict(stored))
    assert all("expert_bias" in key for key in state.keys() - wanted.keys()), state.keys() - wanted.keys()
    assert not report.num_missing_keys or config.model_type == "qwen3_moe"
    for key, value in wanted.items():
        assert torch.equal(state[key], value), key
    ours.load_state_dict(state)
    tokens = torch.arange(1, 33)[None] * 7
    torch.Tensor.bfloat16 = lambda self: self  # type: ignore[method-assign]  # torchtitan's experts compute with it
    with torch.no_grad():
        got, right = ours.eval()(tokens), theirs(tokens).logits
    # Two programs of the same mathematics, in float32: rows in another order would differ by as much as logits do.
    assert right.std() > 0.1
    assert (got - right).abs().max() < 1e-3 * right.std(), (got - right).abs().max()

    save_state_dict(ckpt, {**state, "optimizer": {"step": 3}}, no_dist=True)
    convert(ckpt, back, spec=model_specs.of_config(config.to_dict(), to="hugging_face"), hf_config=hf)
    again = {name: value for file in back.glob("*.safetensors") for name, value in load_file(file).items()}
    assert again.keys() == stored.keys()
    for key, value in stored.items():
        assert torch.equal(again[key], value), key
    loaded = type(theirs).from_pretrained(back).state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.equal(loaded[key], value), key


@pytest.mark.parametrize("family", [llama3, qwen3, qwen3_moe, deepseek_v3, deepseek_v3_with_small_queries])
def test_both_ways(tmp_path: Path, family: Callable[[], tuple[Any, Any]]) -> None:
    run_ranks(1, _both_ways, str(tmp_path), family, limit_s=150)
