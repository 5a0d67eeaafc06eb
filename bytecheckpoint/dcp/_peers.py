# SPDX-License-Identifier: Apache-2.0
"""The ranks of a call of DCP, and bytes between them.

DCP tells no hook which process group a call was given, nor that it was given none. It runs the hooks inside methods of
one object that knows, so that is where we look. Where it is not found (hooks called by hand, a DCP built otherwise,
saves without collectives) nothing is sent but by DCP itself: the default group is no substitute.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from bytecheckpoint._fork_locks import ForkSafeLock
from bytecheckpoint.dcp import _collectives, _compat
from bytecheckpoint.errors import ProcessGroupChangedError
from bytecheckpoint.probes.of_torch import EXCHANGE, GROUPS, READING_TOGETHER
from bytecheckpoint.probes.probe import holds

__all__ = ["Channel", "Peers", "group_of_call", "peers_of_call", "planned_by_own_hooks", "rank_of_call", "unused_name"]

# The methods in which DCP calls hooks.
_STEPS = tuple(
    getattr(_compat.DistWrapper, name).__code__
    for name in ("reduce_scatter", "all_reduce", "all_gather")
    if hasattr(_compat.DistWrapper, name)
)
# As it was when this was imported; it cannot fail.
_FINISH_PLAN = DefaultLoadPlanner.finish_plan
# Of messages about plans; whatever else runs on the group at the same time does not use it.
_TAG = 0xB9C
# A message goes in pieces, so that one for which there is no memory can still be taken.
_PIECE_BYTES = 16 << 20


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
        group = self.group or _default()
        return Channel(_carrier_of(group))

    def begin_gather(self, tensor: torch.Tensor) -> tuple[dist.Work, list[torch.Tensor]]:
        """Collective: all ranks must call it, with tensors of one shape and dtype. It does not wait.

        Returns:
            When the work is done, ``tensor`` of each rank, by rank, on the coordinator; nothing on the others. On the
            device that the group uses for objects, as DCP's own exchanges do.
        """
        group = self.group or _default()
        mine = tensor.to(_compat.object_device(group))
        gathered = [torch.empty_like(mine) for _ in range(self.size)] if self.is_coordinator else []
        return _collectives.begin_gather(group, mine, gathered, self.coordinator), gathered


class Channel:
    """Point to point between the ranks of a call; messages from one rank arrive in the order they were sent."""

    def __init__(self, carrier: dist.ProcessGroup) -> None:
        self._carrier = carrier
        self.bytes_sent = 0
        self.bytes_received = 0

    def send(self, data: bytes, to: int) -> None:
        """Blocks until ``data`` is on its way. RuntimeError if the peer has died, or takes longer than the group's
        timeout."""
        self.begin_send(torch.tensor([len(data)], dtype=torch.int64, device="cpu"), to).wait()
        for begin in range(0, len(data), _PIECE_BYTES):
            piece = bytearray(memoryview(data)[begin : begin + _PIECE_BYTES])
            self.begin_send(torch.frombuffer(piece, dtype=torch.uint8), to).wait()

    def receive(self, sender: int) -> bytes:
        """The next message of ``sender``. RuntimeError as for ``send``; MemoryError once it is through, for the sender
        waits until all of it is taken."""
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

    def begin_send(self, tensor: torch.Tensor, to: int, kind: int = 0) -> dist.Work:
        """Does not wait; ``tensor``, contiguous and in host memory, must not change until the work is done. The peer
        knows its size.

        Args:
            kind: Small number; messages of different kinds may overtake one another.
        """
        work: dist.Work = self._carrier.send([tensor], to, _TAG + kind)
        self.bytes_sent += tensor.nbytes
        return work

    def begin_receive(self, tensor: torch.Tensor, sender: int, kind: int = 0) -> dist.Work:
        """Begins to fill ``tensor``, which is contiguous and in host memory."""
        work: dist.Work = self._carrier.recv([tensor], sender, _TAG + kind)
        self.bytes_received += tensor.nbytes
        return work


def peers_of_call() -> Peers | None:
    """The ranks of the call of DCP in which this thread runs a hook; None if it is not known, or has one rank."""
    call = _wrapper_of_call()
    if call is None or not call.use_dist or _compat.is_fake(call.group or _default()):
        return None
    peers = Peers(call.group, call.rank, call.get_world_size(), call.coordinator_rank)
    return peers if peers.size > 1 else None


def group_of_call() -> tuple[dist.ProcessGroup | None, int] | None:
    """The group itself over which the call of DCP goes now, and its size; no group and 1 if it goes alone.

    None if it is not known. Without a group of its own, a call goes over whatever is the default one at each moment.
    """
    call = _wrapper_of_call()
    if call is None:
        return None
    if not call.use_dist:
        return None, 1
    group = call.group or _default()
    return None if _compat.is_fake(group) else (group, group.size())


def _wrapper_of_call() -> Any:
    if not (holds(EXCHANGE) and holds(GROUPS)):
        return None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if any(frame.f_code is step for step in _STEPS):
            call = frame.f_locals.get("self")
            return call if isinstance(call, _compat.DistWrapper) else None
        frame = frame.f_back
    return None


def rank_of_call(said: Mapping[str, Any]) -> int:
    """Of this rank in the call; ``said`` are the keyword arguments of a hook, which in older DCP are fewer, and which
    do not reach a hook behind an override without them."""
    peers = peers_of_call()
    return said.get("rank", 0) if peers is None else peers.rank


def _default() -> dist.ProcessGroup:
    """The default group.

    Raises:
        ProcessGroupChangedError: There is none any more.
    """
    group = dist.group.WORLD
    if group is None:
        raise ProcessGroupChangedError("the default process group was destroyed while ranks used it")
    return group


def planned_by_own_hooks(reader: object) -> bool:
    """Do all ranks that come to ``reader.read_data`` in this call come there together?

    Between DCP's planning and ``read_data`` only ``finish_plan`` of the planner runs, and what wraps the reader. If one
    of them raises on one rank, the others would wait for it; so both must be known, as objects of the call.
    """
    if not holds(READING_TOGETHER):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not any(frame.f_code is step for step in _STEPS):
        if "storage_reader" in frame.f_locals and "planner" in frame.f_locals:
            planner: Any = frame.f_locals["planner"]
            finish = getattr(getattr(planner, "finish_plan", None), "__func__", None)
            return frame.f_locals["storage_reader"] is reader and finish is _FINISH_PLAN
        frame = frame.f_back
    return False


_lock = ForkSafeLock()
_carriers: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _carrier_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if _compat.is_gloo_on_host(group):
        return group
    with _lock:
        carrier = _carriers.get(group)
    if carrier is None:
        # Without the lock: two groups may be met in another order elsewhere.
        carrier = _compat.gloo_between(group, unused_name(group, "peers"))
        with _lock:
            _carriers[group] = carrier
    return carrier


# How many groups were made for each use of each group, in each world. Process-wide names would differ from those of a
# process that came to the world later.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, str]]] = weakref.WeakKeyDictionary()


def unused_name(group: dist.ProcessGroup, use: str) -> str:
    """For a group of the ranks of ``group``. The same on all of them, if all have asked as often."""
    with _lock:
        made = _made.setdefault(_default(), Counter())
        made[group.group_name, use] += 1  # names of groups recur, of those that are destroyed
        return f"bytecheckpoint/{group.group_name}/{use}/{made[group.group_name, use]}/"
