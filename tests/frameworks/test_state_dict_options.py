# SPDX-License-Identifier: Apache-2.0
"""torch's ``get_state_dict`` and ``set_state_dict`` with their options, around our writer, reader and planners."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter
from bytecheckpoint.training_state.names import original_name
from frameworks.wrapped import differences, full_state, optimizer_of, train, wrap

FROZEN = "model.frozen.weight"


@dataclass(frozen=True)
class Case:
    """Options under which a state is saved and loaded.

    Attributes:
        options: Passed to ``get_state_dict``, and to ``set_state_dict`` unless ``to_set`` is given.
        to_set: Options of ``set_state_dict``.
        is_saved: Whether a key of a full state comes back. Other keys keep the loader's values.
        of_layer: Whether only the first block's state is saved.
        wrappings: The wrappings for which torch supports the options.
    """

    options: StateDictOptions
    to_set: StateDictOptions | None = None
    is_saved: Callable[[str], bool] = lambda key: True
    of_layer: bool = False
    wrappings: tuple[str, ...] = field(default=("ddp", "fsdp orig", "fsdp2"))


def is_of_layer(key: str) -> bool:
    return ".layers.0." in key


CASES = {
    "default": Case(StateDictOptions()),
    "full": Case(StateDictOptions(full_state_dict=True)),
    "full, on rank 0": Case(
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        to_set=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        wrappings=("ddp", "fsdp2"),  # torch does not support ShardedTensors here
    ),
    "offloaded": Case(StateDictOptions(cpu_offload=True)),
    "flat": Case(
        StateDictOptions(flatten_optimizer_state_dict=True),
        wrappings=("ddp", "fsdp flat", "fsdp2"),  # torch 2.13 aborts when it sets this state with `use_orig_params`
    ),
    "full and flat": Case(
        StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
        wrappings=("fsdp orig", "fsdp flat"),  # torch 2.13 cannot set its own state for the others
    ),
    "without the frozen": Case(
        StateDictOptions(ignore_frozen_params=True),
        to_set=StateDictOptions(ignore_frozen_params=True, strict=False),
        is_saved=lambda key: key != FROZEN,
    ),
    "not strict": Case(StateDictOptions(strict=False)),
    "one layer": Case(StateDictOptions(strict=False), is_saved=is_of_layer, of_layer=True),
    "one layer, of short names": Case(
        StateDictOptions(keep_submodule_prefixes=False, strict=False), is_saved=is_of_layer, of_layer=True
    ),
}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> dict[str, Any]:
    submodules = {layer_of(model)} if case.of_layer else None
    state: dict[str, Any] = {"model": get_model_state_dict(model, submodules=submodules, options=case.options)}
    if not case.of_layer:  # torch keeps prefixes in optimizer states, but not in options
        state["optim"] = get_optimizer_state_dict(model, optimizer, options=case.options)
    if case.options.full_state_dict and case.options.cpu_offload and dist.get_rank() > 0:
        return {"model": {}, "optim": {}}  # only rank 0 holds it; elsewhere torch returns an empty list for the groups
    return state


def set_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], case: Case) -> None:
    options = case.to_set or case.options
    of_model = state["model"] if case.options.keep_submodule_prefixes else {layer_of(model): state["model"]}
    set_model_state_dict(model, of_model, options=options)
    if "optim" in state:
        set_optimizer_state_dict(model, optimizer, state["optim"], options=options)


def layer_of(model: nn.Module) -> nn.Module:
    return next(module for name, module in model.named_modules() if original_name(name).endswith("layers.0"))


def optimizer_by_unit(model: nn.Module) -> torch.optim.Optimizer:
    return optimizer_of(model, is_decayed=lambda name: "layers." in name)


def through(folder: str) -> list[str]:
    found = []
    for name in ("ddp", "fsdp orig", "fsdp flat", "fsdp2"):
        model = wrap(name, seed=1)
        optimizer = optimizer_by_unit(model)
        train(model, optimizer)
        wanted = copy.deepcopy(full_state(model, optimizer))
        for title, case in CASES.items():
            if name not in case.wrappings:
                continue
            path = f"{folder}/{name}, {title}"
            dcp.save(state_of(model, optimizer, case), storage_writer=BcpWriter(path), planner=BcpSavePlanner())
            other = wrap(name, seed=2)
            other_optimizer = optimizer_by_unit(other)
            train(other, other_optimizer, steps=1)
            before = copy.deepcopy(full_state(other, other_optimizer))
            state = state_of(other, other_optimizer, case)
            dcp.load(state, storage_reader=BcpReader(path), planner=BcpLoadPlanner())
            set_state(other, other_optimizer, state, case)
            got = full_state(other, other_optimizer)
            if dist.get_rank() == 0:
                comes = {key for key in wanted if case.is_saved(key) and (key.startswith("model") or not case.of_layer)}
                expected = {key: value if key in comes else before[key] for key, value in wanted.items()}
                found += [f"{name}, {title}: {key}" for key in differences(listed(got), listed(expected))]
    return found


def listed(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state with tuples as lists, because torch turns tuples into lists where it gathers."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in state.items()}


def test_each_option(tmp_path: Path) -> None:
    """The saved keys come back bit for bit, and nothing else changes."""
    assert run_ranks(2, through, str(tmp_path), limit_s=200)[0] == []


class Fused(nn.Module):
    """Hides the name of its child in its keys, and declares so in the way that ``dsd_fqn_modifiers`` expects."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self._register_state_dict_hook(_hide)
        self.register_load_state_dict_pre_hook(_show)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _hide(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}inner.")]:
        state[prefix + key.removeprefix(f"{prefix}inner.")] = state.pop(key)


def _show(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    for name in ("weight", "bias"):
        if f"{prefix}{name}" in state:
            state[f"{prefix}inner.{name}"] = state.pop(f"{prefix}{name}")


def modified(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrappings: list[Callable[[nn.Module], nn.Module]] = [
        DistributedDataParallel,
        lambda model: fully_shard(model, mesh=mesh),
    ]
    options = StateDictOptions(dsd_fqn_modifiers="_fqn_modifiers")
    for wrapped in wrappings:
        # Only the model: torch 2.13 cannot set optimizer states under such names.
        saved, loaded = (wrapped(nn.Sequential(Fused(), nn.Linear(5, 2))) for _ in range(2))
        state = {"model": get_model_state_dict(saved, options=options)}
        assert "0.weight" in state["model"]
        dcp.save(state, storage_writer=BcpWriter(folder), planner=BcpSavePlanner())
        state = {"model": get_model_state_dict(loaded, options=options)}
        dcp.load(state, storage_reader=BcpReader(folder), planner=BcpLoadPlanner())
        set_model_state_dict(loaded, state["model"], options=options)
        for one, other in zip(saved.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(whole(one), whole(other))


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def test_names_that_modules_modify(tmp_path: Path) -> None:
    run_ranks(2, modified, str(tmp_path))
