# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks that can read one another's memory, because they run on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _C
from bytecheckpoint.runtime.place import own_place

__all__ = ["MemoryPlace", "SharedMemory", "are_together"]


@dataclass(frozen=True)
class MemoryPlace:
    """Where other ranks find the memory into which a rank reads.

    Attributes:
        machine: Equal for two ranks if and only if a pid means the same process to both.
        address: See ``_C.SharedMemory.address``.
    """

    machine: str
    address: tuple[int, int, int, int, int]


class SharedMemory:
    """The memory into which this rank reads, and that of the ranks whose memory it could open.

    Attributes:
        engine: The memory itself.
        place: Where other ranks find it.
        sources: Ranks whose memory this rank reads from.
        readers: Ranks that read from the memory of this rank.
    """

    def __init__(self, engine: _C.SharedMemory, place: MemoryPlace) -> None:
        self.engine = engine
        self.place = place
        self.sources: frozenset[int] = frozenset()
        self.readers: frozenset[int] = frozenset()

    @classmethod
    def made_for(cls, job: _C.LoadJob) -> SharedMemory | None:
        """Makes the memory for ``job``. None if the system does not have such memory; then units go as messages."""
        machine = own_place().processes
        if not machine:
            return None
        try:
            engine = _C.SharedMemory(job)
        except (CheckpointError, OSError):
            return None
        return cls(engine, MemoryPlace(machine, engine.address))

    def open(self, rank: int, places: Sequence[MemoryPlace | None]) -> None:
        """Opens the memory of the other ranks of this machine, where the system allows it: it makes them ``sources``.

        Args:
            rank: Number of this rank.
            places: Where the memory of each rank is, by rank.
        """
        opened = []
        for peer, place in enumerate(places):
            if peer == rank or place is None or place.machine != self.place.machine:
                continue
            try:
                self.engine.open(peer, place.address)
            except CheckpointError:
                continue
            opened.append(peer)
        self.sources = frozenset(opened)


def are_together(places: Sequence[MemoryPlace | None]) -> bool:
    """Whether any two of the ranks are on one machine."""
    machines = [place.machine for place in places if place is not None]
    return len(set(machines)) < len(machines)
