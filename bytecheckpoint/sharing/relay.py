# SPDX-License-Identifier: Apache-2.0
"""Sends units of bytes from the rank that reads them to the ranks that want them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from bytecheckpoint.distributed.waits import Message
from bytecheckpoint.native import _C
from bytecheckpoint.runtime.interrupts import DeferredInterrupt
from bytecheckpoint.sharing.memory import SharedMemory
from bytecheckpoint.sharing.messages import HEADER, PAYLOAD, TAKEN, PeerMessages

__all__ = ["Relay"]

_UNREAD = -1  # in a header: the unit could not be read, and no payload follows
_HEADERS_AHEAD = 16
_HEADER_NUMBERS = 3
# So many messages that say that a unit was taken may be on their way.
_MOST_TAKEN = 16

_Work: TypeAlias = Message | None


class _Sent(NamedTuple):
    """A slot, and the messages that must be done before it can be filled again."""

    slot: int
    works: list[tuple[int, _Work]]


class _Announced(NamedTuple):
    """A unit of another rank, after this rank has begun to receive its header."""

    number: int
    owner: int
    header: torch.Tensor
    work: _Work


class _Incoming(NamedTuple):
    """A unit of another rank, after this rank has begun to receive its payload."""

    number: int
    owner: int
    slot: int
    num_bytes: int
    work: _Work


class Relay:
    """One rank's part in one round, in which all ranks go through the units in the same order.

    A unit travels as a header (its size, or that it could not be read) and, if it was read, a payload. The receiver
    begins to receive the payload when it has the header. A receiver that has opened the owner's memory gets no payload:
    it copies what it wants from the slot that the header names, and answers that it has taken it. Until all such
    receivers have answered, the owner leaves the slot as it is. No rank waits for a unit that comes later in the order.
    So the first unit that has not yet arrived everywhere can always go on, and the round ends. A rank sends its own
    units as soon as they are read, ahead of their turn. Memory is a ring of slots: one part for own units, one for
    those of others.

    A rank that fails, or hears of a failure, goes on to the end with headers alone. So all ranks hear of the failure,
    and none waits for bytes that never come.

    Args:
        messages: Messages to and from the other ranks.
        rank: Number of this rank.
        units: All units that this rank wants: owner, size, and the ranks that want the unit.
        start: Begins to read. If it raises, the others are told as for any other failure.
        interrupt: Keeps Ctrl-C until the relay looks for it, once per unit.
        memory: What ranks of this machine share; None if all units travel as payloads.
    """

    def __init__(
        self,
        messages: PeerMessages,
        rank: int,
        units: list[tuple[int, int, list[int]]],
        start: Callable[[], _C.SharedRun],
        interrupt: DeferredInterrupt,
        memory: SharedMemory | None,
    ) -> None:
        self._messages = messages
        self._rank = rank
        self._units = units
        self._start = start
        self._interrupt = interrupt
        self._sources = frozenset[int]() if memory is None else memory.sources
        self._readers = frozenset[int]() if memory is None else memory.readers
        self._error: BaseException | None = None
        self._is_stopped = False
        self._job: _C.SharedRun | None = None
        self._slots: list[torch.Tensor] = []
        self._own = collections.deque(n for n, (owner, _, _) in enumerate(units) if owner == rank)
        self._sent: collections.deque[_Sent] = collections.deque()
        self._most_sent = 0
        self._unread: list[tuple[int, _Work]] = []
        self._taken: collections.deque[tuple[int, _Work]] = collections.deque()
        self._foreign = collections.deque(n for n, (owner, _, _) in enumerate(units) if owner != rank)
        self._announced: collections.deque[_Announced] = collections.deque()
        self._incoming: collections.deque[_Incoming] = collections.deque()
        self._free: collections.deque[int] = collections.deque()

    def run(self) -> dict[str, Any] | None:
        """Reads, sends, receives and scatters all units. Called once.

        Returns:
            What was done; None if another rank failed, which says itself why.

        Raises:
            BaseException: What this rank failed with; raised only when nobody waits for this rank any more.
        """
        try:
            self._guarded(self._begin)
            for number, (owner, _, _) in enumerate(self._units):
                self._guarded(self._interrupt.raise_if_any)
                if owner == self._rank:
                    self._send_through(number)
                else:
                    self._send_what_is_read()
                    self._receive()
            while self._incoming:
                self._take_in()
            while self._sent:
                self._reclaim()
            for peer, work in (*self._unread, *self._taken):
                self._messages.wait(peer, work)
            if self._error is not None:
                raise self._error
            self._messages.raise_if_lost()
            return None if self._is_stopped or self._job is None else self._job.finish()
        finally:
            # The memory of the slots is freed or reused after this, and an error would keep them through its frames.
            self._error = self._job = None
            self._slots.clear()

    def _begin(self) -> None:
        job = self._start()
        self._slots = [torch.frombuffer(job.slot(i), dtype=torch.uint8) for i in range(job.num_slots)]
        self._free.extend(range(job.num_own_slots, job.num_slots))
        self._most_sent = job.num_own_slots // 2
        self._job = job

    def _guarded(self, step: Callable[[], object]) -> bool:
        """Runs ``step``. Returns False if it raised; then this rank has failed."""
        try:
            step()
        except BaseException as error:
            self._error = self._error or error
            self._is_stopped = True
            return False
        return True

    # Own units.

    def _send_through(self, number: int) -> None:
        """Sends all own units up to ``number``. Waits until they are read, and for slots to read them into."""
        while self._own and self._own[0] <= number:
            while len(self._sent) > self._most_sent:
                self._reclaim()
            if self._is_stopped or not self._send_read(wait=True):
                self._send_header(self._own.popleft(), [_UNREAD, 0, 0], self._unread)

    def _send_what_is_read(self) -> None:
        while not self._is_stopped and self._own and len(self._sent) < self._most_sent:
            if not self._send_read(wait=False):
                return

    def _send_read(self, wait: bool) -> bool:
        """Sends the next own unit. Returns False if it is not yet read, or cannot be read."""
        job = self._job
        assert job is not None
        read: list[tuple[int, int, int] | None] = []
        if not self._guarded(lambda: read.append(job.next_own(wait))) or read[0] is None:
            return False
        number, slot, num_bytes = read[0]
        self._own.popleft()
        works: list[tuple[int, _Work]] = []
        self._send_header(number, [num_bytes, slot, int(job.verifies)], works)
        payload = self._slots[slot][:num_bytes]
        for peer in self._others(number):
            if peer in self._readers:
                answer = torch.zeros(1, dtype=torch.int64, device="cpu")
                works.append((peer, self._messages.receive(answer, peer, TAKEN)))
            else:
                works.append((peer, self._messages.send(payload, peer, PAYLOAD)))
        self._guarded(lambda: job.scatter(number, slot, num_bytes))
        self._sent.append(_Sent(slot, works))
        if not works:
            job.release(self._sent.pop().slot)
        return True

    def _send_header(self, number: int, numbers: list[int], works: list[tuple[int, _Work]]) -> None:
        header = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        works += [(peer, self._messages.send(header, peer, HEADER)) for peer in self._others(number)]

    def _others(self, number: int) -> list[int]:
        return [rank for rank in self._units[number][2] if rank != self._rank]

    def _reclaim(self) -> None:
        """Waits until the oldest unit that is being sent has gone to all, and releases its slot."""
        sent = self._sent.popleft()
        have_gone = [
            self._messages.wait(peer, work, "wait_peer" if peer in self._readers else "send")
            for peer, work in sent.works
        ]
        if not all(have_gone):
            # A peer that this rank has lost may be alive, and still copy from the slot.
            self._is_stopped = True
            return
        assert self._job is not None
        self._job.release(sent.slot)

    # Units of others.

    def _receive(self) -> None:
        """Waits for the header of the next unit of another rank, and begins to receive its payload, if it has one."""
        while self._foreign and len(self._announced) < _HEADERS_AHEAD:
            self._announce(self._foreign.popleft())
        unit = self._announced.popleft()
        if not self._messages.wait(unit.owner, unit.work):
            self._is_stopped = True
            return
        num_bytes, slot, is_verified = unit.header.tolist()
        if num_bytes == _UNREAD:
            self._is_stopped = True
            return
        if unit.owner in self._sources:
            self._take(unit.number, slot, num_bytes, is_verified=bool(is_verified))
            self._answer(unit.owner)
            return
        if not self._free:
            self._take_in() if self._incoming else self._make_spare_slot()
        slot = self._free.popleft()
        work = self._messages.receive(self._slots[slot][:num_bytes], unit.owner, PAYLOAD)
        self._incoming.append(_Incoming(unit.number, unit.owner, slot, num_bytes, work))

    def _announce(self, number: int) -> None:
        owner = self._units[number][0]
        header = torch.zeros(_HEADER_NUMBERS, dtype=torch.int64, device="cpu")
        self._announced.append(_Announced(number, owner, header, self._messages.receive(header, owner, HEADER)))

    def _take_in(self) -> None:
        """Waits for the oldest payload, then verifies and scatters it."""
        unit = self._incoming.popleft()
        self._free.append(unit.slot)
        if not self._messages.wait(unit.owner, unit.work, "receive"):
            self._is_stopped = True
        self._take(unit.number, unit.slot, unit.num_bytes, is_verified=False)

    def _take(self, number: int, slot: int, num_bytes: int, *, is_verified: bool) -> None:
        """Verifies and scatters a unit, unless the round has failed. The owner may have verified this very memory."""
        if self._is_stopped:
            return
        job = self._job
        assert job is not None
        if self._guarded(lambda: job.check(number, slot, num_bytes, is_verified)):
            self._guarded(lambda: job.scatter(number, slot, num_bytes))

    def _answer(self, owner: int) -> None:
        """Tells the owner of a unit that this rank reads its slot no more; also if it never did, after a failure."""
        self._taken.append((owner, self._messages.send(torch.ones(1, dtype=torch.int64, device="cpu"), owner, TAKEN)))
        if len(self._taken) > _MOST_TAKEN:
            self._messages.wait(*self._taken.popleft())

    def _make_spare_slot(self) -> None:
        """Makes a slot for payloads that come although this rank could not even begin to read."""
        largest = max(num_bytes for _, num_bytes, _ in self._units)
        self._slots.append(torch.empty(largest, dtype=torch.uint8, device="cpu"))
        self._free.append(len(self._slots) - 1)
