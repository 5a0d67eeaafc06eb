# SPDX-License-Identifier: Apache-2.0
"""Specs for known models, between the names of Hugging Face and those of torchtitan or Megatron-Core, both ways."""

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
from bytecheckpoint.load_spec.transforms import Concat, Pad, Reshape, Slice, Split, Stack, Transpose

__all__ = ["MegatronSide", "Side", "deepseek_v3", "llama", "megatron", "of_config", "qwen3"]

Side = Literal["torchtitan", "hugging_face"]
MegatronSide = Literal["megatron", "hugging_face"]

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


def megatron(
    config: _Config,
    to: MegatronSide = "megatron",
    *,
    vocabulary_rows: int | None = None,
    is_local: bool = False,
) -> LoadSpec:
    """Returns the spec between Hugging Face's dense models, and those with experts, and Megatron-Core's ``GPTModel``.

    Megatron-Core's ``torch_dist`` checkpoints have all layers in one tensor. The rows of ``linear_qkv`` stand by group:
    the queries of a group, its key, its value. ``linear_fc1`` has the gate's rows before the other ones. So Llama,
    Mistral, Qwen 2 and 3 are covered, with experts Mixtral and Qwen 3, whose experts stand in a dim behind the layers.

    Args:
        config: See ``llama``.
        to: ``megatron``: loads weights of Hugging Face into such a checkpoint's model. ``hugging_face``: makes weights
            of Hugging Face of a checkpoint, and takes nothing else of it, such as the optimizer.
        vocabulary_rows: Rows of the embedding in Megatron-Core, which pads the vocabulary; None: as many as
            ``vocab_size``.
        is_local: Whether the model was made of Megatron-Core's local layers, and not of Transformer Engine's: with
            experts, one norm of a layer has another name then.

    Raises:
        ConfigError: See ``llama``; or the config is of a model that has a layer of another kind.
    """
    read = _ConfigFile.of(config, "megatron", tuple(_MEGATRON_EXPERTS))
    read.refuse("mlp_bias", "mlp_only_layers", by="Megatron-Core's specs here")
    if read.number("decoder_sparse_step", 1) != 1:
        raise ConfigError(f"{read.what}: decoder_sparse_step: layers of two kinds are not stacked")
    if to not in ("megatron", "hugging_face"):
        raise ConfigError(f"{read.what}: to={to!r} must be 'megatron' or 'hugging_face'")
    is_tied = bool(read.content.get("tie_word_embeddings"))
    names = {_EMBEDDING: "embedding.word_embeddings.weight", "model.norm.weight": "decoder.final_layernorm.weight"}
    names |= {} if is_tied else {_HEAD: "output_layer.weight"}
    transforms = [*_grouped_qkv(read), *_mlp(read)]
    stacks = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}
    stacks |= {"self_attn.o_proj.weight": "self_attention.linear_proj.weight"}
    if read.content.get("attention_bias") and read.model_type == "llama":
        stacks["self_attn.o_proj.bias"] = "self_attention.linear_proj.bias"
    is_dense = _MEGATRON_EXPERTS[read.model_type] is None
    norm = "mlp.linear_fc1.layer_norm_weight" if is_dense or is_local else "pre_mlp_layernorm.weight"
    stacks["post_attention_layernorm.weight"] = norm
    if read.model_type.startswith("qwen3"):
        stacks |= {
            "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
            "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
        }
    transforms += [Stack(f"{_LAYER}.{theirs}", f"{_STACKED}.{ours}") for theirs, ours in stacks.items()]
    rows, size = vocabulary_rows, read.number("vocab_size", 0)
    padded = [name for name in (_EMBEDDING, _HEAD) if name in names and rows is not None and rows != size]
    if padded and size == 0:
        raise ConfigError(f"{read.what}: vocabulary_rows={rows}: the config must say vocab_size")
    spec = LoadSpec(rename=names, transforms=transforms)
    if to == "hugging_face":
        made = [each.to for each in transforms if isinstance(each, Stack) and each.to.startswith(_STACKED)]
        back = spec.inverted()
        cut = [Slice(names[name], end=size) for name in padded]
        return dataclasses.replace(back, transforms=[*cut, *back.transforms], include=[*names.values(), *made])
    return dataclasses.replace(spec, transforms=[*(Pad(name, size=rows) for name in padded), *transforms])


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


# Where the models that Megatron-Core has keep their experts; None: they have none.
_MEGATRON_EXPERTS: Mapping[str, tuple[str, str, str, str, str] | None] = {
    "llama": None,
    "mistral": None,
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen2": None,
    "qwen3": None,
    "qwen3_moe": ("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
}
_STACKED = "decoder.layers"


def _grouped_qkv(config: _ConfigFile) -> list[Transform]:
    """Makes the rows of ``linear_qkv``: [groups, queries of a group and a key and a value, size of a head, hidden]."""
    num_heads, hidden = config.number("num_attention_heads"), config.number("hidden_size")
    groups = config.number("num_key_value_heads", 0) or num_heads
    size = config.number("head_dim", 0) or hidden // num_heads
    of_group = {"q_proj": num_heads // groups * size, "k_proj": size, "v_proj": size}
    has_bias = config.model_type == "qwen2" or bool(config.content.get("attention_bias"))
    transforms: list[Transform] = []
    for kind in ("weight", "bias") if has_bias else ("weight",):
        tail = [hidden] if kind == "weight" else []
        parts = {f"{_LAYER}.self_attn.{name}.{kind}": rows for name, rows in of_group.items()}
        joined, rows_of_group = f"{_LAYER}.self_attn.qkv.{kind}", sum(of_group.values())
        transforms += [
            Reshape(name, shape=[groups, rows, *tail], source_shape=[groups * rows, *tail])
            for name, rows in parts.items()
        ]
        transforms += [
            Concat([*parts], joined, dim=1, sizes=[*parts.values()]),
            Reshape(joined, shape=[groups * rows_of_group, *tail], source_shape=[groups, rows_of_group, *tail]),
            Stack(joined, f"{_STACKED}.self_attention.linear_qkv.{kind}"),
        ]
    return transforms


def _mlp(config: _ConfigFile) -> list[Transform]:
    """Joins gate and up projection, and stacks the layers, and the experts of each."""
    experts = _MEGATRON_EXPERTS[config.model_type]
    if experts is None:
        gate_up = [f"{_LAYER}.mlp.{name}.weight" for name in ("gate_proj", "up_proj")]
        joined = f"{_LAYER}.mlp.gate_up.weight"
        return [
            Concat(gate_up, joined, sizes="alike"),
            Stack(joined, f"{_STACKED}.mlp.linear_fc1.weight"),
            Stack(f"{_LAYER}.mlp.down_proj.weight", f"{_STACKED}.mlp.linear_fc2.weight"),
        ]
    router, folder, gate, up, down = experts
    of_expert, all_experts = f"{_LAYER}.{folder}.{{expert}}", f"{_STACKED}.mlp.experts.experts"
    return [
        Stack(f"{_LAYER}.{router}.weight", f"{_STACKED}.mlp.router.weight"),
        Concat([f"{of_expert}.{gate}.weight", f"{of_expert}.{up}.weight"], f"{of_expert}.fc1", sizes="alike"),
        Stack(f"{of_expert}.fc1", f"{_LAYER}.fc1_of_experts"),
        Stack(f"{_LAYER}.fc1_of_experts", f"{all_experts}.linear_fc1.weight"),
        Stack(f"{of_expert}.{down}.weight", f"{_LAYER}.fc2_of_experts"),
        Stack(f"{_LAYER}.fc2_of_experts", f"{all_experts}.linear_fc2.weight"),
    ]


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

    def refuse(self, *keys: str, by: str = "torchtitan's model") -> None:
        """Refuses what the other side's model does not have.

        Raises:
            ConfigError: The config has one of these keys.
        """
        for key in keys:
            if self.content.get(key):
                raise ConfigError(f"{self.what}: the config says {key}=true, which {by} does not have")

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
