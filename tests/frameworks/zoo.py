# SPDX-License-Identifier: Apache-2.0
"""A model of odd parts that never runs: parameters that are tied, frozen, in no optimizer, strided or empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

__all__ = ["IN_NO_OPTIMIZER", "KINDS", "Cell", "Kind", "Zoo", "fill", "make", "optimizer_of_zoo"]

IN_NO_OPTIMIZER = "left_out"


class Counted(nn.Module):
    """Has extra state: an object and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {"count": 0, "scales": torch.zeros(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


class Cell(nn.Module):
    """Has parameters of one to four dims. No tested number of ranks divides any of them."""

    def __init__(self) -> None:
        super().__init__()
        for ndim, shape in enumerate([(7,), (7, 11), (2, 7, 3), (2, 3, 1, 7)], start=1):
            self.register_parameter(f"of_{ndim}", nn.Parameter(torch.randn(shape)))
        self.norm = nn.BatchNorm1d(7)


class Tiny(nn.Module):
    """Has fewer elements than there are ranks, so some ranks hold only padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 1))


class Still(nn.Module):
    """Has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5), requires_grad=False)


class Strided(nn.Module):
    """Has parameters whose dims are in another order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, (2, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.transposed = nn.Parameter(torch.randn(7, 5).t())


class Zoo(nn.Module):
    """Has every odd part.

    Args:
        strided: Whether some parameters are not contiguous.
        scalar: Whether a parameter has no dims.
        fp8: Whether some frozen parameters have 8 bits.
    """

    def __init__(self, strided: bool, scalar: bool, fp8: bool) -> None:
        super().__init__()
        self.cell = Cell()
        self.tiny = Tiny()
        self.still = Still()
        self.counted = Counted()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.once = nn.Linear(3, 3)
        self.again = self.once  # one module under two names
        self.left_out = nn.Parameter(torch.randn(5, 3))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.register_buffer("scale_inv", torch.randn(3, 3).to(torch.float8_e4m3fn))
        self.register_buffer("number", torch.tensor(7))
        if strided:
            self.strided = Strided()
        if scalar:
            self.temperature = nn.Parameter(torch.randn(()))
        if fp8:
            for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
                self.register_parameter(name, nn.Parameter(torch.randn(5, 3).to(dtype), requires_grad=False))


@dataclass(frozen=True)
class Kind:
    """How a Zoo is wrapped, and which parts it may have.

    Attributes:
        framework: The argument of ``save``.
        wrap: May change the model in place.
        groups: Whether parameters of one module may be in several groups, and some in none.
    """

    framework: str
    wrap: Callable[[Zoo], nn.Module]
    strided: bool = True
    scalar: bool = False
    fp8: bool = False
    groups: bool = True
    dtype: torch.dtype = torch.float32


def _ddp(model: Zoo) -> nn.Module:
    # DDP sends parameters from rank 0 to all ranks, and gloo cannot send 8-bit ones.
    ignored = [name for name, tensor in model.state_dict().items() if name in ("e4m3", "e5m2", "scale_inv")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model)


def _fsdp(model: Zoo, **kwargs: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Cell, Tiny, Still})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **kwargs)


def _fsdp_ignoring(model: Zoo) -> nn.Module:
    return _fsdp(model, use_orig_params=True, ignored_states=[model.left_out, model.once.weight])


def _fsdp_compiled(model: Zoo) -> nn.Module:
    model.cell = torch.compile(model.cell)  # type: ignore[assignment]
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    return _fsdp(model, use_orig_params=True)


def _compiled(model: Zoo) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Cell))
    return torch.compile(_ddp(model))  # type: ignore[return-value]


def _fsdp2(model: Zoo) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.cell, model.tiny, model.still):
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp2_compiled(model: Zoo) -> nn.Module:
    model.cell = torch.compile(model.cell)  # type: ignore[assignment]
    return _fsdp2(model)


KINDS = {
    "plain": Kind("ddp", lambda model: model, scalar=True, fp8=True),
    "bf16": Kind("ddp", lambda model: model, scalar=True, fp8=True, dtype=torch.bfloat16),
    "ddp": Kind("ddp", _ddp, scalar=True, fp8=True),
    "ddp compiled": Kind("ddp", _compiled, scalar=True, fp8=True),
    "fsdp orig": Kind("fsdp", partial(_fsdp, use_orig_params=True)),
    "fsdp compiled": Kind("fsdp", _fsdp_compiled),
    "fsdp flat": Kind("fsdp", partial(_fsdp, use_orig_params=False), groups=False),
    "fsdp ignoring": Kind("fsdp", _fsdp_ignoring),
    "fsdp bf16": Kind("fsdp", partial(_fsdp, use_orig_params=True), dtype=torch.bfloat16),
    "fsdp no shard": Kind("fsdp", partial(_fsdp, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)),
    "fsdp2": Kind("fsdp2", _fsdp2, strided=False, fp8=True),
    "fsdp2 compiled": Kind("fsdp2", _fsdp2_compiled, strided=False, fp8=True),
    "fsdp2 bf16": Kind("fsdp2", _fsdp2, strided=False, fp8=True, dtype=torch.bfloat16),
}


def make(kind: Kind, seed: int, is_wrapped: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    model = Zoo(kind.strided, kind.scalar, kind.fp8)
    for parameter in model.parameters():
        if parameter.element_size() > 1:
            parameter.data = parameter.data.to(kind.dtype)
    return kind.wrap(model) if is_wrapped else model


def optimizer_of_zoo(kind: Kind, model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW with two groups of different options, and a parameter in no group.

    If two groups would split a flat parameter, there is one group of all parameters.
    """
    first, second = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not (kind.groups and IN_NO_OPTIMIZER in name):
            (first if kind.groups and name.endswith(("of_2", "weight")) else second).append(parameter)
    groups = [{"params": first, "lr": 1e-3, "weight_decay": 0.5}, {"params": second, "lr": 2e-3}]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def fill(optimizer: torch.optim.Optimizer) -> None:
    """Fills states with twice the parameter and its square, so each element can be checked in any layout."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            value = parameter.detach()
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": value * 2,
                "exp_avg_sq": value * value,
            }
