# SPDX-License-Identifier: Apache-2.0
"""The state of live optimizers, keyed by the original names of parameters.

The keys are those of torch's ``StateDictOptions(flatten_optimizer_state_dict=True)``: ``state.{fqn}.{name}`` and
``param_groups.{fqn}.{option}``. They mean the same under every wrapping and in every order of parameters. The ranks of
a pipeline, each with groups of its own, do not collide in these keys. No optimizer step is ever taken to make a state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.convert.nesting import nested
from bytecheckpoint.errors import InvalidPlanError, KeyMismatchError, UnsupportedError
from bytecheckpoint.tensors.chunks import LocalChunks
from bytecheckpoint.tensors.subclass_parts import DESCRIPTION, parts_of
from bytecheckpoint.training_state.flat_parameters import FlatEntry, FlatUnit, flat_units
from bytecheckpoint.training_state.layouts import Layout, layouts_of
from bytecheckpoint.training_state.names import original_name, unwrapped
from bytecheckpoint.training_state.optimizer_contents import OptimizerContents, check_containers
from bytecheckpoint.training_state.options import as_before, is_same
from bytecheckpoint.training_state.stored import Stored, names_below, whole_states

__all__ = ["OptimizerLoad", "OptimizerState"]

_NOT_OPTIONS = frozenset({"params", "param_names"})

_TreePath = tuple[str | int, ...]


@dataclass(frozen=True)
class _Slot:
    """The part of one original parameter that one parameter of an optimizer holds.

    Attributes:
        fqn: Name of the original parameter.
        shape: Shape of the whole original parameter.
        has_state: Whether this rank holds anything of it. Otherwise its state, if any, is on another rank.
        view: Converts a tensor that the optimizer keeps per element to the value for a state dict.
        is_per_element: Whether a tensor of the optimizer has one value for each element of the parameter.
        empty: Makes such a per-element tensor of a dtype, filled with zeros.
        is_flat: Whether the optimizer's parameter is a flat parameter of FSDP1 or a part of one.
    """

    fqn: str
    shape: torch.Size
    has_state: bool
    view: Callable[[torch.Tensor], torch.Tensor]
    is_per_element: Callable[[torch.Tensor], bool]
    empty: Callable[[torch.dtype], torch.Tensor]
    is_flat: bool = True


@dataclass(frozen=True)
class _Member:
    """One parameter of an optimizer. A flat one holds several original parameters.

    Attributes:
        contents: Contents of the optimizer.
        group: Options of the parameter's group.
        key: Key of its state in ``contents``.
        parameter: The parameter that the optimizer holds.
        slots: The original parameters in it.
    """

    contents: OptimizerContents
    group: dict[str, Any]
    key: Hashable
    parameter: nn.Parameter
    slots: tuple[_Slot, ...]

    @property
    def state(self) -> Mapping[str, Any]:
        # Not by index: the dict of states is a defaultdict, and would add an empty state.
        state: Mapping[str, Any] = self.contents.states.get(self.key, {})
        return state


class OptimizerState:
    """What optimizers keep for the parameters of a model.

    Args:
        model: A model as for ``ModuleState``; only its names are used.
        optimizers: One optimizer, or several that have different parameters of the model.
        units: Flat parameters of ``model``; None looks for them.

    Raises:
        InvalidPlanError: A parameter of an optimizer is not in the model, or is in two groups.
        UnsupportedError: Flat parameters cannot be taken apart, or ``OptimizerContents`` refuses an optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        units: Sequence[FlatUnit] | None = None,
    ) -> None:
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else [*optimizers]
        slots = _slots_of(model, flat_units(model) if units is None else units)
        self._members = [*_members(slots, self._optimizers)]

    def values(self) -> dict[str, Any]:
        """Returns all states and options, by key. The tensors share the memory of the optimizers.

        Raises:
            UnsupportedError: For a flat parameter the optimizer keeps a tensor that is not per element, or containers.
                Or ``check_containers`` refuses something.
        """
        values: dict[str, Any] = {}
        for member in self._members:
            for slot in member.slots:
                check_containers(slot.fqn, member.state if slot.has_state else {}, member.group)
                for name, value in member.state.items() if slot.has_state else ():
                    values[f"state.{slot.fqn}.{name}"] = _value_of(slot, name, value)
                for option, value in member.group.items():
                    if option not in _NOT_OPTIONS:
                        values[f"param_groups.{slot.fqn}.{option}"] = value
        return values

    def layouts(self) -> dict[str, Layout]:
        """Returns the layouts of the tensors that a load would not make as they are, by key."""
        return {
            key: layout
            for member in self._members
            for slot in member.slots
            if slot.has_state and not slot.is_flat
            for name, value in member.state.items()
            for key, layout in layouts_of(f"state.{slot.fqn}.{name}", value, member.parameter)
        }

    def plan_load(self, stored: Stored, groups: Mapping[str, str] | None = None) -> OptimizerLoad:
        """Plans what to load from a checkpoint.

        Args:
            stored: Keys of the checkpoint.
            groups: For each parameter the prefix of its options, for checkpoints that have them under other keys.
        """
        return OptimizerLoad(self._members, stored, groups or {})


@dataclass
class _Planned:
    """What is loaded for one member.

    A ``_TreePath`` is a path into the state of a parameter: the name of a state, then the keys through its containers.

    Attributes:
        member: The member.
        tree_paths: The paths of all states, in the order of the checkpoint.
        tensors: The tensors to load into, by path; the optimizer's own tensor where it has a suitable one.
        objects: For the path of each state that is not a tensor, its key in the checkpoint.
        options: For the path of each option, its keys in the checkpoint, one for each original parameter.
        stateless: Parts of a flat parameter for which the checkpoint has options but no state.
    """

    member: _Member
    tree_paths: dict[_TreePath, None] = field(default_factory=dict)
    tensors: dict[_TreePath, torch.Tensor] = field(default_factory=dict)
    objects: dict[_TreePath, str] = field(default_factory=dict)
    options: dict[_TreePath, list[str]] = field(default_factory=dict)
    stateless: list[_Slot] = field(default_factory=list)


class OptimizerLoad:
    """Values for a load of optimizer states. After the load, ``finish`` puts them into the optimizers.

    Attributes:
        values: State dict to load into, by key.
        missing: Names of parameters for which the checkpoint has neither a state nor options.
    """

    def __init__(self, members: Sequence[_Member], stored: Stored, groups: Mapping[str, str]) -> None:
        self.values: dict[str, Any] = {}
        self.missing: list[str] = []
        fqns = {slot.fqn for member in members for slot in member.slots}
        states = names_below(stored, "state.", fqns)
        options = names_below(stored, "param_groups.", fqns | {prefix.split(".", 1)[1] for prefix in groups.values()})
        self._planned: list[_Planned] = []
        for member in members:
            planned, is_known = _Planned(member), False
            for slot in member.slots:
                prefix = groups.get(slot.fqn, f"param_groups.{slot.fqn}")
                of_group = options.get(prefix.split(".", 1)[1], [])
                if slot.fqn not in states and not of_group:
                    self.missing.append(slot.fqn)
                    continue
                is_known = True
                for name in whole_states(states.get(slot.fqn, [])) if slot.has_state else ():
                    self._plan(planned, slot, name, stored)
                for option in (option for option in of_group if option not in _NOT_OPTIONS):
                    key = f"{prefix}.{option}"
                    self._plan_option(planned, stored.tree_path(key, f"{prefix}."), key, stored)
                if slot.is_flat and slot.fqn not in states:
                    planned.stateless.append(slot)
            if is_known:
                self._planned.append(planned)

    def _plan(self, planned: _Planned, slot: _Slot, name: str, stored: Stored) -> None:
        key = f"state.{slot.fqn}.{name}"
        member = planned.member
        if key not in stored:
            self._plan_parts(planned, slot, name, stored)
            return
        found = stored[key]
        path = stored.tree_path(key, f"state.{slot.fqn}.")
        planned.tree_paths[path] = None
        before = planned.tensors.get(path, _at(member.state, path))
        if found is None:
            planned.objects[path] = key
            self.values[key] = None if isinstance(before, torch.Tensor) else before  # `finish` knows what to do
        elif key in stored.layouts and not slot.is_flat:
            stored.check_size(key)
            device = _device_of(member, found.shape)
            layout, dtype = stored.layouts[key], found.known_dtype(key)
            planned.tensors[path] = self.values[key] = layout.made(before, member.parameter, found.shape, dtype, device)
        elif found.shape == slot.shape and not (found.shape == torch.Size() and name == "step"):
            if not isinstance(before, torch.Tensor) or not slot.is_per_element(before):
                before = slot.empty(found.known_dtype(key))
            planned.tensors[path] = before
            self.values[key] = slot.view(before)
        else:
            if not isinstance(before, torch.Tensor) or before.shape != found.shape:
                before = stored.empty(key, _device_of(member, found.shape))
                assert before is not None
            planned.tensors[path] = self.values[key] = before

    def _plan_parts(self, planned: _Planned, slot: _Slot, name: str, stored: Stored) -> None:
        """Plans to fill a tensor of a subclass, of which the checkpoint has the parts.

        Raises:
            InvalidPlanError: The optimizer has no such tensor. It cannot be made: no class is looked for.
        """
        key = f"state.{slot.fqn}.{name}"
        *path, _ = stored.tree_path(f"{key}.{DESCRIPTION}", f"state.{slot.fqn}.")
        before = _at(planned.member.state, tuple(path))
        if not isinstance(before, torch.Tensor) or parts_of(before, key) is None:
            raise InvalidPlanError(
                f"optimizer state '{name}' of '{slot.fqn}' was saved by the parts of a tensor subclass, and this "
                f"{type(planned.member.contents.optimizer).__name__} has no such tensor to fill: let it make its state "
                "before the load, by a step with lr=0 and gradients of zeros. The load then replaces all of it"
            )
        planned.tree_paths[tuple(path)] = None
        planned.tensors[tuple(path)] = self.values[key] = before

    def _plan_option(self, planned: _Planned, path: _TreePath, key: str, stored: Stored) -> None:
        planned.options.setdefault(path, []).append(key)
        if key in self.values:
            return
        found, current = stored[key], _at(planned.member.group, path)
        if found is None:
            self.values[key] = None if isinstance(current, torch.Tensor) else current
        elif isinstance(current, torch.Tensor) and current.shape == found.shape:
            self.values[key] = current.detach().clone()  # a copy, until all options of the group are known to be equal
        else:
            self.values[key] = stored.empty(key, None)

    def finish(self) -> None:
        """Puts the loaded ``values`` into the optimizers, and removes states that the checkpoint does not have.

        Raises:
            KeyMismatchError: Parameters of one group were saved with different options. Nothing was changed except
                tensors that were loaded in place.
        """
        groups: dict[int, tuple[dict[str, Any], dict[_TreePath, list[str]]]] = {}
        for planned in self._planned:
            _, options = groups.setdefault(id(planned.member.group), (planned.member.group, {}))
            for path, keys in planned.options.items():
                options.setdefault(path, []).extend(keys)
        for _, options in groups.values():
            for keys in options.values():
                self._check_equal(keys)
        for planned in self._planned:
            for slot in planned.stateless:
                _forget(slot, planned.tensors.values())
            objects = {
                path: as_before(_at(planned.member.state, path), self.values[key])
                for path, key in planned.objects.items()
            }
            values = {**planned.tensors, **objects}
            state = nested({path: values[path] for path in planned.tree_paths})
            if state:
                planned.member.contents.states[planned.member.key] = state
            else:
                planned.member.contents.states.pop(planned.member.key, None)
        for group, options in groups.values():
            loaded = {path: as_before(_at(group, path), self.values[keys[0]]) for path, keys in options.items()}
            group.update(nested(loaded))
        for contents in {id(planned.member.contents): planned.member.contents for planned in self._planned}.values():
            contents.hand_over()

    def _check_equal(self, keys: list[str]) -> None:
        first = self.values[keys[0]]
        for key in keys[1:]:
            other = self.values[key]
            if not is_same(first, other):
                raise KeyMismatchError(
                    f"load of an optimizer: parameters of one group were saved with different options: '{keys[0]}' is "
                    f"{first!r}, '{key}' is {other!r}; make the groups as they were when it was saved"
                )


def _device_of(member: _Member, shape: torch.Size) -> torch.device | None:
    """Returns the device of a new plain tensor for a state; None for the default device."""
    on_device = member.group.get("capturable") or member.group.get("fused")
    return member.parameter.device if on_device or shape != torch.Size() else None


def _at(container: Any, path: _TreePath) -> Any:
    """Returns what ``container`` has at ``path``, or None."""
    for step in path:
        is_there = step in container if isinstance(container, Mapping) else _is_place(container, step)
        if not is_there:
            return None
        container = container[step]
    return container


def _is_place(container: object, step: str | int) -> bool:
    return isinstance(container, (list, tuple)) and isinstance(step, int) and step < len(container)


def _members(slots: Mapping[int, tuple[_Slot, ...]], optimizers: Sequence[Optimizer]) -> Iterator[_Member]:
    places: dict[str, tuple[OptimizerContents, int]] = {}
    for contents in map(OptimizerContents, optimizers):
        for number, group, key, parameter in contents.members():
            kind = type(contents.optimizer).__name__
            if id(parameter) not in slots:
                raise InvalidPlanError(
                    f"a parameter of {[*parameter.shape]} in group {number} of a {kind} is not one of the model's: "
                    "pass the model that the optimizer was made for, wrapped as it was then"
                )
            for slot in slots[id(parameter)]:
                first, of_first = places.setdefault(slot.fqn, (contents, number))
                if first is not contents or of_first != number:
                    raise InvalidPlanError(
                        f"'{slot.fqn}' is in group {of_first} of a {type(first.optimizer).__name__} and in group "
                        f"{number} of a {kind}: only one state of each parameter can be saved; put the state_dict() of "
                        "one of them into extra_state"
                    )
            yield _Member(contents, group, key, parameter, slots[id(parameter)])


def _slots_of(model: nn.Module, units: Sequence[FlatUnit]) -> dict[int, tuple[_Slot, ...]]:
    """Returns the slots of each parameter that may be in an optimizer, by the parameter's id."""
    slots: dict[int, tuple[_Slot, ...]] = {}
    for unit in units:
        if id(unit.parameter) in slots:
            continue  # a module with several names: the first name counts, as in torch
        slots[id(unit.parameter)] = tuple(_slot_of_unit(unit, entry) for entry in unit.entries)
        for entry in unit.entries:
            if entry.parameter is not None:
                slot = _slot_of_entry(entry) if unit.is_sharded else _slot_of_parameter(entry.fqn, entry.parameter)
                slots[id(entry.parameter)] = (slot,)
    for name, parameter in unwrapped(model).named_parameters():
        if id(parameter) not in slots:
            slots[id(parameter)] = (_slot_of_parameter(original_name(name), parameter),)
    return slots


def _slot_of_parameter(fqn: str, parameter: nn.Parameter) -> _Slot:
    return _Slot(
        fqn,
        parameter.shape,
        has_state=True,
        view=lambda tensor: tensor,
        is_per_element=lambda tensor: tensor.shape == parameter.shape,
        empty=lambda dtype: torch.zeros_like(parameter, dtype=dtype, requires_grad=False),
        is_flat=False,
    )


def _slot_of_unit(unit: FlatUnit, entry: FlatEntry) -> _Slot:
    return _Slot(
        entry.fqn,
        entry.shape,
        has_state=True,  # of the flat parameter, which has elements on every rank, if only padding
        view=lambda tensor: entry.chunks_of(unit.local_part(entry, tensor)),
        is_per_element=lambda tensor: tensor.shape == torch.Size([unit.num_elements]),
        empty=lambda dtype: torch.zeros(unit.num_elements, dtype=dtype, device=unit.shard.device),
    )


def _slot_of_entry(entry: FlatEntry) -> _Slot:
    """Returns the slot of a parameter with ``use_orig_params``.

    What the optimizer keeps has one dim. The parameter itself may have more: FSDP shows all of it after some forwards.
    """
    assert entry.parameter is not None
    device = entry.parameter.device
    return _Slot(
        entry.fqn,
        entry.shape,
        has_state=entry.numel > 0 or entry.shape.numel() == 0,
        view=entry.chunks_of,
        is_per_element=lambda tensor: tensor.shape == torch.Size([entry.numel]),
        empty=lambda dtype: torch.zeros(entry.numel, dtype=dtype, device=device),
    )


def _forget(slot: _Slot, tensors: Iterable[torch.Tensor]) -> None:
    """Sets the part of a flat parameter for which no state was saved to zeros, as an optimizer begins."""
    for tensor in tensors:
        chunks = slot.view(tensor) if slot.is_per_element(tensor) else None
        for piece in chunks.tensors if isinstance(chunks, LocalChunks) else ():
            piece.zero_()


def _value_of(slot: _Slot, name: str, value: Any) -> Any:
    """Converts a state of an optimizer to a value for a state dict.

    The flat part of a parameter has one dim, even if the parameter is a scalar.

    Raises:
        UnsupportedError: FSDP1 does not say which elements of the parameter the value belongs to.
    """
    holds_tensors = isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value)
    is_nest = holds_tensors or isinstance(value, Mapping)
    if is_nest and (slot.is_flat or isinstance(value, tuple)):
        raise UnsupportedError(
            f"optimizer state '{name}' of '{slot.fqn}' is a {type(value).__name__}: tensors and plain values can be "
            "saved, and lists and dicts of them, but not for FSDP1; put the state_dict() of this optimizer into "
            "extra_state"
        )
    if not slot.is_flat or not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    if slot.is_per_element(value):
        return slot.view(value)
    raise UnsupportedError(
        f"optimizer state '{name}' of '{slot.fqn}' is a tensor of {[*value.shape]}, which FSDP1 cannot have meant for "
        f"the elements of {[*slot.shape]}; use fully_shard (FSDP2) with this optimizer"
    )
