# SPDX-License-Identifier: Apache-2.0
"""Says of a save or load of this process where it is stuck, and to other processes when it has ended."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bytecheckpoint.calls.call import Call, Doing
from bytecheckpoint.calls.watch import watch
from bytecheckpoint.listing import listed
from bytecheckpoint.native import _core
from bytecheckpoint.runtime.live_pages import LiveCall, ranks_here
from bytecheckpoint.runtime.place import Place, own_place

if TYPE_CHECKING:
    from bytecheckpoint.native import _C

__all__ = ["WAITS_FOR_RANKS", "NamedCall", "watch_for_stalls"]

WAITS_FOR_RANKS = ("global_plan", "exchange", "wait", "wait_peer")
"""Phases in which a rank waits for others, which are to blame if it waits for long."""

_LOOK_INTERVAL_S = 0.5
_logger = logging.getLogger("bytecheckpoint")


@dataclass
class NamedCall:
    """Which call this is, for messages.

    Attributes:
        kind: ``save`` or ``load``.
        path: Path of the checkpoint.
        rank: Number of this rank.
        world_size: Number of ranks; 0 if it is not known.
        elsewhere: Returns what ranks on other machines are doing, as far as this rank has heard; None if nobody tells.
            Rank 0 hears of all ranks, the others hear of rank 0.
        places: Where each rank runs; empty if that is not known.
    """

    kind: str
    path: str
    rank: int
    world_size: int
    elsewhere: Callable[[], Mapping[int, Doing]] | None = None
    places: Sequence[Place] = ()

    def __str__(self) -> str:
        return f"{self.kind}({self.path}), rank {self.rank}"

    def awaited(self, phase: str) -> str:
        """Returns in words which ranks this one waits for in ``phase``, as far as it can know; "" if it knows none."""
        if phase not in WAITS_FOR_RANKS:
            return ""
        here = {call.rank: call for call in ranks_here(self.kind, self.path) if call.rank != self.rank}
        there = {rank: of for rank, of in (self.elsewhere() if self.elsewhere else {}).items() if rank not in here}
        busy = {
            rank: _in_words(call) for rank, call in here.items() if call.is_stopped or call.phase not in WAITS_FOR_RANKS
        }
        busy |= {
            rank: f"in phase {name} for {s:.0f} s" for rank, (name, s) in there.items() if name not in WAITS_FOR_RANKS
        }
        unseen = sorted({*range(self.world_size)} - {self.rank, *here, *there})
        notes = [f"{self._named(rank)} is {text}" for rank, text in sorted(busy.items())]
        if unseen and not busy:
            notes = self._not_seen(unseen)
        if not notes:  # all wait: for the one that is furthest behind
            behind = [call for call in here.values() if _core.PHASES.index(call.phase) < _core.PHASES.index(phase)]
            notes = [f"rank {call.rank} is {_in_words(call)}" for call in behind]
        return listed(notes)

    def _named(self, rank: int) -> str:
        """Returns the rank in words, with its host if that is another one."""
        place = self.places[rank] if rank < len(self.places) else None
        return f"rank {rank}" if place is None or place.is_with(own_place()) else f"rank {rank} on {place}"

    def _not_seen(self, unseen: Sequence[int]) -> list[str]:
        """Returns in words what is known of ranks of which nothing is seen here, and nobody has said what they do."""
        if not self.places:
            ranks = listed([str(rank) for rank in unseen])
            return [f"nothing of this call is seen of rank {ranks} on this machine: not come, or on another machine"]
        here = [rank for rank in unseen if rank < len(self.places) and self.places[rank].is_with(own_place())]
        there = [self._named(rank) for rank in unseen if rank not in here]
        notes = []
        if here:
            notes.append(f"nothing of this call is seen of rank {listed([str(rank) for rank in here])} on this machine")
        if there and self.rank == 0:
            notes.append(f"nothing of this call is heard of {listed(there)}")
        elif there and not here:
            notes.append(f"no rank of this machine is behind; the log of {self._named(0)} says what the others do")
        return notes


def _in_words(call: LiveCall) -> str:
    state = f", {call.state_text}" if call.is_stopped else ""
    done = _done(call.bytes_done, call.bytes_expected)
    return f"in phase {call.phase} for {call.phase_s:.0f} s{done} (pid {call.pid}{state})"


def _done(num_bytes: int, expected: int) -> str:
    return f", {num_bytes:,} of {expected:,} bytes done" if expected else ""


class _Watched:
    """One call."""

    def __init__(self, spans: _C.Trace, call: Call, title: NamedCall, stall_timeout_s: float) -> None:
        self._spans = weakref.ref(spans)
        self._call = call
        self._title = title
        self._stall_timeout_s = stall_timeout_s
        self._seen = ("", 0)
        self._moved = self._said = time.monotonic()

    def look(self) -> bool:
        """Looks at the call once. Returns whether it still runs."""
        spans = self._spans()
        if spans is None:
            return False
        if not self._call.is_running():
            spans.leave()
            return False
        now, seen = time.monotonic(), (spans.phase, spans.bytes_done)
        if seen != self._seen:
            self._seen, self._moved, self._said = seen, now, now
        elif now - self._said >= self._stall_timeout_s:
            self._said = now
            phase, done = seen
            awaited = self._title.awaited(phase)
            _logger.warning(
                "%s: no progress for %.0f s, in phase %s for %.0f s%s%s",
                *(self._title, now - self._moved, phase, (time.monotonic_ns() - spans.since_ns) / 1e9),
                _done(done, spans.bytes_expected),
                f"; {awaited}" if awaited else "",
            )
        return True


def _doing(of_call: weakref.ref[_C.Trace]) -> Doing | None:
    """Returns the phase of a call, and the seconds since it began; None if it has ended."""
    spans = of_call()
    if spans is None or not spans.phase:
        return None
    return spans.phase, (time.monotonic_ns() - spans.since_ns) / 1e9


def watch_for_stalls(spans: _C.Trace, call: Call, title: NamedCall, stall_timeout_s: float) -> None:
    """Watches a call until it ends: then its page says so to other processes.

    A call without progress for ``stall_timeout_s`` is logged as a warning, with its phase and the ranks that it waits
    for, and again after as long.

    Args:
        spans: Trace of the call.
        call: Tells whether the call still runs.
        title: Which call it is, for messages.
        stall_timeout_s: Seconds.
    """
    call.doing = functools.partial(_doing, weakref.ref(spans))
    watch(_Watched(spans, call, title, stall_timeout_s).look, _LOOK_INTERVAL_S)
