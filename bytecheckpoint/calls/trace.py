# SPDX-License-Identifier: Apache-2.0
"""The trace of one save or load on this rank."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bytecheckpoint.calls.call import Call, Doing
from bytecheckpoint.calls.stalls import NamedCall, watch_for_stalls
from bytecheckpoint.config import Config
from bytecheckpoint.native import _C
from bytecheckpoint.report.rank_trace import RankTrace
from bytecheckpoint.runtime.boot_id import boot_id
from bytecheckpoint.runtime.place import Place

__all__ = ["MOST_TRACE_BYTES", "CallTrace"]

MOST_TRACE_BYTES = 2048
"""Bytes of spans that a rank sends to the coordinator at most, apart from totals."""

# Nanoseconds below which neighbouring pieces of work become one span, and the spans that a thread keeps at most.
_KEPT = {"summary": (1_000_000, 1024), "full": (0, 1 << 15)}


class CallTrace:
    """Records what the threads of this rank do in one call, and when its messages to the coordinator travelled.

    Args:
        config: Settings; None records nothing.
        kind: ``save`` or ``load``.
        path: Path of the checkpoint.
        rank: Number of this rank in the call.
        world_size: Number of ranks; 0 if it is not known.

    Attributes:
        kind: As it was passed.
        path: As it was passed.
        spans: Where the engine records. None with ``Config(trace="off")``.
        origin_ns: When the call began, as ``time.monotonic_ns`` says.
    """

    def __init__(
        self, config: Config | None, kind: str = "", path: str = "", rank: int = 0, world_size: int = 0
    ) -> None:
        self.spans: _C.Trace | None = None
        self.kind, self.path = kind, path
        self._call = NamedCall(kind, path, rank, world_size)
        self._stall_timeout_s = 0.0 if config is None else config.stall_timeout_s
        self._moments: dict[str, int] = {}
        self._is_full = config is not None and config.trace == "full"
        if config is not None and config.trace in _KEPT:
            about = {"kind": kind, "path": path, "rank": rank, "world_size": world_size}
            join_ns, most = _KEPT[config.trace]
            header = json.dumps({**about, "pid": os.getpid(), "host": os.uname().nodename, "at": time.time()})
            self.spans = _C.Trace(join_ns=join_ns, spans_of_lane=most, header=header)
        self.origin_ns = time.monotonic_ns() if self.spans is None else self.spans.origin_ns

    @property
    def began_at(self) -> float:
        """Unix time at which the call began."""
        return time.time() - (time.monotonic_ns() - self.origin_ns) / 1e9

    def add(self, phase: str, begin_ns: int, end_ns: int, lane: str = "call") -> None:
        """Notes that this rank was in ``phase`` between two times of ``time.monotonic_ns``."""
        if self.spans is not None:
            self.spans.add(phase, begin_ns, end_ns, lane=lane)

    def enter(self, phase: str, call: Call | None = None) -> None:
        """Notes for whoever looks from outside that the rank is in ``phase`` from now on.

        Args:
            phase: Name of the phase.
            call: With the first phase, the call: it is watched until it ends.
        """
        if self.spans is None:
            return
        self.spans.enter(phase)
        if call is not None:
            watch_for_stalls(self.spans, call, self._call, self._stall_timeout_s)

    def leave(self) -> None:
        """Notes for whoever looks from outside that the rank is in no phase, until it enters one."""
        if self.spans is not None:
            self.spans.leave()

    def note_request(self, begin_ns: int, end_ns: int) -> None:
        """Notes a request to an object store. Any thread."""
        self.add("request", begin_ns, end_ns, lane="store")

    def ask_elsewhere(self, doing: Callable[[], Mapping[int, Doing]], places: Sequence[Place]) -> None:
        """Notes what is known of ranks on other machines, for what is said where this rank waits for long.

        Args:
            doing: Returns what they are doing, as far as this rank has heard.
            places: Where each rank runs.
        """
        self._call.elsewhere, self._call.places = doing, places

    def expect(self, num_bytes: int) -> None:
        """Notes how many bytes this rank is going to write, or wants to read."""
        if self.spans is not None:
            self.spans.expect(num_bytes)

    def mark(self, moment: str) -> None:
        """Notes that it is now one of the moments between which messages travel.

        Args:
            moment: Name of the field of ``RankTrace``: ``sent_ns``, ``received_ns``, ``heard_ns`` or ``answered_ns``.
        """
        self._moments[moment] = time.monotonic_ns()

    def whole(self) -> RankTrace | None:
        """Returns all of what was recorded so far, if every piece of work is recorded; else None."""
        return self.of_rank(sys.maxsize) if self._is_full else None

    def of_rank(self, most_bytes: int = MOST_TRACE_BYTES) -> RankTrace | None:
        """Returns what was recorded so far, with spans of at most ``most_bytes``; None if nothing is recorded."""
        if self.spans is None:
            return None
        return RankTrace(
            host=os.uname().nodename,
            clock=_clock(),
            began_ns=self.origin_ns,
            unix_offset_s=time.time() - time.monotonic(),
            spans=self.spans.encode(most_bytes),
            **self._moments,
        )


@functools.cache
def _clock() -> str:
    """Returns an id of the monotonic clock: that of the system's start, and of the time namespace, as containers have.

    It is "" if the system does not tell.
    """
    try:
        return f"{boot_id()} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""
