# SPDX-License-Identifier: Apache-2.0
"""The state of live modules, keyed by original names, whatever wraps the modules."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.errors import ConfigError, UnsupportedError
from bytecheckpoint.native import _C
from bytecheckpoint.tensors.subclass_parts import parts_of
from bytecheckpoint.training_state.flat_parameters import FlatUnit, flat_units, has_flat_parameters
from bytecheckpoint.training_state.module_hooks import hooks_of, is_changed_by_loads, own_methods
from bytecheckpoint.training_state.names import inner, is_wrapper, name_of_key, original_name, unwrapped

__all__ = ["ModuleState", "tied_names"]

_EXTRA_STATE = "_extra_state"


class ModuleState:
    """Parameters and buffers of a model, as values of a state dict that share its memory.

    Args:
        model: A plain model, or one wrapped by DistributedDataParallel, FSDP1, ``fully_shard``, tensor parallelism,
            activation checkpointing or torch.compile.
        decompose: For FSDP1 only. True takes flat parameters apart in place, without communication. False uses FSDP's
            own sharded state dict, for which all ranks gather each flat parameter; the constructor is then collective.

    Attributes:
        values: For each original name a tensor, DTensor, LocalChunks, or the extra state of a module.
        units: Flat parameters that were taken apart; None if the model has none or ``decompose`` is False.

    Raises:
        UnsupportedError: Flat parameters cannot be taken apart: they are over tensor parallelism, or belong to modules
            with their own state dict hooks. Or a parameter or buffer is marked as parts of a larger tensor.
    """

    def __init__(self, model: nn.Module, decompose: bool = True) -> None:
        _refuse_parts(model)
        self._model = model
        self.units: Sequence[FlatUnit] | None = None
        self.values: dict[str, Any] = {}
        self._state_dict: _StateDict | None = None
        if not has_flat_parameters(model):
            self._state_dict = _StateDict(model)
            self.values = self._state_dict.values
        elif decompose:
            self.units = flat_units(model)
            self.values = _decomposed(model, self.units)
        else:
            self.values = get_model_state_dict(model, options=_OPTIONS)

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Refuses a model of which some shards are on other ranks than ``ranks``: a load would lack these shards.

        Raises:
            ConfigError: The message names these other ranks.
        """
        holders = {rank for unit in self.units or () for rank in unit.ranks}
        sharded = (parameter for parameter in self._model.parameters() if isinstance(parameter, DTensor))
        for mesh, placements in {(parameter.device_mesh, parameter.placements) for parameter in sharded}:
            place = mesh.get_coordinate()
            if place is not None:  # otherwise this rank holds no shard of it
                of_axes = zip(placements, place, strict=True)
                shards = mesh.mesh[tuple(slice(None) if placement.is_shard() else at for placement, at in of_axes)]
                holders.update(shards.flatten().tolist())
        absent = sorted(holders.difference(ranks))
        if absent:
            raise ConfigError(
                f"process_group has the ranks {[*ranks]}, and shards of the model are on the ranks {absent} too: give "
                "a group of all ranks over which it is sharded"
            )

    def each_ranks_own(self) -> list[str]:
        """Returns the keys whose values may differ between ranks: buffers, and what modules and hooks add.

        For each of these keys a save takes the value of the first rank that has it, just as DDP broadcasts it.
        """
        named = unwrapped(self._model).named_parameters(remove_duplicate=False)
        parameters = {original_name(name) for name, _ in named}
        return [
            key
            for key, value in self.values.items()
            if key not in parameters and (type(value) is torch.Tensor or not isinstance(value, torch.Tensor))
        ]

    def before_load(self) -> None:
        """Frees the gathered parameters that FSDP1 still keeps, because a load makes them out of date."""
        for unit in self.units or ():  # with FSDP's own state dict, FSDP does this itself
            unit.let_go_of_gathered()

    def after_load(self, loaded: Mapping[str, Any]) -> list[str]:
        """Passes to the modules what was not loaded in place (extra states, tensors of hooks), and calls load hooks.

        Args:
            loaded: The entries of ``values`` that were loaded.

        Returns:
            Names of the values that the modules did not take.
        """
        self.values.update(loaded)
        if self._state_dict is not None:
            return self._state_dict.load(loaded)
        if self.units is None:
            return [*set_model_state_dict(self._model, self.values, options=_OPTIONS).unexpected_keys]
        modules = {original_name(name): module for name, module in _modules(self._model)}
        for key, value in self.values.items():
            name, _, last = key.rpartition(".")
            if last == _EXTRA_STATE:
                modules[name].set_extra_state(value)
        return []


class _StateDict:
    """``state_dict()`` of a model without flat parameters, under original names.

    It is the state dict of the module inside DistributedDataParallel and torch.compile, because the
    ``load_state_dict`` of these wrappers does not call one that the module overrides. Only if a wrapper has hooks
    itself, its own state dict is used.

    Attributes:
        values: The values of the state dict, by original name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._module = model
        while is_wrapper(self._module) and not any(hooks_of(self._module)):
            self._module = inner(self._module)
        with torch.no_grad():
            state = self._module.state_dict()
        self._versions = getattr(state, "_metadata", None)  # versions of modules, which their load hooks may need
        self._keys = {name_of_key(self._module, key): key for key in state}
        self.values: dict[str, Any] = dict(zip(self._keys, state.values(), strict=True))

    def load(self, loaded: Mapping[str, Any]) -> list[str]:
        """Does what ``ModuleState.after_load`` does."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        own = {storage for tensor in tensors for storage in _storages(tensor)}
        if all(_is_within(value, own) for value in loaded.values()) and not is_changed_by_loads(self._module):
            return []
        state = OrderedDict((self._keys[name], value) for name, value in loaded.items())
        if self._versions is not None:
            state._metadata = self._versions  # type: ignore[attr-defined]
        with torch.no_grad():
            result = self._module.load_state_dict(state, strict=False)
        return [name_of_key(self._module, key) for key in getattr(result, "unexpected_keys", ())]


def tied_names(model: nn.Module, units: Sequence[FlatUnit] | None = None) -> list[list[str]]:
    """Returns the original names of each parameter that has several. The first is the first one in ``state_dict``.

    Args:
        model: A model as for ``ModuleState``.
        units: Flat parameters of ``model``; None looks for them.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(original_name(name))
    if units is None:
        try:
            units = flat_units(model)
        except UnsupportedError:  # FSDP over tensor parallelism is saved by FSDP's own state dict
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


def _storages(tensor: torch.Tensor) -> set[int]:
    """Returns the addresses of the memory that a tensor is in, or the parts that it is made of."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    parts = parts_of(local, "") or {(): local}
    return {part.untyped_storage().data_ptr() for part in parts.values() if isinstance(part, torch.Tensor)}


def _is_within(value: object, storages: set[int]) -> bool:
    # A ShardedTensor comes from FSDP1's own state dict, whose tensors are copies.
    if not isinstance(value, torch.Tensor) or isinstance(value, _compat.ShardedTensor):
        return False
    return value.numel() == 0 or _storages(value) <= storages


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields all modules except FSDP's wrappers, which hold nothing themselves.

    A module occurs under each of its names, as in a state dict.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, FullyShardedDataParallel):
            yield name, module


def _decomposed(model: nn.Module, units: Sequence[FlatUnit]) -> dict[str, Any]:
    """Returns the values of ``state_dict()``, in its order within each module; this rank's part of flat parameters."""
    flat: dict[str, Any] = {}
    flat_parameters = {id(unit.parameter) for unit in units}  # without `use_orig_params` they stand in modules
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


def _refuse_parts(model: nn.Module) -> None:
    """Refuses tensors that are marked as parts of a larger tensor.

    Torch's state dict loses the mark, and the state of an optimizer never has one.

    Raises:
        UnsupportedError: There is such a tensor.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if _C.is_marked_as_parts(tensor):
            raise UnsupportedError(
                f"'{original_name(name)}' is marked as parts of a larger tensor (torch's CheckpointableTensor), which "
                "a module's state dict does not show; use dcp.save and dcp.load with a state dict of such tensors"
            )


def _refuse_hooks(name: str, module: nn.Module) -> None:
    """Refuses state dict hooks and methods that are not FSDP's own: taking flat parameters apart would skip them."""
    methods = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
    for what in (
        *(f"a state dict hook of {home}" for home in hooks_of(module)),
        *(f"its own {method}" for method in own_methods(module, methods)),
    ):
        raise UnsupportedError(
            f"'{original_name(name)}', a {type(module).__name__}, has {what}, which taking flat parameters apart would "
            "leave out; pass save_decomposed_model_optimizer=False (and load_decomposed_model_optimizer=False)"
        )
