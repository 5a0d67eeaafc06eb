# SPDX-License-Identifier: Apache-2.0
"""Notices that a rank of a process group has died or stopped, and ends every wait on that group.

Gloo reports a dead peer only to ranks that wait for that very peer, and a stopped one to nobody before the timeout of
the group. So each rank has a thread that exchanges signs of life with rank 0. A rank has died if its connection ends
without a farewell. It has stopped if nothing is heard of it for longer than ``stall_timeout_s`` while some rank is in a
call. Rank 0 tells all ranks; each then closes the connections of its group, which ends all waits.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch.distributed as dist

from bytecheckpoint.calls.call import Call, Doing
from bytecheckpoint.compat.private_names import is_registered
from bytecheckpoint.distributed.liveness_frames import (
    FRAME,
    NO_ID,
    SECONDS,
    Kind,
    Link,
    LossReason,
    doing_to_bytes,
    in_words,
)
from bytecheckpoint.distributed.mixed_calls import CallKind, CallKinds
from bytecheckpoint.distributed.monitors_here import note
from bytecheckpoint.distributed.sent_data import SentData, address_of_bytes, address_to_bytes
from bytecheckpoint.distributed.waits import allow_leaving, leave_waits
from bytecheckpoint.errors import RankLostError
from bytecheckpoint.runtime.per_process import HomeProcess
from bytecheckpoint.runtime.place import Place

__all__ = ["LivenessMonitor", "OnLoss"]

OnLoss: TypeAlias = Callable[[frozenset[int], "tuple[int, str] | None"], None]
"""Called with the lost ranks, and with who holds the right to commit which save, if that is known."""

# Number of signs of life per stall timeout: some may come late.
_BEATS = 4
_MAX_TICK_S = 1.0
# A loss that is noted within this time after a failed call of this rank is what made that call fail.
_HEARD_WITHIN_S = 5.0
# If a peer receives nothing any more, no new frames are kept for it beyond this.
_MAX_UNSENT_BYTES = 1 << 16


class LivenessMonitor:
    """Watches the ranks of one process group, on one rank. Ends with the group.

    While no rank is in a call, no rank counts as stopped: ranks may be silent for any time while nobody waits.

    Args:
        group: The group whose ranks are watched.
        parent: The monitor ends when this group is destroyed.
        links: Connections by rank: to all others on rank 0, to rank 0 on the others.
        places: Where each rank runs.
        sent: What this rank sends to the others over the group.
        stall_timeout_s: The stall timeout that this rank wants; the smallest of all ranks counts.

    Attributes:
        stall_timeout_s: The stall timeout that counts now, as far as this rank has heard.
        places: Where each rank runs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        parent: dist.ProcessGroup,
        links: dict[int, socket.socket],
        places: Sequence[Place],
        sent: SentData,
        stall_timeout_s: float,
    ) -> None:
        self.stall_timeout_s = stall_timeout_s
        self._stalls_since = -math.inf  # when it last changed
        self._group, self._parent = weakref.ref(group), weakref.ref(parent)
        self._rank = group.rank()
        self.places = tuple(places)
        # On rank 0 of all ranks, elsewhere of this one and rank 0. A rank that wants another one says so at once.
        self._stall_timeouts_s = dict.fromkeys((self._rank, *links), stall_timeout_s)
        self._home = HomeProcess()
        self._lock = threading.Lock()
        self._sent = sent
        self._lost: dict[int, LossReason] = {}
        self._towards: dict[int, str] = {}  # to which address lost ranks cannot send
        self._silent = set[int]()  # of which nothing is heard now, while somebody waits
        self._is_lost = threading.Event()
        self._has_told_peers = False
        self._failed_at = -math.inf  # when the last failed call of this rank ended
        self._frames: list[bytes] = []  # frames to send
        self._kinds = CallKinds()
        self._num_kept = 0
        self._calls: list[tuple[Call, OnLoss | None]] = []
        self._holder: tuple[int, bytes] | None = None
        self._is_closing = False
        now = time.monotonic()
        self._links = {peer: Link(peer, link, now) for peer, link in links.items()}
        self._somebody_waits_since: float | None = None
        self._said_stall_timeout_s = 0.0
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup_reader, self._wakeup_writer, *links.values()):
            end.setblocking(False)
        allow_leaving(group)
        note(self)
        self._thread = threading.Thread(target=self._run, name="bytecheckpoint-watch", daemon=True)
        self._thread.start()

    # Called by the threads that use the group.

    @contextmanager
    def in_call(self, kind: CallKind = CallKind.UNKNOWN) -> Iterator[None]:
        """Marks a ``with`` block in which this rank is in a call, and may wait for others."""
        self._kinds.begin(kind)
        self._ring()
        try:
            yield
        except BaseException:
            with self._lock:
                self._failed_at = time.monotonic()
                self._has_told_peers = bool(self._lost)
            raise
        finally:
            self._kinds.end()
            self._ring()

    def note_call(self, call: Call, on_loss: OnLoss | None = None) -> None:
        """Notes that this rank is in ``call``, a call of DCP, until that has ended.

        Args:
            call: Tells whether it still runs.
            on_loss: Called when a rank is lost, before the waits of this rank end. Once ``call`` has ended and the next
                one has begun, it is not called any more.
        """
        with self._lock:
            self._calls = [(other, callback) for other, callback in self._calls if other.is_running()]
            self._calls.append((call, on_loss))
        self._ring()

    def keep(self) -> None:
        """Makes signs of life go on until ``let_go``, even if the group is destroyed before: a save will use it."""
        with self._lock:
            self._num_kept += 1

    def let_go(self) -> None:
        """Ends one ``keep``. Any thread."""
        with self._lock:
            self._num_kept -= 1
        self._ring()

    def set_stall_timeout(self, stall_timeout_s: float) -> None:
        """Sets the stall timeout that this rank wants. All ranks use the smallest one, and beat as often as it asks."""
        if self._stall_timeouts_s[self._rank] != stall_timeout_s:
            self._note_stall_timeout(self._rank, stall_timeout_s)

    def hold(self, save_id: str) -> None:
        """Tells all that this rank has the right to commit ``save_id``. If it stops, the others take the right away."""
        self._send_to_all(Kind.HOLDS, 0, self._rank, bytes.fromhex(save_id))

    def give_up(self, cut_off_from: str = "") -> None:
        """Tells all that this rank is out of step, so that nobody waits for it.

        Args:
            cut_off_from: Address of the ranks to which its connection has ended; "" for another reason.
        """
        if cut_off_from:
            self._lose(self._rank, LossReason.CUT_OFF, address_to_bytes(cut_off_from))
        else:
            self._lose(self._rank, LossReason.GAVE_UP)

    def lose(self, reasons: Mapping[int, LossReason]) -> None:
        """Loses ranks that another monitor, of a group of the same ranks, has lost."""
        for rank, reason in reasons.items():
            self._lose(rank, reason)

    def wait_for_loss(self, timeout_s: float) -> bool:
        """Waits until a rank is lost. Returns False if none is lost after ``timeout_s``."""
        return self._is_lost.wait(timeout_s)

    def doing(self) -> dict[int, Doing]:
        """Returns what ranks were doing when they gave their last sign of life: on rank 0 all, else rank 0."""
        now = time.monotonic()
        return {link.peer: said for link in [*self._links.values()] if (said := link.doing_by(now)) is not None}

    @property
    def holder(self) -> tuple[int, str] | None:
        """Who was the last to take the right to commit, and for which save; None if nobody was."""
        return None if self._holder is None else (self._holder[0], self._holder[1].hex())

    @property
    def is_lost(self) -> bool:
        """Whether a rank is lost, so that the group is of no use any more."""
        return bool(self._lost)

    @property
    def has_told_peers(self) -> bool:
        """Whether a call of this rank has failed because of the loss. If so, one has failed on the others, too."""
        return self._has_told_peers

    @property
    def is_final(self) -> bool:
        """Whether a rank has died, so that there can never be a group of these ranks again."""
        with self._lock:
            return LossReason.DIED in self._lost.values()

    def losses(self, is_told: bool, waited_s: float) -> dict[int, LossReason]:
        """Returns why the ranks cannot make a new group, by rank; nothing if nothing speaks against it yet.

        Args:
            is_told: Whether a call of this rank has failed because of the losses. A rank that has stopped may have gone
                on since. So it counts only if it stays silent for the stall timeout.
            waited_s: How long this call has waited, in seconds.
        """
        with self._lock:
            if not is_told or LossReason.DIED in self._lost.values():
                return dict(self._lost)
            return dict.fromkeys(self._silent if waited_s > self.stall_timeout_s else (), LossReason.STOPPED)

    def error(self, what: str, path: str, losses: Mapping[int, LossReason] | None = None) -> RankLostError:
        """Returns the error to raise on this rank.

        Args:
            what: What was being done.
            path: Path of it.
            losses: What became of the lost ranks; None for what this monitor has noticed.
        """
        with self._lock:
            lost, towards = sorted((self._lost if losses is None else losses).items()), dict(self._towards)
        ranks = in_words(lost, towards, self.places, self.stall_timeout_s)
        reasons = "; ".join(f"rank {rank} {text}" for rank, text in ranks.items()) or "a rank cannot be reached"
        return RankLostError(f"{what}({path}): {reasons}", ranks, path)

    def close(self, timeout_s: float = 0.0) -> None:
        """Says farewell and ends the thread; waits for that for ``timeout_s`` at most. No effect in a forked child."""
        if self._home.is_here():
            self._is_closing = True
            self._ring()
            self._thread.join(timeout_s)

    def forget_in_child(self) -> None:
        """Closes the connections in a forked child. If they stayed open, the parent's death would not end them."""
        for end in (self._wakeup_reader, self._wakeup_writer, *(link.socket for link in self._links.values())):
            end.close()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, so the thread will wake up, or the thread has ended
            self._wakeup_writer.send(b"!")

    def _send_to_all(self, kind: Kind, flag: int, rank: int, save_id: bytes = NO_ID, number: int = 0) -> None:
        with self._lock:
            self._frames.append(FRAME.pack(kind, flag, number, rank, save_id))
        self._ring()

    def _lose(self, rank: int, reason: LossReason, towards: bytes = NO_ID) -> None:
        """Notes a loss, and tells the others. The thread of the monitor ends the waits. Any thread.

        Args:
            rank: Rank that is lost.
            reason: What became of it.
            towards: Address to which it cannot send.
        """
        with self._lock:
            known = self._lost.get(rank)
            if known is not None and not (known == LossReason.STOPPED and reason == LossReason.DIED):
                return
            self._lost[rank] = reason
            if towards != NO_ID:
                self._towards[rank] = address_of_bytes(towards)
            # This rank may hear of the loss only after it made a call fail; other ranks may hear of it before.
            self._has_told_peers = self._has_told_peers or time.monotonic() - self._failed_at < _HEARD_WITHIN_S
        self._send_to_all(Kind.LOST, reason, rank, towards)

    # Called by the thread of the monitor.

    def _run(self) -> None:
        self._note_stall_timeout(self._rank, self.stall_timeout_s)
        last_beat, last_turn, was_in_call = 0.0, time.monotonic(), False
        with selectors.PollSelector() as selector:  # poll, because a forked child would share an epoll descriptor
            selector.register(self._wakeup_reader, selectors.EVENT_READ)
            for link in self._links.values():
                selector.register(link.socket, selectors.EVENT_READ, link)
            while self._is_wanted():
                beat = self.stall_timeout_s / _BEATS
                for key, _ in selector.select(min(beat / 2, _MAX_TICK_S)):
                    if key.data is None:
                        with contextlib.suppress(OSError):
                            self._wakeup_reader.recv(4096)
                    elif not self._hear(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - last_turn > self.stall_timeout_s / 2:
                    # This process itself stood still, so what it has heard of others is too old to judge them.
                    for link in self._links.values():
                        link.last_heard_s = now
                    self._sent.forget()
                last_turn = now
                in_call = self._is_in_call()
                if now - last_beat >= beat or in_call != was_in_call:
                    self._say_alive(in_call)
                    last_beat, was_in_call = now, in_call
                    self._judge_data(now)
                self._judge(now, in_call)
                self._send_frames()
                if self._lost:
                    self._end_waits()
            self._send_to_all(Kind.FAREWELL, 0, self._rank)
            self._send_frames()
        for end in (self._wakeup_reader, self._wakeup_writer, *(link.socket for link in self._links.values())):
            end.close()

    def _is_wanted(self) -> bool:
        if self._is_closing or self._group() is None:
            return False
        parent = self._parent()
        is_there = parent is not None and is_registered(parent)
        return is_there or self._num_kept > 0 or self._is_in_call_here()

    def _is_in_call_here(self) -> bool:
        with self._lock:
            return bool(self._kinds) or any(call.is_running() for call, _ in self._calls)

    def _is_in_call(self) -> bool:
        """Whether this rank is in a call; on rank 0, whether any rank is."""
        return self._is_in_call_here() or (self._rank == 0 and any(link.is_in_call for link in self._links.values()))

    def _say_alive(self, in_call: bool) -> None:
        with self._lock:
            known = [of_call for call, _ in self._calls if (of_call := call.doing()) is not None]
        kind, number = self._kinds.said
        doing = doing_to_bytes(known[-1]) if known else NO_ID
        self._send_to_all(Kind.BEAT, max(in_call, kind), self._rank, doing, number)

    def _send_frames(self) -> None:
        with self._lock:
            frames, self._frames = self._frames, []
        for link in self._links.values():
            if len(link.unsent) < _MAX_UNSENT_BYTES:
                link.unsent += b"".join(frames)
            try:
                while link.unsent:
                    del link.unsent[: link.socket.send(link.unsent)]
            except BlockingIOError:
                continue
            except OSError:
                link.unsent.clear()  # `_hear` will notice that the peer is gone

    def _hear(self, link: Link) -> bool:
        """Reads all that has come from a peer. Returns False if nothing will come any more."""
        while True:
            try:
                piece = link.socket.recv(1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                piece = b""
            if not piece:
                if not link.is_leaving and not self._is_closing:
                    self._lose(link.peer, LossReason.DIED)
                return False
            for frame in link.hear(piece, time.monotonic()):
                self._take_note(link, frame)

    def _take_note(self, link: Link, frame: bytes) -> None:
        kind, flag, number, rank, save_id = FRAME.unpack(frame)
        if kind == Kind.BEAT:
            link.is_in_call, link.doing = bool(flag), save_id
            mixed = self._kinds.hear(rank, flag, number, self.stall_timeout_s) if self._rank == 0 else None
            if mixed is not None and not self._lost:
                self._lose(rank, mixed)
        elif kind == Kind.FAREWELL:
            link.is_leaving = True
        elif kind == Kind.LOST:
            self._lose(rank, LossReason(flag), save_id)  # tells the others, too
        elif kind == Kind.HOLDS:
            with self._lock:
                self._holder = (rank, save_id)
                if self._rank == 0:
                    self._frames.append(frame)
        elif kind == Kind.SILENT:
            self._note_silence(rank, bool(flag))
        elif kind == Kind.STALLS:
            self._note_stall_timeout(rank, *SECONDS.unpack(save_id))

    def _note_stall_timeout(self, rank: int, stall_timeout_s: float) -> None:
        """Notes the stall timeout that ``rank`` wants, and tells the others if their view changes. Any thread."""
        with self._lock:
            self._stall_timeouts_s[rank] = stall_timeout_s
            least = min(self._stall_timeouts_s.values())
            if least != self.stall_timeout_s:
                self.stall_timeout_s = least
                self._stalls_since = time.monotonic()  # before now the others may have beaten less often
            mine = least if self._rank == 0 else self._stall_timeouts_s[self._rank]
            if mine != self._said_stall_timeout_s:
                self._said_stall_timeout_s = mine
                self._frames.append(FRAME.pack(Kind.STALLS, 0, 0, self._rank, SECONDS.pack(mine)))
        self._ring()

    def _judge(self, now: float, in_call: bool) -> None:
        """Notes which peers are silent. It goes on after a loss: ranks may wait to make a new group."""
        if not in_call:
            self._somebody_waits_since = None
        elif self._somebody_waits_since is None:
            self._somebody_waits_since = now
        since = now if self._somebody_waits_since is None else self._somebody_waits_since
        for link in self._links.values():
            is_silent = now - max(link.last_heard_s, since, self._stalls_since) > self.stall_timeout_s
            if is_silent != (link.peer in self._silent):
                self._note_silence(link.peer, is_silent)
            if is_silent and not self._is_lost.is_set():
                self._lose(link.peer, LossReason.ENDED if link.is_leaving else LossReason.STOPPED)

    def _judge_data(self, now: float) -> None:
        """Notes that data of this rank do not move. A rank that is silent, too, is noticed before, and is to blame."""
        if self._is_lost.is_set():
            return
        for address in self._sent.stuck(now, self.stall_timeout_s * (1 + 1 / _BEATS)):
            if any(place.address == address for place in self.places):
                self._lose(self._rank, LossReason.NO_DATA, address_to_bytes(address))

    def _note_silence(self, rank: int, is_silent: bool) -> None:
        with self._lock:
            (self._silent.add if is_silent else self._silent.discard)(rank)
            if self._rank == 0:
                self._frames.append(FRAME.pack(Kind.SILENT, is_silent, 0, rank, NO_ID))

    def _end_waits(self) -> None:
        """Ends the waits of this rank. Called once a rank is lost and the others have been told."""
        with self._lock:
            calls, self._calls = self._calls, [(call, None) for call, _ in self._calls]
            lost = frozenset(self._lost)
        for _, on_loss in calls:
            if on_loss is not None:
                on_loss(lost, self.holder)
        if self._is_lost.is_set():
            return
        self._is_lost.set()
        leave_waits(self._group())
