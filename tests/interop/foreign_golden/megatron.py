# SPDX-License-Identifier: Apache-2.0
"""Writes ``torch_dist`` checkpoints of Megatron Core, into ``FOLDER/megatron-VERSION``.

    python3.11 -m venv /tmp/env && /tmp/env/bin/pip install megatron-core==0.16.1 torch==2.13.0 numpy psutil
    python3.12 -m venv /tmp/env && /tmp/env/bin/pip install megatron-core==0.19.2 torch==2.13.0 numpy psutil
    cd tests && /tmp/env/bin/python -m interop.foreign_golden.megatron FOLDER

Two ranks write each of ``state`` (all that ``ShardedTensor`` and ``ShardedObject`` can say), ``parallel`` (the same,
by ``FullyParallelSaveStrategyWrapper``), ``gpt`` (a GPT of two layers, tensor parallel, with the state of Adam) and
``moe`` (with experts, expert parallel, and the wrapper). ``expected.pt`` has the tensors by the keys of ``.metadata``:
a prepended axis is an axis of them. ``expected.json`` has the common state, and the objects by their unique keys.

``gpt`` is a Qwen2, and ``moe`` a Qwen3-MoE. Of either, ``logits.pt`` has ``tokens`` and the ``logits`` that the saved
model makes of them on both ranks, in float32, and ``model.json`` has what a config of Hugging Face needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from interop.foreign_golden.names import check_names
from interop.foreign_golden.ranks import Shard, assembled, numbers, run, write_expected

COMMON = {
    "iteration": 7,
    "checkpoint_version": 3.0,
    "args": {"hidden_size": 32, "lr": 0.25, "bf16": True, "data": ["a", "b"], "rope": None, "betas": {"first": 0.5}},
}

FACTS = [
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "layernorm_epsilon",
    "normalization",
    "layernorm_zero_centered_gamma",
    "qk_layernorm",
    "add_qkv_bias",
    "add_bias_linear",
    "gated_linear_unit",
    "rotary_interleaved",
]
FACTS_OF_EXPERTS = [
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
]


def state() -> dict[str, Any]:
    """Returns what a rank of two saves: sharded along either axis, replicated, stacked, and objects."""
    rank = dist.get_rank()
    of_ranks = ShardedTensor.from_rank_offsets
    uneven = numbers(5, 3)[:2] if rank == 0 else numbers(5, 3)[2:]
    layers = [
        of_ranks("layers.bias", numbers(4, start=10 * layer), (0, layer, 4), prepend_axis_num=1)
        for layer in (2 * rank, 2 * rank + 1)
    ]
    stacked = of_ranks(  # both a stacked layer and tensor parallel: layer 0 and 1 lie on both ranks
        "layers.weight", numbers(3, 2, start=100 * rank), (0, 0, 1), (2, rank, 2), prepend_axis_num=1
    )
    return {
        "model": {
            "rows": of_ranks("model.rows", numbers(2, 3, start=50 * rank), (0, rank, 2)),
            "columns": of_ranks("model.columns", numbers(4, 3, start=50 * rank, dtype=torch.bfloat16), (1, rank, 2)),
            "same": of_ranks("model.same", numbers(3, 3), replica_id=rank),
            "same3": of_ranks("model.same3", numbers(7, dtype=torch.float16), replica_id=(0, 0, rank)),
            "scalar": of_ranks("model.scalar", torch.tensor(2.5), replica_id=rank),
            "count": of_ranks("model.count", torch.arange(4) + 4 * rank, (0, rank, 2)),
            "flags": of_ranks("model.flags", torch.tensor([True, False, True]), replica_id=rank),
            "double": of_ranks("model.double", numbers(6, dtype=torch.float64), replica_id=rank),
            "uneven": ShardedTensor(
                "model.uneven", uneven, uneven.dtype, tuple(uneven.shape), (5, 3), (2 * rank, 0), None
            ),
        },
        "layers": {str(index): layer for index, layer in enumerate(layers)},
        "stacked": stacked,
        "objects": {
            "split": ShardedObject("objects.split", {"rank": rank, "noise": [rank, 0.5]}, (2,), (rank,)),
            "grid": ShardedObject("objects.grid", f"at {rank}", (1, 2), (0, rank)),
            "same": ShardedObject("objects.same", {"step": 7}, (1,), (0,), replica_id=rank),
        },
        **COMMON,
    }


def shards(saved: Any) -> list[Shard]:
    """Returns the shards that ``saved`` has, replicas too, with the prepended axes as axes."""
    found: list[Shard] = []
    for value in nested_values(saved):
        if isinstance(value, ShardedTensor):
            data = value.data.detach().clone()
            data = data.reshape((1,) * value.prepend_axis_num + tuple(data.shape))
            found.append((value.key, tuple(value.global_shape), tuple(value.global_offset), data))
    return found


def objects(saved: Any) -> dict[str, Any]:
    """Returns the objects of all ranks by their unique keys; None stands for what JSON does not have. Collective."""
    local = {value.unique_key: value.data for value in nested_values(saved) if isinstance(value, ShardedObject)}
    local = {key: None if key.startswith("rng_state") else data for key, data in local.items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return {key: data for one in gathered for key, data in one.items()}


def save(kind: str, version: str) -> None:
    # Megatron uses a GPU whether there is one or not: it waits for it, and agrees on failures with tensors there.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    computed: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    if kind in ("gpt", "moe"):
        saved, common, computed, facts = model_state(kind)
    else:
        saved, common = state(), COMMON
    apply_factories(saved)  # as save does first: a gated MLP becomes two shards of one key
    folder = Path(f"megatron-{version}", kind)
    tensors, kept = assembled(shards(saved)), objects(saved)
    if dist.get_rank() == 0:
        (folder / "checkpoint").mkdir(parents=True)
        write_expected(folder, tensors, {"common": common, "objects": kept})
        if computed:
            torch.save(computed, folder / "logits.pt")
            (folder / "model.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    dist.barrier()
    strategy = None
    if kind in ("parallel", "moe"):
        strategy = FullyParallelSaveStrategyWrapper(_default_strategy())
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    dist_checkpointing.save(saved, str(folder / "checkpoint"), strategy, content_metadata=metadata)


def _default_strategy() -> Any:
    try:
        return get_default_save_sharded_strategy("torch_dist")
    except TypeError:
        return get_default_save_sharded_strategy()


def model_state(kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]:
    """Returns what Megatron-LM saves of a small GPT, the common state as JSON has it, logits, and facts. Collective."""
    experts = kind == "moe"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=1 if experts else 2, expert_model_parallel_size=2 if experts else 1
    )
    get_cuda_rng_tracker(inference_rng_tracker=True)  # the first call decides; this one needs no GPU
    vars(moe_utils).setdefault("te_general_gemm", None)  # where there is no TransformerEngine, nothing sets it
    dtype = torch.bfloat16 if experts else torch.float32
    options: dict[str, Any] = {}
    if experts:
        options = {"num_moe_experts": 4, "expert_model_parallel_size": 2, "moe_router_topk": 2, "qk_layernorm": True}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=not experts,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        tensor_model_parallel_size=1 if experts else 2,
        **options,
    )
    spec = get_gpt_layer_local_spec(num_experts=4 if experts else None, qk_layernorm=experts, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )
    fill(model)
    model.to(dtype)
    sharded = model.sharded_state_dict()
    saved = {"model": sharded, "rng_state": [rng_state()]}
    if not experts:
        saved["optimizer"] = optimizer_state(model, sharded)
    args = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "swiglu": True}
    common = {"args": args, "iteration": 7, "checkpoint_version": 3.0, "num_floating_point_operations_so_far": 0}
    namespace = argparse.Namespace(**args, params_dtype=dtype, attention_backend=AttnBackend.auto)
    computed = logits(model.float())  # after the step of the optimizer
    model.to(dtype)  # exact: these are the parameters that are saved
    return {**saved, **common, "args": namespace}, common, computed, facts_of(model)


def fill(model: torch.nn.Module) -> None:
    """Gives the parameters few values, so that archives are small, but no two shards or experts the same ones."""
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            seed = 2 * index
            if not getattr(parameter, "allreduce", True):
                seed += expert_rank
            elif getattr(parameter, "tensor_model_parallel", False):
                seed += tensor_rank
            values = torch.randint(-4, 5, parameter.shape, generator=torch.Generator().manual_seed(seed)) / 16
            parameter.copy_(values + 1 if "norm" in name else values)


def logits(model: GPTModel) -> dict[str, torch.Tensor]:
    """Returns tokens, and the logits that ``model`` makes of them. Collective."""
    tokens = torch.arange(2 * 12).reshape(2, 12) % model.vocab_size
    positions = torch.arange(12).expand(2, 12)
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)  # what it makes itself, but on a GPU
    with torch.inference_mode():
        made = model.eval()(tokens, positions, mask)
    assert made.shape == (2, 12, model.vocab_size)
    assert made.dtype == torch.float32
    gathered = [torch.empty_like(made) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, made)
    assert all(torch.equal(one, made) for one in gathered), "ranks differ"
    return {"tokens": tokens, "logits": made.clone()}


def facts_of(model: GPTModel) -> dict[str, Any]:
    """Returns what a config of Hugging Face needs to know, by Megatron's names."""
    config = model.config
    facts = {name: getattr(config, name) for name in FACTS}
    facts["activation_func"] = config.activation_func.__name__
    facts["vocab_size"] = model.vocab_size
    for name in ("position_embedding_type", "rotary_base", "rotary_percent", "max_sequence_length"):
        facts[name] = getattr(model, name)
    facts["share_embeddings_and_output_weights"] = model.share_embeddings_and_output_weights
    if config.num_moe_experts is not None:
        facts.update((name, getattr(config, name)) for name in FACTS_OF_EXPERTS)
    return facts


def optimizer_state(model: torch.nn.Module, sharded: dict[str, Any]) -> dict[str, Any]:
    """Returns what FP32Optimizer.sharded_state_dict makes. Its constructor needs a GPU, so it is not called itself."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() / 2
    optimizer.step()
    state = optimizer.state_dict()
    of_ids = get_param_id_to_sharded_param_map(sharded, (p for g in optimizer.param_groups for p in g["params"]))
    step = {key: value.pop("step") for key, value in state["state"].items()}
    optim_state_to_sharding_state(state, of_ids, exclude_keys="step")
    state["state"]["common_step"] = next(iter(step.values()))
    return state


def rng_state() -> ShardedObject:
    random.seed(1)
    numpy.random.seed(1)
    states = [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": numpy.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "rng_tracker_states": {},
        }
    ]
    size = dist.get_world_size()
    return ShardedObject("rng_state", states, (1, size), (0, dist.get_rank()))


def main() -> None:
    from megatron.core import __version__ as version

    root = Path(sys.argv[1]).absolute()
    os.chdir(root)
    for kind in sys.argv[2:] or ["state", "parallel", "gpt", "moe"]:
        run(2, save, kind, version)
    check_names(root)


if __name__ == "__main__":
    main()
