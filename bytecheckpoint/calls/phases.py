# SPDX-License-Identifier: Apache-2.0
"""Where the time of a save or a load goes."""

from __future__ import annotations

import time
from typing import Any

from bytecheckpoint.calls.call import Call
from bytecheckpoint.calls.trace import CallTrace

__all__ = ["Phases"]


# What comes after a phase, for whoever looks from outside; in a load other than in a save.
_NEXT = {
    "plan_s": "exchange",
    "global_plan_s": "begin",
    "begin_s": "exchange",
    "exchange_s": "write",
    "write_s": "wait",
    "wait_s": "assemble",
    "assemble_s": "commit",
    "metadata_s": "plan",
    "read_s": "objects",
    "objects_s": "wait",
}
_NEXT_OF_LOAD = {"exchange_s": "read"}
# With the end of these phases a message to the coordinator, or back, begins or ends its way.
_MOMENTS = {"plan_s": "sent_ns", "global_plan_s": "heard_ns", "begin_s": "answered_ns", "exchange_s": "received_ns"}
# In these phases the threads record what they do, under the same name.
_OF_THREADS = ("write_s", "read_s")


class Phases:
    """A clock that is told the end of each phase. It starts when it is made.

    Args:
        trace: Where to record the phases; None records nothing.
        call: The call, which is watched until it ends.

    Attributes:
        trace: The trace of the call.
        seconds: Seconds by phase; a phase is named as its field of a report. If a phase ended more than once, the sum.
    """

    def __init__(self, trace: CallTrace | None = None, call: Call | None = None) -> None:
        self.trace = CallTrace(None) if trace is None else trace
        self._begin_ns = self._last_ns = self.trace.origin_ns
        self.seconds: dict[str, Any] = {}  # floats; reports take them as keyword arguments
        self.trace.enter("metadata" if self.trace.kind == "load" else "plan", call)

    @property
    def total_s(self) -> float:
        """Seconds from the start to the end of the last phase."""
        return (self._last_ns - self._begin_ns) / 1e9

    def end(self, phase: str, last: str = "", last_s: float = 0.0) -> None:
        """Counts the time since the end of the phase before as ``phase``.

        Args:
            phase: Name of the phase, as a field of a report.
            last: Another phase, which has followed it and ends now, too.
            last_s: Seconds that this one took.
        """
        now = time.monotonic_ns() - round(last_s * 1e9)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + (now - self._last_ns) / 1e9
        if phase not in _OF_THREADS:  # the trace has no "_s" at the end of a name
            self.trace.add(phase[:-2], self._last_ns, now)
        after = (self.trace.kind == "load" and _NEXT_OF_LOAD.get(phase)) or _NEXT.get(phase)
        if after:
            self.trace.enter(after)
        self._last_ns = now
        if phase in _MOMENTS:
            self.trace.mark(_MOMENTS[phase])
        if last:
            self.end(last)
