# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks of which some may be lost."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from bytecheckpoint.dcp._peers import Channel
from bytecheckpoint.errors import CheckpointError

__all__ = ["HEADER", "PAYLOAD", "Mail"]

# Kinds of messages, each in an order of its own.
HEADER, PAYLOAD = 1, 2
_SIZE, _STATEMENT = 3, 4


class Mail:
    """Sends and receives; remembers the loss of a peer and goes on with the others.

    A rank that stopped at the first loss would leave its other peers waiting for what it owes them. So nothing here
    raises but ``raise_if_lost``, which is for when nobody waits any more.

    Attributes:
        lost: What was raised about each peer that no longer answers.
    """

    def __init__(self, channel: Channel, rank: int, size: int) -> None:
        self._channel = channel
        self._rank = rank
        self._size = size
        self.lost: dict[int, RuntimeError] = {}

    def send(self, tensor: torch.Tensor, to: int, kind: int) -> dist.Work | None:
        """Begins to; ``tensor`` must not change until the work is done. None if the peer is lost."""
        return self._begin(self._channel.begin_send, tensor, to, kind)

    def receive(self, tensor: torch.Tensor, sender: int, kind: int) -> dist.Work | None:
        """Begins to fill ``tensor``. None if the peer is lost."""
        return self._begin(self._channel.begin_receive, tensor, sender, kind)

    def _begin(
        self, begin: Callable[[torch.Tensor, int, int], dist.Work], tensor: torch.Tensor, peer: int, kind: int
    ) -> dist.Work | None:
        if peer in self.lost:
            return None
        try:
            return begin(tensor, peer, kind)
        except RuntimeError as error:
            self.lost[peer] = error
            return None

    def wait(self, peer: int, work: dist.Work | None) -> bool:
        """Blocks until ``work`` with ``peer`` is done. False if the peer is lost."""
        if work is None:
            return False
        try:
            work.wait()
        except RuntimeError as error:
            self.lost.setdefault(peer, error)
            return False
        return True

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank; all ranks must call it.

        Each sends to each: in a ring of collectives only the neighbours of a rank see its loss, and the others wait
        for them.

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
        """Raises a CheckpointError that names the peers that do not answer."""
        if self.lost:
            reasons = "; ".join(f"rank {rank}: {str(error).splitlines()[0]}" for rank, error in self.lost.items())
            raise CheckpointError(f"ranks that share the reading of this load do not answer ({reasons})")
