# SPDX-License-Identifier: Apache-2.0
"""State of a run besides model and optimizer: data loaders, schedulers, generators of random numbers."""

from __future__ import annotations

import random
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bytecheckpoint.errors import ConfigError, InvalidPlanError, KeyMismatchError
from bytecheckpoint.frameworks.stored import Stored

__all__ = ["POLICIES", "ExtraStateLoad", "check_policy", "get_rng_state", "saved_values", "set_rng_state"]

POLICIES = ("own", "replicated", "sharded")
_OF_RANK = re.compile(r"rank_(\d+)\.(.*)", re.DOTALL)

Policy = str | Mapping[str, str]


def check_policy(policy: Policy) -> None:
    """Raises a ConfigError for what is no policy."""
    names = policy.values() if isinstance(policy, Mapping) else [policy]
    if any(name not in POLICIES for name in names):
        raise ConfigError(f"extra_state_policy={policy!r}: {', '.join(POLICIES)} wanted, of all keys or by key")


def saved_values(extra_state: Mapping[str, Any], policy: Policy, rank: int) -> dict[str, Any]:
    """The state dict of one rank, of one level; its values are objects as they are, or tensors.

    What is replicated stands under its own key, on all ranks that have it; the rest begins with the rank.

    Args:
        extra_state: Of this rank. Mappings in it become dicts, except an ``OrderedDict`` or ``Counter``.
        policy: What becomes of a value on another number of ranks. ``own``: it belongs to its rank, and there is none
            for others. ``replicated``: it is equal on all ranks, and any number of them gets it; that of the first rank
            that has it is saved. ``sharded``: a list, tuple or tensor; those of all ranks, one behind the other,
            are dealt out anew.

    Raises:
        InvalidPlanError: What is to be sharded is no sequence; a key is no text.
    """
    values: dict[str, Any] = {}
    for key, value in extra_state.items():
        if not isinstance(key, str) or _OF_RANK.fullmatch(key):
            raise InvalidPlanError(f"extra_state[{key!r}]: a text is wanted, which does not begin as 'rank_0.' does")
        of_key = _policy_of(policy, key)
        is_sequence = isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.ndim > 0)
        if of_key == "sharded" and not is_sequence:
            raise InvalidPlanError(
                f"extra_state[{key!r}] is to be sharded, and is a {type(value).__name__}: a list, a tuple or a tensor "
                "with a first dim to deal out is wanted"
            )
        values[key if of_key == "replicated" else f"rank_{rank}.{key}"] = _plain(value, {})
    return values


def _plain(value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    """``value``, with dicts in the place of mappings that torch's ``weights_only`` rules do not load.

    Args:
        seen: By id, what was made of what: the same once more is the same again. Holds what a mapping has just made,
            too, so that no other value has its id.
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
    """What one rank loads of a saved extra state, and makes of it.

    Args:
        stored: Keys of the checkpoint.
        policy: As it was saved.
        saved_ranks: Number of ranks that saved.
        rank: Of this process among ``num_ranks`` that load.

    Attributes:
        values: For the load: tensors, and None in the place of objects.
        unavailable: Keys that belong to ranks, of which there were others when they were saved.
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
        """Raises a KeyMismatchError if there are keys of ranks that are not these."""
        if self.unavailable:
            names = ", ".join(map(repr, self.unavailable))
            raise KeyMismatchError(
                f"extra_state: {names} was saved by each of {num_saved} ranks as its own, and {self._num_ranks} load: "
                "save with extra_state_policy={key: 'replicated' or 'sharded'} what other ranks can use, or load with "
                "strict=False, which keeps what checkpoint_state['extra_state'] has under these keys"
            )

    def loaded(self) -> dict[str, Any]:
        """The extra state, once ``values`` are loaded."""
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
    """States of the generators of random numbers of Python, torch, its CUDA devices, and numpy if it is in use.

    Plain data and tensors, for ``extra_state``: ``{"rng": bytecheckpoint.get_rng_state()}``. It belongs to one rank:
    another number of ranks begins with generators of its own.
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
    """Sets the generators to what ``get_rng_state`` gave.

    Raises:
        ConfigError: It is no such state.
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
        raise ConfigError(f"set_rng_state: not what get_rng_state gave: {type(error).__name__}: {error}") from error
