# SPDX-License-Identifier: Apache-2.0
"""Plans of earlier saves of this process, found again by what they were made of.

A plan depends on what the ranks hold, on the planner's settings, and on which copies of ranks differ, and on nothing
else: not on the path, other values or who asks. Its key is therefore a digest of just these. The coordinator keeps
whole plans, by a digest of all but the copies; every rank keeps what it was assigned. DCP makes a new planner for each
save, so the cache belongs to the process.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from bytecheckpoint.native import _C
from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = ["CachedPlan", "EncodedAssignment", "PlanCache", "digest_of", "part_of", "plan_cache"]

# The oldest plans are dropped while all plans together have more chunks than this. A chunk takes some 150 bytes, and a
# plan of 10,000 ranks has two million chunks.
_MOST_CHUNKS = 4_000_000

# What `hashes_of_groups` returns for each group.
_GROUP_BYTES, _HASH_BYTES = 4, 8

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def digest_of(parts: Iterable[bytes]) -> bytes:
    """Returns a digest of 16 bytes; other ``parts``, or the same bytes divided otherwise, give another one."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def part_of(key: bytes, rank: int) -> bytes:
    """Returns the name of the assignment of one rank in the plan ``key``.

    The rank belongs to the name because one process may be another rank in another group that plans the same, and
    because threads of one process may be different ranks.
    """
    return key + rank.to_bytes(4, "little")


class EncodedAssignment(NamedTuple):
    """What one rank is to write: numbers of boxes in its own inventory. Its size grows with what the rank writes.

    Attributes:
        encoded: The assignment.
        num_items: Number of items that the rank writes.
        groups: Which copies of the rank equal those of other ranks, for ``hashes_of_groups``.
        key: Key of the plan.
    """

    encoded: bytes
    num_items: int
    groups: bytes = b""
    key: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent for it."""
        return len(self.encoded) + len(self.groups) + len(self.key)


class _Inventory(Protocol):
    """What a rank has sent; see ``LocalInventory``."""

    @property
    def message(self) -> bytes | None: ...
    @property
    def known_hashes(self) -> Mapping[bytes, bytes]: ...


@dataclass(frozen=True)
class CachedPlan:
    """A plan: which rank writes what.

    Attributes:
        assignments: The assignment of each rank, by rank.
        manifest: What the metadata will say.
        blobs: Messages of the ranks, by digest, if they went through this process. Checksums in them may be outdated.
        key: Key of the plan.
        differing: Keys of which copies differ. The lowest rank writes them, and they are not compared again.
    """

    assignments: list[EncodedAssignment]
    manifest: _C.Checkpoint
    blobs: Mapping[bytes, bytes] = field(default_factory=dict)
    key: bytes = b""
    differing: frozenset[str] = frozenset()

    @functools.cached_property
    def num_items(self) -> int:
        """Number of items of all ranks together."""
        return sum(assignment.num_items for assignment in self.assignments)

    @classmethod
    def of(cls, base: bytes, known_differing: Iterable[str], plan: tuple[Any, ...]) -> CachedPlan:
        """Makes a plan of what C++ returns.

        Args:
            base: Digest of what the ranks hold and of the settings.
            known_differing: Keys of which copies have differed before.
            plan: What ``_C.plan_ranks`` returned.
        """
        encoded, num_items, _, groups, differing, manifest = plan
        names = frozenset((*known_differing, *(fqn for fqn, _, _ in differing)))
        key = digest_of((base, *(name.encode("utf-8", "surrogatepass") for name in sorted(names)), b"", *groups))
        assignments = [EncodedAssignment(*of_rank, key) for of_rank in zip(encoded, num_items, groups, strict=True)]
        return cls(assignments, manifest, key=key, differing=names)

    def copies_agree(self, ranks: Sequence[_Inventory]) -> bool:
        """Returns whether all copies that were equal when the plan was made are equal now, too.

        Args:
            ranks: What each rank has sent.
        """
        hashes: dict[bytes, bytes] = {}
        for rank, (of_rank, assignment) in enumerate(zip(ranks, self.assignments, strict=True)):
            found = of_rank.known_hashes.get(part_of(self.key, rank))
            if found is None and of_rank.message is not None:
                found = _C.hashes_of_groups(of_rank.message, assignment.groups)
            if found is None:
                return False
            for at in range(0, len(found), _GROUP_BYTES + _HASH_BYTES):
                group, own = found[at : at + _GROUP_BYTES], found[at + _GROUP_BYTES : at + _GROUP_BYTES + _HASH_BYTES]
                if hashes.setdefault(group, own) != own:
                    return False
        return True


class _Recent(Generic[_Key, _Value]):
    """A dict in the order of last use."""

    def __init__(self) -> None:
        self._entries: OrderedDict[_Key, _Value] = OrderedDict()

    def get(self, key: _Key) -> _Value | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: _Key, value: _Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)

    def take(self, key: _Key) -> _Value:
        return self._entries.pop(key)

    def drop_oldest(self) -> None:
        self._entries.popitem(last=False)

    def items(self) -> list[tuple[_Key, _Value]]:
        return list(self._entries.items())

    def __len__(self) -> int:
        return len(self._entries)


class PlanCache:
    """Keeps a bounded number of plans, and of assignments. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._plans: _Recent[bytes, CachedPlan] = _Recent()
        self._assignments: _Recent[tuple[bytes, bytes], EncodedAssignment] = _Recent()

    def plan(self, key: bytes) -> CachedPlan | None:
        """Returns the plan that is kept under ``key``, a digest of all but the copies; None if there is none."""
        with self._lock:
            return self._plans.get(key)

    def keep_plan(self, key: bytes, planned: CachedPlan, capacity: int) -> None:
        """Keeps a plan, and drops the least recently used ones beyond ``capacity``."""
        with self._lock:
            self._plans.put(key, planned)
            while len(self._plans) > 1 and (len(self._plans) > capacity or self._num_chunks() > _MOST_CHUNKS):
                self._plans.drop_oldest()

    def blob(self, digest: bytes) -> bytes | None:
        """Returns the message of a rank that sent only its ``digest``, if a plan in the cache was made of it."""
        with self._lock:
            for _, planned in self._plans.items():
                if digest in planned.blobs:
                    return planned.blobs[digest]
        return None

    def take_assignments(self, digest: bytes) -> dict[bytes, EncodedAssignment]:
        """Removes and returns what a rank of this process was assigned when its inventory had this ``digest``.

        A save that gets a plan keeps the assignments again. If it fails before that, they stay forgotten and the next
        save sends whole inventories, so it cannot fail because ranks relied on what they knew.

        Returns:
            Assignments by the names that ``part_of`` gives.
        """
        with self._lock:
            keys = [key for key, _ in self._assignments.items() if key[0] == digest]
            return {part: self._assignments.take((digest, part)) for _, part in keys}

    def keep_assignments(self, digest: bytes, assignments: Mapping[bytes, EncodedAssignment], capacity: int) -> None:
        """Keeps ``assignments``, and drops the least recently used ones beyond ``capacity``.

        Args:
            digest: Digest of the inventory that they are for.
            assignments: By the names that ``part_of`` gives; the last counts as the newest.
            capacity: Number of assignments that the cache keeps in all.
        """
        with self._lock:
            for part, assignment in assignments.items():
                self._assignments.put((digest, part), assignment)
            while len(self._assignments) > capacity:
                self._assignments.drop_oldest()

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._plans, self._assignments = _Recent(), _Recent()

    def _num_chunks(self) -> int:
        return sum(planned.num_items for _, planned in self._plans.items())


_cache = PlanCache()


def plan_cache() -> PlanCache:
    """Returns the cache of this process."""
    return _cache
