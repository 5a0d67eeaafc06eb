# SPDX-License-Identifier: Apache-2.0
"""Specs, as TOML, between the names of Hugging Face's Llama and those of torchtitan's llama3."""

from __future__ import annotations

from typing import Any

__all__ = ["from_hugging_face", "to_hugging_face"]

_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers.{i}.self_attn.q_proj": "layers.{i}.attention.qkv_linear.wq",
    "model.layers.{i}.self_attn.k_proj": "layers.{i}.attention.qkv_linear.wk",
    "model.layers.{i}.self_attn.v_proj": "layers.{i}.attention.qkv_linear.wv",
    "model.layers.{i}.self_attn.o_proj": "layers.{i}.attention.wo",
    "model.layers.{i}.mlp.gate_proj": "layers.{i}.feed_forward.w1",
    "model.layers.{i}.mlp.up_proj": "layers.{i}.feed_forward.w3",
    "model.layers.{i}.mlp.down_proj": "layers.{i}.feed_forward.w2",
    "model.layers.{i}.input_layernorm": "layers.{i}.attention_norm",
    "model.layers.{i}.post_attention_layernorm": "layers.{i}.ffn_norm",
    "model.norm": "norm",
}


def from_hugging_face(model: Any) -> str:
    """Returns the spec that loads Hugging Face's weights into a model of this configuration of torchtitan."""
    text = "[rename]\n" + "".join(f'"{theirs}" = "{ours}"\n' for theirs, ours in _NAMES.items())
    # Hugging Face rotates halves of a head, torchtitan pairs of neighbours.
    return text + _turned(
        model, "model.layers.{i}.self_attn.q_proj", "model.layers.{i}.self_attn.k_proj", is_halves=True
    )


def to_hugging_face(model: Any) -> str:
    """Returns the spec that makes Hugging Face's weights of a checkpoint of such a model."""
    text = "[rename]\n" + "".join(f'"{ours}" = "{theirs}"\n' for theirs, ours in _NAMES.items())
    text += _turned(model, "layers.{i}.attention.qkv_linear.wq", "layers.{i}.attention.qkv_linear.wk", is_halves=False)
    return text


def _turned(model: Any, query: str, key: str, is_halves: bool) -> str:
    attention = model.layers[0].attention
    num_heads = attention.n_heads
    size = attention.head_dim or model.dim // num_heads
    text = ""
    for name, heads in ((query, num_heads), (key, attention.n_kv_heads or num_heads)):
        shape = [heads, 2, size // 2, -1] if is_halves else [heads, size // 2, 2, -1]
        for table in (
            f'kind = "reshape"\nfrom = "{name}.weight"\nshape = {shape}\n',
            f'kind = "transpose"\nfrom = "{name}.weight"\ndim0 = 1\ndim1 = 2\n',
            f'kind = "reshape"\nfrom = "{name}.weight"\nshape = [{heads * size}, -1]\n',
        ):
            text += f"\n[[transforms]]\n{table}"
    return text
