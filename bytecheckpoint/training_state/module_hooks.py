# SPDX-License-Identifier: Apache-2.0
"""Finds what a module adds when its state dict is made or loaded: hooks, and methods that it overrides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

__all__ = ["hooks_of", "is_changed_by_loads", "own_methods"]

_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", *_LOAD_HOOKS)

# Hooks from these modules of torch may be ignored. Hooks of wrappers rename keys and keep the wrappers up to date: we
# have names of our own and load in place. Hooks of norms read what older versions wrote.
_OF_TORCH = ("torch.distributed.fsdp", "torch.distributed.algorithms._checkpoint", "torch.nn.utils.")


def hooks_of(module: nn.Module, kinds: Sequence[str] = _HOOKS) -> Iterator[str]:
    """Returns the name of the Python module of each hook that is not torch's own."""
    for kind in kinds:
        for hook in getattr(module, kind).values():
            home = getattr(hook, "__module__", None) or getattr(getattr(hook, "hook", None), "__module__", "") or ""
            if not home.startswith(_OF_TORCH):
                yield home


def own_methods(module: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """Yields those of ``names`` that ``module`` overrides.

    Overrides by modules of torch.nn do not count: they only read what older versions wrote.
    """
    for name in names:
        home = getattr(getattr(type(module), name), "__module__", "")
        if name in vars(module) or not home.startswith("torch.nn.modules."):
            yield name


def is_changed_by_loads(model: nn.Module) -> bool:
    """Whether ``model.load_state_dict`` does more than copy tensors into parameters and buffers."""
    return any(own_methods(model, ["load_state_dict"])) or any(
        any(hooks_of(module, _LOAD_HOOKS)) or any(own_methods(module, ["_load_from_state_dict", "set_extra_state"]))
        for module in model.modules()
    )
