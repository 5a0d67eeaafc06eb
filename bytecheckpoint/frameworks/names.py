# SPDX-License-Identifier: Apache-2.0
"""Names of parameters as they were before anything was wrapped around the modules."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["original_name", "unwrapped"]

# What FSDP1, activation checkpointing and torch.compile put between a module and its child.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def original_name(name: str) -> str:
    """``name`` of a parameter, buffer or module, without the wrappers in it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module within DistributedDataParallel, which names nothing that a checkpoint keeps."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
    return model
