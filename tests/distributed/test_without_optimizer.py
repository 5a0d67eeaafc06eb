# SPDX-License-Identifier: Apache-2.0
"""Loads of a model alone from a checkpoint of training: no byte of the optimizer is read, nor needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint import LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.report import LoadReport

SIZE = 768  # 2.25 MiB a layer
BLOCK = 256 << 10


def sharded(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


def save_training(root: Path) -> list[torch.Tensor]:
    model = sharded(1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, SIZE)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    save_state_dict(root / "state", {"model": of_model, "optimizer": of_optimizer, "step": 1})
    bytecheckpoint.save(root / "live", {"model": model, "optimizer": optimizer, "extra_state": {"step": 1}}, "fsdp2")
    return weights(model)


def load_model(root: Path, wanted: list[list[torch.Tensor]]) -> list[LoadReport]:
    whole = [torch.cat(shards) for shards in zip(*wanted, strict=True)]
    reports = []
    for name in ("state", "state with a spec", "live", "live with a spec"):
        model = sharded(2)
        if name.startswith("live"):
            spec = LoadSpec(include="*.weight") if "spec" in name else None
            result = bytecheckpoint.load(root / "live", {"model": model}, "fsdp2", spec=spec)
            assert not result.missing_keys
            assert not result.unexpected_keys
            assert [*result.parts] == ["model"]
            reports.append(result.parts["model"])
        elif name == "state":
            reports.append(load_state_dict(root / "state", {"model": model.state_dict()}))
        else:
            spec = LoadSpec(include="model", rename={"model": ""})
            reports.append(load_state_dict(root / "state", model.state_dict(), spec=spec))
        for value, tensor in zip(model.parameters(), whole, strict=True):
            assert torch.equal(value.full_tensor(), tensor)  # type: ignore[attr-defined]
    return reports


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_optimizer_is_neither_read_nor_needed(tmp_path: Path, num_ranks: int) -> None:
    wanted = run_ranks(2, save_training, tmp_path)
    model_bytes = 4 * SIZE * SIZE * 4
    stored = sum(file.stat().st_size for file in (tmp_path / "state").glob("*.distcp"))
    assert stored > 3 * model_bytes  # AdamW keeps two tensors for each of the model
    for file in (tmp_path / "live" / "optimizer").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))  # whoever reads it finds damage
    of_ranks = run_ranks(num_ranks, load_model, tmp_path, wanted)
    for reports in zip(*of_ranks, strict=True):
        assert sum(report.bytes_wanted for report in reports) == model_bytes
        # Whole blocks: at each end of what a rank reads of a tensor, less than one more.
        ends = 2 * 4 * num_ranks * BLOCK
        assert model_bytes <= sum(report.bytes_read + report.bytes_received for report in reports) <= model_bytes + ends
        assert sum(report.bytes_read for report in reports) < stored * 0.75
    for name in ("optimizer", "extra_state"):
        for file in filter(Path.is_file, (tmp_path / "live" / name).iterdir()):
            file.unlink()
    run_ranks(num_ranks, load_model, tmp_path, wanted)
