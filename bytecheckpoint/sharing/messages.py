# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks, some of which may be lost."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.distributed.channel import Channel
from bytecheckpoint.distributed.waits import Message
from bytecheckpoint.errors import CheckpointError

__all__ = ["HEADER", "PAYLOAD", "TAKEN", "PeerMessages"]

# Kinds of messages. Only messages of one kind arrive in the order of sending.
HEADER, PAYLOAD = 1, 2
_SIZE, _STATEMENT = 3, 4
TAKEN = 5


class PeerMessages:
    """Sends and receives messages. Remembers which peers are lost, and goes on with the others.

    If a rank stopped at the first loss, its other peers would wait for messages that it owes them. So the methods for
    single messages do not raise for a lost peer. Call ``raise_if_lost`` when nobody waits any more.

    Attributes:
        lost: The error for each peer that no longer answers.
        trace: Records how long this rank waits for others.
    """

    def __init__(self, channel: Channel, rank: int, size: int) -> None:
        self._channel = channel
        self._rank = rank
        self._size = size
        self.lost: dict[int, RuntimeError] = {}
        self.trace = CallTrace(None)

    def send(self, tensor: torch.Tensor, to: int, kind: int) -> Message | None:
        """Begins to send ``tensor``, which must not change until the work is done. Returns None if the peer is lost."""
        return self._begin(self._channel.begin_send, tensor, to, kind)

    def receive(self, tensor: torch.Tensor, sender: int, kind: int) -> Message | None:
        """Begins to fill ``tensor``. Returns None if the peer is lost."""
        return self._begin(self._channel.begin_receive, tensor, sender, kind)

    def _begin(
        self, begin: Callable[[torch.Tensor, int, int], Message], tensor: torch.Tensor, peer: int, kind: int
    ) -> Message | None:
        if peer in self.lost:
            return None
        try:
            return begin(tensor, peer, kind)
        except RuntimeError as error:
            self.lost[peer] = error
            return None

    def wait(self, peer: int, work: Message | None, phase: str = "wait_peer") -> bool:
        """Blocks until ``work`` with ``peer`` is done, which it records as ``phase``. False if the peer is lost."""
        if work is None:
            return False
        begin_ns = time.monotonic_ns()
        try:
            work.wait()
        except RuntimeError as error:
            self.lost.setdefault(peer, error)
            return False
        finally:
            self.trace.add(phase, begin_ns, time.monotonic_ns(), lane="scatter")
        return True

    def gather(self, data: bytes) -> list[bytes]:
        """Returns ``data`` of every rank, by rank. All ranks must call it.

        Each rank sends to every other: in a ring of collectives only the neighbours of a lost rank see the loss, and
        the other ranks wait for these neighbours.

        Raises:
            CheckpointError: A peer is lost.
        """
        peers = [rank for rank in range(self._size) if rank != self._rank]
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None
        sizes = {peer: torch.zeros(1, dtype=torch.int64, device="cpu") for peer in peers}
        receives = [(peer, self.receive(sizes[peer], peer, _SIZE)) for peer in peers]
        sends = [(peer, self.send(size, peer, _SIZE)) for peer in peers]
        if mine is not None:
            sends += [(peer, self.send(mine, peer, _STATEMENT)) for peer in peers]
        buffers = {self._rank: bytearray(data)}
        bodies = []
        for peer, work in receives:
            buffers[peer] = bytearray(int(sizes[peer])) if self.wait(peer, work) else bytearray()
            if buffers[peer]:
                body = torch.frombuffer(buffers[peer], dtype=torch.uint8)
                bodies.append((peer, self.receive(body, peer, _STATEMENT)))
        for peer, work in bodies + sends:
            self.wait(peer, work)
        self.raise_if_lost()
        return [bytes(buffers[rank]) for rank in range(self._size)]

    def raise_if_lost(self) -> None:
        """Raises a CheckpointError if peers are lost. It names them."""
        if self.lost:
            reasons = "; ".join(f"rank {rank}: {str(error).splitlines()[0]}" for rank, error in self.lost.items())
            raise CheckpointError(f"ranks that share the reading of this load do not answer ({reasons})")
