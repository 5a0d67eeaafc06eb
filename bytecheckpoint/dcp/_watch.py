# SPDX-License-Identifier: Apache-2.0
"""Notices that a rank of a process group has died or stopped, and ends every wait on that group.

Gloo tells of a dead peer only those that wait for that very peer, and of a stopped one nobody before the timeout of the
group. So each rank has a thread that exchanges signs of life with rank 0. A connection that ends without a farewell is
a rank that died. Silence for longer than ``stall_timeout_s``, while some rank is in a call, is a rank that stopped.
Rank 0 tells all; each rank then closes the connections of its group, which ends all waits.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import math
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch.distributed as dist

from bytecheckpoint._fork_locks import ForkSafeLock
from bytecheckpoint.dcp._calls import Call
from bytecheckpoint.dcp._compat import close_connections, is_registered
from bytecheckpoint.errors import RankLostError

__all__ = ["OnLoss", "Watch"]

OnLoss: TypeAlias = Callable[[frozenset[int], "tuple[int, str] | None"], None]
"""Called with the lost ranks, and with who holds the right to commit which save, if that is known."""

# Kind, whether somebody is in a call or what became of a rank, the rank it is about, a save id.
_FRAME = struct.Struct("<BBxxI16s")
_NO_ID = b"\0" * 16
_SECONDS = struct.Struct("<d8x")
# Signs of life a stall timeout: some may come late.
_BEATS = 4
_MAX_TICK_S = 1.0
_HEARD_WITHIN_S = 5.0
# Of a peer that takes nothing any more nothing new is kept.
_MAX_UNSENT_BYTES = 1 << 16


class _Kind(enum.IntEnum):
    BEAT = 1
    LOST = 2
    FAREWELL = 3
    HOLDS = 4  # a rank has the right to commit the save of this id
    STALLS = 5  # of a rank: the stall timeout it wants, a double in the place of the id; of rank 0: the least of all


class _Fate(enum.IntEnum):
    DIED = 1
    STOPPED = 2
    GAVE_UP = 3
    ENDED = 4


_WORDS = {
    _Fate.DIED: "died: its connection has ended",
    _Fate.STOPPED: "stopped: nothing was heard of it for more than {:g} s",
    _Fate.GAVE_UP: "gave up: it raised outside of what DCP hands to all ranks",
    _Fate.ENDED: "ended, or destroyed the process group",
}


@dataclass
class _Link:
    """To one peer.

    Attributes:
        heard: When the last sign of life came.
        is_in_call: As the peer said then.
        is_leaving: It has said farewell.
    """

    peer: int
    socket: socket.socket
    heard: float
    is_in_call: bool = False
    is_leaving: bool = False
    received: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)


class Watch:
    """The signs of life of one process group on one rank. Ends with the group.

    Nothing is judged while no rank is in a call: a rank may be silent for as long as it likes while nobody waits.

    Args:
        parent: That the group ends with, when it is destroyed.
        links: To the others on rank 0, to rank 0 elsewhere.
        stall_timeout_s: Of this rank; the smallest of all ranks counts.

    Attributes:
        stall_timeout_s: The one that counts now, as far as this rank has heard.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        parent: dist.ProcessGroup,
        links: dict[int, socket.socket],
        stall_timeout_s: float,
    ) -> None:
        self.stall_timeout_s = stall_timeout_s
        self._stalls_since = -math.inf  # when it last changed
        self._group, self._parent = weakref.ref(group), weakref.ref(parent)
        self._rank = group.rank()
        # Of all ranks on rank 0, elsewhere of this one and of rank 0. Those that differ are heard of at once.
        self._stall_timeouts_s = dict.fromkeys((self._rank, *links), stall_timeout_s)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lost: dict[int, _Fate] = {}
        self._is_lost = threading.Event()
        self._is_told = False
        self._failed_at = -math.inf  # the last call of this rank that failed
        self._told: list[bytes] = []  # frames that other threads want sent
        self._num_calls = 0
        self._num_kept = 0
        self._calls: list[tuple[Call, OnLoss | None]] = []
        self._holder: tuple[int, bytes] | None = None
        self._is_closing = False
        now = time.monotonic()
        self._links = {peer: _Link(peer, link, now) for peer, link in links.items()}
        self._somebody_waits_since: float | None = None
        self._said_stall_timeout_s = 0.0
        self._bell, self._clapper = socket.socketpair()
        for end in (self._bell, self._clapper, *links.values()):
            end.setblocking(False)
        _note(self)
        self._thread = threading.Thread(target=self._run, name="bytecheckpoint-watch", daemon=True)
        self._thread.start()

    # For the threads that use the group.

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Somebody waits for others, as long as this lasts."""
        with self._lock:
            self._num_calls += 1
        self._ring()
        try:
            yield
        except BaseException:
            with self._lock:
                self._failed_at = time.monotonic()
                self._is_told = bool(self._lost)
            raise
        finally:
            with self._lock:
                self._num_calls -= 1
            self._ring()

    def note_call(self, call: Call, on_loss: OnLoss | None = None) -> None:
        """As ``in_call``, for a call of DCP.

        Args:
            on_loss: Called when a rank is lost, before the waits of this rank end. Not after the next call has begun.
        """
        with self._lock:
            self._calls = [(other, told) for other, told in self._calls if other.is_running()]
            self._calls.append((call, on_loss))
        self._ring()

    def keep(self) -> None:
        """A save is going to use the group: signs of life go on until ``let_go``, also if it is destroyed before."""
        with self._lock:
            self._num_kept += 1

    def let_go(self) -> None:
        """Ends one ``keep``. Any thread."""
        with self._lock:
            self._num_kept -= 1
        self._ring()

    def set_stall_timeout(self, stall_timeout_s: float) -> None:
        """From now on this rank wants this one. The least of all ranks counts: all beat as often as that asks for."""
        if self._stall_timeouts_s[self._rank] != stall_timeout_s:
            self._note_stall_timeout(self._rank, stall_timeout_s)

    def hold(self, save_id: str) -> None:
        """This rank has the right to commit ``save_id``: if it stops, the others take the right away."""
        self._say(_Kind.HOLDS, 0, self._rank, bytes.fromhex(save_id))

    def give_up(self) -> None:
        """This rank is out of step: nobody shall wait for it."""
        self._lose(self._rank, _Fate.GAVE_UP)

    def lose_as(self, other: Watch) -> None:
        """Loses the ranks that ``other``, of a group of the same ranks, has lost."""
        with other._lock:
            lost = dict(other._lost)
        for rank, fate in lost.items():
            self._lose(rank, fate)

    def wait_for_loss(self, timeout_s: float) -> bool:
        """Until a rank is known to be lost. False if none is after ``timeout_s``."""
        return self._is_lost.wait(timeout_s)

    @property
    def is_lost(self) -> bool:
        """Is the group of no use any more?"""
        return bool(self._lost)

    @property
    def is_told(self) -> bool:
        """Has a call failed here for that? On the others it has, too."""
        return self._is_told

    @property
    def is_final(self) -> bool:
        """Has a rank died, so that a group of these ranks can never be again?"""
        with self._lock:
            return _Fate.DIED in self._lost.values()

    def error(self, what: str, path: str) -> RankLostError:
        """What to raise, on this rank, of ``what`` that was being done."""
        with self._lock:
            lost = dict(sorted(self._lost.items()))
        ranks = {rank: _WORDS[fate].format(self.stall_timeout_s) for rank, fate in lost.items()}
        reasons = "; ".join(f"rank {rank} {text}" for rank, text in ranks.items()) or "a rank cannot be reached"
        return RankLostError(f"{what}({path}): {reasons}", ranks, path)

    def close(self, timeout_s: float = 0.0) -> None:
        """Says farewell and ends, without waiting for more than ``timeout_s``. No effect in a forked child."""
        if self._pid == os.getpid():
            self._is_closing = True
            self._ring()
            self._thread.join(timeout_s)

    def forget_in_child(self) -> None:
        """Else the death of the parent would not end its connections."""
        for end in (self._bell, self._clapper, *(link.socket for link in self._links.values())):
            end.close()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it is rung already, or has ended
            self._clapper.send(b"!")

    def _say(self, kind: _Kind, flag: int, rank: int, save_id: bytes = _NO_ID) -> None:
        with self._lock:
            self._told.append(_FRAME.pack(kind, flag, rank, save_id))
        self._ring()

    def _lose(self, rank: int, fate: _Fate) -> None:
        """The thread of the watch does what follows from it. Any thread."""
        with self._lock:
            if rank in self._lost:
                return
            self._lost[rank] = fate
            # What made a call fail may be heard of after that, here and not on others.
            self._is_told = self._is_told or time.monotonic() - self._failed_at < _HEARD_WITHIN_S
        self._say(_Kind.LOST, fate, rank)

    # For the thread of the watch.

    def _run(self) -> None:
        self._note_stall_timeout(self._rank, self.stall_timeout_s)
        last_beat, last_turn, was_in_call = 0.0, time.monotonic(), False
        with selectors.PollSelector() as selector:  # of which a forked child shares nothing
            selector.register(self._bell, selectors.EVENT_READ)
            for link in self._links.values():
                selector.register(link.socket, selectors.EVENT_READ, link)
            while self._is_wanted():
                beat = self.stall_timeout_s / _BEATS
                for key, _ in selector.select(min(beat / 2, _MAX_TICK_S)):
                    if key.data is None:
                        with contextlib.suppress(OSError):
                            self._bell.recv(4096)
                    elif not self._hear(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - last_turn > self.stall_timeout_s / 2:
                    # It was this process that stood still; what it can say of others is too old.
                    for link in self._links.values():
                        link.heard = now
                last_turn = now
                in_call = self._is_in_call()
                if now - last_beat >= beat or in_call != was_in_call:
                    self._say_alive(in_call)
                    last_beat, was_in_call = now, in_call
                self._judge(now, in_call)
                self._send_told()
                if self._lost:
                    self._end_waits()
            self._say(_Kind.FAREWELL, 0, self._rank)
            self._send_told()
        for end in (self._bell, self._clapper, *(link.socket for link in self._links.values())):
            end.close()

    def _is_wanted(self) -> bool:
        if self._is_closing or self._group() is None:
            return False
        parent = self._parent()
        is_there = parent is not None and is_registered(parent)
        return is_there or self._num_kept > 0 or self._is_in_call_here()

    def _is_in_call_here(self) -> bool:
        with self._lock:
            return self._num_calls > 0 or any(call.is_running() for call, _ in self._calls)

    def _is_in_call(self) -> bool:
        """This rank, and on rank 0 any."""
        return self._is_in_call_here() or (self._rank == 0 and any(link.is_in_call for link in self._links.values()))

    def _say_alive(self, in_call: bool) -> None:
        self._say(_Kind.BEAT, in_call, self._rank)

    def _send_told(self) -> None:
        with self._lock:
            told, self._told = self._told, []
        for link in self._links.values():
            if len(link.unsent) < _MAX_UNSENT_BYTES:
                link.unsent += b"".join(told)
            try:
                while link.unsent:
                    del link.unsent[: link.socket.send(link.unsent)]
            except BlockingIOError:
                continue
            except OSError:
                link.unsent.clear()  # it will be heard that the peer is gone

    def _hear(self, link: _Link) -> bool:
        """All that has come. False if nothing will any more."""
        while True:
            try:
                piece = link.socket.recv(1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                piece = b""
            if not piece:
                if not link.is_leaving and not self._is_closing:
                    self._lose(link.peer, _Fate.DIED)
                return False
            link.heard = time.monotonic()
            link.received += piece
            while len(link.received) >= _FRAME.size:
                frame, link.received = link.received[: _FRAME.size], link.received[_FRAME.size :]
                self._take_note(link, frame)

    def _take_note(self, link: _Link, frame: bytes) -> None:
        kind, flag, rank, save_id = _FRAME.unpack(frame)
        if kind == _Kind.BEAT:
            link.is_in_call = bool(flag)
        elif kind == _Kind.FAREWELL:
            link.is_leaving = True
        elif kind == _Kind.LOST:
            self._lose(rank, _Fate(flag))  # which tells the others, too
        elif kind == _Kind.HOLDS:
            with self._lock:
                self._holder = (rank, save_id)
                if self._rank == 0:
                    self._told.append(frame)
        elif kind == _Kind.STALLS:
            self._note_stall_timeout(rank, *_SECONDS.unpack(save_id))

    def _note_stall_timeout(self, rank: int, stall_timeout_s: float) -> None:
        """Any thread."""
        with self._lock:
            self._stall_timeouts_s[rank] = stall_timeout_s
            least = min(self._stall_timeouts_s.values())
            if least != self.stall_timeout_s:
                self.stall_timeout_s = least
                self._stalls_since = time.monotonic()  # until then the others may have beaten less often
            mine = least if self._rank == 0 else self._stall_timeouts_s[self._rank]
            if mine != self._said_stall_timeout_s:
                self._said_stall_timeout_s = mine
                self._told.append(_FRAME.pack(_Kind.STALLS, 0, self._rank, _SECONDS.pack(mine)))
        self._ring()

    def _judge(self, now: float, in_call: bool) -> None:
        if not in_call or self._is_lost.is_set():
            self._somebody_waits_since = None
            return
        if self._somebody_waits_since is None:
            self._somebody_waits_since = now
        for link in self._links.values():
            if now - max(link.heard, self._somebody_waits_since, self._stalls_since) > self.stall_timeout_s:
                self._lose(link.peer, _Fate.ENDED if link.is_leaving else _Fate.STOPPED)

    def _end_waits(self) -> None:
        """Once a rank is lost, and the others have been told."""
        with self._lock:
            calls, self._calls = self._calls, [(call, None) for call, _ in self._calls]
            lost = frozenset(self._lost)
            holder = None if self._holder is None else (self._holder[0], self._holder[1].hex())
        for _, on_loss in calls:
            if on_loss is not None:
                on_loss(lost, holder)
        if self._is_lost.is_set():
            return
        self._is_lost.set()
        group = self._group()
        if group is not None:
            close_connections(group)


_alive: weakref.WeakSet[Watch] | None = None
_noting = ForkSafeLock()
_FAREWELL_S = 1.0


def _note(watch: Watch) -> None:
    """Of the process: what its end and its children need to know."""
    global _alive
    with _noting:
        if _alive is None:
            _alive = weakref.WeakSet()
            atexit.register(_at_exit)
            os.register_at_fork(after_in_child=_in_child)
        _alive.add(watch)


def _at_exit() -> None:
    for watch in list(_alive or ()):
        watch.close(_FAREWELL_S)


def _in_child() -> None:
    for watch in list(_alive or ()):
        watch.forget_in_child()
    if _alive is not None:
        _alive.clear()
