# SPDX-License-Identifier: Apache-2.0
"""Conversions to a checkpoint of ours and to one of stock DCP: from any source, whole, nested, cut, read by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.ranks import run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bytecheckpoint import LoadSpec, load_state_dict, save_state_dict, verify
from bytecheckpoint.convert import convert
from bytecheckpoint.convert.conversion import Format
from bytecheckpoint.errors import ConfigError, UnsupportedError
from bytecheckpoint.native import _core
from bytecheckpoint.transforms import Stack, Transpose
from interop.nested_state import assert_equal, save_sharded, state

BOTH: list[Format] = ["bcp", "dcp"]


def zeros(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeros(each) for key, each in value.items()}
    if isinstance(value, list):
        return [zeros(each) for each in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def with_stock(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    got: dict[str, Any] = zeros(like)
    dcp.load(got, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return got


@pytest.mark.parametrize("to", BOTH)
@pytest.mark.parametrize("stock", [False, True])
def test_a_nested_state_with_objects_comes_over_whole(tmp_path: Path, to: Format, stock: bool) -> None:
    run_ranks(3, save_sharded, str(tmp_path / "ckpt"), stock)
    report = convert(tmp_path / "ckpt", tmp_path / "out", to=to, verify=True, shard_size="1MB")
    assert (report.num_tensors, report.num_objects) == (6, 3)
    assert report.num_files > 10
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.suffix not in (".distcp", "")]
    assert_equal(with_stock(tmp_path / "out", state()), state())
    got = zeros(state())
    load_state_dict(tmp_path / "out", got, no_dist=True)
    assert_equal(got, state())
    found = verify(tmp_path / "out")
    assert not found.problems
    assert (_core.Checkpoint.open(str(tmp_path / "out")).foreign is None) == (to == "bcp")
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    assert_equal(torch.load(tmp_path / "whole.pt", weights_only=True), state())


@pytest.mark.parametrize("to", BOTH)
def test_safetensors_become_a_checkpoint(tmp_path: Path, to: Format) -> None:
    tensors = {f"l.{i}.w": torch.randn(7, 5) for i in range(100)} | {"b": torch.arange(10_000_000, dtype=torch.int16)}
    save_file(tensors, tmp_path / "model.safetensors")
    report = convert(tmp_path, tmp_path / "out", to=to, dtype="bfloat16", workers=2, verify=True)
    assert report.num_files == 3  # a tensor larger than a share is cut
    assert report.num_cast == 100
    wanted = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    assert_equal(with_stock(tmp_path / "out", wanted), wanted)


@pytest.mark.parametrize("to", BOTH)
def test_objects_share_a_file(tmp_path: Path, to: Format) -> None:
    objects = {f"o.{i}": "x" * i for i in range(300)}
    save_state_dict(tmp_path / "ckpt", objects, no_dist=True)
    report = convert(tmp_path / "ckpt", tmp_path / "out", to=to)
    assert (report.num_objects, report.num_files) == (300, 1)
    assert with_stock(tmp_path / "out", objects) == objects


def test_keys_keep_their_place_below_what_is_renamed(tmp_path: Path) -> None:
    model = {"a.b": torch.ones(2), "c": {"d": torch.zeros(3)}}
    save_state_dict(tmp_path / "ckpt", {"model": model, "n": 1}, no_dist=True)
    spec = LoadSpec(rename={"model": "net.inner"})
    convert(tmp_path / "ckpt", tmp_path / "renamed", to="bcp", spec=spec)
    dcp_to_torch_save(tmp_path / "renamed", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_equal(whole, {"net.inner": model, "n": 1})
    convert(tmp_path / "ckpt", tmp_path / "bare", to="dcp", spec=LoadSpec(include="model", rename={"model": ""}))
    dcp_to_torch_save(tmp_path / "bare", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_equal(whole, model)


def load_on(path: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    experts = [torch.arange(12.0).view(3, 4) + i for i in range(4)]
    wanted = {"w": torch.stack(experts), "t": torch.arange(35.0).view(7, 5).T}
    got: dict[str, Any] = {
        key: distribute_tensor(torch.zeros_like(value, memory_format=torch.contiguous_format), mesh, [Shard(0)])
        for key, value in wanted.items()
    }
    load_state_dict(path, got)
    for key, value in wanted.items():
        assert isinstance(got[key], DTensor)
        assert torch.equal(got[key].full_tensor(), value)


@pytest.mark.parametrize("to", BOTH)
def test_transforms_are_written_out(tmp_path: Path, to: Format) -> None:
    save_state_dict(
        tmp_path / "ckpt",
        {f"e.{i}": torch.arange(12.0).view(3, 4) + i for i in range(4)} | {"t": torch.arange(35.0).view(7, 5)},
        no_dist=True,
    )
    convert(tmp_path / "ckpt", tmp_path / "out", to=to, spec=LoadSpec(transforms=[Stack("e.{i}", "w"), Transpose("t")]))
    run_ranks(2, load_on, str(tmp_path / "out"))


@pytest.mark.parametrize("to", BOTH)
def test_quantized_tensors_are_copied_as_they_are(tmp_path: Path, to: Format) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 0, torch.qint8)
    save_state_dict(tmp_path / "ckpt", {"q": quantized, "w": torch.ones(3)}, no_dist=True)
    convert(tmp_path / "ckpt", tmp_path / "out", to=to, verify=True)
    got = {"q": torch.quantize_per_tensor(torch.zeros(6), 0.5, 0, torch.qint8), "w": torch.zeros(3)}
    load_state_dict(tmp_path / "out", got, no_dist=True)
    assert torch.equal(got["q"].int_repr(), quantized.int_repr())
    with pytest.raises(UnsupportedError, match="quantized tensors: 'q'"):
        convert(tmp_path / "ckpt", tmp_path / "hf")


def test_an_unknown_format_and_an_empty_source(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ckpt", {"w": torch.ones(3)}, no_dist=True)
    with pytest.raises(ConfigError, match="to='zip': must be one of safetensors, bcp, dcp"):
        convert(tmp_path / "ckpt", tmp_path / "out", to="zip")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
