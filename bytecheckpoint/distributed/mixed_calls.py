# SPDX-License-Identifier: Apache-2.0
"""Finds ranks that wait for one another in different calls, as after a call that one rank has skipped."""

from __future__ import annotations

import enum
import threading
import time

from bytecheckpoint.distributed.liveness_frames import LossReason

__all__ = ["CallKind", "CallKinds"]

_NUMBERS = 1 << 16
# Ranks in different calls count as such after half of the stall timeout, and not before this: a rank may be slow to
# leave an exchange that has ended.
_LEAST_S = 2.0


class CallKind(enum.IntEnum):
    """What a rank exchanges with the others. Ranks of two kinds never meet."""

    NONE = 0
    UNKNOWN = 1
    SAVE = 2  # the hooks of a save
    LOAD = 3
    AGREEMENT = 4  # short exchanges between the steps of a call

    @property
    def loss(self) -> LossReason:
        """What becomes of a rank that is in a call of this kind where another one is under way."""
        return {CallKind.SAVE: LossReason.IN_SAVE, CallKind.LOAD: LossReason.IN_LOAD}.get(self, LossReason.IN_OTHER)


class CallKinds:
    """The kinds of the calls that this rank and its peers are in.

    A rank that stays in one exchange, while this rank stays in one exchange of another kind, waits for this one, which
    waits for it: all of our exchanges end on all ranks together. What a rank does by itself between two exchanges, for
    however long, is of an unknown kind, unless both are within the hooks of one save or load.

    Thread safety: any thread may call any method.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[CallKind] = []
        self._number = 0  # of calls that this rank has begun or ended
        # By peer: the kind and number of its call, the number of this rank's then, and since when that is so.
        self._heard: dict[int, tuple[int, int, int, float]] = {}

    def begin(self, kind: CallKind) -> None:
        """Notes that this rank is in a call within the ones that it is in."""
        with self._lock:
            self._calls.append(kind)
            self._number += 1

    def end(self) -> None:
        """Notes that it has left the innermost one."""
        with self._lock:
            self._calls.pop()
            self._number += 1

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def said(self) -> tuple[int, int]:
        """What a sign of life says: the kind of call, and a number that changes when an exchange begins or ends."""
        with self._lock:
            return self._kind or (CallKind.UNKNOWN if self._calls else CallKind.NONE), self._number % _NUMBERS

    @property
    def _kind(self) -> CallKind:
        """The outermost kind that is known: exchanges within the hooks of a save are of the save."""
        return next((kind for kind in self._calls if kind > CallKind.UNKNOWN), CallKind.NONE)

    def hear(self, peer: int, kind: int, number: int, stall_timeout_s: float) -> LossReason | None:
        """Takes a sign of life. Returns a loss if the peer and this rank wait for one another in vain.

        Args:
            peer: Rank that says it.
            kind: What it says; see ``said``.
            number: What it says; see ``said``.
            stall_timeout_s: After half of that, in which nothing has changed, they do.
        """
        now = time.monotonic()
        with self._lock:
            own, state = self._kind, (kind, number, self._number)
            *before, since = self._heard.get(peer, (*state, now))
            since = since if (*before,) == state else now
            self._heard[peer] = (*state, since)
        is_mixed = own > CallKind.UNKNOWN and kind > CallKind.UNKNOWN and own != kind
        return CallKind(kind).loss if is_mixed and now - since >= max(stall_timeout_s / 2, _LEAST_S) else None
