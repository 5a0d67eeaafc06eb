# SPDX-License-Identifier: Apache-2.0
"""The contents of one optimizer: its live state, or the state dict that its own ``state_dict`` returns."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UnsupportedError

__all__ = ["OptimizerContents", "check_containers"]

_METHODS = ("state_dict", "load_state_dict")
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_ELSE = "put the state_dict() of this optimizer into extra_state"


class OptimizerContents:
    """States and options of an optimizer.

    These are the live ones, unless the optimizer overrides ``state_dict`` or ``load_state_dict``, or has hooks for
    them. In that case they are those of its state dict, which ``hand_over`` passes to ``load_state_dict``.

    Attributes:
        optimizer: The optimizer.
        states: State of each parameter, by the key that ``members`` returns for it.

    Raises:
        UnsupportedError: A state belongs to no parameter, or the state dict is not by parameter, as torch's is.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = [[*group["params"]] for group in optimizer.param_groups]
        self._state_dict: dict[str, Any] | None = None
        self.states: MutableMapping[Any, Any] = optimizer.state
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        # Check this first: torch's own state_dict() raises a KeyError for a parameter that is in no group.
        self._check_states({key: state for key, state in self.states.items() if isinstance(key, torch.Tensor)})
        if _has_own_state_dict(optimizer):
            self._state_dict = optimizer.state_dict()
            self._check_form(self._state_dict)
            self.states, self._groups = self._state_dict["state"], self._state_dict["param_groups"]
        self._check_states(self.states)

    def members(self) -> Iterator[tuple[int, dict[str, Any], Hashable, nn.Parameter]]:
        """Yields for each parameter: number of its group, options of the group, key of its state, the parameter.

        The options can be changed in place.
        """
        for number, (group, parameters) in enumerate(zip(self._groups, self._parameters, strict=True)):
            keys = parameters if self._state_dict is None else group["params"]
            for key, parameter in zip(keys, parameters, strict=True):
                yield number, group, key, parameter

    def hand_over(self) -> None:
        """Passes the state dict to the optimizer, if there is one. ``states`` and options must be loaded before.

        The optimizer's own code may raise any exception.
        """
        if self._state_dict is not None:
            self.optimizer.load_state_dict(self._state_dict)

    def _check_states(self, states: Mapping[Any, Any]) -> None:
        keys = {_of(key) for _, _, key, _ in self.members()}
        for key, state in states.items():
            is_empty = isinstance(state, Mapping) and not state
            if _of(key) not in keys and not is_empty:
                name = f"a tensor of {[*key.shape]}" if isinstance(key, torch.Tensor) else repr(key)
                raise UnsupportedError(
                    f"a {type(self.optimizer).__name__} keeps state under {name}, which is not a parameter of its "
                    f"groups: this state would be lost; {_ELSE}"
                )

    def _check_form(self, state: Any) -> None:
        wanted = [len(parameters) for parameters in self._parameters]
        keys = [*state] if isinstance(state, dict) else type(state).__name__
        found: Any = None
        if isinstance(keys, list) and {*keys} == {"state", "param_groups"}:
            found = [len(group["params"]) for group in state["param_groups"]]
            if found == wanted:
                return
        raise UnsupportedError(
            f"state_dict() of a {type(self.optimizer).__name__} is not by parameter: it must have 'state' and "
            f"'param_groups' with groups of {wanted} parameters, got {keys if found is None else found}; {_ELSE}"
        )


def _of(key: object) -> object:
    """Returns a key for comparison: tensors are compared by identity."""
    return id(key) if isinstance(key, torch.Tensor) else key


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    overrides = any(getattr(type(optimizer), name) is not getattr(Optimizer, name) for name in _METHODS)
    is_patched = any(name in vars(optimizer) for name in _METHODS)
    return overrides or is_patched or any(getattr(optimizer, hooks, ()) for hooks in _HOOKS)


def check_containers(fqn: str, state: Mapping[Any, Any], options: Mapping[Any, Any]) -> None:
    """Checks that a checkpoint can restore what is kept for a parameter.

    A checkpoint takes containers apart, and a load makes them again from their keys.

    Args:
        fqn: Name of the parameter, for messages.
        state: Its state.
        options: Options of its group.

    Raises:
        UnsupportedError: A key is not text, and would come back as text. Or a dict within a state is empty, and would
            not come back.
    """
    for kind, of_kind in (("state", state), ("option", options)):
        for name, value in of_kind.items():
            what = f"optimizer {kind} {name!r} of '{fqn}'"
            if not isinstance(name, str):
                raise UnsupportedError(
                    f"{what}: a name in a checkpoint must be a str, got {type(name).__name__}; {_ELSE}"
                )
            _check_container(what, value, may_be_empty=kind == "option")


def _check_container(what: str, value: Any, may_be_empty: bool) -> None:
    if not isinstance(value, (Mapping, list)):
        return
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd or (not value and not may_be_empty):
            found = (
                f"has the key {odd[0]!r}, which would come back as text"
                if odd
                else "is an empty dict, or has one, which would be lost"
            )
            raise UnsupportedError(f"{what} {found}; {_ELSE}")
    for inner in value.values() if isinstance(value, Mapping) else value:
        _check_container(what, inner, may_be_empty)
