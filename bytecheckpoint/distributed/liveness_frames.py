# SPDX-License-Identifier: Apache-2.0
"""What ranks tell one another while they watch each other, and the connections for that."""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bytecheckpoint.calls.call import Doing
from bytecheckpoint.listing import listed
from bytecheckpoint.runtime.place import Place

__all__ = ["FRAME", "NO_ID", "SECONDS", "Kind", "Link", "LossReason", "doing_to_bytes", "in_words"]

# Kind; in which kind of call a rank is, or what became of it; number of that call; the rank that the frame is about; a
# save id.
FRAME = struct.Struct("<BBHI16s")
NO_ID = b"\0" * 16
SECONDS = struct.Struct("<d8x")
_DOING = struct.Struct("<12sI")  # in place of the id of a sign of life: the phase of a call, and its seconds so far


class Kind(enum.IntEnum):
    """Kinds of frames."""

    BEAT = 1
    LOST = 2
    FAREWELL = 3
    HOLDS = 4  # a rank has the right to commit the save of this id
    STALLS = 5  # a stall timeout, a double in place of the id: the one that a rank wants, or rank 0's smallest of all
    SILENT = 6  # whether nothing has been heard of a rank for the stall timeout, as rank 0 says after a loss, too


class LossReason(enum.IntEnum):
    """What became of a rank that is lost."""

    DIED = 1
    STOPPED = 2
    GAVE_UP = 3
    ENDED = 4
    NO_DATA = 5  # its data do not reach the ranks at an address, which comes in place of the id
    CUT_OFF = 6  # its connection to the ranks at such an address has ended
    IN_SAVE = 7  # while rank 0 is in another kind of call
    IN_LOAD = 8
    IN_OTHER = 9


_SAME_CALLS = ": all ranks must make the same calls in the same order, and one may have skipped a call"
_WORDS = {
    LossReason.DIED: "died: its connection has ended",
    LossReason.STOPPED: "stopped: nothing was heard from it for more than {:g} s",
    LossReason.GAVE_UP: "gave up: it raised an error that DCP does not pass on to all ranks",
    LossReason.ENDED: "ended, or destroyed the process group",
    LossReason.NO_DATA: "sends data to {1} that have not moved for more than {0:g} s, while signs of life pass: look "
    "for a smaller MTU on the way, and for a firewall that drops large packets",
    LossReason.CUT_OFF: "has lost its connection to {1}",
    LossReason.IN_SAVE: "waits in a save, and rank 0 in another call" + _SAME_CALLS,
    LossReason.IN_LOAD: "waits in a load, and rank 0 in another call" + _SAME_CALLS,
    LossReason.IN_OTHER: "waits in another call than rank 0" + _SAME_CALLS,
}


def in_words(
    lost: Sequence[tuple[int, LossReason]], towards: Mapping[int, str], places: Sequence[Place], stall_timeout_s: float
) -> dict[int, str]:
    """Returns what became of each lost rank, with its host.

    Args:
        lost: The lost ranks, each with the reason.
        towards: Addresses to which some of them cannot send.
        places: Where each rank runs.
        stall_timeout_s: In seconds.
    """
    ranks = {}
    for rank, reason in lost:
        address = towards.get(rank, "")
        peers = [str(peer) for peer, place in enumerate(places) if place.address == address and peer != rank]
        host = next((str(place) for place in places if place.address == address), address)
        peers_text = f"rank {listed(peers)} (on host {host})" if peers else address
        ranks[rank] = f"{_WORDS[reason].format(stall_timeout_s, peers_text)} (on host {places[rank]})"
    return ranks


@dataclass
class Link:
    """The connection to one peer.

    Attributes:
        last_heard_s: When the last sign of life came.
        is_in_call: Whether the peer was in a call then, as it said.
        is_leaving: Whether the peer has said farewell.
        doing: What it is doing, as it said then; all zeros if it did not say.
    """

    peer: int
    socket: socket.socket
    last_heard_s: float
    is_in_call: bool = False
    is_leaving: bool = False
    doing: bytes = NO_ID
    received: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)

    def hear(self, piece: bytes, now: float) -> Iterator[bytes]:
        """Takes bytes from the peer, and yields the frames that are whole by then."""
        self.last_heard_s = now
        self.received += piece
        while len(self.received) >= FRAME.size:
            frame, self.received = self.received[: FRAME.size], self.received[FRAME.size :]
            yield frame

    def doing_by(self, now: float) -> Doing | None:
        """Returns what the peer is doing ``now``, as it said last; None if it did not say."""
        phase, seconds = _DOING.unpack(self.doing)
        return (phase.rstrip(b"\0").decode(), seconds + now - self.last_heard_s) if phase[0] else None


def doing_to_bytes(of_call: Doing) -> bytes:
    """Returns the phase of a call, and its seconds, in place of an id."""
    phase, seconds = of_call
    return _DOING.pack(phase.encode(), min(round(seconds), 0xFFFFFFFF))
