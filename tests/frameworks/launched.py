# SPDX-License-Identifier: Apache-2.0
"""What tests of the integrations share: ranks that look as if a launcher had started them, kills, saves that fail."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ports import free_port
from torch.distributed.tensor import DTensor

__all__ = ["as_launched", "block_commit", "die", "whole"]


def as_launched() -> None:
    """Sets the variables of torchrun. The default group is there already, and frameworks take it as it is."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), TORCHELASTIC_RUN_ID="tests")


def die() -> None:
    """Kills this process, as the kernel does when memory is full."""
    os.kill(os.getpid(), signal.SIGKILL)


def block_commit(checkpoint: Path) -> None:
    """Makes every save to a folder fail: what stands where its commit mark belongs cannot be replaced."""
    (checkpoint / ".metadata" / "in the way").mkdir(parents=True, exist_ok=True)


def whole(tree: Any) -> Any:
    """Returns a copy of a state with whole tensors. Collective if there are sharded ones."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [whole(value) for value in tree]
    if isinstance(tree, DTensor):
        tree = tree.full_tensor()
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree
