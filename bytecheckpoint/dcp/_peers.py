# SPDX-License-Identifier: Apache-2.0
"""The ranks of a call of DCP, and bytes between them.

DCP tells no hook which process group a call was given, nor that it was given none. It runs the hooks inside methods of
one object that knows, so that is where we look. Where it is not found (hooks called by hand, a DCP built otherwise,
saves without collectives) nothing is sent but by DCP itself: the default group is no substitute.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.utils import _DistWrapper

__all__ = ["Channel", "Peers", "peers_of_call", "planned_by_own_hooks"]

# The methods in which DCP calls hooks.
_STEPS = tuple(
    getattr(_DistWrapper, name).__code__
    for name in ("reduce_scatter", "all_reduce", "all_gather")
    if hasattr(_DistWrapper, name)
)
# As it was when this was imported; it cannot fail.
_FINISH_PLAN = DefaultLoadPlanner.finish_plan
# Of messages about plans; whatever else runs on the group at the same time does not use it.
_TAG = 0xB9C


@dataclass(frozen=True)
class Peers:
    """All ranks of one call, this one included.

    Attributes:
        group: That the call was given; None for the default one.
        rank: Number of this rank in the group.
        size: Number of ranks.
        coordinator: Rank that plans and commits.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    coordinator: int

    @property
    def is_coordinator(self) -> bool:
        """Is it this rank?"""
        return self.rank == self.coordinator

    def connect(self) -> Channel:
        """Collective, the first time for each group: all ranks must call it, and none may have failed before.

        Returns:
            Messages in host memory between the ranks, over the group itself if it can carry them, else over a gloo
            group of the same ranks, made once.
        """
        group = self.group or dist.group.WORLD
        assert group is not None
        return Channel(_carrier_of(group), dist.get_process_group_ranks(group))


class Channel:
    """Point to point between the ranks of a call; messages from one rank arrive in the order they were sent."""

    def __init__(self, carrier: dist.ProcessGroup, global_ranks: Sequence[int]) -> None:
        self._carrier = carrier
        self._global_ranks = global_ranks
        self.bytes_sent = 0
        self.bytes_received = 0

    def send(self, data: bytes, to: int) -> None:
        """Blocks until ``data`` is on its way. RuntimeError if the peer has died, or takes longer than the group's
        timeout."""
        self.send_tensor(torch.tensor([len(data)], dtype=torch.int64, device="cpu"), to)
        if data:
            self.send_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)

    def receive(self, sender: int) -> bytes:
        """The next message of ``sender``. RuntimeError as for ``send``."""
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self.receive_tensor(size, sender)
        data = bytearray(int(size))
        if data:
            self.receive_tensor(torch.frombuffer(data, dtype=torch.uint8), sender)
        return bytes(data)

    def send_tensor(self, tensor: torch.Tensor, to: int) -> None:
        """Contiguous, in host memory; the peer knows its size."""
        dist.send(tensor, dst=self._global_ranks[to], group=self._carrier, tag=_TAG)
        self.bytes_sent += tensor.nbytes

    def receive_tensor(self, tensor: torch.Tensor, sender: int) -> None:
        """Fills ``tensor``, which is contiguous and in host memory."""
        dist.recv(tensor, src=self._global_ranks[sender], group=self._carrier, tag=_TAG)
        self.bytes_received += tensor.nbytes

    def begin_send(self, tensor: torch.Tensor, to: int, kind: int = 0) -> dist.Work:
        """As ``send_tensor``, without waiting; ``tensor`` must not change until the work is done.

        Args:
            kind: Small number; messages of different kinds may overtake one another.
        """
        work = dist.isend(tensor, dst=self._global_ranks[to], group=self._carrier, tag=_TAG + kind)
        assert work is not None
        self.bytes_sent += tensor.nbytes
        return work

    def begin_receive(self, tensor: torch.Tensor, sender: int, kind: int = 0) -> dist.Work:
        """As ``receive_tensor``, without waiting."""
        work = dist.irecv(tensor, src=self._global_ranks[sender], group=self._carrier, tag=_TAG + kind)
        assert work is not None
        self.bytes_received += tensor.nbytes
        return work


def peers_of_call() -> Peers | None:
    """The ranks of the call of DCP in which this thread runs a hook; None if it is not known, or has one rank."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if any(frame.f_code is step for step in _STEPS):
            call: Any = frame.f_locals["self"]
            if not call.use_dist:
                return None
            peers = Peers(call.group, call.rank, call.get_world_size(), call.coordinator_rank)
            return peers if peers.size > 1 else None
        frame = frame.f_back
    return None


def planned_by_own_hooks(reader: object) -> bool:
    """Do all ranks that come to ``reader.read_data`` in this call come there together?

    Between DCP's planning and ``read_data`` only ``finish_plan`` of the planner runs, and what wraps the reader. If one
    of them raises on one rank, the others would wait for it; so both must be known, as objects of the call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not any(frame.f_code is step for step in _STEPS):
        if "storage_reader" in frame.f_locals and "planner" in frame.f_locals:
            planner: Any = frame.f_locals["planner"]
            finish = getattr(getattr(planner, "finish_plan", None), "__func__", None)
            return frame.f_locals["storage_reader"] is reader and finish is _FINISH_PLAN
        frame = frame.f_back
    return False


_lock = threading.Lock()
_carriers: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _carrier_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if _is_carrier(group):
        return group
    with _lock:
        if group not in _carriers:
            _carriers[group] = _new_gloo_group(group)
        return _carriers[group]


def _is_carrier(group: dist.ProcessGroup) -> bool:
    """Does gloo move its tensors of host memory?"""
    return "cpu:gloo" in str(dist.get_backend_config(group))


def _new_gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Without the ranks outside ``group``, which know nothing of this call."""
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return made
