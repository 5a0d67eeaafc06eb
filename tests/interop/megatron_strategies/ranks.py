# SPDX-License-Identifier: Apache-2.0
"""Ranks that save and load a small GPT by Megatron-Core, through its own strategies or through ours.

    cd tests && PYTHONPATH=.. python -m interop.megatron_strategies.ranks FOLDER SAVER:LOADER

Runs in an environment that has megatron-core and our package, but not pytest. What a tensor must hold follows from its
key and shape alone, so that every layout fills and checks it in the same way.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    apply_factories,
)
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from bytecheckpoint.integrations import megatron as ours

__all__: list[str] = []


class Layout(NamedTuple):
    """Numbers of ranks: all, and those that share a tensor, the layers, or the experts."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


# How a GPT is saved, and how it is loaded again.
DENSE = (Layout(2, tensor=2), [Layout(2, pipeline=2), Layout(4, tensor=2, pipeline=2), Layout(4, tensor=4), Layout(2)])
PIPELINE = (Layout(4, tensor=2, pipeline=2), [Layout(2)])
EXPERTS = (Layout(2, expert=2), [Layout(4, expert=4), Layout(4, pipeline=2, expert=2), Layout(2)])


def run(num_ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Runs ``function(*args)`` on new gloo ranks, each a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, f"file://{folder}/store", function, args)
        # Forked, because importing Megatron takes many seconds.
        torch.multiprocessing.start_processes(_rank, arguments, num_ranks, start_method="fork")


def _rank(rank: int, num_ranks: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    use_cpu()
    function(*args)
    dist.barrier()
    dist.destroy_process_group()


def use_cpu() -> None:
    """Makes Megatron, which uses a GPU whether there is one or not, take tensors of the CPU for those of one."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    kind_of, tensor_class = torch.Tensor.type, vars(torch)["Tensor"]

    def kind(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind_of(self, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.")

    tensor_class.type = kind
    tensor_class.cuda = lambda self, *_, **__: self
    for name in ("tensor", "zeros"):
        setattr(torch, name, _elsewhere(getattr(torch, name)))


def _elsewhere(make: Any) -> Any:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return make(*args, device=None if str(device).startswith("cuda") else device, **kwargs)

    return made


def whole(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns all that a checkpoint must have under ``key``."""
    numbers = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(shape, generator=numbers).to(dtype)


def shards(tree: Any) -> Iterator[ShardedTensor]:
    return (value for value in nested_values(tree) if isinstance(value, ShardedTensor))


def is_right(shard: ShardedTensor) -> bool:
    wanted = whole(shard.key, tuple(shard.global_shape), shard.dtype)[shard.global_slice()]
    return torch.equal(shard.data, wanted)


def fill(tree: Any) -> None:
    for shard in shards(tree):
        shard.data.detach().copy_(whole(shard.key, tuple(shard.global_shape), shard.dtype)[shard.global_slice()])


def model_of(layout: Layout, has_experts: bool) -> GPTModel:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
    )
    get_cuda_rng_tracker(inference_rng_tracker=True)
    vars(moe_utils).setdefault("te_general_gemm", None)
    options: dict[str, Any] = {}
    if has_experts:
        options = {"num_moe_experts": 4, "expert_model_parallel_size": layout.expert, "moe_router_topk": 2}
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=4,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_tensor_parallel_size=1,
        pipeline_dtype=torch.float32,
        **options,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4 if has_experts else None, normalization="RMSNorm"),
        vocab_size=64,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )
    return model


def state_of(model: GPTModel) -> dict[str, Any]:
    """Returns what Megatron-LM saves: model, optimizer, random numbers, and what is common to all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    sharded = model.sharded_state_dict()
    state = optimizer.state_dict()
    of_ids = get_param_id_to_sharded_param_map(sharded, (p for g in optimizer.param_groups for p in g["params"]))
    step = {key: value.pop("step") for key, value in state["state"].items()}
    optim_state_to_sharding_state(state, of_ids, exclude_keys="step")
    state["state"]["common_step"] = next(iter(step.values()))
    rng = {"numpy": numpy.random.RandomState(3).get_state(), "torch": torch.arange(5, dtype=torch.uint8)}
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    place = dist.get_rank() % tensor
    return {
        "model": sharded,
        "optimizer": state,
        "rng_state": [ShardedObject("rng_state", [rng], (1,), (0,), replica_id=dist.get_rank())],
        "of_rank": ShardedObject("of_rank", {"place": place}, (tensor,), (place,), dist.get_rank() // tensor),
        "iteration": 7,
        "args": Namespace(num_layers=4, attention_backend=AttnBackend.auto),
        "kept": LocalNonpersistentObject(("local", dist.get_rank())),
    }


def save(path: str, by: str, layout: Layout, has_experts: bool) -> None:
    """Saves. ``by`` is ``theirs`` or ``ours``, and how, behind dots: ``parallel``, ``async``, ``registered``."""
    model = model_of(layout, has_experts)
    saved = state_of(model)
    apply_factories(saved)
    fill(saved)
    if dist.get_rank() == 0:
        Path(path).mkdir(parents=True)
    dist.barrier()
    strategy = None
    if by.startswith("theirs"):
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    elif ".registered" in by:
        ours.register()
    else:
        strategy = ours.BcpSaveStrategy()
    if ".parallel" in by:
        strategy = FullyParallelSaveStrategyWrapper(strategy or TorchDistSaveShardedStrategy("torch_dist", 1))
    options: dict[str, Any] = {"content_metadata": {"form": "fully_reshardable"}}
    if ".async" not in by:
        dist_checkpointing.save(saved, path, strategy, **options)
    else:
        if hasattr(dist_checkpointing.serialization, "save_integrity_manifest"):  # 0.19
            options["async_strategy"] = "mcore"
        queue = AsyncCallsQueue()
        queue.schedule_async_request(dist_checkpointing.save(saved, path, strategy, async_sharded_save=True, **options))
        for shard in shards(saved):
            shard.data.detach().zero_()  # training goes on
        queue.maybe_finalize_async_calls(blocking=False)
        queue.maybe_finalize_async_calls(blocking=True)
    assert (Path(path) / ".metadata").exists()


def load(path: str, by: str, layout: Layout, has_experts: bool) -> None:
    """Loads into a model of zeros, and compares every element and object."""
    model = model_of(layout, has_experts)
    wanted = state_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for shard in shards(wanted["optimizer"]):
        shard.data.zero_()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    if tensor != 2:  # saved by two tensor parallel ranks
        del wanted["of_rank"]
    strategy: Any = None
    if by.startswith("theirs"):
        strategy = TorchDistLoadShardedStrategy()
    elif ".registered" in by:
        ours.register()
    else:
        strategy = ours.BcpLoadStrategy()
    if ".parallel" in by:
        strategy = strategy or TorchDistLoadShardedStrategy()
        strategy = FullyParallelLoadStrategyWrapper(strategy, exchange_algo="gather_object")  # the others want a GPU
    state_of_optimizer = wanted["optimizer"]
    loaded = dist_checkpointing.load(wanted, path, strategy)
    model.load_state_dict(loaded["model"])
    again = {"model": model.sharded_state_dict(), "optimizer": state_of_optimizer}
    apply_factories(again)
    wrong = [shard.key for shard in shards(again["model"]) if not is_right(shard)]
    assert not wrong, f"rank {dist.get_rank()}: other elements than were saved: {wrong}"
    check_optimizer(loaded["optimizer"]["state"], again["optimizer"]["state"])
    assert loaded["optimizer"]["state"]["common_step"] == 1
    assert loaded["iteration"] == 7
    assert loaded["args"] == Namespace(num_layers=4, attention_backend=AttnBackend.auto)
    assert loaded["kept"] == ("local", dist.get_rank())
    assert loaded["content_metadata"] == {"form": "fully_reshardable"}
    assert numpy.array_equal(loaded["rng_state"][0][0]["numpy"][1], numpy.random.RandomState(3).get_state()[1])
    assert torch.equal(loaded["rng_state"][0][0]["torch"], torch.arange(5, dtype=torch.uint8))
    if "of_rank" in wanted:
        assert loaded["of_rank"] == {"place": dist.get_rank() % 2}


def check_optimizer(loaded: dict[Any, Any], described: dict[Any, Any]) -> None:
    """Compares the states of the optimizer with what their descriptions say they are."""
    assert loaded.keys() == described.keys()
    for number, of_parameter in described.items():
        if number == "common_step":
            continue
        for name, description in of_parameter.items():
            value = loaded[number][name]
            parts = [*shards(description)] if isinstance(description, (dict, list)) else [description]
            wanted = [whole(p.key, tuple(p.global_shape), p.dtype)[p.global_slice()] for p in parts]
            assert torch.equal(value, torch.cat(wanted)), f"rank {dist.get_rank()}: {parts[0].key} differs"


def main() -> None:
    root, (saver, loader) = Path(sys.argv[1]), sys.argv[2].split(":")
    is_short = len(sys.argv) > 3
    for name, (layout, others) in {"dense": DENSE, "pipeline": PIPELINE, "experts": EXPERTS}.items():
        path, has_experts = str(root / f"{name}-{saver}"), name == "experts"
        if not Path(path).exists():
            run(layout.ranks, save, path, saver, layout, has_experts)
        for other in others[:1] if is_short else others:
            run(other.ranks, load, path, loader, other, has_experts)
            print(f"{saver} saves {layout}, {loader} loads {other}", flush=True)
        if is_short and name == "dense":
            return


if __name__ == "__main__":
    main()
