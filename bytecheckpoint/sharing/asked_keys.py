# SPDX-License-Identifier: Apache-2.0
"""Finds out which keys of a checkpoint the ranks of a load ask for, and which no rank asks for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from bytecheckpoint.listing import listed

__all__ = ["RequestedKeys", "Unfilled", "asked_by_any", "compare"]

# A report names no more keys than this.
_MOST_NAMES = 256
# A warning names no more keys of each kind than this.
_MOST_WARNED = 5


def _part_of(key: str) -> str:
    """Returns the top-level part that a key belongs to: ``optimizer`` for ``optimizer.state.0.exp_avg``."""
    return key.partition(".")[0]


@dataclass(frozen=True)
class RequestedKeys:
    """The keys that one rank asks for, as it tells the coordinator.

    Attributes:
        marks: One byte for each key of the checkpoint, in the checkpoint's order, compressed: 1 if the rank asks for
            the key. None: it asks for all keys.
        parts: Top-level parts that the rank asks for without asking for every key in them.
        missing: Keys that the rank asks for and the checkpoint does not have; only the first ones if there are many.
        num_missing: Number of all such keys.
    """

    marks: bytes | None
    parts: frozenset[str]
    missing: tuple[str, ...]
    num_missing: int

    @classmethod
    def of(cls, stored: Sequence[str], keys: Collection[str], tops: Iterable[object] = ()) -> RequestedKeys:
        """Compares the keys that a rank asks for with those of the checkpoint.

        Args:
            stored: Keys of the checkpoint.
            keys: Keys that the rank asks for, in a collection with quick look-up.
            tops: Keys at the top level of its state dict. A container without a tensor in it asks for its part, too.
        """
        marks = bytes(map(keys.__contains__, stored))
        num_found = marks.count(1)
        missing: list[str] = []
        if num_found < len(keys):
            there = set(stored)
            missing = sorted(key for key in keys if key not in there)
        if num_found == len(stored):
            return cls(None, frozenset(), tuple(missing[:_MOST_NAMES]), len(missing))
        in_part = {_part_of(key) for key, is_asked in zip(stored, marks, strict=True) if not is_asked}
        if in_part:
            in_part &= {_part_of(str(top)) for top in tops} or {_part_of(key) for key in keys}
        return cls(zlib.compress(marks, 1), frozenset(in_part), tuple(missing[:_MOST_NAMES]), len(missing))


@dataclass(frozen=True)
class Unfilled:
    """Keys that a load leaves unfilled, by the fields of a ``LoadReport``."""

    missing_keys: tuple[str, ...] = ()
    num_missing_keys: int = 0
    unexpected_keys: tuple[str, ...] = ()
    num_unexpected_keys: int = 0

    def warning(self, path: str) -> str | None:
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
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict makes it"
            )
        return text


def asked_by_any(ranks: Sequence[RequestedKeys]) -> bytes | None:
    """Returns one byte for each key of the checkpoint: 1 if any rank asks for it. None: some rank asks for all keys."""
    of_ranks = {asked.marks for asked in ranks}  # most ranks ask for the same
    found = b""
    for marks in of_ranks:
        if marks is None:
            return None
        marked = zlib.decompress(marks)
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
    is_asked = asked_by_any(ranks) if parts or of_all_parts else None
    if is_asked is None:
        return Unfilled(tuple(missing[:_MOST_NAMES]), num_missing)
    stored = keys_of_checkpoint()
    unexpected = [
        key for key, mark in zip(stored, is_asked, strict=True) if not mark and (of_all_parts or _part_of(key) in parts)
    ]
    return Unfilled(tuple(missing[:_MOST_NAMES]), num_missing, tuple(unexpected[:_MOST_NAMES]), len(unexpected))
