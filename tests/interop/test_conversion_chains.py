# SPDX-License-Identifier: Apache-2.0
"""Conversions one after the other, over all formats: what a checkpoint holds stays what it was, by its digest."""

from __future__ import annotations

import argparse
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import digest, load_state_dict, save_state_dict
from bytecheckpoint.convert import convert
from bytecheckpoint.convert.conversion import FORMATS, Format
from bytecheckpoint.errors import StorageError, UnsafeObjectError, UnsupportedError
from interop.nested_state import assert_equal, state


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "large": torch.randn(700, 1001, generator=generator),
        "bf16": torch.randn(64, 3, generator=generator).bfloat16(),
        "fp8": torch.randn(64, 64, generator=generator).to(torch.float8_e4m3fn),
        "int": torch.arange(33),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "a.b.nan": torch.tensor([float("nan"), -0.0]),
    }


@pytest.mark.parametrize("seed", range(6))
def test_the_digest_stays(tmp_path: Path, seed: int) -> None:
    """Each step has another format, size of files and number of workers."""
    rng = random.Random(seed)
    save_state_dict(tmp_path / "0", tensors(), no_dist=True)
    wanted = digest(tmp_path / "0")
    source = tmp_path / "0"
    for step, to in enumerate(rng.sample(FORMATS, len(FORMATS)), 1):
        target = tmp_path / f"{step}{'.pt' if to == 'torch' else ''}"
        report = convert(source, target, to=to, shard_size=rng.choice(["500kB", "2MB", "5GB"]), verify=True)
        assert report.num_tensors == len(tensors())
        assert digest(target).keys == wanted.keys, to
        source = target


@pytest.mark.parametrize("to", ["bcp", "dcp", "torch"])
def test_a_file_of_torch_with_objects_and_views(tmp_path: Path, to: Format) -> None:
    base = torch.arange(60.0).view(6, 10)
    saved: dict[str, Any] = {**state(), "turned": base.T, "part": base[1:4, 2:7]}
    torch.save(saved, tmp_path / "saved.pt")
    convert(tmp_path / "saved.pt", tmp_path / "other", to=to, verify=True)
    convert(tmp_path / "other", tmp_path / "whole.pt", to="torch", verify=True)
    assert_equal(torch.load(tmp_path / "whole.pt", weights_only=True), saved)


def test_an_object_that_needs_code_is_copied_as_it_is_or_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "args": argparse.Namespace(lr=0.1)}, tmp_path / "saved.pt")
    with pytest.raises((UnsupportedError, UnsafeObjectError), match="args"):
        convert(tmp_path / "saved.pt", tmp_path / "other.pt", to="torch")
    assert not (tmp_path / "other.pt").exists()
    convert(tmp_path / "saved.pt", tmp_path / "other", to="bcp", verify=True)
    got: dict[str, Any] = {"w": torch.zeros(3), "args": None}
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path / "other"), no_dist=True)
    assert got["args"] == argparse.Namespace(lr=0.1)
    with pytest.raises(UnsafeObjectError, match="args"):
        load_state_dict(tmp_path / "other", got, no_dist=True)


@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_leaves_no_target(tmp_path: Path, to: Format) -> None:
    save_state_dict(tmp_path / "ckpt", tensors(), no_dist=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(StorageError, match="File too large"):
            convert(tmp_path / "ckpt", tmp_path / "out", to=to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "ckpt", tmp_path / "out", to=to, resume=True, verify=True)
    assert digest(tmp_path / "out").keys == digest(tmp_path / "ckpt").keys
