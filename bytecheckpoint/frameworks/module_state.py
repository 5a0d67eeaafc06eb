# SPDX-License-Identifier: Apache-2.0
"""The state of live modules, keyed by original names whatever they are wrapped in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.frameworks.flat_parameters import FlatUnit, flat_units, has_flat_parameters
from bytecheckpoint.frameworks.names import original_name, unwrapped

__all__ = ["ModuleState", "tied_names"]

_EXTRA_STATE = "_extra_state"


class ModuleState:
    """Parameters and buffers of a model, as values of a state dict that share its memory.

    Args:
        model: Plain, or wrapped by DistributedDataParallel, FSDP1, ``fully_shard``, tensor parallelism, activation
            checkpointing, torch.compile.
        decompose: Of FSDP1: take flat parameters apart where they lie, without communication. Else FSDP's own sharded
            state dict, for which all ranks gather each flat parameter; then this is collective.

    Attributes:
        values: Original name to tensor, DTensor, LocalChunks, or the extra state of a module.
        units: Flat parameters that were taken apart; None if none were to be.

    Raises:
        UnsupportedError: Flat parameters that cannot be taken apart: over tensor parallelism, or of modules with hooks
            of their own that change the state dict.
    """

    def __init__(self, model: nn.Module, decompose: bool = True) -> None:
        self._model = model
        self.units = flat_units(model) if decompose and has_flat_parameters(model) else None
        self.values: dict[str, Any] = (
            get_model_state_dict(model, options=_OPTIONS) if self.units is None else _decomposed(model, self.units)
        )

    def before_load(self) -> None:
        """What FSDP1 still keeps of gathered parameters is let go of: it will be out of date."""
        for unit in self.units or ():  # FSDP's own load does so by itself
            unit.let_go_of_gathered()

    def after_load(self) -> None:
        """Hands over what was not loaded in place: extra states, and tensors that hooks made."""
        if self.units is not None:
            modules = {original_name(name): module for name, module in _modules(self._model)}
            for key, value in self.values.items():
                name, _, last = key.rpartition(".")
                if last == _EXTRA_STATE:
                    modules[name].set_extra_state(value)
            return
        own = {_storage(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        is_in_place = all(_is_within(value, own) for value in self.values.values())
        if not is_in_place:
            set_model_state_dict(self._model, self.values, options=_OPTIONS)


def tied_names(model: nn.Module, units: Sequence[FlatUnit] | None = None) -> list[list[str]]:
    """Original names of each parameter that has several, the first as ``state_dict`` gives them first.

    Args:
        units: Flat parameters of ``model``; None looks for them.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(original_name(name))
    if units is None:
        try:
            units = flat_units(model)
        except UnsupportedError:  # FSDP over tensor parallelism, which is saved by FSDP's own state dict
            units = []
    for unit in units:
        for alias, fqn in unit.aliases.items():
            of_parameter = next((known for known in names.values() if fqn in known), None)
            if of_parameter is None:
                names[len(names)] = of_parameter = [fqn]
            if alias not in of_parameter:
                of_parameter.append(alias)
    return [of_parameter for of_parameter in names.values() if len(of_parameter) > 1]


_OPTIONS = StateDictOptions(strict=False)


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _is_within(value: object, storages: set[int]) -> bool:
    # A ShardedTensor is of FSDP1's own state dict, for which it copies.
    if not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensor):
        return False
    return value.numel() == 0 or _storage(value) in storages


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Of FSDP's wrappers what they wrap: the wrappers hold nothing themselves. Under all names, as in a state dict."""
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, FullyShardedDataParallel):
            yield name, module


def _decomposed(model: nn.Module, units: Sequence[FlatUnit]) -> dict[str, Any]:
    """As ``state_dict`` gives it, and in its order within each module; of flat parameters what this rank holds."""
    flat: dict[str, Any] = {}
    flat_parameters = {id(unit.parameter) for unit in units}  # a module has it without `use_orig_params`
    for unit in units:
        shard = unit.shard
        for entry in unit.entries:
            flat[entry.fqn] = entry.chunks_of(unit.local_part(entry, shard))
        for alias, fqn in unit.aliases.items():
            flat[alias] = flat[fqn]
    values: dict[str, Any] = {}
    for name, module in _modules(model):
        _refuse_hooks(name, module)
        prefix = original_name(name) + "." if original_name(name) else ""
        for local_name, parameter in module._parameters.items():
            is_flat = id(parameter) in flat_parameters or prefix + local_name in flat
            if parameter is not None and not is_flat:
                values[prefix + local_name] = parameter.detach()
        for local_name, buffer in module._buffers.items():
            if buffer is not None and local_name not in module._non_persistent_buffers_set:
                values[prefix + local_name] = buffer.detach()
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            values[prefix + _EXTRA_STATE] = module.get_extra_state()
    return {**values, **flat}


def _refuse_hooks(name: str, module: nn.Module) -> None:
    """FSDP's own hooks are those that are not needed; others would be left out."""
    hooks = [
        *module._state_dict_hooks.values(),
        *module._state_dict_pre_hooks.values(),
        *module._load_state_dict_pre_hooks.values(),
        *module._load_state_dict_post_hooks.values(),
    ]
    for hook in hooks:
        home = getattr(hook, "__module__", None) or getattr(getattr(hook, "hook", None), "__module__", "") or ""
        if not home.startswith(("torch.distributed.fsdp", "torch.distributed.algorithms._checkpoint")):
            raise UnsupportedError(
                f"'{original_name(name)}', a {type(module).__name__}, has a state dict hook of {home}, which taking "
                "flat parameters apart would leave out; pass save_decomposed_model_optimizer=False (and "
                "load_decomposed_model_optimizer=False)"
            )
    for method in ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict"):
        home = getattr(getattr(type(module), method), "__module__", "")
        # Those of torch.nn read what older versions wrote, which is not what is loaded here.
        if not home.startswith("torch.nn.modules."):
            raise UnsupportedError(
                f"'{original_name(name)}', a {type(module).__name__}, has its own {method}, which taking flat "
                "parameters apart would leave out; pass save_decomposed_model_optimizer=False (and "
                "load_decomposed_model_optimizer=False)"
            )
