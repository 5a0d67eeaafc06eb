# SPDX-License-Identifier: Apache-2.0
"""The ranks of a call of DCP, and messages of bytes between them."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.distributed import collectives as _collectives
from bytecheckpoint.distributed.waits import Collective, Message
from bytecheckpoint.errors import ProcessGroupChangedError
from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = ["Channel", "Peers", "next_name", "unused_name"]

# Tag of our messages, plus their kind; whatever else runs on the group at the same time does not use it.
_TAG = 0xB9C
# A message goes in pieces, so that a rank that has no memory for all of it can still receive it.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Peers:
    """All ranks of one call, this one included.

    Attributes:
        group: The group that the call was given; None for the default group.
        rank: Number of this rank in the group.
        size: Number of ranks.
        coordinator: The rank that plans and commits.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    coordinator: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.rank == self.coordinator

    def connect(self) -> Channel:
        """Connects the ranks for messages in host memory.

        Collective the first time for each group: all ranks must call it, and none may have failed before.

        Returns:
            A channel over the group itself if that can carry such messages, else over a gloo group of the same ranks,
            which is made once.
        """
        group = self.group or _default()
        return Channel(_carrier_of(group))

    def begin_gather(self, tensor: torch.Tensor) -> tuple[Collective, list[torch.Tensor]]:
        """Begins to gather ``tensor`` of each rank on the coordinator. Does not wait.

        Collective: all ranks must call it, with tensors of one shape and dtype.

        Returns:
            The work, and the list of tensors, by rank, that is filled when the work is done; the list is empty on all
            ranks but the coordinator. They are on the device that the group uses for objects, as in DCP's own
            exchanges.
        """
        group = self.group or _default()
        mine = tensor.to(_compat.object_device(group))
        gathered = [torch.empty_like(mine) for _ in range(self.size)] if self.is_coordinator else []
        return _collectives.begin_gather(group, mine, gathered, self.coordinator), gathered


class Channel:
    """Point-to-point messages between the ranks of a call. Those of one rank and kind arrive in order."""

    def __init__(self, carrier: dist.ProcessGroup) -> None:
        self._carrier = carrier
        self.bytes_sent = 0
        self.bytes_received = 0

    def send(self, data: bytes, to: int) -> None:
        """Sends ``data``, and blocks until it is on its way.

        Raises:
            RuntimeError: The peer has died, or takes longer than the timeout of the group.
        """
        self.begin_send(torch.tensor([len(data)], dtype=torch.int64, device="cpu"), to).wait()
        for begin in range(0, len(data), _PIECE_BYTES):
            piece = bytearray(memoryview(data)[begin : begin + _PIECE_BYTES])
            self.begin_send(torch.frombuffer(piece, dtype=torch.uint8), to).wait()

    def receive(self, sender: int) -> bytes:
        """Returns the next message of ``sender``.

        Raises:
            RuntimeError: See ``send``.
            MemoryError: There is no memory for the message. Raised only after all of it was received, because the
                sender waits for that.
        """
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self.begin_receive(size, sender).wait()
        num_bytes = int(size)
        failure: MemoryError | None = None
        try:
            data = bytearray(num_bytes)
        except MemoryError as error:
            failure, data = error, bytearray(min(num_bytes, _PIECE_BYTES))
        for begin in range(0, num_bytes, _PIECE_BYTES):
            at = begin if failure is None else 0
            piece = memoryview(data)[at : at + min(_PIECE_BYTES, num_bytes - begin)]
            self.begin_receive(torch.frombuffer(piece, dtype=torch.uint8), sender).wait()
        if failure is not None:
            raise failure
        return bytes(data)

    def begin_send(self, tensor: torch.Tensor, to: int, kind: int = 0) -> Message:
        """Begins to send ``tensor``. Does not wait.

        Args:
            tensor: Contiguous, in host memory; must not change until the work is done. The peer must know its size.
            to: The rank that receives it.
            kind: Small number; messages of different kinds may overtake one another.
        """
        work = self._carrier.send([tensor], to, _TAG + kind)
        self.bytes_sent += tensor.nbytes
        return Message(work, self._carrier)

    def begin_receive(self, tensor: torch.Tensor, sender: int, kind: int = 0) -> Message:
        """Begins to fill ``tensor``, which must be contiguous and in host memory. Does not wait."""
        work = self._carrier.recv([tensor], sender, _TAG + kind)
        self.bytes_received += tensor.nbytes
        return Message(work, self._carrier)


def _default() -> dist.ProcessGroup:
    """Returns the default group.

    Raises:
        ProcessGroupChangedError: It was destroyed.
    """
    group = dist.group.WORLD
    if group is None:
        raise ProcessGroupChangedError("the default process group was destroyed while ranks used it")
    return group


_lock = ForkSafeLock()
_carriers: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _carrier_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if _compat.is_gloo_on_host(group):
        return group
    with _lock:
        carrier = _carriers.get(group)
    if carrier is None:
        # Without the lock: another rank may come to two groups in the other order, and both would wait for ever.
        carrier = _compat.gloo_between(group, unused_name(group, "peers"))
        with _lock:
            _carriers[group] = carrier
    return carrier


# Number of groups made for each use of each group, by world. A count for the whole process would differ on a process
# that joined the world later.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, str]]] = weakref.WeakKeyDictionary()


def next_name(group: dist.ProcessGroup, use: str) -> str:
    """Returns the name that ``unused_name`` returns next, without using it."""
    with _lock:
        made = _made.setdefault(_default(), Counter())
        return _name(group, use, made[group.group_name, use] + 1)


def unused_name(group: dist.ProcessGroup, use: str) -> str:
    """Returns a name for a new group of the ranks of ``group``: the same on all ranks that have asked equally often."""
    with _lock:
        made = _made.setdefault(_default(), Counter())
        made[group.group_name, use] += 1  # by name, not by group: torch reuses the names of destroyed groups
        return _name(group, use, made[group.group_name, use])


def _name(group: dist.ProcessGroup, use: str, number: int) -> str:
    return f"bytecheckpoint/{group.group_name}/{use}/{number}/"
