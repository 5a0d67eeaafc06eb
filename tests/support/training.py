# SPDX-License-Identifier: Apache-2.0
"""A small model under FSDP2 with AdamW, and its state dicts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["Training"]


class Training:
    """A model and its optimizer, on all ranks of the default group.

    Args:
        seed: Seed of the initial weights, the same on all ranks.
        hybrid: True: the mesh has 2 x half the ranks; the model is replicated over the first axis, and sharded over
            the second.
    """

    def __init__(self, seed: int, *, hybrid: bool = False) -> None:
        torch.manual_seed(seed)
        size = dist.get_world_size()
        mesh: DeviceMesh = (
            init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
            if hybrid
            else init_device_mesh("cpu", (size,))
        )
        # 5 and 3 rows do not divide by 2 or 4: uneven and empty shards.
        self.model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3)))
        fully_shard(self.model[2], mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self, count: int) -> None:
        """Trains ``count`` steps. All ranks get the same batch, so their number changes sums only by rounding."""
        for number in range(count):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            self.model(batch).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": 3}

    def load_state(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def full_state(self) -> dict[str, Any]:
        """Returns the state with whole tensors. Collective."""
        whole: dict[str, Any] = _gathered(self.state())
        return whole


def _gathered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _gathered(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_gathered(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value
