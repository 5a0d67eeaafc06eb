# SPDX-License-Identifier: Apache-2.0
"""One small model under every kind of parallelism, and its state as torch gathers it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

__all__ = ["FRAMEWORK_OF", "WRAPPINGS", "Block", "Net", "differences", "full_state", "optimizer_of", "train", "wrap"]

WIDTH, HIDDEN, VOCABULARY = 6, 12, 13  # tensor parallelism needs a hidden dim that 2, 3 and 4 divide


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Frozen(nn.Module):
    """A parameter without a gradient, with a dim of 1 and a dim of odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 7, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


class Net(nn.Module):
    """Has tied, frozen and odd-sized parameters, one saved and one unsaved buffer. All are float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.frozen = Frozen()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("cache", torch.rand(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(tokens))
        for block in self.layers.values():
            x = block(x)
        return self.head(x) * self.scale[0]


def _fsdp(model: nn.Module, units: set[type], **kwargs: Any) -> nn.Module:
    policy = ModuleWrapPolicy(units) if units else None
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **kwargs)


def _fsdp_hybrid(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    return _fsdp(model, {Block}, use_orig_params=True, sharding_strategy=strategy, device_mesh=mesh)


def _fsdp_checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return _fsdp(model, {Block}, use_orig_params=True)


def _fully_shard(model: Net, **kwargs: Any) -> nn.Module:
    for block in model.layers.values():
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def _fsdp2(model: Net, **kwargs: Any) -> nn.Module:
    return _fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **kwargs)


def _fsdp2_hybrid(model: Net) -> nn.Module:
    shape = (2, dist.get_world_size() // 2)
    return _fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def _parallelize(model: Net, mesh: Any) -> None:
    for block in model.layers.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _tp(model: Net) -> nn.Module:
    _parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _fsdp2_tp(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    _parallelize(model, mesh["tensor"])
    return _fully_shard(model, mesh=mesh["data"])


_BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)

# Wraps a Net, which may be changed in place. Hybrid and 2-D wrappings need an even number of ranks.
WRAPPINGS: dict[str, Callable[[Any], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp orig": partial(_fsdp, units={Block}, use_orig_params=True),
    "fsdp orig root": partial(_fsdp, units=set(), use_orig_params=True),
    "fsdp flat": partial(_fsdp, units={Block, Frozen}, use_orig_params=False),
    "fsdp flat leaves": partial(_fsdp, units={nn.LayerNorm, Frozen, Block}, use_orig_params=False),
    "fsdp grad op": partial(
        _fsdp, units={Block}, use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
    "fsdp no shard": partial(_fsdp, units={Block}, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp mixed": partial(_fsdp, units={Block}, use_orig_params=True, mixed_precision=_BF16),
    "fsdp hybrid": _fsdp_hybrid,
    "fsdp checkpointed": _fsdp_checkpointed,
    "fsdp2": _fsdp2,
    "fsdp2 mixed": partial(_fsdp2, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp2 hybrid": _fsdp2_hybrid,
    "tp": _tp,
    "fsdp2 tp": _fsdp2_tp,
}
FRAMEWORK_OF = {
    name: "ddp" if name in ("plain", "ddp") else "fsdp" if name.startswith("fsdp ") else "fsdp2" for name in WRAPPINGS
}


def wrap(name: str, seed: int = 0) -> nn.Module:
    """Returns a new Net, initialized from ``seed``, under one of ``WRAPPINGS``."""
    torch.manual_seed(seed)
    return WRAPPINGS[name](Net())


def _is_decayed(name: str) -> bool:
    return name.endswith("weight") and "norm" not in name


def optimizer_of(
    model: nn.Module, without: str | None = None, is_decayed: Callable[[str], bool] = _is_decayed
) -> torch.optim.Optimizer:
    """Returns AdamW with two groups. Frozen parameters, and those with ``without`` in their names, are in no group.

    Args:
        is_decayed: Whether a parameter is in the decayed group, given its name in the wrapped ``model``.
    """
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (without is None or without not in name):
            (decayed if is_decayed(name) else others).append(parameter)
    groups = [{"params": others, "lr": 2e-3, "weight_decay": 0.0}, {"params": decayed, "lr": 1e-3}]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 1) -> list[float]:
    """Takes some steps and returns their losses. Every rank has the same batch."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (4, 3), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Returns model and optimizer state as torch gathers them, by original names. Only rank 0 has all of it."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    state = {f"model.{key}": value for key, value in get_model_state_dict(model, options=options).items()}
    if optimizer is not None:
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
        state |= {f"optimizer.{key}": value for key, value in optimizer_state.items()}
    return state


def differences(got: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Returns keys that only one of them has, or whose values differ in type, dtype, shape or any bit."""
    keys = [*wanted, *(got.keys() - wanted.keys())]
    return [key for key in keys if key not in got or key not in wanted or not _are_equal(got[key], wanted[key])]


def _are_equal(got: Any, wanted: Any) -> bool:
    if isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor):
        same_kind = (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        return same_kind and torch.equal(_bits(got), _bits(wanted))
    return type(got) is type(wanted) and bool(got == wanted)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes, so that NaN equals itself and fp8 tensors can be compared."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
