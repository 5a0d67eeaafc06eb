# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of others on three ranks, loaded and converted together; and conversions of them that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.goldens import GOLDEN
from support.killed_conversions import SHARD_BYTES, kill_a_conversion
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint import LoadSpec
from bytecheckpoint.convert import convert

SOURCES = {
    "verl": (GOLDEN / "verl-0.9.1-torch2.13.0" / "tp", []),
    "zero3": (GOLDEN / "deepspeed-0.19.8" / "zero3-bf16" / "run", ["module", "optimizer"]),
    "Megatron-Core": (GOLDEN / "megatron-0.19.2" / "gpt" / "checkpoint", ["decoder", "embedding"]),
    "Orbax": (GOLDEN / "orbax-0.12.8" / "chunked" / "checkpoint", ["params", "layers"]),
}


def tensors_of(path: Path, include: list[str]) -> dict[str, torch.Tensor]:
    stored = bytecheckpoint.read(path)
    names = [name for name in stored if not include or name.partition(".")[0] in include]
    return {name: value for name in names if isinstance(value := stored[name], torch.Tensor)}


def load_and_convert(path: Path, include: list[str], target: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = tensors_of(path, include)
    state = {
        name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(value.dim() - 1)])
        for name, value in whole.items()
        if value.dim() > 0
    }
    bytecheckpoint.load_state_dict(path, state)
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), whole[name]), name
    spec = LoadSpec(include=[*whole])
    convert(path, target, spec=spec, process_group=dist.group.WORLD, shard_size=400, workers=2)


def assert_converted(path: Path, include: list[str], target: Path) -> None:
    files = [*target.glob("*.safetensors")]
    assert len(files) > 1
    got = {key: value for file in files for key, value in load_file(file).items()}
    whole = tensors_of(path, include)
    assert got.keys() == whole.keys()
    assert all(torch.equal(got[key], value) for key, value in whole.items())


@pytest.mark.parametrize("name", SOURCES)
def test_on_ranks(name: str, tmp_path: Path) -> None:
    path, include = SOURCES[name]
    run_ranks(3, load_and_convert, path, include, tmp_path / "out")
    assert_converted(path, include, tmp_path / "out")


@pytest.mark.parametrize("name", SOURCES)
def test_a_killed_conversion_goes_on(name: str, tmp_path: Path) -> None:
    path, include = SOURCES[name]
    wanted = [*tensors_of(path, include)]
    kill_a_conversion(path, tmp_path / "out", include=wanted)
    spec = LoadSpec(include=wanted)
    report = convert(path, tmp_path / "out", spec=spec, shard_size=SHARD_BYTES, resume=True, verify=True)
    assert report.num_resumed == 2
    assert_converted(path, include, tmp_path / "out")
