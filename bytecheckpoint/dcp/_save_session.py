# SPDX-License-Identifier: Apache-2.0
"""The session of one save in this process, from ``storage_meta`` to the end of ``finish``.

DCP tells a writer when a save begins and, if all goes well, when it ends. If another rank fails, DCP calls no further
hook on the coordinator. A cycle of exception and frame then keeps the objects of the failed save alive until the
garbage collector runs. The right to commit must not live that long, because other processes would find the path busy.
So while the coordinator holds the right, DCP's own call is watched, and the right is given back once that call has
left its thread.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytecheckpoint.calls.phases import Phases
from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.calls.watch import watch
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.distributed.call_order import number_of_turn
from bytecheckpoint.distributed.launch import is_unaware, refuse_unaware_rank
from bytecheckpoint.distributed.parcel import Parcel
from bytecheckpoint.errors import CheckpointError, ProcessGroupChangedError, RankLostError, UnsupportedError
from bytecheckpoint.journal.failed_calls import note_lost_coordinator
from bytecheckpoint.listing import listed
from bytecheckpoint.native import _C
from bytecheckpoint.report import RankSaveReport, SaveReport
from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.runtime.per_process import HomeProcess
from bytecheckpoint.storage.folder import Commit, Folder
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.save_records import about_save

if TYPE_CHECKING:
    from bytecheckpoint.distributed.liveness import LivenessMonitor

__all__ = [
    "RankResult",
    "SaveSession",
    "begin_session",
    "end_unfinished_saves",
    "note_coordinator",
    "take_right_away",
]

_logger = logging.getLogger("bytecheckpoint")

_TAKE_AWAY_S = 2.0


@dataclass(eq=False)
class SaveSession:
    """State of one save on one rank.

    Attributes:
        path: Directory of the checkpoint, as it was passed on this rank.
        save_id: 32 hex digits. The id of the coordinator is the id of the save.
        context: Context of the DCP call that runs the save.
        rank: Number of this rank in the save.
        is_coordinator: True if this rank commits.
        commits_alone: True in a save without collectives: each rank commits its own part.
        commit: The right to commit. None before ``prepare_global_plan``, and on ranks that do not commit.
        handed_in: True once ``write_data`` has returned this rank's result to DCP.
        earlier_holder: The coordinator and id of a save that took the right to commit before this one; None if no save
            has.
        lost: Ranks that are lost.
        phases: Duration of each phase so far.
        report: Report of this rank, once it has written its part.
        digest: Digest of the checkpoint, once it is computed; else "".
        ranks: Liveness monitor of the ranks that save; None if there is none.
        folder: Folder of the checkpoint.
        call: Number of the call on this rank; 0 if calls are not counted.
        memory_s: Seconds that it took to commit the same state in memory before; 0 if it was not.
        thread: Thread that runs the save.
        home: Process that began the save. A forked child must not touch the save.
    """

    path: str
    save_id: str
    context: CallContext
    phases: Phases
    rank: int = 0
    is_coordinator: bool = False
    commits_alone: bool = False
    commit: Commit | None = None
    handed_in: bool = False
    report: SaveReport | None = None
    digest: str = ""
    ranks: LivenessMonitor | None = None
    earlier_holder: tuple[int, str] | None = None
    lost: set[int] = field(default_factory=set)
    memory_s: float = 0.0
    folder: Folder = field(init=False)
    call: int = field(default_factory=number_of_turn)
    thread: threading.Thread = field(default_factory=threading.current_thread)
    home: HomeProcess = field(default_factory=HomeProcess)
    _over: threading.Event = field(default_factory=threading.Event)
    _finish: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.folder = folder_at(self.path)

    def use_folder(self, config: Config) -> None:
        """Makes the folder known to the engine. Its requests count in the trace.

        Raises:
            CheckpointError: See ``Folder.use``.
        """
        self.folder.use(config, _C, self.phases.trace.note_request)

    def refuse_forked_child(self) -> None:
        """Raises a ``CheckpointError`` in a forked child of the process that began the save."""
        if not self.home.is_here():
            raise CheckpointError(f"save({self.path}): this process is a forked child; the save belongs to its parent")

    def is_running(self) -> bool:
        """Returns whether DCP's call still runs; True also while a hook of this save runs another save."""
        call = self.context.call
        return call is not None and call.is_running()

    def end(self) -> None:
        """Ends the session and gives back the right to commit. A committed save stays. Any thread may call it."""
        self._over.set()
        if self.commit is not None:
            self.commit.abandon()

    def begin_finish(self) -> None:
        """Notes that ``finish`` has begun: it ends the save, whatever happens."""
        self._finish.set()

    @property
    def finishing(self) -> bool:
        """Whether ``finish`` has begun."""
        return self._finish.is_set()

    @property
    def is_over(self) -> bool:
        """Whether ``end`` was called."""
        return self._over.is_set()

    def watch_ranks(self, config: Config) -> None:
        """Makes the loss of a rank end the save from now on, if the ranks have a liveness monitor.

        This rank then gives its right to commit back. If the coordinator itself is lost, this rank takes the right away
        from it, because a coordinator that has only stopped may go on later.

        Args:
            config: Settings of the save.
        """
        ref = weakref.ref(self)

        def on_loss(lost: frozenset[int], holder: tuple[int, str] | None) -> None:
            session = ref()
            if session is None:
                return
            session.lost.update(lost)
            session.context.is_held = holder != session.earlier_holder
            if holder is not None and holder[0] in lost and holder[0] != session.rank:
                take_right_away(session.path, holder, session.phases.trace.began_at, config)
            session.end()

        self.ranks = self.context.watch_ranks(self.phases.trace, on_loss)
        self.earlier_holder = None if self.ranks is None else self.ranks.holder

    def about(self, config: Config) -> bytes:
        """Returns what stays of the save if it dies; see ``about_save``."""
        return about_save(
            rank=self.rank,
            world_size=self.context.size,
            began_at=self.phases.trace.began_at,
            is_async=self.context.staging is not None,
            with_host=config.journal_hosts,
        )

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Checks on the coordinator that it has heard from exactly the ranks with which the save began.

        Args:
            ranks: Ranks that the coordinator has heard from.

        Raises:
            ProcessGroupChangedError: Ranks are missing, or the process group has changed: the default group was
                destroyed during the save, and maybe made anew.
        """
        num_ranks = self.context.size
        if num_ranks == 0 or self.commits_alone:
            return
        if not self.context.is_over_its_group() or sorted(ranks) != [*range(num_ranks)]:
            error = ProcessGroupChangedError(
                f"save({self.path}): the process group was destroyed or replaced before the save was committed: it "
                f"began on {num_ranks} ranks, and the coordinator has heard from the ranks {sorted(ranks)}",
                self.path,
            )
            _logger.error("%s", error)  # over another group it is not known which ranks DCP tells
            raise error

    def check_machines(self) -> None:
        """Checks on the coordinator that all ranks see the folder, if that is in the memory of a machine.

        Raises:
            UnsupportedError: Ranks are on other machines, as far as that is known.
        """
        places = () if self.ranks is None or not self.folder.is_of_one_machine else self.ranks.places
        others = [rank for rank, place in enumerate(places) if not place.is_with(places[0])]
        if others:
            raise UnsupportedError(
                f"save({self.path}): rank 0 is on {places[0]}, and rank {others[0]} on {places[others[0]]}: this save "
                "takes them for one machine. For states in the memory of several, each must have a network namespace "
                "of its own; and a thread of DCP cannot save there, but async_save_state_dict can",
                self.path,
            )

    def monitor(self, config: Config) -> None:
        """Makes the save end at its deadline, or when DCP's call has ended without calling ``finish``.

        Such a save is then noted as one that failed: no hook has heard why.

        Args:
            config: Settings of the save.
        """
        # A weak reference: if nobody else holds the session, the destructor of its commit ends the save.
        ref, over, finish, thread = weakref.ref(self), self._over, self._finish, self.thread
        path, context, lost = self.path, self.context, self.lost
        deadline = time.monotonic() + config.commit_deadline_s

        def end() -> None:
            over.set()  # also if nobody holds the session any more: it is ended once
            session = ref()
            if session is not None:
                session.end()
            if not is_running() and context.call is not None and not finish.is_set():
                context.note_end(_unheard(path, lost), path, config)

        def is_running() -> bool:
            return thread.is_alive() if context.call is None else context.call.is_running()

        def look() -> bool:
            if over.is_set() and (finish.is_set() or context.is_failure_noted or context.call is None):
                return False
            if is_running() and (over.is_set() or time.monotonic() < deadline):
                return True
            has_begun = _in_thread(end, "bytecheckpoint-save") is not None
            return is_running() or not has_begun

        watch(look)


def _unheard(path: str, lost: Collection[int]) -> CheckpointError:
    """Returns why a save failed where none of our hooks has heard of it, as far as that is known."""
    ranks = f": {'rank' if len(lost) == 1 else 'ranks'} {listed([*map(str, sorted(lost))])} lost" if lost else ""
    text = f"save({path}) was not committed{ranks}; DCP ended it before its last hook, and raised the reason"
    return RankLostError(text, dict.fromkeys(lost, "lost"), path) if lost else CheckpointError(text, path)


def take_right_away(path: str, holder: tuple[int, str], began_at: float, config: Config) -> None:
    """Takes the right to commit away from a lost coordinator, by removing the ``.tmp`` file of its commit.

    A thread removes the file, and this rank waits for that thread for 2 s at most: storage that does not answer must
    not keep the rank from reporting the loss. The rank that has removed it notes the save as one that failed.

    Args:
        path: Directory of the checkpoint.
        holder: The coordinator, and the id of the save.
        began_at: Unix time at which the save began.
        config: Settings of the save.
    """
    rank, save_id = holder

    def unlink() -> None:
        note = note_lost_coordinator(path, save_id, rank, began_at, config)
        with contextlib.suppress(OSError):  # the save is committed, or this rank does not see the directory
            Path(path, f".metadata.{save_id}.tmp").unlink()
            note()

    unlinking = _in_thread(unlink, "bytecheckpoint-take-away")
    if unlinking is not None:  # else the deadline of the commit ends the right
        unlinking.join(_TAKE_AWAY_S)


def _in_thread(work: Callable[[], None], name: str) -> threading.Thread | None:
    """Does ``work`` in a thread of its own, since storage may not answer. None if no thread can be started."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


_of_thread = threading.local()


def begin_session(path: str, save_id: str, context: CallContext, config: Config) -> SaveSession:
    """Begins a save in this thread. Ends an earlier save of the thread, unless a hook of that save begins this one.

    Raises:
        ConfigError: A launcher has started several ranks, and DCP saves this one as if it were alone.
    """
    if context.size < 2 and is_unaware() and not context.is_explicit and context.lets_dcp_choose_ranks:
        refuse_unaware_rank("save", path)
    earlier: weakref.ref[SaveSession] | None = getattr(_of_thread, "session", None)
    session = None if earlier is None else earlier()
    # Calls compare equal if their frames have one address. The earlier call is then over: a call begins only one save,
    # and a new frame may reuse the address.
    is_over = session is not None and (session.context.call == context.call or not session.is_running())
    if session is not None and is_over and not session.finishing:
        session.end()
    trace = CallTrace(config, "save", path, context.rank_or({}), context.size)
    session = SaveSession(path, save_id, context, Phases(trace, context.call))
    _of_thread.session = weakref.ref(session)
    context.ends_with(session.end)
    context.save_id = save_id
    return session


_lock = ForkSafeLock()
# Sessions of this process that coordinate a save, by device and inode of the directory. An entry ends with its session.
_coordinating: dict[tuple[int, int], list[weakref.ref[SaveSession]]] = {}


def end_unfinished_saves(session: SaveSession, io_timeout_s: float) -> bool:
    """Ends earlier saves of this process in the same directory that nobody else will end.

    Such a save has returned its result to DCP but not begun ``finish``, or its thread has ended, or this thread began
    it and no longer runs it.

    Returns:
        Whether the directory is there.

    Raises:
        StorageError: The storage does not answer.
    """
    directory = _C.directory_id(session.path, io_timeout_s)
    if directory is None:
        return False  # so no save in it
    me = threading.current_thread()
    with _lock:
        _drop_dead_entries()
        others = [s for ref in _coordinating.get(directory, []) if (s := ref()) is not None and s is not session]
    for other in others:
        is_left = other.handed_in or not other.thread.is_alive() or (other.thread is me and not other.is_running())
        if is_left and not other.finishing:
            other.end()
    return True


def note_coordinator(session: SaveSession, directory: tuple[int, int]) -> None:
    """Registers ``session``, which coordinates a save in ``directory``, for ``end_unfinished_saves`` of later saves."""
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
    """What one rank sends to the coordinator after writing: where its records are, or why there are none.

    Attributes:
        rank: Number of the rank in the save.
        path: Directory of the checkpoint, as it was passed on that rank.
        call: Number of the call on that rank; 0 if calls are not counted.
        written: Encoded ``format::WriteResult``; empty on failure.
        file_names: Names of the files that the rank created, also on failure.
        link_names: Names of those that it linked.
        error: The failure, in a form that can be pickled; None on success.
        report: What the rank did; None on failure.
        unsafe: Keys of objects that will not load without opting in, each with the names that a load refuses.
        hashes: Of each file, with ``Config.link_unchanged``: its name, in how many saves it was linked, and the hashes
            of its records.
        host: Name of the machine.
    """

    rank: int
    path: str = ""
    call: int = 0
    written: bytes = b""
    file_names: tuple[str, ...] = ()
    link_names: tuple[str, ...] = ()
    error: BaseException | None = None
    report: RankSaveReport | None = None
    unsafe: tuple[tuple[str, str], ...] = ()
    hashes: tuple[tuple[str, int, bytes], ...] = ()
    host: str = field(default_factory=platform.node)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "error": None if self.error is None else Parcel(self.error)}
