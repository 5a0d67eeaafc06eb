# SPDX-License-Identifier: Apache-2.0
"""Where and when a rank did its part of a call, and what its threads did."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.errors import CorruptCheckpointError

__all__ = ["RankTrace"]

_NUMBERS = struct.Struct("<qqqqqdBB")
_MOST_TEXT = 255


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """Where and when one rank did its part of a save or a load, and what its threads did.

    Times are nanoseconds of ``time.monotonic_ns`` on that rank.

    Attributes:
        host: Name of the machine.
        clock: Id of that clock: ranks with the same id have the same clock. "" if it is not known.
        began_ns: When the rank began the call.
        sent_ns: When its plan was ready to be sent to the coordinator.
        received_ns: When it had the answer.
        heard_ns: On the coordinator, when it had the plans of all ranks; else 0.
        answered_ns: On the coordinator, when its answers were ready to be sent; else 0.
        unix_offset_s: Unix time minus the monotonic clock, in seconds.
        spans: What the threads did, as ``_core.decode_trace`` takes it.
    """

    host: str = ""
    clock: str = ""
    began_ns: int = 0
    sent_ns: int = 0
    received_ns: int = 0
    heard_ns: int = 0
    answered_ns: int = 0
    unix_offset_s: float = 0.0
    spans: bytes = b""

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """What the threads did: ``phases``, ``sizes`` and ``lanes``, as ``_core.decode_trace`` returns them."""
        from bytecheckpoint.native import _core

        return _core.decode_trace(self.spans) if self.spans else {"phases": {}, "sizes": {}, "lanes": []}

    @property
    def phases(self) -> dict[str, float]:
        """Seconds that the threads of the rank were busy, by phase."""
        return {name: seconds for name, (_, seconds, _) in self.summary["phases"].items()}

    @property
    def began_at(self) -> float:
        """Unix time at which the rank began the call, by its own clock."""
        return self.began_ns / 1e9 + self.unix_offset_s

    def lanes(self, began_s: float) -> list[dict[str, Any]]:
        """Returns what the threads did, as in the journal: lanes with spans.

        Args:
            began_s: When the rank began, in seconds after the coordinator. Times of spans are after the coordinator.
        """
        shift = round(began_s * 1e6)
        return [
            {"name": name, "spans": [[phase, begin + shift, *rest] for phase, begin, *rest in spans]}
            for name, spans in self.summary["lanes"]
        ]

    def to_bytes(self) -> bytes:
        """Returns the trace as bytes, for a message between ranks."""
        host, clock = self.host.encode()[:_MOST_TEXT], self.clock.encode()[:_MOST_TEXT]
        times = (self.began_ns, self.sent_ns, self.received_ns, self.heard_ns, self.answered_ns)
        numbers = _NUMBERS.pack(*times, self.unix_offset_s, len(host), len(clock))
        return numbers + host + clock + self.spans

    @classmethod
    def from_bytes(cls, message: bytes) -> RankTrace:
        """Returns what ``to_bytes`` made a message of.

        Raises:
            CorruptCheckpointError: It is too short.
        """
        if len(message) < _NUMBERS.size:
            raise CorruptCheckpointError(f"a trace of a rank has {len(message)} bytes, at least {_NUMBERS.size} wanted")
        began, sent, received, heard, answered, offset, of_host, of_clock = _NUMBERS.unpack_from(message)
        begin = _NUMBERS.size
        host, clock = message[begin : begin + of_host], message[begin + of_host : begin + of_host + of_clock]
        return cls(
            host=host.decode(errors="replace"),
            clock=clock.decode(errors="replace"),
            began_ns=began,
            sent_ns=sent,
            received_ns=received,
            heard_ns=heard,
            answered_ns=answered,
            unix_offset_s=offset,
            spans=message[begin + of_host + of_clock :],
        )
