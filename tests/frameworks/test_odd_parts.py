# SPDX-License-Identifier: Apache-2.0
"""Saves odd parts of models under every framework on 1, 3 and 5 ranks, and loads them in a plain model, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import bytecheckpoint
from frameworks.wrapped import differences
from frameworks.zoo import KINDS, Kind, fill, make, optimizer_of_zoo

SAVED, OTHER = 1, 2  # seeds


def through(folder: str, name: str, kind: Kind) -> list[str]:
    """Saves from the wrapped model into a plain one and back. Returns the differences."""
    rank, plain = dist.get_rank(), "ddp"
    model = make(kind, SAVED)
    optimizer = optimizer_of_zoo(kind, model)
    fill(optimizer)
    mark(model, rank)
    parts = {"model": model, "optimizer": optimizer}
    bytecheckpoint.save(f"{folder}/{name}", parts, kind.framework)

    single = make(kind, OTHER, is_wrapped=False)
    single_optimizer = optimizer_of_zoo(kind, single)
    single_parts = {"model": single, "optimizer": single_optimizer}
    bytecheckpoint.load(f"{folder}/{name}", single_parts, plain)
    wanted = make(kind, SAVED, is_wrapped=False)
    mark(wanted, 0)  # rank 0's buffers and extra states
    found = [f"of {name}: {key}" for key in differences(flat(single.state_dict()), flat(wanted.state_dict()))]
    found += [f"of {name}: {key}" for key in odd_states(single_optimizer)]
    found += [f"of {name}: options"] * (options(single_optimizer) != options(optimizer_of_zoo(kind, wanted)))

    bytecheckpoint.save(f"{folder}/{name}", single_parts, plain)
    model = make(kind, OTHER)
    optimizer = optimizer_of_zoo(kind, model)
    for group in optimizer.param_groups:
        group["lr"] = 77.0
    bytecheckpoint.load(f"{folder}/{name}", {"model": model, "optimizer": optimizer}, kind.framework)
    got = full(model, kind)
    if rank == 0:
        found += [f"into {name}: {key}" for key in differences(flat(got), flat(wanted.state_dict()))]
    found += [f"into {name}: {key}" for key in odd_states(optimizer)]
    found += [f"into {name}: options"] * (options(optimizer) != options(optimizer_of_zoo(kind, model)))
    return found


def full(model: nn.Module, kind: Kind) -> dict[str, Any]:
    """Returns the state as torch gathers it. gloo cannot send 8-bit floats, so ``whole`` sends their bytes."""
    if kind.framework != "fsdp2":
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {key: whole(value) for key, value in get_model_state_dict(model).items()}


def whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    part, shape, stride = value.to_local(), value.shape, value.stride()
    is_small = part.element_size() == 1
    bits = part.view(torch.uint8) if is_small else part
    gathered = DTensor.from_local(
        bits, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()
    return gathered.view(part.dtype) if is_small else gathered


def mark(model: nn.Module, rank: int) -> None:
    """Sets what may differ from rank to rank."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.fill_(rank + 0.5)
            module.num_batches_tracked.fill_(rank + 5)
        if hasattr(module, "extra") and "extra" in vars(module):
            module.extra = {"count": rank + 3, "scales": torch.full((2,), rank + 0.25)}


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state in one level. Extra states are dicts."""
    level: dict[str, Any] = {}
    for key, value in state.items():
        level |= {f"{key}.{name}": of_it for name, of_it in value.items()} if isinstance(value, dict) else {key: value}
    return level


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def odd_states(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns where an optimizer lacks the state that ``fill`` makes. Parameters without local elements are skipped."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            value, state = local(parameter), optimizer.state.get(parameter)
            if value.numel() == 0:
                continue
            is_right = (
                state is not None
                and state.keys() == {"step", "exp_avg", "exp_avg_sq"}
                and float(state["step"]) == 3.0
                and torch.equal(local(state["exp_avg"]), value * 2)
                and torch.equal(local(state["exp_avg_sq"]), value * value)
            )
            found += [f"state of parameter {at} of group {number}, {[*value.shape]}"] * (not is_right)
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_through(folder: str) -> list[str]:
    return [text for name, kind in KINDS.items() for text in through(folder, name, kind)]


@pytest.mark.parametrize("num_ranks", [1, 3, pytest.param(5, marks=pytest.mark.long)])
def test_odd_parts(tmp_path: Path, num_ranks: int) -> None:
    """Saves and loads each kind strictly, and every bit is equal."""
    assert [text for of_rank in run_ranks(num_ranks, all_through, str(tmp_path), limit_s=200) for text in of_rank] == []
