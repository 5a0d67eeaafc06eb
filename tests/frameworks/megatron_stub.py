# SPDX-License-Identifier: Apache-2.0
"""As much of ``megatron.core.dist_checkpointing`` as our strategies use, where Megatron-Core is not installed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

__all__ = ["AsyncRequest", "LoadStrategy", "SaveStrategy", "ShardedObject", "ShardedTensor", "strategies"]


@dataclass
class ShardedTensor:
    """A part of a tensor; its first ``prepend_axis_num`` offsets are of axes that ``data`` does not have."""

    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False

    def init_data(self, device: str) -> None:
        if self.data is None:
            shape = self.global_shape[self.prepend_axis_num :]
            self.data = torch.empty(shape, dtype=self.dtype, device=device)


@dataclass
class ShardedObject:
    """A part of an object."""

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any = 0

    @property
    def unique_key(self) -> str:
        offset, shape = (".".join(map(str, one)) for one in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"


class AsyncRequest(NamedTuple):
    """A save in the background."""

    async_fn: Any
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Any]


class SaveStrategy:
    """Megatron's own."""

    def __init__(self, backend: str = "torch_dist", version: int = 1) -> None:
        self.backend, self.version = backend, version
        self.separation_hint = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        raise AssertionError("Megatron's own save was called")

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        raise AssertionError("Megatron's own async_save was called")


class LoadStrategy:
    """Megatron's own."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        raise AssertionError("Megatron's own load was called")


def is_main_replica(replica_id: Any) -> bool:
    return replica_id in (0, (0, 0))


def _make_plain(tree: Any) -> None:
    """Does nothing: nothing here is quantized."""


def strategies() -> Any:
    """Returns our module, imported with what is above in the place of Megatron-Core."""
    contents: dict[str, dict[str, Any]] = {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.dist_checkpointing": {},
        "megatron.core.dist_checkpointing.strategies": {},
        "megatron.core.dist_checkpointing.mapping": {
            "ShardedTensor": ShardedTensor,
            "ShardedObject": ShardedObject,
            "is_main_replica": is_main_replica,
        },
        "megatron.core.dist_checkpointing.utils": {"force_all_tensors_to_non_fp8": _make_plain},
        "megatron.core.dist_checkpointing.strategies.async_utils": {"AsyncRequest": AsyncRequest},
        "megatron.core.dist_checkpointing.strategies.torch": {
            "TorchDistSaveShardedStrategy": SaveStrategy,
            "TorchDistLoadShardedStrategy": LoadStrategy,
        },
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
    return import_module("bytecheckpoint.integrations.megatron")
