# SPDX-License-Identifier: Apache-2.0
"""Plans of earlier saves of this process, by what they were made of.

A plan is a function of what the ranks hold and of the planner's settings, and of nothing else: not of the path, nor of
values, nor of who asks. So it is found by a digest of just these. The coordinator keeps whole plans; every rank keeps
what it was told to write. DCP makes new planners for each save, so all of this belongs to the process.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from bytecheckpoint import _C
from bytecheckpoint._fork_locks import ForkSafeLock

__all__ = ["Answer", "PlanCache", "Planned", "digest_of", "part_of", "plan_cache"]

# Of the oldest plans, those are dropped that would make all chunks together more than this: a chunk takes some 150
# bytes, and 10,000 ranks have two million.
_MOST_CHUNKS = 4_000_000

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def digest_of(parts: Iterable[bytes]) -> bytes:
    """16 bytes that no other ``parts`` have."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def part_of(key: bytes, rank: int) -> bytes:
    """Names the answer to one rank in the plan ``key``. A process may be another rank in another group that plans the
    same, and threads may be ranks of one."""
    return key + rank.to_bytes(4, "little")


class Answer(NamedTuple):
    """What one rank is told to write: of its own boxes, by their numbers. Grows with what it writes."""

    encoded: bytes
    num_items: int


@dataclass(frozen=True)
class Planned:
    """Who writes what.

    Attributes:
        answers: By rank.
        manifest: What the metadata will say.
        blobs: What the ranks hold, by digest, where that went through this process.
    """

    answers: list[Answer]
    manifest: _C.Checkpoint
    blobs: Mapping[bytes, bytes] = field(default_factory=dict)

    @functools.cached_property
    def num_items(self) -> int:
        """Of all ranks."""
        return sum(answer.num_items for answer in self.answers)

    @classmethod
    def of(cls, plan: tuple[list[bytes], list[int], list[int], _C.Checkpoint]) -> Planned:
        """What C++ gives: answers, numbers of items and bytes by rank, and the manifest."""
        answers, num_items, _, manifest = plan
        return cls(list(map(Answer, answers, num_items)), manifest)


class _Recent(Generic[_Key, _Value]):
    """The entries that were used last."""

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
    """Bounded in number: of plans, and of answers. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._plans: _Recent[bytes, Planned] = _Recent()
        self._answers: _Recent[tuple[bytes, bytes], Answer] = _Recent()

    def plan(self, key: bytes) -> Planned | None:
        """The plan of what ``key`` is the digest of."""
        with self._lock:
            return self._plans.get(key)

    def keep_plan(self, key: bytes, planned: Planned, capacity: int) -> None:
        """Forgets the least recently used beyond ``capacity`` plans."""
        with self._lock:
            self._plans.put(key, planned)
            while len(self._plans) > 1 and (len(self._plans) > capacity or self._num_chunks() > _MOST_CHUNKS):
                self._plans.drop_oldest()

    def blob(self, digest: bytes) -> bytes | None:
        """What a rank holds that sent its digest alone, if a plan that is kept was made of it."""
        with self._lock:
            for _, planned in self._plans.items():
                if digest in planned.blobs:
                    return planned.blobs[digest]
        return None

    def take_answers(self, digest: bytes) -> dict[bytes, Answer]:
        """What was told, by part of a plan, to a rank of this process that held what ``digest`` is of.

        Whoever comes to a plan keeps them again. If the save fails before, the next one sends what it holds: it shall
        not fail because the ranks relied on what they know.
        """
        with self._lock:
            keys = [key for key, _ in self._answers.items() if key[0] == digest]
            return {part: self._answers.take((digest, part)) for _, part in keys}

    def keep_answers(self, digest: bytes, answers: Mapping[bytes, Answer], capacity: int) -> None:
        """Forgets the least recently used beyond ``capacity`` answers; the last of ``answers`` is the newest."""
        with self._lock:
            for part, answer in answers.items():
                self._answers.put((digest, part), answer)
            while len(self._answers) > capacity:
                self._answers.drop_oldest()

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._plans, self._answers = _Recent(), _Recent()

    def _num_chunks(self) -> int:
        return sum(planned.num_items for _, planned in self._plans.items())


_cache = PlanCache()


def plan_cache() -> PlanCache:
    """That of this process."""
    return _cache
