# SPDX-License-Identifier: Apache-2.0
"""The extra state of a run, besides model and optimizer: data loaders, schedulers, random number generators."""

from __future__ import annotations

import random
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bytecheckpoint.errors import ConfigError, InvalidPlanError, KeyMismatchError
from bytecheckpoint.training_state.stored import Stored

__all__ = ["POLICIES", "ExtraStateLoad", "check_policy", "get_rng_state", "saved_values", "set_rng_state"]

POLICIES = ("own", "replicated", "sharded")
_OF_RANK = re.compile(r"rank_(\d+)\.(.*)", re.DOTALL)

Policy = str | Mapping[str, str]


def check_policy(policy: Policy) -> None:
    """Raises a ConfigError if ``policy`` is not a valid policy."""
    names = policy.values() if isinstance(policy, Mapping) else [policy]
    if any(name not in POLICIES for name in names):
        raise ConfigError(
            f"extra_state_policy={policy!r}: must be one of {', '.join(POLICIES)}, or a dict of these by key"
        )


def saved_values(extra_state: Mapping[str, Any], policy: Policy, rank: int) -> dict[str, Any]:
    """Returns the state dict of one rank. It has one level; its values are tensors, or objects that stay whole.

    A replicated value has its own key, on all ranks that have it. The keys of other values begin with the rank.

    Args:
        extra_state: Extra state of this rank. Mappings in it become dicts, except an ``OrderedDict`` or ``Counter``.
        policy: What happens to a value if another number of ranks loads it. ``own``: the value belongs to its rank, and
            other ranks get nothing. ``replicated``: the value is equal on all ranks, that of the first rank that has it
            is saved, and all ranks of a load get it. ``sharded``: the value is a list, tuple or tensor; the values of
            all ranks are concatenated, and divided anew among the ranks of the load.
        rank: This rank.

    Raises:
        InvalidPlanError: A value that is to be sharded is not a sequence, or a key is not text.
    """
    values: dict[str, Any] = {}
    for key, value in extra_state.items():
        if not isinstance(key, str) or _OF_RANK.fullmatch(key):
            raise InvalidPlanError(f"extra_state[{key!r}]: the key must be a str that does not begin like 'rank_0.'")
        of_key = _policy_of(policy, key)
        is_sequence = isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.ndim > 0)
        if of_key == "sharded" and not is_sequence:
            raise InvalidPlanError(
                f"extra_state[{key!r}] is to be sharded, but is a {type(value).__name__}: it must be a list, a tuple, "
                "or a tensor with at least one dim"
            )
        values[key if of_key == "replicated" else f"rank_{rank}.{key}"] = _plain(value, {})
    return values


def _plain(value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    """Returns ``value`` with dicts instead of mappings that torch's ``weights_only`` rules do not load.

    Args:
        value: Any value.
        seen: By id, each value and what was made of it, so that a value that occurs twice stays one object. It also
            keeps values alive that a mapping has just made, so that no other value gets their id.
    """
    if id(value) in seen:
        return seen[id(value)][1]
    made = value
    if isinstance(value, Mapping):
        kind: Any = type(value) if type(value) in (Counter, OrderedDict) else dict
        made = kind({key: _plain(of_key, seen) for key, of_key in value.items()})
    elif type(value) in (list, tuple):
        made = type(value)(_plain(element, seen) for element in value)
    seen[id(value)] = value, made
    return made


def _rank_of(name: str) -> int:
    match = _OF_RANK.fullmatch(name)
    return -1 if match is None else int(match[1])


def _policy_of(policy: Policy, key: str) -> str:
    return policy if isinstance(policy, str) else policy.get(key, "own")


class ExtraStateLoad:
    """Selects what one rank loads of a saved extra state, and joins it after the load.

    Args:
        stored: Keys of the checkpoint.
        policy: Policy that it was saved with.
        saved_ranks: Number of ranks that saved it.
        rank: Rank of this process in the load.
        num_ranks: Number of ranks that load.

    Attributes:
        values: State dict to load into: tensors, and None in the place of objects.
        unavailable: Keys whose values belong to single ranks (``own``), and that this load cannot assign because
            another number of ranks saved them.
    """

    def __init__(self, stored: Stored, policy: Policy, saved_ranks: int, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        is_same = saved_ranks == num_ranks
        self._parts: dict[str, list[str]] = {}
        self._dealt_out: set[str] = set()
        unavailable = set()
        for name in stored:
            match = _OF_RANK.fullmatch(name)
            key = name if match is None else match[2]
            is_dealt_out = not is_same and _policy_of(policy, key) == "sharded"
            if match is None or is_dealt_out or (is_same and int(match[1]) == rank):
                self._parts.setdefault(key, []).append(name)
                if is_dealt_out:
                    self._dealt_out.add(key)
            elif not is_same:
                unavailable.add(key)
        self.unavailable = sorted(unavailable)
        self.values: dict[str, Any] = {}
        for names in self._parts.values():
            names.sort(key=_rank_of)
            self.values.update((name, stored.empty(name)) for name in names)

    def check(self, num_saved: int) -> None:
        """Refuses a load if there are ``unavailable`` keys.

        Args:
            num_saved: Number of ranks that saved them.

        Raises:
            KeyMismatchError: There are some.
        """
        if self.unavailable:
            names = ", ".join(map(repr, self.unavailable))
            raise KeyMismatchError(
                f"extra_state: {names} was saved by each of {num_saved} ranks as its own, but {self._num_ranks} ranks "
                "load: save values that other ranks can use with extra_state_policy={key: 'replicated' or 'sharded'}, "
                "or load with strict=False, which keeps what checkpoint_state['extra_state'] has under these keys"
            )

    def loaded(self) -> dict[str, Any]:
        """Returns the extra state. ``values`` must be loaded before."""
        return {key: self._joined(key, [self.values[name] for name in names]) for key, names in self._parts.items()}

    def _joined(self, key: str, parts: list[Any]) -> Any:
        if key not in self._dealt_out:
            return parts[0]
        if len({isinstance(part, torch.Tensor) for part in parts}) > 1:
            raise KeyMismatchError(
                f"extra_state[{key!r}] was saved to be sharded, as a tensor by some ranks and as a list by others: "
                "load it on as many ranks as saved it"
            )
        length = sum(map(len, parts))
        begin, end = (length * number // self._num_ranks for number in (self._rank, self._rank + 1))
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts)[begin:end].clone()
        joined: Sequence[Any] = [element for part in parts for element in part][begin:end]
        return tuple(joined) if isinstance(parts[0], tuple) else joined


def get_rng_state() -> dict[str, Any]:
    """Returns the states of the random number generators of Python, torch, its CUDA devices, and numpy if imported.

    The result is plain data and tensors, for ``extra_state``: ``{"rng": bytecheckpoint.get_rng_state()}``. It belongs
    to one rank (policy ``own``), so another number of ranks starts with generators of its own.
    """
    import sys

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Sets the random number generators to a state that ``get_rng_state`` returned.

    Args:
        state: What ``get_rng_state`` returned. States of CUDA devices beyond those of this process are ignored.

    Raises:
        ConfigError: ``state`` has another form.
    """
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"set_rng_state: the state is not one that get_rng_state gave: {type(error).__name__}: {error}"
        ) from error
