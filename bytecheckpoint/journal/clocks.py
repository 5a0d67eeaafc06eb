# SPDX-License-Identifier: Apache-2.0
"""Times of other ranks on the clock of the coordinator.

Ranks of one machine have the same clock. For another machine, the exchange of plans bounds the difference: the
coordinator had heard of a plan after it was sent, and the answer came after the coordinator had sent it.

    rank           sent ---.                      .--> received      coordinator's time = rank's time + offset
    coordinator             `--> heard   answered                    answered - received <= offset <= heard - sent

Within these bounds the difference of the Unix clocks, which most clusters keep in step, is the estimate.
"""

from __future__ import annotations

from bytecheckpoint.report.rank_trace import RankTrace

__all__ = ["offset_of"]


def offset_of(trace: RankTrace, coordinator: RankTrace) -> tuple[float, float | None]:
    """Returns what to add to the monotonic clock of a rank to get that of the coordinator.

    Args:
        trace: Trace of the rank.
        coordinator: Trace of the coordinator.

    Returns:
        The offset in seconds, and the most that it may be wrong; None if there are no bounds.
    """
    if trace.clock and trace.clock == coordinator.clock:
        return 0.0, 0.0
    estimate = trace.unix_offset_s - coordinator.unix_offset_s
    if not (trace.sent_ns and trace.received_ns and coordinator.heard_ns and coordinator.answered_ns):
        return estimate, None
    lowest = (coordinator.answered_ns - trace.received_ns) / 1e9
    highest = (coordinator.heard_ns - trace.sent_ns) / 1e9
    if lowest > highest:  # these are not times of one exchange
        return estimate, None
    offset = min(max(estimate, lowest), highest)
    return offset, max(offset - lowest, highest - offset)
