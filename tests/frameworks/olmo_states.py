# SPDX-License-Identifier: Apache-2.0
"""A small transformer in OLMo-core's train module. FSDP2 shards it if there are ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import SkipStepAdamWConfig
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig, TransformerTrainModule
from torch.distributed.checkpoint import state_dict as dcp_states
from torch.distributed.tensor import DTensor

__all__ = ["change", "states", "train_module", "whole"]

_CONTEXT_TOKENS = 16


def train_module(seed: int, num_steps: int, **options: Any) -> TransformerTrainModule:
    """Returns a module that was built and trained for ``num_steps``. Without a step there is no optimizer state.

    On ranks, call it once in a process.

    Args:
        options: Passed to ``TransformerTrainModule``.
    """
    torch.manual_seed(seed)
    model = TransformerConfig.llama_like(d_model=32, vocab_size=64, n_layers=2, n_heads=4).build(init_device="cpu")
    sharded = TransformerDataParallelConfig(name=DataParallelType.fsdp) if dist.is_initialized() else None
    module = TransformerTrainModule(
        model,
        SkipStepAdamWConfig(lr=1e-2),
        rank_microbatch_size=2 * _CONTEXT_TOKENS,
        max_sequence_length=_CONTEXT_TOKENS,
        device=torch.device("cpu"),
        dp_config=sharded,
        **options,
    )
    for _ in range(num_steps):
        tokens = torch.randint(0, 64, (2, _CONTEXT_TOKENS))
        module.model(tokens).float().square().mean().backward()
        module.optim.step()
        module.optim.zero_grad()
    return module


def states(module: TransformerTrainModule) -> dict[str, Any]:
    """Returns the state of model and optimizer as plain values under flat names. Collective."""
    options = dcp_states.StateDictOptions(flatten_optimizer_state_dict=True)
    model, optim = dcp_states.get_state_dict(module.model, module.optim, options=options)
    return {name: whole(value) for name, value in {**model, **optim}.items()}


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def change(module: TransformerTrainModule) -> None:
    """Changes every element of parameters and optimizer state, and the learning rate."""
    for parameter in module.model.parameters():
        parameter.add_(1)
    for state in module.optim.state.values():
        for value in state.values():
            value.add_(1)
    for group in module.optim.param_groups:
        group["lr"] += 1
