# SPDX-License-Identifier: Apache-2.0
"""Tests a save and a load in one process, without torch.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dtypes import NAMES
from support.equality import assert_equal, settled

from bytecheckpoint import BcpReader, BcpWriter


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return {
        "model": {
            "weight": torch.randn(300, 70, generator=generator),
            "transposed": torch.randn(64, 33, generator=generator).t(),
            "strided": torch.arange(1000)[::3],
            "channels_last": torch.randn(2, 3, 5, 7, generator=generator).contiguous(memory_format=torch.channels_last),
            "expanded": torch.randn(1, 9, generator=generator).expand(5, 9),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2.5),
            "large": torch.randn(3 << 20, generator=generator),
            "parameter": torch.nn.Parameter(torch.randn(4, generator=generator)),
            "conjugate": torch.randn(6, dtype=torch.complex64, generator=generator).conj(),
        },
        "step": 12,
        "betas": [0.9, 0.95],
        "name": "x",
    }


def zeros_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: zeros_like(item) for key, item in value.items()}
    return [zeros_like(item) for item in value] if isinstance(value, list) else type(value)()


@pytest.mark.parametrize("reader", [BcpReader, dcp.FileSystemReader])
def test_state_comes_back(tmp_path: Path, reader: Any) -> None:
    wanted = state()
    dcp.save(wanted, storage_writer=BcpWriter(tmp_path / "ckpt"))
    got = zeros_like(wanted)
    dcp.load(got, storage_reader=reader(tmp_path / "ckpt"))
    assert_equal(got, settled(wanted))


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_of_the_format(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (6 * 4 * dtype.itemsize,), dtype=torch.uint8)
    wanted = raw.view(dtype).reshape(6, 4)
    dcp.save({"t": wanted}, storage_writer=BcpWriter(tmp_path))
    for reader in (BcpReader(tmp_path), dcp.FileSystemReader(tmp_path)):
        got = torch.zeros(6 * 4 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(6, 4)
        dcp.load({"t": got}, storage_reader=reader)
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
