# SPDX-License-Identifier: Apache-2.0
"""Conversions to a file of torch.save: every dtype, nested, cast, with objects; read by torch.load and by zip tools."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from bytecheckpoint import LoadSpec, _core, save_state_dict
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CheckpointExistsError, UnsupportedError
from bytecheckpoint.transforms import Stack, Unstack
from interop.nested_state import assert_equal, save_sharded, state

LONG = pytest.mark.skipif("BCP_LONG" not in os.environ, reason="writes 8.6 GB; runs in make torture (BCP_LONG=1)")


def test_a_nested_state_of_several_ranks(tmp_path: Path) -> None:
    run_ranks(3, save_sharded, str(tmp_path / "ckpt"), False)
    report = convert(tmp_path / "ckpt", tmp_path / "out/model.pt", to="torch", verify=True)
    assert (report.num_files, report.num_tensors, report.num_objects) == (1, 6, 3)
    assert [*(tmp_path / "out").iterdir()] == [tmp_path / "out/model.pt"]
    for mmap in (False, True):
        assert_equal(torch.load(tmp_path / "out/model.pt", weights_only=True, mmap=mmap), state())
    with zipfile.ZipFile(tmp_path / "out/model.pt") as archive:
        assert archive.testzip() is None  # compares all checksums
    with pytest.raises(CheckpointExistsError):
        convert(tmp_path / "ckpt", tmp_path / "out/model.pt", to="torch")


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"scalar": torch.tensor(3.5), "empty": torch.zeros(3, 0, 2), "none": torch.zeros(0)}
    for name in _core.dtype_names():
        bits = torch.arange(256, dtype=torch.uint8)
        tensors[name] = (bits % 2).bool() if name == "bool" else bits.view(getattr(torch, name)).reshape(2, -1)
    save_state_dict(tmp_path / "ckpt", tensors, no_dist=True)
    convert(tmp_path / "ckpt", tmp_path / "model.pt", to="torch", verify=True)
    got = torch.load(tmp_path / "model.pt", weights_only=True)
    assert got.keys() == tensors.keys()
    for key, value in tensors.items():
        assert (got[key].dtype, got[key].shape, got[key].is_contiguous()) == (value.dtype, value.shape, True)
        assert got[key].view(torch.uint8).equal(value.view(torch.uint8)) if value.dim() else got[key].equal(value)


def test_objects_alone(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ckpt", {"step": 3, "names": ["a", (1, None)]}, no_dist=True)
    convert(tmp_path / "ckpt", tmp_path / "state.pt", to="torch", verify=True)
    assert torch.load(tmp_path / "state.pt", weights_only=True) == {"step": 3, "names": ["a", (1, None)]}


def test_cast_and_renamed_over_several_slots(tmp_path: Path) -> None:
    tensors = {f"l.{i}": torch.randn(1_000_003 + i) for i in range(8)}
    save_state_dict(tmp_path / "ckpt", {"model": tensors}, no_dist=True)
    spec = LoadSpec(include="model", rename={"model": ""})
    convert(tmp_path / "ckpt", tmp_path / "model.pt", to="torch", spec=spec, dtype="bfloat16", verify=True)
    got = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_equal(got, {key: value.bfloat16() for key, value in tensors.items()})


def test_more_entries_than_a_zip_of_old_can_count(tmp_path: Path) -> None:
    number = 66_000
    save_state_dict(tmp_path / "ckpt", {"w": torch.arange(number)}, no_dist=True)
    convert(tmp_path / "ckpt", tmp_path / "many.pt", to="torch", spec=LoadSpec(transforms=[Unstack("w", "w.{i}")]))
    got = torch.load(tmp_path / "many.pt", weights_only=True)
    assert len(got) == number
    assert all(int(got[f"w.{i}"]) == i for i in range(number))


@LONG
def test_more_bytes_than_a_zip_of_old_can_count(tmp_path: Path) -> None:
    rows = 130
    tensors = {f"w.{i}": torch.full((1 << 25,), i, dtype=torch.uint8) for i in range(rows)}
    save_state_dict(tmp_path / "ckpt", tensors | {"z": torch.ones(3)}, no_dist=True)
    spec = LoadSpec(transforms=[Stack("w.{i}", "large")])
    convert(tmp_path / "ckpt", tmp_path / "large.pt", to="torch", spec=spec, verify=True)
    assert (tmp_path / "large.pt").stat().st_size > 1 << 32
    got = torch.load(tmp_path / "large.pt", weights_only=True, mmap=True)
    assert got["large"].shape == (rows, 1 << 25)
    assert all(int(got["large"][i, -1]) == i for i in range(rows))
    assert got["z"].equal(torch.ones(3))


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    save_state_dict(tmp_path / "ckpt", {"q": quantized}, no_dist=True)
    with pytest.raises(UnsupportedError, match="'q' is qint8"):
        convert(tmp_path / "ckpt", tmp_path / "model.pt", to="torch")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
