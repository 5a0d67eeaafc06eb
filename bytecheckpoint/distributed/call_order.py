# SPDX-License-Identifier: Apache-2.0
"""Counts the calls over the same ranks, so that a save is refused if ranks came to it with different calls.

A call may fail on one rank before that rank meets the others. They wait in their call, and the next call of that rank
meets them there. If both go to one path, nothing in a plan shows that the two states are of different steps. So each
rank counts its calls before anything can fail, and the count goes to the coordinator with what the rank has written. If
counts differ, the save is refused, and the ranks that are behind skip their calls up to the highest count.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint.errors import OutOfStepError
from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = [
    "CallOrder",
    "check_in_step",
    "check_same_kind",
    "draw_turn",
    "in_turn",
    "next_turn",
    "number_of_turn",
    "take_back_turn",
    "take_drawn_turn",
]


@dataclass(eq=False)
class _Count:
    """Counts the calls of one use over the ranks of a group.

    Attributes:
        called: Number of calls so far.
        skipped: Calls up to this number are skipped, because other ranks have had later ones.
    """

    called: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class CallOrder:
    """One call of this rank.

    Attributes:
        number: Number of the call, from 1; the same on all ranks that are in step.
    """

    number: int
    _count: _Count

    def note(self, error: BaseException) -> None:
        """Notes the counts of the other ranks, if ``error`` has them."""
        failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        for failure, _ in failures:
            if isinstance(failure, OutOfStepError):
                self._count.skipped = max([self._count.skipped, *failure.calls.values()])

    def check(self, what: str, path: str) -> None:
        """Checks that this call is not to be skipped. Call it before the first exchange between ranks.

        Raises:
            OutOfStepError: The other ranks have already had this call.
        """
        if self.number <= self._count.skipped:
            raise OutOfStepError(
                f"{what}({path}): this call is skipped: it is call {self.number} of this rank, but other ranks have "
                f"already made call {self._count.skipped}: an earlier call failed on one rank alone",
                path=path,
            )


_of_thread = threading.local()
_lock = ForkSafeLock()
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Count]] = weakref.WeakKeyDictionary()


def next_turn(group: dist.ProcessGroup | None, no_dist: bool, use: str) -> CallOrder | None:
    """Counts a call. Every collective call does this first; it raises nothing.

    Args:
        group: Group of the ranks that call; None for the default group.
        no_dist: Whether this rank calls alone.
        use: Calls of each use are counted apart, because those of different uses may overtake one another.

    Returns:
        The call; None if this rank calls alone.
    """
    parent = None if no_dist or not dist.is_available() else group or dist.group.WORLD
    if parent is None or not isinstance(parent, dist.ProcessGroup):  # another type is refused later
        return None
    with _lock:
        count = _counts.setdefault(parent, {}).setdefault(use, _Count())
        count.called += 1
        _of_thread.newest = CallOrder(count.called, count)
        return _of_thread.newest  # type: ignore[no-any-return]


def take_back_turn() -> None:
    """Undoes the count of the call that this thread has counted last: the ranks did not meet in it."""
    newest: CallOrder | None = getattr(_of_thread, "newest", None)
    _of_thread.newest = None
    with _lock:
        if newest is not None and newest._count.called == newest.number:
            newest._count.called -= 1


def draw_turn(group: dist.ProcessGroup | None, no_dist: bool, use: str) -> None:
    """Counts a call, as ``next_turn`` does, and keeps it for ``take_drawn_turn``, which this thread calls later."""
    _of_thread.drawn = next_turn(group, no_dist, use)


def take_drawn_turn() -> CallOrder | None:
    """Removes and returns the call that this thread has counted with ``draw_turn``, or None."""
    drawn: CallOrder | None = getattr(_of_thread, "drawn", None)
    _of_thread.drawn = None
    return drawn


@contextmanager
def in_turn(turn: CallOrder | None, what: str, path: str) -> Iterator[None]:
    """Marks a ``with`` block, in this thread, in which the ranks of one call exchange messages.

    Raises:
        OutOfStepError: See ``CallOrder.check``.
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
    """Returns the number of the call whose ``in_turn`` block this thread is in; 0 if calls are not counted."""
    turn: CallOrder | None = getattr(_of_thread, "turn", None)
    return 0 if turn is None else turn.number


def check_same_kind(what: str, path: str, others: Mapping[int, str]) -> None:
    """Checks that all ranks are in a call of one kind.

    Args:
        what: What is being done on this rank.
        path: Path of it, for the error; "" if it is not known.
        others: What the ranks do that do something else.

    Raises:
        OutOfStepError: There are some.
    """
    if others:
        texts = ", ".join(f"rank {rank} is in {other}" for rank, other in sorted(others.items())[:8])
        where = f"{what}({path})" if path else what
        raise OutOfStepError(
            f"{where}: the ranks are in different calls ({texts}): all ranks must make the same calls in the same "
            "order, and one may have skipped a call. Nothing is saved or loaded",
            path=path,
        )


def check_in_step(what: str, path: str, calls: Mapping[int, int]) -> None:
    """Checks that all ranks are in the same call.

    Args:
        what: What is being done, for the error.
        path: Path of it, for the error.
        calls: The number of the call, by rank.

    Raises:
        OutOfStepError: The numbers differ.
    """
    if len(set(calls.values())) > 1:
        texts = ", ".join(f"rank {rank} is at its call {number}" for rank, number in sorted(calls.items())[:8])
        raise OutOfStepError(
            f"{what}({path}): the ranks are at different calls ({texts}): an earlier call failed on one rank alone, or "
            "was not made there. Nothing is saved. The ranks that are behind skip calls until all are in step",
            calls,
            path,
        )
