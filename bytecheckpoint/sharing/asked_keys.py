# SPDX-License-Identifier: Apache-2.0
"""Finds out which keys of a checkpoint the ranks of a load ask for, and which no rank asks for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.listing import listed

__all__ = ["RequestedKeys", "Unfilled", "asked_by_any", "compare"]

# A report names no more keys than this.
_MOST_NAMES = 256
# A warning names no more keys of each kind than this.
_MOST_WARNED = 5
# Names at the top of the flat state dicts of optimizers, which torch makes with `flatten_optimizer_state_dict`.
_OF_OPTIMIZERS = frozenset(("state", "param_groups", "optimizer", "optim"))


def _part_of(key: str) -> str:
    """Returns the top-level part that a key belongs to: ``optimizer`` for ``optimizer.state.0.exp_avg``."""
    return key.partition(".")[0]


def _containers_of(key: str, path: Sequence[object]) -> list[str]:
    """Returns the containers that count as parts of a state, and that a key is in: outer ones first.

    These are the first two levels of dicts and lists, and ``state`` of an optimizer, which may be deeper. In a flat
    state dict only the names that optimizers have are known to be parts.
    """
    steps = [*map(str, path)]
    if len(steps) < 2:
        return [part for part in (_part_of(key),) if part in _OF_OPTIMIZERS and part != key]
    depths = (depth for depth in range(1, len(steps)) if depth <= 2 or steps[depth - 1] == "state")
    return [".".join(steps[:depth]) for depth in depths]


def _without_keys(
    keys: Iterable[str], is_missing: Callable[[str], bool], paths: Mapping[str, Sequence[object]]
) -> list[str]:
    """Returns the containers of which all keys are missing; of containers in one another only the outermost."""
    found, lacking = set[str](), dict[str, list[str]]()
    for key in keys:
        containers = _containers_of(key, paths.get(key, ()))
        if is_missing(key):
            lacking[key] = containers
        else:
            found.update(containers)
    outermost = (next((part for part in parts if part not in found), None) for parts in lacking.values())
    return [*dict.fromkeys(part for part in outermost if part is not None)]


@dataclass(frozen=True)
class RequestedKeys:
    """The keys that one rank asks for, as it tells the coordinator.

    Attributes:
        marks: One byte for each key of the checkpoint, in the checkpoint's order, compressed: 1 if the rank asks for
            the key. None: it asks for all keys.
        parts: Top-level parts that the rank asks for without asking for every key in them.
        missing: Keys that the rank asks for and the checkpoint does not have; only the first ones if there are many.
        num_missing: Number of all such keys.
        missing_parts: Containers of the state of which all keys are missing; only the first ones.
    """

    marks: bytes | None
    parts: frozenset[str]
    missing: tuple[str, ...]
    num_missing: int
    missing_parts: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        stored: Sequence[str],
        keys: Collection[str],
        tops: Iterable[object] = (),
        paths: Mapping[str, Sequence[Any]] | None = None,
    ) -> RequestedKeys:
        """Compares the keys that a rank asks for with those of the checkpoint.

        Args:
            stored: Keys of the checkpoint.
            keys: Keys that the rank asks for, in a collection with quick look-up.
            tops: Keys at the top level of its state dict. A container without a tensor in it asks for its part, too.
            paths: Path of each key through the containers of its state dict.
        """
        marks = bytes(map(keys.__contains__, stored))
        num_found = marks.count(1)
        missing: list[str] = []
        missing_parts: tuple[str, ...] = ()
        if num_found < len(keys):
            there = set(stored)
            missing = sorted(key for key in keys if key not in there)
            missing_parts = tuple(_without_keys(keys, lambda key: key not in there, paths or {})[:_MOST_NAMES])
        of_missing = tuple(missing[:_MOST_NAMES]), len(missing), missing_parts
        if num_found == len(stored):
            return cls(None, frozenset(), *of_missing)
        in_part = {_part_of(key) for key, is_asked in zip(stored, marks, strict=True) if not is_asked}
        if in_part:
            in_part &= {_part_of(str(top)) for top in tops} or {_part_of(key) for key in keys}
        return cls(zlib.compress(marks, 1), frozenset(in_part), *of_missing)


@dataclass(frozen=True)
class Unfilled:
    """Keys that a load leaves unfilled, by the fields of a ``LoadReport``."""

    missing_keys: tuple[str, ...] = ()
    num_missing_keys: int = 0
    unexpected_keys: tuple[str, ...] = ()
    num_unexpected_keys: int = 0
    missing_parts: tuple[str, ...] = ()

    def warning_of_missing_parts(self, path: str) -> str | None:
        """Returns the text of a warning; None unless all keys of a part of the state are missing."""
        if not self.missing_parts:
            return None
        parts = listed([*map(repr, self.missing_parts)], _MOST_WARNED)
        text = (
            f"load({path}): the checkpoint has nothing of {parts}, so what the state has there stays as it was. Leave "
            "it out of the state if that is meant; if the checkpoint has it under another name, "
            "LoadSpec(rename=...) says so"
        )
        if any(name in _OF_OPTIMIZERS for part in self.missing_parts for name in part.split(".")):
            text += (
                ". The state that get_optimizer_state_dict makes for an optimizer that has none is not that of a new "
                "optimizer, because it makes a step: if there is none to load, make a new optimizer after the load"
            )
        return text

    def warning_of_parts(self, path: str) -> str | None:
        """Returns the text of a warning; None unless only some keys of a top-level part are loaded."""
        if not self.num_unexpected_keys:
            return None
        parts = sorted({_part_of(key) for key in self.unexpected_keys})
        text = (
            f"load({path}): only a part of {', '.join(map(repr, parts))} is loaded: no rank asks for these keys of the "
            f"checkpoint: {listed([*map(repr, self.unexpected_keys)], _MOST_WARNED, self.num_unexpected_keys)}"
        )
        if self.missing_keys:
            missing = listed([*map(repr, self.missing_keys)], _MOST_WARNED, self.num_missing_keys)
            text += f"; these keys are not in the checkpoint: {missing}"
        if any(".state." in key for key in self.unexpected_keys):
            text += (
                ". The state_dict() of an optimizer has no state before its first step: "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict makes it, but only while "
                "optimizer.state is empty and no parameter has a gradient"
            )
        return text


def asked_by_any(ranks: Sequence[RequestedKeys]) -> bytes | None:
    """Returns one byte for each key of the checkpoint: 1 if any rank asks for it. None: some rank asks for all keys.

    Raises:
        ConfigError: Ranks have seen different numbers of keys.
    """
    of_ranks = {asked.marks: rank for rank, asked in enumerate(ranks)}  # most ranks ask for the same
    found, of_first = b"", 0
    for marks, rank in of_ranks.items():
        if marks is None:
            return None
        marked = zlib.decompress(marks)
        if found and len(found) != len(marked):
            raise ConfigError(
                f"load: rank {of_first} chooses from {len(found):,} keys, and rank {rank} from {len(marked):,}: pass "
                "the same LoadSpec on all ranks"
            )
        of_first = of_first if found else rank
        found = (int.from_bytes(found, "little") | int.from_bytes(marked, "little")).to_bytes(len(marked), "little")
    return found


def compare(
    keys_of_checkpoint: Callable[[], Sequence[str]], ranks: Sequence[RequestedKeys], *, of_all_parts: bool = False
) -> Unfilled:
    """Returns the keys that no rank asks for though some rank asks for their part, and the keys that any rank misses.

    Args:
        keys_of_checkpoint: Returns the keys that ``RequestedKeys.of`` got as ``stored``; called only if needed.
        ranks: What each rank asks for.
        of_all_parts: Whether the keys of parts that no rank asks for count, too.
    """
    missing = sorted({key for asked in ranks for key in asked.missing})
    num_missing = max([len(missing), *(asked.num_missing for asked in ranks)])
    parts = frozenset[str]().union(*(asked.parts for asked in ranks))
    lacking = [*dict.fromkeys(part for asked in ranks for part in asked.missing_parts)]
    is_asked = asked_by_any(ranks) if parts or of_all_parts or lacking else None
    stored = keys_of_checkpoint() if lacking or is_asked is not None else ()
    if lacking:  # another rank may find some of it, as another stage of a pipeline does
        marks = is_asked or b"\1" * len(stored)
        found = {key for key, mark in zip(stored, marks, strict=True) if mark}
        lacking = [part for part in lacking if not any(key.startswith(f"{part}.") for key in found)]
    of_missing = tuple(missing[:_MOST_NAMES]), num_missing
    missing_parts = tuple(lacking[:_MOST_NAMES])
    if is_asked is None or not (parts or of_all_parts):
        return Unfilled(*of_missing, missing_parts=missing_parts)
    unexpected = [
        key for key, mark in zip(stored, is_asked, strict=True) if not mark and (of_all_parts or _part_of(key) in parts)
    ]
    return Unfilled(*of_missing, tuple(unexpected[:_MOST_NAMES]), len(unexpected), missing_parts)
