# SPDX-License-Identifier: Apache-2.0
"""FSDP2 training on the ranks of the default process group, and its state in the form that DCP saves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from training.model import Decoder, ModelConfig, global_batch, next_token_loss

WARMUP_STEPS = 20


class Trainer:
    """A sharded decoder with AdamW and a learning-rate schedule. Construction and all methods are collective.

    Args:
        config: Size of the model.
        num_sequences: Sequences in the global batch; a multiple of the number of ranks.
        data_seed: Seed of the data. Two jobs with the same seed see the same data.
        init_seed: Seed of the initial parameters, the same on every rank.
    """

    def __init__(self, config: ModelConfig, num_sequences: int, data_seed: int, init_seed: int) -> None:
        torch.manual_seed(init_seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = Decoder(config)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, start_factor=0.2, total_iters=WARMUP_STEPS)
        self.num_sequences = num_sequences
        self.progress = {"step": 0, "data_seed": data_seed}

    def train_step(self) -> tuple[int, float]:
        """Trains on the next global batch. Returns the step's number, from 1, and the loss over that whole batch."""
        self.progress["step"] += 1
        step = self.progress["step"]
        batch = global_batch(step, self.num_sequences, self.progress["data_seed"])
        loss = next_token_loss(self.model, batch.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        mean_loss = loss.detach().double()
        dist.all_reduce(mean_loss)
        return step, mean_loss.item() / dist.get_world_size()

    def state(self) -> dict[str, Any]:
        """Returns the state to save or to load into: DTensors that share memory with the model and the optimizer."""
        return self._state(StateDictOptions())

    def full_state(self) -> dict[str, Any]:
        """Returns the same state, gathered into whole tensors in host memory on rank 0. Other ranks get no tensors."""
        return self._state(StateDictOptions(full_state_dict=True, cpu_offload=True))

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over a loaded ``state()``, including values that are not tensors."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])
        self.progress = dict(state["progress"])

    def _state(self, options: StateDictOptions) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "progress": dict(self.progress),
        }
