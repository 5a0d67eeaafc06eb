# SPDX-License-Identifier: Apache-2.0
"""State that each rank has of its own: samplers, data loaders, random number generators.

``bytecheckpoint.save`` calls it the extra state, and keeps it in a part of its own. ``save_state_dict(per_rank=...)``
keeps it beside the other keys, below ``per_rank``:

    per_rank.rank_3_of_8.rng     belongs to rank 3
    per_rank.shard_3_of_8.data   the share of rank 3, of what is dealt out anew to another number of ranks
    per_rank.step                equal on all ranks

Stock DCP reads them like any others. There a dict, list or tuple is a tuple of one element, which DCP keeps whole.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.metadata import checkpoint_of
from bytecheckpoint.errors import ConfigError, CorruptCheckpointError, InvalidPlanError, KeyMismatchError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.near_names import did_you_mean
from bytecheckpoint.tensors.stored_tensors import StoredTensor

__all__ = [
    "POLICIES",
    "PerRankPlanner",
    "Policy",
    "RankStateLoad",
    "check_policy",
    "patterns_with_per_rank",
    "saved_values",
    "with_per_rank",
]

POLICIES = ("own", "replicated", "sharded")
_OF_RANK = re.compile(r"rank_(\d+)\.(.*)", re.DOTALL)
_KEY = "per_rank"
_PATTERN = f"{_KEY}.*"
_STORED = re.compile(r"(rank|shard)_(\d{1,9})_of_(\d{1,9})\.(.*)", re.DOTALL)
_ARE_FLATTENED = (dict, list, tuple)

Policy = str | Mapping[str, str]


def check_policy(policy: Policy, argument: str = "extra_state_policy") -> None:
    """Raises a ConfigError if ``policy``, which was passed as ``argument``, is not a valid policy."""
    names = policy.values() if isinstance(policy, Mapping) else [policy]
    wrong = [name for name in names if name not in POLICIES]
    if wrong:
        raise ConfigError(
            f"{argument}={policy!r}: must be one of {', '.join(POLICIES)}, or a dict of these by key"
            f"{did_you_mean(wrong[0], POLICIES)}"
        )


def saved_values(
    of_rank: Mapping[str, Any], policy: Policy, rank: int, argument: str = "extra_state"
) -> dict[str, Any]:
    """Returns the state dict of one rank. It has one level; its values are tensors, or objects that stay whole.

    A replicated value has its own key, on all ranks that have it. The keys of other values begin with the rank.

    Args:
        of_rank: Values of this rank. Mappings in them become dicts, except an ``OrderedDict`` or ``Counter``.
        policy: What happens to a value if another number of ranks loads it. ``own``: the value belongs to its rank, and
            other ranks get nothing. ``replicated``: the value is equal on all ranks, that of the first rank that has it
            is saved, and all ranks of a load get it. ``sharded``: the value is a list, tuple or tensor; the values of
            all ranks are concatenated, and divided anew among the ranks of the load.
        rank: This rank.
        argument: As what the values were passed, for messages.

    Raises:
        InvalidPlanError: A value that is to be sharded is not a sequence, or a key is not text.
    """
    values: dict[str, Any] = {}
    for key, value in of_rank.items():
        if not isinstance(key, str) or _OF_RANK.fullmatch(key) or _STORED.fullmatch(key):
            raise InvalidPlanError(f"{argument}[{key!r}]: the key must be a str that does not begin like 'rank_0.'")
        of_key = _policy_of(policy, key)
        is_sequence = isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.ndim > 0)
        if of_key == "sharded" and not is_sequence:
            raise InvalidPlanError(
                f"{argument}[{key!r}] is to be sharded, but is a {type(value).__name__}: it must be a list, a tuple, "
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


class RankStateLoad:
    """Selects what one rank loads of the state that ranks had of their own, and joins it after the load.

    Args:
        names: Names that ``saved_values`` gave.
        empty: Returns an empty tensor for the name of a tensor, and None for that of an object.
        policy: Policy that it was saved with.
        saved_ranks: Number of ranks that saved it.
        rank: Rank of this process in the load.
        num_ranks: Number of ranks that load.
        argument: As what the values were passed, for messages.

    Attributes:
        values: State dict to load into: tensors, and None in the place of objects.
        unavailable: Keys whose values belong to single ranks (``own``), and that this load cannot assign because
            another number of ranks saved them.
        left_out: The names of these values.
    """

    def __init__(
        self,
        names: Iterable[str],
        empty: Callable[[str], torch.Tensor | None],
        policy: Policy,
        saved_ranks: int,
        rank: int,
        num_ranks: int,
        argument: str = "extra_state",
    ) -> None:
        self._saved_ranks, self._rank, self._num_ranks, self._argument = saved_ranks, rank, num_ranks, argument
        is_same = saved_ranks == num_ranks
        self._parts: dict[str, list[str]] = {}
        self._dealt_out: set[str] = set()
        unavailable: dict[str, str] = {}
        for name in names:
            match = _OF_RANK.fullmatch(name)
            key = name if match is None else match[2]
            is_dealt_out = not is_same and _policy_of(policy, key) == "sharded"
            if match is None or is_dealt_out or (is_same and int(match[1]) == rank):
                self._parts.setdefault(key, []).append(name)
                if is_dealt_out:
                    self._dealt_out.add(key)
            elif not is_same:
                unavailable[name] = key
        self.unavailable, self.left_out = sorted({*unavailable.values()}), [*unavailable]
        self.values: dict[str, Any] = {}
        for of_key in self._parts.values():
            of_key.sort(key=_rank_of)
            self.values.update((name, empty(name)) for name in of_key)

    @property
    def keys(self) -> list[str]:
        """The keys of the values that this rank loads."""
        return [*self._parts]

    def check(self, instead: str, but_for: Collection[str] = ()) -> None:
        """Refuses a load if there are ``unavailable`` keys.

        Args:
            instead: How to load without them, for the message.
            but_for: Keys that may be.

        Raises:
            KeyMismatchError: There are some.
        """
        refused = [key for key in self.unavailable if key not in but_for]
        if refused:
            raise KeyMismatchError(
                f"{self._argument}: {', '.join(map(repr, refused))} was saved by each of {self._saved_ranks} "
                f"ranks as its own, but {self._num_ranks} ranks load: save values that other ranks can use with "
                f"{self._argument}_policy={{key: 'replicated' or 'sharded'}}, or {instead}"
            )

    def loaded(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the values of this rank by key.

        Args:
            values: What was loaded, by name; None takes ``values`` of this object, which must be loaded by then.
        """
        found = self.values if values is None else values
        return {key: self._joined(key, [found[name] for name in names]) for key, names in self._parts.items()}

    def _joined(self, key: str, parts: list[Any]) -> Any:
        if key not in self._dealt_out:
            return parts[0]
        if len({isinstance(part, torch.Tensor) for part in parts}) > 1:
            raise KeyMismatchError(
                f"{self._argument}[{key!r}] was saved to be sharded, as a tensor by some ranks and as a list by "
                "others: load it on as many ranks as saved it"
            )
        length = sum(map(len, parts))
        begin, end = (length * number // self._num_ranks for number in (self._rank, self._rank + 1))
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts)[begin:end].clone()
        joined: Sequence[Any] = [element for part in parts for element in part][begin:end]
        return tuple(joined) if isinstance(parts[0], tuple) else joined


def with_per_rank(
    state: dict[str, Any], per_rank: Mapping[str, Any] | None, policy: Policy, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Returns the state dict of a save with the values of this rank in it.

    Args:
        state: State dict.
        per_rank: Values of this rank; of a Stateful value, its ``state_dict()``. None leaves ``state`` as it is.
        policy: See ``saved_values``; equal on all ranks.
        group: Ranks that save; None is this process alone.

    Raises:
        ConfigError: ``per_rank`` is no dict, ``policy`` is none, or ``state`` has a key of that name.
        InvalidPlanError: See ``saved_values``.
    """
    if per_rank is None:
        return state
    _check_per_rank(state, per_rank)
    check_policy(policy, "per_rank_policy")
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    values = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in per_rank.items()}
    stored = {}
    for name, value in saved_values(values, policy, rank, _KEY).items():
        of_rank = _OF_RANK.fullmatch(name)
        if of_rank is not None:
            kind = "shard" if _policy_of(policy, of_rank[2]) == "sharded" else "rank"
            name = "_".join((kind, str(rank), "of", f"{size}.{of_rank[2]}"))
        stored[name] = (value,) if isinstance(value, _ARE_FLATTENED) else value
    return {**state, _KEY: stored}


def _unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def patterns_with_per_rank(patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns of what is saved or loaded with those of the ranks' own state; none stays none."""
    return (*patterns, _PATTERN) if patterns else ()


def _check_per_rank(state: Mapping[str, Any], per_rank: object, kind: type = Mapping) -> None:
    if not isinstance(per_rank, kind):
        raise ConfigError(f"per_rank: must be a dict of values by name, got a {type(per_rank).__name__}")
    if _KEY in state:
        raise ConfigError(f"the state has a key '{_KEY}', which is that of per_rank: give it another name")


class PerRankPlanner(BcpLoadPlanner):
    """Loads what ``with_per_rank`` saved, together with a state dict.

    Args:
        into: Receives the values of this rank, by ``finish``: in the place of those that are there, or, for a Stateful
            value, by its ``load_state_dict``.
        group: Ranks that load; None is this process alone.
        spec: See ``BcpLoadPlanner``.
    """

    def __init__(
        self, into: MutableMapping[str, Any], group: dist.ProcessGroup | None, spec: LoadSpec | None = None
    ) -> None:
        if spec is not None and spec.include:
            spec = replace(spec, include=patterns_with_per_rank(spec.include))
        super().__init__(spec=spec)
        self._into = into
        self._rank, self._num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._names: dict[str, str] = {}  # in the checkpoint, by those that ``saved_values`` gives
        self._load: RankStateLoad | None = None
        self._values: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Adds what this rank loads of the ranks' own state to ``state_dict``.

        Raises:
            ConfigError: See ``with_per_rank``.
            KeyMismatchError: A key of ``into`` was not saved, and ``spec`` does not allow that; or a value belongs to
                single ranks, of which there were others, and ``into`` has none that could stay; or ranks have saved a
                key by different policies.
        """
        assert metadata is not None, "set_up_planner was given no metadata"
        _check_per_rank(state_dict, self._into, MutableMapping)
        self._load = self._load_of(metadata)
        self._check(self._load)
        if self.spec is not None and self._load.left_out:
            names = "|".join(re.escape(self._names[name]) for name in self._load.left_out)
            self.spec = replace(self.spec, exclude=(*self.spec.exclude, f"re:{_KEY}\\.({names})"))
        self._values = {self._names[name]: value for name, value in self._load.values.items()}
        if self._values:
            state_dict[_KEY] = self._values
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def finish(self) -> None:
        """Puts what was loaded into ``into``."""
        assert self._load is not None, "nothing was loaded"
        whole = {name: _unwrapped(self._values[self._names[name]]) for name in self._load.values}
        for key, value in self._load.loaded(whole).items():
            target = self._into.get(key)
            if isinstance(target, Stateful):
                target.load_state_dict(value)
            else:
                self._into[key] = value

    def _load_of(self, metadata: Metadata) -> RankStateLoad:
        stored: dict[str, StoredTensor | None] = {}
        kinds: dict[str, set[str]] = {}
        sizes: set[int] = set()
        for key, dtype, shape, _, record_bytes, *_ in checkpoint_of(metadata).contents():
            if not key.startswith(f"{_KEY}."):
                continue
            name = key[len(_KEY) + 1 :]
            found = _STORED.fullmatch(name)
            plain = name if found is None else f"rank_{int(found[2])}.{found[4]}"
            self._names[plain], stored[plain] = name, StoredTensor.of(dtype, shape, record_bytes)
            kind = "replicated" if found is None else "own" if found[1] == "rank" else "sharded"
            kinds.setdefault(name if found is None else found[4], set()).add(kind)
            if found is not None:
                sizes.add(int(found[3]))
        twofold = next((key for key, of_key in kinds.items() if len(of_key) > 1), None)
        if twofold is not None:
            raise KeyMismatchError(
                f"{_KEY}: ranks have saved {twofold!r} by different policies: {listed(sorted(kinds[twofold]))}; load "
                f"without {_KEY}=, and save by one policy on all ranks; bytecheckpoint.read(path) has the value of each"
            )
        policy = {key: next(iter(of_key)) for key, of_key in kinds.items()}
        if len(sizes) > 1:
            raise CorruptCheckpointError(f"{_KEY}: its keys name {len(sizes)} numbers of ranks that saved them")

        def empty(plain: str) -> torch.Tensor | None:
            found = stored[plain]
            return None if found is None else found.empty(f"{_KEY}.{self._names[plain]}")

        saved_ranks = max(sizes, default=self._num_ranks)
        return RankStateLoad(stored, empty, policy, saved_ranks, self._rank, self._num_ranks, _KEY)

    def _check(self, load: RankStateLoad) -> None:
        """Refuses, or warns of, what is not loaded."""
        kept = sorted({*map(str, self._into)} - {*load.keys})
        missing = [key for key in kept if key not in load.unavailable]
        if missing and (self.spec is None or self.spec.refuses_missing):
            raise KeyMismatchError(
                f"{_KEY}: {listed([*map(repr, missing)])} was not saved by {_KEY}=; LoadSpec(strict=False) keeps what "
                "is there"
            )
        load.check("pass per_rank with values of your own under these keys, which are then kept", but_for=kept)
        if kept and self._rank == 0:
            warnings.warn(
                f"bytecheckpoint: {_KEY}: {listed([*map(repr, kept)])} is not loaded: what is there is kept",
                RuntimeWarning,
                stacklevel=2,
            )
