# SPDX-License-Identifier: Apache-2.0
"""Loads of checkpoints that ByteCheckpoint 0.0.2 wrote, with torch 2.5: ``make_reference_golden.py``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from support.goldens import GOLDEN as GOLDENS
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint import BcpReader, LoadSpec, load_state_dict
from bytecheckpoint.cli.app import bcp
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CorruptCheckpointError, UnsupportedError

GOLDEN = GOLDENS / "reference"
RUNS = ["ddp_1", "ddp_2", "fsdp_2", "fsdp2_2"]


def step_of(run: str) -> Path:
    return GOLDEN / run / "global_step_7"


def wanted_in(run: str) -> dict[str, Any]:
    wanted: dict[str, Any] = torch.load(GOLDEN / run / "expected.pt", weights_only=True)
    return wanted


def named(run: str, model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"module.{key}": value for key, value in model.items()} if run.startswith("ddp") else model


def moments_of(run: str, wanted: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the optimizer's tensors as their checkpoint names them: DDP's by the numbers of parameters."""
    return {
        f"state.{number if run.startswith('ddp') else name}.{kind}": value
        for number, (name, of_parameter) in enumerate(wanted["moments"].items())
        for kind, value in of_parameter.items()
    }


@pytest.mark.parametrize("run", RUNS)
def test_models_and_optimizers(run: str) -> None:
    wanted = wanted_in(run)
    for part, tensors in [("model", named(run, wanted["model"])), ("optimizer", moments_of(run, wanted))]:
        got = {key: torch.zeros_like(value) for key, value in tensors.items()}
        dcp.load(got, storage_reader=BcpReader(step_of(run) / part), no_dist=True)
        for key, value in tensors.items():
            assert got[key].dtype == value.dtype
            assert torch.equal(got[key], value), key
    objects: dict[str, Any] = {"param_groups": None}
    load_state_dict(step_of(run) / "optimizer", objects, no_dist=True)
    assert objects["param_groups"][0]["lr"] == 0.01
    extra: dict[str, Any] = {"epoch": 0, "rank": -1, "noise": torch.zeros(3)}
    load_state_dict(step_of(run) / "extra_state" / "extra_state_rank_0.pt", extra, no_dist=True)
    assert extra["epoch"] == 3
    assert extra["noise"].equal(torch.arange(3.0))


def load_shards(path: str, wanted: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    got = {
        key: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]) if value.dim() else torch.zeros_like(value)
        for key, value in wanted.items()
    }
    dcp.load(got, storage_reader=BcpReader(path))
    for key, value in wanted.items():
        whole = got[key].full_tensor() if value.dim() else got[key]
        assert torch.equal(whole, value), key


def test_onto_other_ranks() -> None:
    run_ranks(3, load_shards, str(step_of("fsdp2_2") / "model"), wanted_in("fsdp2_2")["model"])


@pytest.mark.parametrize("run", ["ddp_1", "fsdp_2"])
def test_convert_and_the_commands(tmp_path: Path, run: str) -> None:
    wanted = wanted_in(run)["model"]
    spec = LoadSpec(rename={"module": ""}) if run.startswith("ddp") else None
    convert(step_of(run) / "model", tmp_path / "out", spec=spec)
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], value) for key, value in wanted.items())
    listed = CliRunner().invoke(bcp, ["ls", str(step_of(run) / "model")])
    assert listed.exit_code == 0, listed.output
    assert "embed.weight" in listed.output
    checked = CliRunner().invoke(bcp, ["verify", "--allow-unchecked", str(step_of(run) / "model")])
    assert checked.exit_code == 0, checked.output


def test_a_step_folder_says_how_its_parts_are_read() -> None:
    for call in (
        lambda: load_state_dict(step_of("fsdp_2"), {"embed.weight": torch.zeros(11, 6)}, no_dist=True),
        lambda: bytecheckpoint.load(str(step_of("fsdp_2")), {"model": torch.nn.Linear(1, 1)}, framework="ddp"),
        lambda: bytecheckpoint.latest(GOLDEN / "fsdp_2"),
    ):
        with pytest.raises(UnsupportedError, match=r"ByteCheckpoint 0\.0\.2.*BcpReader.*bcp convert"):
            call()


def test_damage(tmp_path: Path) -> None:
    part = tmp_path / "model"
    shutil.copytree(step_of("fsdp_2") / "model", part)
    state = {"embed.weight": torch.zeros(11, 6)}
    data = part / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp"):
        load_state_dict(part, state, no_dist=True, spec=LoadSpec(include="embed"))
    mark = part / ".metadata"
    whole = mark.read_bytes()
    for changed, message in [
        (whole.replace(b"FloatStorage", b"ByteStorage_"), "embed.weight"),
        (whole.replace(b"all_tensor_metadata", b"all_tensor_metadat_"), "headers of tensors"),
        (whole[:-20], "pickle"),
    ]:
        assert changed != whole
        mark.write_bytes(changed)
        with pytest.raises((CorruptCheckpointError, UnsupportedError), match=message):
            load_state_dict(part, state, no_dist=True)
