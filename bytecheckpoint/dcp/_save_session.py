# SPDX-License-Identifier: Apache-2.0
"""One save in this process: what lives from ``storage_meta`` to the end of ``finish``.

DCP tells a writer when a save begins and, if all goes well, when it ends. When a peer fails it tells the coordinator
nothing more, and what it leaves behind is held by a cycle of exception and frame until the garbage collector comes by.
The right to commit must not outlive such a save: other processes would find the path busy. So the coordinator watches
DCP's own call, while it holds the right, and gives the right back once that call has left its thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from bytecheckpoint import _C
from bytecheckpoint._fork_locks import ForkSafeLock
from bytecheckpoint.dcp._calls import SAVE, Call, call_in, is_in_greenlet
from bytecheckpoint.dcp._groups import watch_of_call
from bytecheckpoint.dcp._peers import group_of_call
from bytecheckpoint.dcp._phases import Phases
from bytecheckpoint.dcp._turns import number_of_turn
from bytecheckpoint.errors import ProcessGroupChangedError
from bytecheckpoint.report import RankSaveReport, SaveReport

if TYPE_CHECKING:
    from bytecheckpoint.dcp._watch import Watch

__all__ = [
    "RankResult",
    "SaveSession",
    "begin_session",
    "end_unfinished_saves",
    "note_coordinator",
    "take_right_away",
]

_logger = logging.getLogger("bytecheckpoint")

_WATCH_INTERVAL_S = 0.1
_TAKE_AWAY_S = 2.0


@dataclass(eq=False)
class SaveSession:
    """State of one save on one rank.

    Attributes:
        path: Directory, as this rank was told.
        save_id: 32 hex digits; the coordinator's is the save's.
        rank: Number of this rank in the save.
        is_coordinator: This rank commits.
        commits_alone: The save is without collectives: each rank commits its own part.
        commit: The right to commit; on the coordinator, from ``prepare_global_plan`` on.
        handed_in: This rank's result is with DCP.
        finishing: ``finish`` runs, or ran.
        phases: What took how long so far.
        report: Of this rank, once its result is with DCP.
        ranks: The watch of those that save, where there is one.
        group: That the save goes over, and its size, as ``group_of_call`` found it when the save began.
        call: Number of the call on this rank; 0 if calls are not counted.
        dcp_call: Of DCP, that runs the save; None if that is not known.
        in_greenlet: Whether a greenlet runs it, of which nobody can tell whether it has ended.
        thread: That runs the save.
        pid: Of the process that began the save; a forked child must leave it alone.
    """

    path: str
    save_id: str
    rank: int = 0
    is_coordinator: bool = False
    commits_alone: bool = False
    commit: _C.Commit | None = None
    handed_in: bool = False
    finishing: bool = False
    phases: Phases = field(default_factory=Phases)
    report: SaveReport | None = None
    ranks: Watch | None = None
    group: tuple[dist.ProcessGroup | None, int] | None = field(default_factory=group_of_call)
    call: int = field(default_factory=number_of_turn)
    dcp_call: Call | None = field(default_factory=partial(call_in, *SAVE))
    in_greenlet: bool = field(default_factory=is_in_greenlet)
    thread: threading.Thread = field(default_factory=threading.current_thread)
    pid: int = field(default_factory=os.getpid)
    _over: threading.Event = field(default_factory=threading.Event)

    def is_running(self) -> bool:
        """Is DCP still at it? Also while its thread runs another save, in a hook of this one."""
        if self.in_greenlet:
            return not self.is_over
        return self.dcp_call is not None and self.dcp_call.is_running()

    def end(self) -> None:
        """Gives back whatever is left. No effect on a committed save. Any thread."""
        self._over.set()
        self.group = None  # a writer that is kept keeps the session
        if self.commit is not None:
            self.commit.abandon()

    @property
    def is_over(self) -> bool:
        """Has ``end`` been called?"""
        return self._over.is_set()

    def watch_ranks(self) -> None:
        """From now on the loss of a rank ends the save: the right to commit is given back, or taken from a coordinator
        that is lost itself and may go on later."""
        self.ranks, call = watch_of_call(), self.dcp_call
        if self.ranks is None or call is None:
            return
        ref = weakref.ref(self)

        def on_loss(lost: frozenset[int], holder: tuple[int, str] | None) -> None:
            session = ref()
            if session is None:
                return
            if holder is not None and holder[0] in lost and holder[0] != session.rank:
                take_right_away(session.path, holder[1])
            session.end()

        self.ranks.note_call(call, on_loss)

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """On the coordinator: ``ranks``, of whom it has heard, are all with whom the save began.

        Raises:
            ProcessGroupChangedError: Some are missing, or there is another group: the one that was the default one has
                been destroyed behind the save, and maybe made anew.
        """
        if self.group is None or self.commits_alone:
            return
        num_ranks = self.group[1]
        if group_of_call() != self.group or sorted(ranks) != [*range(num_ranks)]:
            error = ProcessGroupChangedError(
                f"save({self.path}): began on {num_ranks} ranks, heard of the ranks {sorted(ranks)}, or over another "
                "process group: it was destroyed before the save was committed",
                self.path,
            )
            _logger.error("%s", error)  # whom DCP tells of it over another group is not known
            raise error

    def watch(self, deadline_s: float) -> None:
        """Ends the save ``deadline_s`` from now, or when DCP's call has ended without telling us."""
        call = None if self.in_greenlet else self.dcp_call
        # By weak reference: a session that nobody holds any more ends at once, by its destructor.
        arguments = (weakref.ref(self), self._over, self.thread, call, time.monotonic() + deadline_s)
        watching = threading.Thread(target=_watch, args=arguments, name="bytecheckpoint-save", daemon=True)
        with contextlib.suppress(
            RuntimeError
        ):  # no thread is to be had: the save ends with its thread, or the next one
            watching.start()


def take_right_away(path: str, save_id: str) -> None:
    """From a coordinator that is lost. Storage that does not answer must not keep this rank from noticing the loss."""

    def unlink() -> None:
        with contextlib.suppress(OSError):  # it may have committed, or not see this directory
            Path(path, f".metadata.{save_id}.tmp").unlink()

    unlinking = threading.Thread(target=unlink, name="bytecheckpoint-take-away", daemon=True)
    try:
        unlinking.start()
    except RuntimeError:  # no thread is to be had: the deadline of the commit takes its place
        return
    unlinking.join(_TAKE_AWAY_S)


def _watch(
    ref: weakref.ref[SaveSession],
    over: threading.Event,
    thread: threading.Thread,
    call: Call | None,
    deadline: float,
) -> None:
    while not over.wait(_WATCH_INTERVAL_S):
        running = thread.is_alive() if call is None else call.is_running()
        if running and time.monotonic() < deadline:
            continue
        session = ref()
        if session is not None:
            session.end()  # does nothing to a commit that has come to its rename
        return


_of_thread = threading.local()


def begin_session(path: str, save_id: str) -> SaveSession:
    """Begins a save in this thread. An earlier one has ended, unless a hook of it begins this one."""
    earlier: weakref.ref[SaveSession] | None = getattr(_of_thread, "session", None)
    session = None if earlier is None else earlier()
    if session is not None and not session.finishing and not session.is_running():
        session.end()
    session = SaveSession(path=path, save_id=save_id)
    _of_thread.session = weakref.ref(session)
    return session


_lock = ForkSafeLock()
# Saves of this process that coordinate, by directory. Entries go with their sessions.
_coordinating: dict[tuple[int, int], list[weakref.ref[SaveSession]]] = {}


def end_unfinished_saves(session: SaveSession, io_timeout_s: float) -> None:
    """Ends earlier saves of this process at the same path that nobody will end.

    Such a save handed its results in, or was begun by this very thread, or by one that has ended.

    Raises:
        StorageError: The storage does not answer.
    """
    directory = _C.directory_id(session.path, io_timeout_s)
    if directory is None:
        return  # no directory that could be saved at
    me = threading.current_thread()
    with _lock:
        _drop_dead_entries()
        others = [s for ref in _coordinating.get(directory, []) if (s := ref()) is not None and s is not session]
    for other in others:
        is_left = other.handed_in or not other.thread.is_alive() or (other.thread is me and not other.is_running())
        if is_left and not other.finishing:
            other.end()


def note_coordinator(session: SaveSession, directory: tuple[int, int]) -> None:
    """Lets later saves of this process know of ``session``, which coordinates at ``directory``."""
    with _lock:
        _drop_dead_entries()
        _coordinating.setdefault(directory, []).append(weakref.ref(session))


def _drop_dead_entries() -> None:
    for key, refs in list(_coordinating.items()):
        refs[:] = [ref for ref in refs if ref() is not None]
        if not refs:
            del _coordinating[key]


@dataclass(frozen=True)
class RankResult:
    """What one rank hands to the coordinator: where its records are, or why there are none.

    Attributes:
        rank: Number of the rank in the save.
        path: Directory, as the rank was told.
        call: Number of the call on that rank; 0 if calls are not counted.
        written: Encoded ``format::WriteResult``; empty on failure.
        file_names: Files that were created, whatever became of them.
        error: What failed, in a form that survives pickling.
        report: What the rank did; None on failure.
        unsafe: Keys of objects that will not load without opting in, each with the names that a load refuses.
    """

    rank: int
    path: str = ""
    call: int = 0
    written: bytes = b""
    file_names: tuple[str, ...] = ()
    error: BaseException | None = None
    report: RankSaveReport | None = None
    unsafe: tuple[tuple[str, str], ...] = ()
