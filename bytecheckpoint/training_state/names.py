# SPDX-License-Identifier: Apache-2.0
"""Original names: the names that parameters had before the modules were wrapped."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["inner", "is_wrapper", "name_of_key", "original_name", "unwrapped"]

# Names of the attributes that FSDP1, activation checkpointing and torch.compile put between a module and its child.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def original_name(name: str) -> str:
    """Returns the name of a parameter, buffer or module without the names of wrappers in it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def name_of_key(module: nn.Module, key: str) -> str:
    """Returns the original name of what ``module.state_dict()`` has under ``key``."""
    kept: list[str] = []
    place: object = module
    for part in key.split("."):
        if part not in _WRAPPERS and not (part == "module" and isinstance(place, DistributedDataParallel)):
            kept.append(part)
        place = getattr(place, part, None) if isinstance(place, nn.Module) else None
    return ".".join(kept)


def is_wrapper(model: nn.Module) -> bool:
    """Whether ``model`` is DistributedDataParallel or made by torch.compile. Checkpoints have no names of these."""
    return isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod")


def inner(wrapper: nn.Module) -> nn.Module:
    """Returns the module inside a wrapper, for which ``is_wrapper`` is True."""
    return wrapper.module if isinstance(wrapper, DistributedDataParallel) else wrapper._orig_mod  # type: ignore[return-value]


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside all wrappers for which ``is_wrapper`` is True."""
    while is_wrapper(model):
        model = inner(model)
    return model
