# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: the ranks' models have different keys, and one checkpoint holds the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bytecheckpoint
from bytecheckpoint.errors import KeyMismatchError
from frameworks.wrapped import Block, differences

BLOCKS = 4


class Model(nn.Module):
    """The whole model, or the blocks of one of two stages under the same names. Each block has a buffer."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        numbers = range(BLOCKS) if stage is None else range(stage * 2, stage * 2 + 2)
        self.layers = nn.ModuleDict({str(number): block(number) for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def block(number: int) -> Block:
    torch.manual_seed(number)
    made = Block()
    made.register_buffer("seen", torch.full((3,), float(number)))
    return made


def stage_of(mesh: DeviceMesh, has_tensor_parallel: bool) -> Model:
    model = Model(mesh.get_local_rank("stage"))
    for layer in model.layers.values():
        if has_tensor_parallel:
            parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def train(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.arange(24.0).view(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state of the blocks of this rank's stage, by name, each tensor whole."""
    values: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        values |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
        values[f"optimizer.{name}.lr"] = optimizer.param_groups[0]["lr"]
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in values.items()}


def of_first_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the states of all ranks together. If several ranks hold a key, the lowest rank's value counts."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return {key: value for of_rank in reversed(states) for key, value in of_rank.items()}


def through(folder: str) -> list[str]:
    meshes = {
        "2-d": init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data")),
        "3-d": init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("stage", "data", "tensor")),
    }
    make: dict[str, Any] = {name: partial(stage_of, mesh, name == "3-d") for name, mesh in meshes.items()}
    make["whole"] = Model
    told = {}
    for name, make_model in make.items():
        model = make_model()
        optimizer = train(model)
        if name != "whole":
            for layer in model.layers.values():
                layer.seen += dist.get_rank() + 1  # differs on each rank
        told[name] = of_first_ranks(state_of(model, optimizer))
        parts = {"model": model, "optimizer": optimizer}
        bytecheckpoint.save(f"{folder}/{name}", parts, "ddp" if name == "whole" else "fsdp2")
    assert all(len(state) == len(told["whole"]) for state in told.values())

    found = []
    for name, make_model in make.items():
        for source in told:
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters())
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.detach().zero_()
            parts = {"model": model, "optimizer": optimizer}
            bytecheckpoint.load(f"{folder}/{source}", parts, "ddp" if name == "whole" else "fsdp2")
            got = state_of(model, optimizer)
            assert len(got) == len(told[source]) // (1 if name == "whole" else 2)
            found += [f"{source} in {name}: {key}" for key in differences(got, {k: told[source][k] for k in got})]
    with pytest.raises(KeyMismatchError, match=r"not asked for: .*layers\.2\.norm\.weight"):
        bytecheckpoint.load(f"{folder}/2-d", {"model": Model(0)}, "ddp")
    return found


def test_stages_are_one_checkpoint(tmp_path: Path) -> None:
    """FSDP2 of each stage, with and without tensor parallelism, and the whole model: each loads all, strictly."""
    assert [text for of_rank in run_ranks(4, through, str(tmp_path), limit_s=120) for text in of_rank] == []
