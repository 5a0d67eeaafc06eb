# SPDX-License-Identifier: Apache-2.0
"""Where the time of a save or a load goes."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["Phases"]


class Phases:
    """A clock that is told the end of each phase. It starts when it is made.

    Attributes:
        seconds: Seconds by phase; a phase is named as its field of a report. If a phase ended more than once, the sum.
    """

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self.seconds: dict[str, Any] = {}  # floats; reports take them as keyword arguments

    @property
    def total_s(self) -> float:
        """Seconds from the start to the end of the last phase."""
        return self._last - self._begin

    def end(self, phase: str) -> None:
        """Counts the time since the end of the phase before as ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
