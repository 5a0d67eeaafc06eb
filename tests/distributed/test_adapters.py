# SPDX-License-Identifier: Apache-2.0
"""Adapters alone: saved without their base on several ranks, and loaded beside a base that comes from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bytecheckpoint
from bytecheckpoint import (
    BcpSavePlanner,
    BcpWriter,
    LoadSpec,
    async_save_state_dict,
    load_state_dict,
    save_state_dict,
    shutdown,
)
from bytecheckpoint.errors import ConfigError


class LoraLinear(torch.nn.Module):
    """A linear layer with a low-rank adapter, with names as peft gives them."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(size, size)
        self.base_layer.requires_grad_(False)
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(size, rank, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(rank, size, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low: torch.Tensor = self.lora_B["default"](self.lora_A["default"](x))
        return low + self.base_layer(x)


def adapted(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(LoraLinear(10, 3) for _ in range(3)))


def sharded(seed: int) -> torch.nn.Module:
    model = adapted(seed)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in model.state_dict().items()
    }


def is_adapter(key: str) -> bool:
    return "lora_" in key


def save_adapters(root: Path) -> None:
    model = sharded(1)
    model(torch.ones(2, 10)).sum().backward()
    save_state_dict(root / "now", {"model": model.state_dict()}, include="*.lora_?")
    exclude = r"re:.*base_layer.*"
    async_save_state_dict(root / "later", {"model": model.state_dict()}, exclude=exclude).committed.result(60)
    options: Any = {"storage_writer": BcpWriter(root / "dcp"), "planner": BcpSavePlanner(include="*.lora_{which}")}
    dcp.save({"model": model.state_dict()}, **options)
    bytecheckpoint.save(root / "live", {"model": model}, "fsdp2", include="*.lora_[AB]")
    shutdown(60)


def load_adapters(root: Path, wanted: dict[str, torch.Tensor]) -> None:
    for name in ("now", "later", "dcp", "live"):
        model = sharded(2)
        state = {"model": model.state_dict()}
        # The base, from a folder of Hugging Face with names of its own; the adapters stay as they are.
        base = LoadSpec(rename={"{i}.{name}": "model.{i}.base_layer.{name}"}, strict="checkpoint")
        report = load_state_dict(root / "base", state, spec=base)
        assert report.num_missing_keys == 6
        if name == "live":
            bytecheckpoint.load(root / name, {"model": model}, "fsdp2", spec=LoadSpec(strict="checkpoint"))
        else:
            load_state_dict(root / name, state, spec=LoadSpec(include="model.*.lora_?", strict="checkpoint"))
        for key, value in whole(model).items():
            assert torch.equal(value, wanted[key]), (name, key)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_adapters_load_beside_a_base_of_safetensors(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(2, save_adapters, tmp_path)
    wanted = adapted(1).state_dict()
    for name in ("now", "later", "dcp"):
        keys = dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata
        assert {*keys} == {f"model.{key}" for key in wanted if is_adapter(key)}, name
    base = {key.replace("base_layer.", ""): value for key, value in wanted.items() if not is_adapter(key)}
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors")
    run_ranks(num_ranks, load_adapters, tmp_path, wanted)


def save_stages(root: Path) -> None:
    """Each rank has a stage of its own: a pattern may match keys of one rank alone."""
    rank = dist.get_rank()
    state = {"stages": {f"{rank}": {"w": torch.full((4,), float(rank))}}, "head" if rank else "embed": torch.ones(3)}
    for include in (["embed", "stages.{i}"], ["stages.1", "head"], ["stages.0"]):
        save_state_dict(root / str(len(include)), state, include=include)
        wanted = {"stages.0.w"} if len(include) == 1 else None
        keys = {*dcp.FileSystemReader(root / str(len(include))).read_metadata().state_dict_metadata}
        assert wanted is None or keys == wanted
    with pytest.raises(ConfigError, match=r"'nowhere'$"):
        save_state_dict(root / "refused", state, exclude=["embed", "nowhere"])
    handle = async_save_state_dict(root / "refused", state, exclude=["head", "nowhere"])
    with pytest.raises(ConfigError, match=r"'nowhere'$"):
        handle.committed.result(60)
    with pytest.raises(CheckpointException, match="nowhere"):
        dcp.save(state, storage_writer=BcpWriter(root / "refused"), planner=BcpSavePlanner(include="nowhere"))
    dist.barrier()
    assert not (root / "refused").exists()
    with pytest.raises(ConfigError, match="include, exclude"):
        bytecheckpoint.save(root / "live", {"model": adapted(0)}, "ddp", include=f"{rank}")
    with pytest.raises(ConfigError, match=r"'nowhere'$"):
        bytecheckpoint.save(root / "live", {"model": adapted(0)}, "ddp", include=["0", "nowhere"])
    dist.barrier()
    assert not (root / "live").exists()
    shutdown(60)


def test_patterns_are_checked_over_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_stages, tmp_path)
