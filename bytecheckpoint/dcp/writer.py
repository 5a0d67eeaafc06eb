# SPDX-License-Identifier: Apache-2.0
"""``BcpWriter``, the storage writer for DCP."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bytecheckpoint.dcp._hooks import Hooks, noting_failure
from bytecheckpoint.dcp._plain_call import plan_save
from bytecheckpoint.dcp._save_session import RankResult, SaveSession, begin_session
from bytecheckpoint.dcp._save_steps import commit_save, take_right, write_part
from bytecheckpoint.dcp._unsafe import refuse_unsafe
from bytecheckpoint.dcp._writer_base import WriterBase
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.dcp.metadata import SAVE_ID_PREFIX
from bytecheckpoint.dcp.whole_plans import send_little
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.journal.observers import note_call
from bytecheckpoint.native import _C
from bytecheckpoint.planning.inventory import bytes_of
from bytecheckpoint.runtime.gil_interval import quick_switches

__all__ = ["BcpWriter"]


class BcpWriter(WriterBase):
    """Writes a checkpoint directory through the C++ engine.

    Pass it to ``dcp.save`` as ``storage_writer``. Constructing it is local. Its hooks are collective, and only DCP
    calls them. One writer serves any number of saves. The checkpoint is durable when ``dcp.save`` returns, on every
    rank. Until then the previous checkpoint at the path stays whole.

    Args:
        path: Directory of the checkpoint. The save creates it if it is absent. ``checkpoint_id`` of ``dcp.save``
            replaces it.
        single_file_per_rank: False writes each record into a file of its own.
        sync_files: False leaves out every fsync. A save is then still all or nothing if processes die, but not if
            power is lost.
        thread_count: Number of I/O threads if it is greater than 1. With 1, ``config.io_threads`` counts. More
            threads do not make more files.
        per_thread_copy_ahead: Has no effect. Copies run ahead as far as the ring has free slots.
        cache_staged_state_dict: Has no effect. A synchronous save keeps no copy.
        overwrite: False refuses to replace an existing checkpoint: the save raises ``CheckpointExistsError`` before it
            writes any byte.
        _extensions: Not supported, because transformed streams cannot be checked or read in part.
        serialization_format: Only TORCH_SAVE is supported.
        config: Settings. ``None`` reads the ``BYTECHECKPOINT_*`` variables when the writer is made.
        user_metadata: Any JSON-serialisable value. The save stores it in ``.metadata``, and
            ``BcpReader.user_metadata`` returns it.
        unsafe_objects: Replaces ``config.unsafe_objects``, unless it is None.
        digest: Replaces ``config.digest``, unless it is None.

    Attributes:
        last_report: Report of the last save in which this rank wrote its part; None before the first. The coordinator
            completes it when it has committed. If two saves run at once, it is the report of the one that wrote later.
        save_id: Id of the save that began last. Before the first save, and after ``reset``, it belongs to no save.
        rank: Rank of this process in the save that began last, as DCP passes it; None if DCP passes none.
        use_collectives: ``use_collectives`` of the save that began last.
        fs: DCP's ``FileSystem``, for code that calls its methods. The engine does its own I/O, so replacing it is not
            possible.

    The writer also has the other attributes of ``FileSystemWriter``, except ``transforms``. A save uses the values that
    ``path``, ``single_file_per_rank``, ``sync_files`` and ``overwrite`` have when it begins. Changing any other
    attribute has no effect: ``thread_count``, ``per_thread_copy_ahead``, ``cache_staged_state_dict`` and
    ``serialization_format`` hold what was passed, and ``type_check`` and ``state_dict_cache`` hold the initial values
    of DCP's writer.

    Raises:
        ValueError: ``_extensions`` or ``serialization_format`` asks for what the writer cannot do.
        ConfigError: ``thread_count``, ``unsafe_objects``, ``path`` or a ``BYTECHECKPOINT_*`` variable is invalid.

    A save may fail with these errors, on all ranks and inside DCP's ``CheckpointException``: ``CheckpointBusyError``
    (another save holds the path), ``CheckpointExistsError``, ``InvalidPlanError`` (names the key), ``StorageError``
    (``errno``, ``path``), ``UnsafeObjectError`` (with ``unsafe_objects="error"``), ``SaveFailedError`` (``reasons`` by
    rank), ``CheckpointSupersededError``, ``DurabilityUnknownError``.
    """

    # The hooks, in the order in which DCP calls them.

    def storage_meta(self) -> StorageMeta:
        """Begins a save: draws its id and makes its session."""
        call = CallContext.of_save(self, functools.partial(plan_save, self, config=self.config))
        session = begin_session(str(self.checkpoint_id), self.same_save_as or _C.draw_save_id(), call, self.config)
        session.memory_s, self.memory_s, self.same_save_as = self.memory_s, 0.0, ""
        session.watch_ranks(self.config)
        others = [other for other in getattr(self._of_thread, "sessions", ()) if other.is_running()]
        self._of_thread.sessions = [*others, session]  # a hook of one save may run another save
        self.save_id = SAVE_ID_PREFIX + session.save_id
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Notes the rank of this process, and whether it is the coordinator."""
        session = self._session
        self.rank, self.use_collectives = kwargs.get("rank"), kwargs.get("use_collectives", True)
        session.commits_alone = not self.use_collectives
        session.is_coordinator = is_coordinator
        session.rank = session.context.rank_or(kwargs)

    @quick_switches()
    @noting_failure
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuses values that must not be stored, before any rank has written a byte."""
        session = self._session
        self._cancelling.raise_if_cancelled(session)
        refuse_unsafe(plan, self.config, session.context.planner)
        # The ring's pages are touched in the background while the ranks exchange their plans.
        _C.prepare_ring(self.config.ring_bytes, bytes_of(plan.items))
        send_little(plan, session.context.peers, looks=not _hooks.are_own(self, "prepare_global_plan"))
        session.phases.end("plan_s")
        return plan

    @quick_switches()
    @noting_failure
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Takes the right to commit: on the coordinator, or without collectives on each rank."""
        session = self._session
        session.phases.end("global_plan_s")
        take_right(session, self._options, plans)
        session.phases.end("begin_s")
        return plans

    @quick_switches()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes and syncs this rank's files.

        A failure is returned as a result, not raised. The coordinator can then clean up before the error is raised on
        every rank.
        """
        session = self._session
        session.phases.end("exchange_s")
        result, report = write_part(session, self._options, plan, planner, self._cancelling)
        self.last_report = report or self.last_report
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])  # type: ignore[list-item]  # only our own `finish` reads it
        return future

    @quick_switches()
    @noting_failure
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Checks every rank's result and commits, or undoes the save and raises. Runs where the commit was begun."""
        session = self._session
        handed_in: list[RankResult] = [result for of_rank in results for result in of_rank]  # type: ignore[misc]
        self.last_report = commit_save(session, self._options, metadata, handed_in, self._cancelling)
        session.context.is_committed = True
        if session.is_coordinator:  # without collectives every rank gets here
            note_call(self.last_report, self.config)

    @property
    def _session(self) -> SaveSession:
        sessions: list[SaveSession] = getattr(self._of_thread, "sessions", [])
        if not sessions:
            raise CheckpointError("BcpWriter is for dcp.save: storage_meta must be the first hook that is called")
        if len(sessions) > 1 and not sessions[-1].is_running():
            sessions.pop()
        session = sessions[-1]
        session.refuse_forked_child()
        return session


_hooks = Hooks(BcpWriter)
