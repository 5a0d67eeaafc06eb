# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's ``DistributedOptimizer`` in its sharded forms, saved and loaded through both kinds of strategies.

    cd tests && PYTHONPATH=.. python -m interop.megatron_strategies.optimizer FOLDER

Runs where ``ranks.py`` runs. On all ranks and in all layouts what our strategy loads is what Megatron's own loads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from bytecheckpoint.integrations.megatron import BcpLoadStrategy, BcpSaveStrategy
from interop.megatron_strategies.ranks import Layout, model_of, run, shards

__all__: list[str] = []

# How each form is saved, and the layouts that may load it.
FORMS = {
    "fully_reshardable": (Layout(2), [Layout(2, tensor=2), Layout(4, tensor=2, pipeline=2), Layout(4, tensor=2)]),
    "dp_reshardable": (Layout(2), [Layout(4), Layout(2)]),
}


def trained(layout: Layout) -> tuple[Any, Any]:
    """Returns a bfloat16 model and its optimizer, which has made a step."""
    model = model_of(layout, False).bfloat16()
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    settings = {"optimizer": "adam", "lr": 0.01, "bf16": True, "params_dtype": torch.bfloat16}
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings, use_distributed_optimizer=True), [chunk])
    for number, parameter in enumerate(model.parameters()):
        values = torch.Generator().manual_seed(number)
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=values))
    optimizer.step()
    return model, optimizer


def state_of(model: Any, optimizer: Any, form: str, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": form}
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=is_loading, metadata=metadata)
    return state


def save(root: str, layout: Layout, form: str) -> None:
    model, optimizer = trained(layout)
    for name, strategy in (("ours", BcpSaveStrategy()), ("theirs", None)):
        path = Path(root, f"{form}-{name}")
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state_of(model, optimizer, form, is_loading=False), str(path), strategy)


def tensors(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yields the tensors of a nested state, each with its place; not the padding, which nobody has initialized."""
    if isinstance(tree, dict) and tree.get("padding"):
        return
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in pairs:
        yield from tensors(value, (*place, key))
    if isinstance(tree, torch.Tensor):
        yield place, tree.clone()


def load(root: str, layout: Layout, form: str) -> None:
    model, optimizer = trained(layout)
    loaded = []
    for name, strategy in (
        ("theirs", None),
        ("ours", BcpLoadStrategy()),
        ("theirs", BcpLoadStrategy()),
        ("ours", None),
    ):
        wanted = state_of(model, optimizer, form, is_loading=True)
        for shard in shards(wanted):
            if shard.data is not None:
                shard.data.detach().zero_()
        found = dist_checkpointing.load(wanted, str(Path(root, f"{form}-{name}")), strategy)
        loaded.append(dict(tensors(found)))
    first, *others = loaded
    assert len(first) > 40
    assert all(value.count_nonzero() for value in first.values())
    for other in others:
        assert first.keys() == other.keys()
        different = [place for place, value in first.items() if not torch.equal(value, other[place])]
        assert not different, f"rank {dist.get_rank()}, {form}, {layout}: {different}"


def main() -> None:
    for form, (layout, others) in FORMS.items():
        run(layout.ranks, save, sys.argv[1], layout, form)
        for other in others:
            run(other.ranks, load, sys.argv[1], other, form)
            print(f"{form}: {layout}, loaded {other}", flush=True)


if __name__ == "__main__":
    main()
