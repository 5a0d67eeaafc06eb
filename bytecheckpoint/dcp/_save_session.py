# SPDX-License-Identifier: Apache-2.0
"""One save in this process: what lives from ``storage_meta`` to the end of ``finish``.

DCP tells a writer when a save begins and, if all goes well, when it ends. When a peer fails it tells the coordinator
nothing more. The right to commit must not outlive such a save, so it is tied to what a save in progress keeps alive:
the plan that the coordinator got back, and the result that it handed in.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bytecheckpoint import _C

__all__ = ["PlanLease", "RankResult", "RankResults", "SaveSession", "register_coordinator"]


@dataclass(eq=False)
class SaveSession:
    """State of one save on one rank.

    Attributes:
        path: Directory, as this rank was told.
        save_id: 32 hex digits; the coordinator's is the save's.
        commit: The right to commit; on the coordinator, from ``prepare_global_plan`` on.
        handed_in: This rank's result is with DCP.
        finishing: ``finish`` runs, or ran.
        num_leases: Copies of its plan's PlanLease that live in this process.
    """

    path: str
    save_id: str
    is_coordinator: bool = False
    commit: _C.Commit | None = None
    handed_in: bool = False
    finishing: bool = False
    num_leases: int = 0
    thread: threading.Thread = field(default_factory=threading.current_thread)
    timer: threading.Timer | None = None

    def abandon(self) -> None:
        """Gives the right to commit back, unless ``finish`` has it. Any thread."""
        if not self.finishing:
            self.end()

    def end(self) -> None:
        """Gives back whatever is left. No effect on a committed save."""
        if self.timer is not None:
            self.timer.cancel()
        if self.commit is not None:
            self.commit.abandon()

    def return_lease(self) -> None:
        """One copy of the coordinator's plan is gone."""
        self.num_leases -= 1
        if self.num_leases == 0:
            self.abandon()

    def start_deadline(self, seconds: float) -> None:
        """Abandons the save after ``seconds``, so that one that hangs cannot hold its path."""
        if seconds > threading.TIMEOUT_MAX:
            return
        # By weak reference: a session that nobody holds any more ends at once, not at its deadline.
        self.timer = threading.Timer(seconds, _expire, (weakref.ref(self),))
        self.timer.daemon = True
        self.timer.start()
        weakref.finalize(self, self.timer.cancel).atexit = False


def _expire(ref: weakref.ref[SaveSession]) -> None:
    session = ref()
    if session is not None and session.commit is not None:
        session.commit.abandon()  # waits for a commit that is under way, and then does nothing


_lock = threading.Lock()
# Saves of this process that coordinate, by directory. Entries go with their sessions.
_coordinating: dict[tuple[int, int], list[weakref.ref[SaveSession]]] = {}
# By save id, for the leases that come back from a scatter as copies.
_by_save_id: weakref.WeakValueDictionary[str, SaveSession] = weakref.WeakValueDictionary()


def register_coordinator(session: SaveSession) -> None:
    """Ends earlier saves of this process at the same path that nobody will end, and notes this one.

    Such a save handed its results in, or was begun by this very thread, or by one that has ended.
    """
    try:
        status = Path(session.path).stat()
    except OSError:
        return  # no directory, so no earlier save
    key = (status.st_dev, status.st_ino)
    me = threading.current_thread()
    with _lock:
        earlier = [s for ref in _coordinating.get(key, []) if (s := ref()) is not None and s is not session]
        live = []
        for other in earlier:
            if not other.finishing and (other.handed_in or other.thread is me or not other.thread.is_alive()):
                other.end()
            elif other.commit is not None and not other.commit.is_over():
                live.append(other)
        _coordinating[key] = [weakref.ref(s) for s in (*live, session)]
        for stale in [k for k, refs in _coordinating.items() if all(ref() is None for ref in refs)]:
            del _coordinating[stale]
        _by_save_id[session.save_id] = session


class PlanLease:
    """Travels in ``SavePlan.storage_data`` and tells a rank its number.

    On the coordinator the plan, and with it this object or a copy of it that came back from the scatter, lives as long
    as DCP's save does: when the last one dies before ``finish``, nobody will call ``finish`` any more.
    """

    def __init__(self, rank: int, save_id: str) -> None:
        self.rank = rank
        self.save_id = save_id
        session = _by_save_id.get(save_id)
        if session is not None:
            session.num_leases += 1
            weakref.finalize(self, session.return_lease).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.save_id)


@dataclass(frozen=True)
class RankResult:
    """What one rank hands to the coordinator: where its records are, or why there are none.

    Attributes:
        rank: Number of the rank in the save.
        written: Encoded ``format::WriteResult``; empty on failure.
        file_names: Files that were created, whatever became of them.
        error: What failed, in a form that survives pickling.
    """

    rank: int
    written: bytes = b""
    file_names: tuple[str, ...] = ()
    error: BaseException | None = None


class RankResults(list[RankResult]):
    """The list that DCP gathers. A class of its own, because a plain list has no weak references.

    On the coordinator DCP holds on to it until ``finish`` has returned, or a peer's failure was raised.
    """

    def tie(self, session: SaveSession) -> None:
        """Ends ``session`` when this list dies before ``finish``."""
        weakref.finalize(self, session.abandon).atexit = False
