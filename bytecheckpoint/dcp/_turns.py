# SPDX-License-Identifier: Apache-2.0
"""Calls over the same ranks, counted on each of them: what is not the same call on all ranks is not saved.

A call may fail on one rank before that rank comes to the others. They wait in it, the next call of that rank meets
them there, and at one path nothing in a plan says that the two states are of different steps. So each rank counts its
calls, before anything can fail, and the count goes to the coordinator with what the rank has written. Where counts
differ the save is refused, and the ranks that are behind skip their calls up to the highest count.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint._fork_locks import ForkSafeLock
from bytecheckpoint.errors import OutOfStepError

__all__ = ["Turn", "check_in_step", "draw_turn", "in_turn", "next_turn", "number_of_turn", "take_drawn_turn"]


@dataclass(eq=False)
class _Count:
    """Of the calls of one use over the ranks of a group.

    Attributes:
        called: How many there were.
        skipped: Calls up to this number met later calls of other ranks.
    """

    called: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Turn:
    """One call of this rank.

    Attributes:
        number: Of the call, from 1 on; the same on all ranks that are in step.
    """

    number: int
    _count: _Count

    def note(self, error: BaseException) -> None:
        """Takes note of the counts of the other ranks, if ``error`` has them."""
        failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        for failure, _ in failures:
            if isinstance(failure, OutOfStepError):
                self._count.skipped = max(self._count.skipped, *failure.calls.values())

    def check(self, what: str, path: str) -> None:
        """Call it before the first exchange.

        Raises:
            OutOfStepError: The other ranks have had this call already.
        """
        if self.number <= self._count.skipped:
            raise OutOfStepError(
                f"{what}({path}): skipped: it is call {self.number} of this rank, and other ranks have been at call "
                f"{self._count.skipped}: an earlier call failed on one rank alone",
                path=path,
            )


_of_thread = threading.local()
_lock = ForkSafeLock()
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Count]] = weakref.WeakKeyDictionary()


def next_turn(group: dist.ProcessGroup | None, no_dist: bool, use: str) -> Turn | None:
    """Counts a call. The first thing that a collective call does; it raises nothing.

    Args:
        group: Of the ranks that call; None for the default one.
        no_dist: This rank calls alone.
        use: Calls of other uses may overtake this one.

    Returns:
        None if this rank calls alone.
    """
    parent = None if no_dist or not dist.is_available() else group or dist.group.WORLD
    if parent is None or not isinstance(parent, dist.ProcessGroup):  # what else is given is refused later
        return None
    with _lock:
        count = _counts.setdefault(parent, {}).setdefault(use, _Count())
        count.called += 1
        return Turn(count.called, count)


def draw_turn(group: dist.ProcessGroup | None, no_dist: bool, use: str) -> None:
    """As ``next_turn``, for a call that ``take_drawn_turn`` follows later in this thread."""
    _of_thread.drawn = next_turn(group, no_dist, use)


def take_drawn_turn() -> Turn | None:
    """What this thread has drawn."""
    drawn: Turn | None = getattr(_of_thread, "drawn", None)
    _of_thread.drawn = None
    return drawn


@contextmanager
def in_turn(turn: Turn | None, what: str, path: str) -> Iterator[None]:
    """The exchanges of one call, in this thread.

    Raises:
        OutOfStepError: As ``Turn.check`` says.
    """
    if turn is None:
        yield
        return
    turn.check(what, path)
    _of_thread.turn = turn
    try:
        yield
    except BaseException as error:
        turn.note(error)
        raise
    finally:
        _of_thread.turn = None


def number_of_turn() -> int:
    """Of the call whose exchanges this thread is in; 0 if calls are not counted."""
    turn: Turn | None = getattr(_of_thread, "turn", None)
    return 0 if turn is None else turn.number


def check_in_step(what: str, path: str, calls: Mapping[int, int]) -> None:
    """Are all ranks in the same call?

    Args:
        calls: The number of the call, by rank.

    Raises:
        OutOfStepError: They are not.
    """
    if len(set(calls.values())) > 1:
        texts = ", ".join(f"rank {rank} at its call {number}" for rank, number in sorted(calls.items())[:8])
        raise OutOfStepError(
            f"{what}({path}): ranks came with different calls ({texts}): an earlier call failed on one rank alone, or "
            "was not made there. Nothing is saved. The ranks that are behind skip calls until all are in step",
            calls,
            path,
        )
