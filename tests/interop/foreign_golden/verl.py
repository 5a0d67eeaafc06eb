# SPDX-License-Identifier: Apache-2.0
"""Writes what the FSDP checkpoint manager of verl 0.9.1 does, a file a rank, into ``FOLDER/verl-0.9.1-torchVERSION``.

    python3.12 -m venv /tmp/env && /tmp/env/bin/pip install torch==2.13.0 transformers==5.10.4 numpy psutil
    cd tests && /tmp/env/bin/python -m interop.foreign_golden.verl FOLDER

There is an archive of torch 2.10.0, 2.13.0 and 2.15.0 (with transformers 5.24.0), because each pickles meshes in its
own way. verl itself is not installed, because it brings a hundred packages. ``save`` has the calls of
``verl.utils.checkpoint.fsdp_checkpoint_manager.FSDPCheckpointManager.save_checkpoint``, and ``meshes`` those of
``verl.workers.engine.fsdp``; only the device is a CPU. The kinds:

- ``fsdp2``: ``fully_shard`` on 2 ranks, Shard(0), even and uneven, of a Qwen2 with tied weights;
- ``critic``: the same with a head of one row, so that rank 1 has nothing of it, in bfloat16;
- ``hsdp``: a mesh ("ddp", "fsdp") of 2 x 2;
- ``fsdp1``: ``FullyShardedDataParallel`` on 2 ranks; its optimizer has flat parameters of which a rank has its part;
- ``tp``: FSDP2 after tensor parallelism, a mesh ("dp", "tp") of 2 x 2, with ``_StridedShard``. verl does not do that.

``expected.pt`` has the parameters as ``model.NAME`` and, but for FSDP1, what AdamW keeps as ``optim.INDEX.KEY``.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from interop.foreign_golden.names import check_names
from interop.foreign_golden.ranks import run, write_expected

RANKS = {"fsdp2": 2, "critic": 2, "hsdp": 4, "fsdp1": 2, "tp": 4}


def network(kind: str) -> torch.nn.Module:
    """Returns a Qwen2 of one layer with few values, so that archives are small."""
    config = Qwen2Config(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=26,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=kind == "fsdp2",
        num_labels=1,
        architectures=["Qwen2ForCausalLM"],
    )
    torch.manual_seed(1)
    model = Qwen2ForTokenClassification(config) if kind == "critic" else Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn(parameter.shape) * 4).round() / 8)
    return model.to(torch.bfloat16) if kind == "critic" else model


def meshes(kind: str) -> DeviceMesh:
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    if kind == "tp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def sharded(kind: str) -> torch.nn.Module:
    model, mesh = network(kind), meshes(kind)
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.FULL_SHARD, device_mesh=mesh
        )
    if kind == "tp":
        plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], plan)
        mesh = mesh["dp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    if not model.config.tie_word_embeddings:
        fully_shard(model.model.embed_tokens, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def stepped(model: torch.nn.Module, kind: str) -> tuple[torch.optim.Optimizer, Any]:
    """Takes a step. Only FSDP1 needs a backward pass, for its flat parameters; others get half the parameter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.01, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _constant)
    if kind == "fsdp1":
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    for parameter in model.parameters():
        if kind != "fsdp1":
            parameter.grad = parameter.detach() / 2
    optimizer.step()
    scheduler.step()
    return optimizer, scheduler


def _constant(step: int) -> float:
    return 1.0


def save(kind: str, root: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = sharded(kind)
    optimizer, scheduler = stepped(model, kind)
    random.seed(1)
    numpy.random.seed(1)
    folder = Path(root, kind)
    (folder / "huggingface").mkdir(parents=True, exist_ok=True)
    expected = _whole("model.", _model_state(model))
    if kind != "fsdp1":
        state = optimizer.state_dict()["state"]
        flat = {f"{index}.{key}": value for index, of in state.items() for key, value in of.items()}
        expected |= _whole("optim.", flat)
    name = f"world_size_{size}_rank_{rank}.pt"
    torch.save(_model_state(model), folder / f"model_{name}")
    torch.save(_optimizer_state(model, optimizer), folder / f"optim_{name}")
    rng = {"cpu": torch.get_rng_state(), "numpy": numpy.random.get_state(), "random": random.getstate()}
    torch.save({"lr_scheduler": scheduler.state_dict(), "rng": rng}, folder / f"extra_state_{name}")
    if rank == 0:
        write_expected(folder, expected)
        config = model._fsdp_wrapped_module.config if kind == "fsdp1" else model.config
        config.save_pretrained(folder / "huggingface")
        fsdp = {"FSDP_version": 1 if kind == "fsdp1" else 2, "world_size": size}
        (folder / "fsdp_config.json").write_text(json.dumps(fsdp, indent=4))


def _fsdp1_states(model: torch.nn.Module) -> Any:
    of_model, of_optimizer = (of(offload_to_cpu=False) for of in (ShardedStateDictConfig, ShardedOptimStateDictConfig))
    kind = StateDictType.SHARDED_STATE_DICT
    return FullyShardedDataParallel.state_dict_type(model, kind, of_model, of_optimizer)


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    if isinstance(model, FullyShardedDataParallel):
        with _fsdp1_states(model):
            return model.state_dict()
    return model.state_dict()


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if isinstance(model, FullyShardedDataParallel):
        with _fsdp1_states(model):
            return optimizer.state_dict()
    return optimizer.state_dict()


def _whole(prefix: str, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Collective."""
    return {
        prefix + name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()
    }


def main() -> None:
    root = Path(sys.argv[1]).absolute()
    os.chdir(root)
    version = torch.__version__.partition("+")[0]
    for kind in sys.argv[2:] or RANKS:
        run(RANKS[kind], save, kind, f"verl-0.9.1-torch{version}")
    check_names(root)


if __name__ == "__main__":
    main()
