# SPDX-License-Identifier: Apache-2.0
"""Ranks dequantize their own boxes: sharded along any dim, from shards that cut blocks, and with shared reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from bytecheckpoint import Config, LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.report import LoadReport
from bytecheckpoint.transforms import Dequantize, DequantizeMXFP4, Stack

ROWS, COLUMNS, BLOCK = 500, 700, 128
EXPERTS, OUT, GROUPS = 3, 50, 5
SPEC = LoadSpec(
    transforms=[
        Dequantize("{e}.weight", "{e}.weight_scale_inv", block=[BLOCK, BLOCK]),
        Stack("{e}.weight", "stacked"),
        DequantizeMXFP4("*_blocks", "*_scales", "*"),
    ]
)
FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stored() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    tensors = {}
    for e in range(EXPERTS):
        tensors[f"{e}.weight"] = draw(0, 0x7F, ROWS, COLUMNS).view(torch.float8_e4m3fn)
        tensors[f"{e}.weight_scale_inv"] = torch.rand(-(-ROWS // BLOCK), -(-COLUMNS // BLOCK), generator=generator)
    tensors["x_blocks"] = draw(0, 255, EXPERTS, OUT, GROUPS, 16)
    tensors["x_scales"] = draw(110, 140, EXPERTS, OUT, GROUPS)
    return tensors


def wanted() -> dict[str, torch.Tensor]:
    tensors = stored()
    values = []
    for e in range(EXPERTS):
        scales = tensors[f"{e}.weight_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        values.append((tensors[f"{e}.weight"].float() * scales[:ROWS, :COLUMNS]).to(torch.bfloat16))
    blocks, scales = tensors["x_blocks"], (tensors["x_scales"].float() - 127).exp2()
    codes = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1).flatten(-2)
    x = (codes * scales[..., None]).to(torch.bfloat16).flatten(-2)
    return {"stacked": torch.stack(values), "x": x.transpose(1, 2).contiguous()}


def save_sharded(path: str) -> None:
    """Saves with each tensor cut along another dim, inside blocks and inside of pairs' groups."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dims = {
        "0.weight": 0,
        "1.weight": 1,
        "2.weight_scale_inv": 0,
        "1.weight_scale_inv": 1,
        "x_blocks": 3,
        "x_scales": 1,
    }
    save_state_dict(
        path, {k: distribute_tensor(v, mesh, [Shard(dims.get(k, 0))], src_data_rank=None) for k, v in stored().items()}
    )


def load_and_check(path: str, shape: tuple[int, ...], placements: list[Placement], reading: str) -> LoadReport:
    mesh = init_device_mesh("cpu", shape)
    whole = wanted()
    state = {k: distribute_tensor(torch.zeros_like(v), mesh, placements, src_data_rank=None) for k, v in whole.items()}
    report = load_state_dict(path, state, spec=SPEC, config=Config(shared_reading=reading))
    for key, value in whole.items():
        mine = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
        assert torch.equal(state[key].to_local().view(torch.int16), mine.view(torch.int16)), key
    return report


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((3,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((3,), [Shard(2)]),
        ((2, 2), [Shard(1), Shard(2)]),
        ((2, 2), [Replicate(), Shard(1)]),
    ],
)
@pytest.mark.parametrize("reading", ["independent", "cooperative"])
def test_any_placement(tmp_path: Path, shape: tuple[int, ...], placements: list[Placement], reading: str) -> None:
    save_file(stored(), tmp_path / "model.safetensors")
    num_ranks = torch.Size(shape).numel()
    reports = run_ranks(num_ranks, load_and_check, str(tmp_path), shape, placements, reading)
    assert {report.reading for report in reports} == {reading}
    total = sum(value.nbytes for value in stored().values())
    if reading == "cooperative":
        assert sum(report.bytes_read for report in reports) <= 2 * (total + (1 << 18))  # scales come before codes
    elif Replicate() not in placements:
        assert max(report.bytes_wanted for report in reports) < 0.6 * total


@pytest.mark.parametrize("reading", ["independent", "cooperative"])
def test_shards_that_cut_blocks(tmp_path: Path, reading: str) -> None:
    run_ranks(3, save_sharded, str(tmp_path / "ckpt"))
    run_ranks(2, load_and_check, str(tmp_path / "ckpt"), (2,), [Shard(1)], reading)
    run_ranks(4, load_and_check, str(tmp_path / "ckpt"), (4,), [Shard(2)], reading)


def load_model(path: str) -> None:
    """Fills an FSDP2 model, and one rank more than there are rows of blocks."""
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state: dict[str, Any] = {"weight": model.weight}
    spec = LoadSpec(
        include="1", rename={"1": ""}, transforms=[Dequantize("1.weight", "1.weight_scale_inv", block=[BLOCK, BLOCK])]
    )
    load_state_dict(path, state, spec=spec)
    assert isinstance(model.weight, DTensor)
    begin = dist.get_rank() * ROWS // dist.get_world_size()
    mine = wanted()["stacked"][1][begin : begin + ROWS // dist.get_world_size()]
    assert torch.equal(model.weight.to_local(), mine)


def test_fsdp2(tmp_path: Path) -> None:
    save_file(stored(), tmp_path / "model.safetensors")
    run_ranks(4, load_model, str(tmp_path))
