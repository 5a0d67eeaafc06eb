# SPDX-License-Identifier: Apache-2.0
"""A nested state dict with tensors of several kinds and objects, saved by several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bytecheckpoint import save_state_dict


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model": {
            "embed.w": torch.randn(3000, 1001, generator=generator),
            "half": torch.randn(64, 3, generator=generator).to(torch.bfloat16),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.zeros(0, 4),
            "complex": torch.randn(4, 4, dtype=torch.complex64, generator=generator),
        },
        "optimizer": {"state": {"embed.w": {"step": torch.tensor(3.0)}}},
        "step": 7,
        "names": ["a", {"b": (1, 2.5)}],
    }


def assert_equal(got: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(got[key], value)
    elif isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    else:
        assert got == wanted


def save_sharded(path: str, stock: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    to_save = state()
    to_save["model"]["embed.w"] = distribute_tensor(to_save["model"]["embed.w"], mesh, [Shard(1)])
    if stock:
        dcp.save(to_save, storage_writer=dcp.FileSystemWriter(path))
    else:
        save_state_dict(path, to_save)
