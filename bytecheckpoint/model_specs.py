# SPDX-License-Identifier: Apache-2.0
"""Specs for known models, between the names of Hugging Face and those of torchtitan, both ways."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.load_spec.transform import Transform
from bytecheckpoint.load_spec.transforms import Concat, Reshape, Split, Stack, Transpose

__all__ = ["Side", "deepseek_v3", "llama", "of_config", "qwen3"]

Side = Literal["torchtitan", "hugging_face"]

_Config = Mapping[str, Any] | str | os.PathLike[str]
_LAYER, _OURS = "model.layers.{i}", "layers.{i}"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# What all models here have in common.
_OF_ALL = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    f"{_LAYER}.input_layernorm": f"{_OURS}.attention_norm",
    f"{_LAYER}.post_attention_layernorm": f"{_OURS}.ffn_norm",
    f"{_LAYER}.self_attn.o_proj": f"{_OURS}.attention.wo",
}
_OF_GROUPED_ATTENTION = {
    f"{_LAYER}.self_attn.{theirs}": f"{_OURS}.attention.qkv_linear.{ours}"
    for theirs, ours in (("q_proj", "wq"), ("k_proj", "wk"), ("v_proj", "wv"))
}
_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_OF_DENSE = {f"{_LAYER}.mlp.{theirs}": f"{_OURS}.feed_forward.{ours}" for theirs, ours in _PROJECTIONS.items()}
_SHARED = {
    f"{_LAYER}.mlp.shared_experts.{theirs}": f"{_OURS}.moe.shared_experts.{ours}"
    for theirs, ours in _PROJECTIONS.items()
}
_EXPERTS = f"{_OURS}.moe.routed_experts.inner_experts"
_STACKS = tuple(
    Stack(f"{_LAYER}.mlp.experts.{{expert}}.{theirs}.weight", f"{_EXPERTS}.{ours}")
    for theirs, ours in (("gate_proj", "w1_EFD"), ("up_proj", "w3_EFD"), ("down_proj", "w2_EDF"))
)
_ROUTER = {f"{_LAYER}.mlp.gate.weight": f"{_OURS}.moe.router.gate.weight"}


def llama(config: _Config, to: Side = "torchtitan") -> LoadSpec:
    """Returns the spec between Hugging Face's Llama 2 and 3 and torchtitan's ``llama3``.

    Hugging Face rotates the two halves of a head, torchtitan pairs of neighbours: so the rows of the query's and the
    key's weights are in another order.

    Args:
        config: ``config.json`` of Hugging Face: the folder of the model, the path of the file, or what it says. If the
            folder has safetensors, their names are looked at, too.
        to: ``torchtitan``: loads weights of Hugging Face into a model of torchtitan. ``hugging_face``: makes weights of
            Hugging Face of a checkpoint of torchtitan, and takes nothing else of it, such as the optimizer.

    Raises:
        ConfigError: ``config.json`` cannot be read, or is of a model that torchtitan does not have.
    """
    read = _ConfigFile.of(config, "llama", ("llama",))
    read.refuse("attention_bias", "mlp_bias")
    num_heads, num_kv_heads = read.number("num_attention_heads"), read.number("num_key_value_heads", 0)
    size = read.number("head_dim", 0) or read.number("hidden_size") // num_heads
    transforms = [
        *_in_pairs(f"{_LAYER}.self_attn.q_proj.weight", num_heads, size),
        *_in_pairs(f"{_LAYER}.self_attn.k_proj.weight", num_kv_heads or num_heads, size),
    ]
    return _spec(read, to, {**_OF_ALL, **_OF_GROUPED_ATTENTION, **_OF_DENSE}, transforms)


def qwen3(config: _Config, to: Side = "torchtitan") -> LoadSpec:
    """Returns the spec between Hugging Face's Qwen 3, dense or with experts, and torchtitan's ``qwen3``.

    Hugging Face has no bias for load balancing. So with experts the spec to torchtitan has ``strict="checkpoint"``:
    the bias stays as the model has it.

    Args:
        config: See ``llama``.
        to: See ``llama``.

    Raises:
        ConfigError: See ``llama``.
    """
    read = _ConfigFile.of(config, "qwen3", ("qwen3", "qwen3_moe"))
    read.refuse("attention_bias")
    names = {**_OF_ALL, **_OF_GROUPED_ATTENTION}
    names |= {f"{_LAYER}.self_attn.{norm}": f"{_OURS}.attention.{norm}" for norm in ("q_norm", "k_norm")}
    if read.model_type == "qwen3":
        return _spec(read, to, names | _OF_DENSE)
    every, dense = read.number("decoder_sparse_step", 1), {*(read.content.get("mlp_only_layers") or ())}
    layers = range(read.number("num_hidden_layers"))
    are_dense = [layer in dense or (layer + 1) % every != 0 for layer in layers]
    names |= (_OF_DENSE if any(are_dense) else {}) | (_ROUTER if not all(are_dense) else {})
    spec = _spec(read, to, names, () if all(are_dense) else _STACKS)
    return dataclasses.replace(spec, strict="checkpoint") if to == "torchtitan" else spec


def deepseek_v3(config: _Config, to: Side = "torchtitan") -> LoadSpec:
    """Returns the spec between Hugging Face's DeepSeek V3 and torchtitan's ``deepseek_v3``.

    Layers that predict more than one token (MTP) are left out. Weights of 8 bits, as DeepSeek publishes them, need the
    transforms of ``bytecheckpoint.transforms.dequantizing`` before these.

    Args:
        config: See ``llama``.
        to: See ``llama``.

    Raises:
        ConfigError: See ``llama``.
    """
    read = _ConfigFile.of(config, "deepseek_v3", ("deepseek_v3",))
    read.refuse("attention_bias")
    if not read.content.get("rope_interleave", True):
        raise ConfigError(f"{read.what}: rope_interleave=false: torchtitan rotates pairs of neighbours")
    attention = {"kv_a_proj_with_mqa": "wkv_a", "kv_a_layernorm": "kv_norm", "kv_b_proj": "wkv_b"}
    if read.content.get("q_lora_rank"):
        attention |= {"q_a_proj": "wq_a", "q_a_layernorm": "q_norm", "q_b_proj": "wq_b"}
    else:
        attention |= {"q_proj": "wq"}
    names = {**_OF_ALL}
    names |= {f"{_LAYER}.self_attn.{theirs}": f"{_OURS}.attention.{ours}" for theirs, ours in attention.items()}
    num_dense, num_layers = read.number("first_k_dense_replace"), read.number("num_hidden_layers")
    if num_dense:
        names |= _OF_DENSE
    if num_dense >= num_layers:
        return _spec(read, to, names)
    names |= _ROUTER
    names[f"{_LAYER}.mlp.gate.e_score_correction_bias"] = f"{_OURS}.moe.expert_bias_E"
    if read.content.get("n_shared_experts"):
        names |= _SHARED
    return _spec(read, to, names, _STACKS)


def of_config(config: _Config, to: Side = "torchtitan") -> LoadSpec:
    """Returns the spec for the model that ``config.json`` names: ``llama``, ``qwen3`` or ``deepseek_v3``.

    Args:
        config: See ``llama``.
        to: See ``llama``.

    Raises:
        ConfigError: It is none of these, or see ``llama``.
    """
    read = _ConfigFile.of(config, "of_config", tuple(_BY_TYPE))
    return _BY_TYPE[read.model_type](config, to)


_BY_TYPE: Mapping[str, Callable[[_Config, Side], LoadSpec]] = {
    "deepseek_v3": deepseek_v3,
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_moe": qwen3,
}


@dataclass(frozen=True)
class _ConfigFile:
    """A ``config.json``.

    Attributes:
        what: What it is, for messages.
        content: What it says.
        names: Names of the tensors beside it; empty if none are there.
    """

    what: str
    content: Mapping[str, Any]
    names: Sequence[str]

    @classmethod
    def of(cls, config: _Config, caller: str, model_types: tuple[str, ...]) -> _ConfigFile:
        """Reads it.

        Raises:
            ConfigError: It cannot be read, or is of another model.
        """
        what, names = f"model_specs.{caller}", list[str]()
        if not isinstance(config, Mapping):
            path = Path(config)
            folder, file = (path, path / "config.json") if path.is_dir() else (path.parent, path)
            what = f"{what}({os.fspath(config)!r})"
            try:
                config = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{what}: {file}: {error}") from None
            if not isinstance(config, Mapping):
                raise ConfigError(f"{what}: {file} is no JSON object")
            if any(folder.glob("*.safetensors")):
                from bytecheckpoint.native import _core

                names = _core.Checkpoint.open(os.fspath(folder)).names()
        if config.get("model_type") not in model_types:
            raise ConfigError(
                f"{what}: model_type is {config.get('model_type')!r}, and must be one of {', '.join(model_types)}"
            )
        return cls(what, config, names)

    @property
    def model_type(self) -> str:
        """Name of the kind of model."""
        return str(self.content["model_type"])

    def number(self, key: str, default: int | None = None) -> int:
        """Returns a number.

        Raises:
            ConfigError: It is not there, and there is no default; or it is no number.
        """
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int):
            raise ConfigError(f"{self.what}: the config says {key}={value!r}, which must be a number")
        return value

    def refuse(self, *keys: str) -> None:
        """Refuses what torchtitan's model does not have.

        Raises:
            ConfigError: The config has one of these keys.
        """
        for key in keys:
            if self.content.get(key):
                raise ConfigError(f"{self.what}: the config says {key}=true, which torchtitan's model does not have")

    def unused(self) -> list[str]:
        """Returns patterns of tensors that are in the files, but in no model of torchtitan."""
        patterns = []
        if any(name.endswith(".rotary_emb.inv_freq") for name in self.names):
            patterns.append("*.rotary_emb.inv_freq")
        num_layers = self.number("num_hidden_layers", 0)
        numbers = {name.split(".")[2] for name in self.names if name.startswith("model.layers.")}
        more = sorted(int(number) for number in numbers if number.isdecimal() and int(number) >= num_layers)
        return patterns + [f"model.layers.{number}" for number in more if num_layers]


def _in_pairs(name: str, num_heads: int, size: int) -> list[Transform]:
    """Puts the rows of each head into another order: row ``i`` of the second half comes behind row ``i``."""
    flat = [num_heads * size, -1]
    halves, pairs = [num_heads, 2, size // 2, -1], [num_heads, size // 2, 2, -1]
    return [
        Reshape(name, shape=halves, source_shape=flat),
        Transpose(name, dim0=1, dim1=2),
        Reshape(name, shape=flat, source_shape=pairs),
    ]


def _spec(config: _ConfigFile, to: Side, names: Mapping[str, str], transforms: Sequence[Transform] = ()) -> LoadSpec:
    """Returns the spec of names and transforms that lead to torchtitan, or their way back."""
    is_tied = bool(config.content.get("tie_word_embeddings"))
    spec = LoadSpec(rename=names, transforms=transforms)
    if to == "hugging_face":
        made = [each.to for each in transforms if isinstance(each, Stack)]
        # Not all that is there: a training checkpoint has the optimizer, and a buffer that Hugging Face does not know.
        include = [*names.values(), *made, *([] if is_tied else [_HEAD])]
        return dataclasses.replace(spec.inverted(), include=include)
    if to != "torchtitan":
        raise ConfigError(f"{config.what}: to={to!r} must be 'torchtitan' or 'hugging_face'")
    if is_tied and _HEAD not in config.names:
        # torchtitan's state has both names of the one tensor; Hugging Face's files have one.
        twice = "model.embed_tokens.twice"
        tie = [Concat([_EMBEDDING, _EMBEDDING], twice), Split(twice, [_EMBEDDING, _HEAD])]
        spec = dataclasses.replace(spec, transforms=[*tie, *spec.transforms])
    return dataclasses.replace(spec, exclude=config.unused())
