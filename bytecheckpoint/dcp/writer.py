# SPDX-License-Identifier: Apache-2.0
"""``BcpWriter``, the storage writer for DCP."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from errno import ETIMEDOUT
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from bytecheckpoint.checkpoint.direct_io import tell_of_refused_direct_io
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.compat.frames import is_called_by_executor
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._execute_plan import execute_plan
from bytecheckpoint.dcp._gaps import check_planned_metadata, gaps_of_save
from bytecheckpoint.dcp._hooks import Hooks, noting_failure
from bytecheckpoint.dcp._plain_call import plan_save
from bytecheckpoint.dcp._save_digest import with_digest
from bytecheckpoint.dcp._save_failures import check_handed_in, error_to_send, explaining_unseen, say_files_stay
from bytecheckpoint.dcp._save_job import start_job
from bytecheckpoint.dcp._save_reports import report_of_all, report_of_rank
from bytecheckpoint.dcp._save_session import (
    RankResult,
    SaveSession,
    begin_session,
    end_unfinished_saves,
    note_coordinator,
)
from bytecheckpoint.dcp._unsafe import UnsafeObjects, describe_unsafe, refuse_unsafe
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.dcp.metadata import SAVE_ID_PREFIX, assemble, complete_metadata
from bytecheckpoint.dcp.stager import BcpStager
from bytecheckpoint.dcp.stateful import speed_up_dcp
from bytecheckpoint.dcp.whole_plans import send_little
from bytecheckpoint.errors import CheckpointError, ConfigError, SaveCancelledError
from bytecheckpoint.native import _C
from bytecheckpoint.observability.observers import note_call
from bytecheckpoint.planning.assignment import plan_to_write
from bytecheckpoint.planning.inventory import bytes_of
from bytecheckpoint.planning.plan_items import PlanItems
from bytecheckpoint.probes.of_torch import SAVE_AND_LOAD
from bytecheckpoint.probes.probe import require
from bytecheckpoint.report import SaveReport
from bytecheckpoint.runtime.descriptions import described
from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.runtime.gil_interval import quick_switches
from bytecheckpoint.runtime.progress import progress_bar
from bytecheckpoint.staging.staged_state import claim_of_call, note_upload
from bytecheckpoint.storage.last_used import note_commit
from bytecheckpoint.storage.paths import can_be_place, location, working_directory

__all__ = ["BcpWriter"]

# A generous guess of the bytes that one chunk takes in `.metadata`. They are reserved when the save begins, so that the
# disk cannot be full when `.metadata` is written.
_METADATA_BYTES_A_CHUNK = 512


class BcpWriter(StorageWriter):
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

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = _compat.TORCH_SAVE,
        *,
        config: Config | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        unsafe_objects: str | None = None,
        digest: bool | None = None,
    ) -> None:
        super().__init__()
        require(SAVE_AND_LOAD)
        speed_up_dcp()
        if _extensions:
            raise ValueError("_extensions: stream transforms are not supported; leave them out")
        if serialization_format != _compat.TORCH_SAVE:
            raise ValueError(f"serialization_format={serialization_format}: only TORCH_SAVE is supported")
        if not isinstance(thread_count, int) or not 1 <= thread_count <= 16:
            raise ConfigError(f"thread_count={thread_count!r}: must be an int from 1 to 16")
        self.path = location(path)
        self.save_id = SAVE_ID_PREFIX + _C.draw_save_id()
        self.rank: int | None = None
        self.use_collectives = True
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = False
        self.state_dict_cache = None
        self.serialization_format = serialization_format
        self._directory = working_directory()  # relative paths refer to the caller's working directory
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.overwrite = overwrite
        given: dict[str, Any] = {"unsafe_objects": unsafe_objects, "digest": digest}
        given = {name: value for name, value in given.items() if value is not None}
        config = dataclasses.replace(config or Config.from_env(), **given)
        self.config = dataclasses.replace(config, io_threads=thread_count) if thread_count > 1 else config
        self.user_metadata = "" if user_metadata is None else json.dumps(user_metadata)
        self.last_report: SaveReport | None = None
        self._init_threads()

    def _init_threads(self) -> None:
        # Two saves that run at once on one writer run in two threads, so the state of a save is kept per thread.
        self._of_thread = threading.local()
        self._cancelling = ForkSafeLock()
        self._is_cancelled = False
        self._jobs: list[_C.SaveJob] = []  # the ones that write now

    def __getstate__(self) -> dict[str, Any]:
        own = ("_of_thread", "_cancelling", "_is_cancelled", "_jobs")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_threads()

    def __repr__(self) -> str:
        return described(self, str(self.path), single_file_per_rank=True, sync_files=True, overwrite=True)

    @property
    def fs(self) -> FileSystem:
        """DCP's ``FileSystem``, for code that calls its methods. The engine does not use it."""
        return FileSystem()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory that the next save of this thread writes to."""
        path: Path | str = getattr(self._of_thread, "path", self.path)
        return path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether ``checkpoint_id`` is a local path, or a URL of an object store that obstore can write to."""
        return can_be_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Directs the next save to ``checkpoint_id``, if given.

        A relative path is relative to the current working directory. A background save of DCP calls ``reset`` later,
        when the working directory may have changed. Then the path is relative to the working directory at the last of
        these calls from outside the background: the constructor, ``reset``, and ``stage``.
        """
        if checkpoint_id:
            if not is_called_by_executor():
                self._directory = working_directory()
            self.path = self._of_thread.path = location(checkpoint_id, self._directory)
        self.save_id = SAVE_ID_PREFIX + _C.draw_save_id()

    def cancel(self) -> None:
        """Cancels the running save, and every later save of this writer. Any thread may call it; it returns at once.

        The save fails on all ranks with a ``SaveCancelledError`` and leaves no files. The previous checkpoint stays. A
        save that is already being committed is not cancelled.
        """
        with self._cancelling:
            self._is_cancelled = True
            for job in self._jobs:
                job.cancel()

    # The methods of DCP's AsyncStager: `async_save` stages through the writer if it is given no stager.

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``async_save`` is to call ``synchronize_staging``, as in DCP's ``AsyncStager``."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Stages ``state_dict`` as ``BcpStager.stage`` does, with the settings of this writer."""
        self._directory = working_directory()
        return BcpStager(config=self.config)._stage(state_dict, self, is_own=_hooks.are_own(self, "stage"))

    def synchronize_staging(self) -> None:
        """Does what ``BcpStager.synchronize_staging`` does."""
        note_upload()

    def close(self) -> None:
        """Does nothing: a writer holds nothing between saves, and the arena belongs to the process."""

    # The hooks, in the order in which DCP calls them.

    def storage_meta(self) -> StorageMeta:
        """Begins a save: draws its id and makes its session."""
        call = CallContext.of_save(self, functools.partial(plan_save, self, config=self.config))
        if not call.is_explicit:  # else our entry point, which named the call, has claimed the state
            call.staging = claim_of_call()
        session = begin_session(str(self.checkpoint_id), _C.draw_save_id(), call, self.config)
        session.watch_ranks()
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
        self._raise_if_cancelled(session)
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
        session.check_ranks(range(len(plans)))
        if not all(isinstance(plan.items, PlanItems) for plan in plans):  # another planner made the plans
            check_planned_metadata(session.context.planned_metadata(), self._gaps(session))
        end_unfinished_saves(session, self.config.io_timeout_s)
        num_items = sum(len(plan.items) for plan in plans)
        session.use_folder(self.config)
        session.commit = session.folder.begin_commit(
            self.config,
            save_id=session.save_id,
            rank=session.rank if session.commits_alone else None,
            overwrite=self.overwrite,
            sync=self.sync_files,
            reserve_bytes=(num_items + 8) * _METADATA_BYTES_A_CHUNK,
        )
        note_coordinator(session, session.commit.directory_id)
        if session.ranks is not None:
            session.ranks.hold(session.save_id)
        if session.is_over:
            session.end()
            raise CheckpointError(f"save({session.path}): a rank was lost while the save began", session.path)
        session.monitor(self.config.commit_deadline_s)
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
        job: _C.SaveJob | None = None
        unsafe = UnsafeObjects(self.config)
        try:
            to_write = plan_to_write(plan.items)
            job = start_job(
                session,
                self.config,
                to_write,
                sync=self.sync_files,
                one_file_a_record=not self.single_file_per_rank,
            )
            with self._progress_bar(session, job, to_write.num_bytes), self._cancellable(session, job):
                execute_plan(job, to_write, planner, unsafe)
                written = job.finish()
            tell_of_refused_direct_io(session.path, _C)
            of_rank, self.last_report = report_of_rank(session, job, planner, self.config)
            result = RankResult(
                session.rank,
                session.path,
                session.call,
                written,
                tuple(job.file_names),
                report=of_rank,
                unsafe=tuple(unsafe.found.items()),
            )
        except BaseException as error:
            session.refuse_forked_child()
            names = () if job is None else tuple(job.file_names)
            job = None
            error = error_to_send(error, session)
            result = RankResult(session.rank, session.path, session.call, file_names=names, error=error)
        session.handed_in = True
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])  # type: ignore[list-item]  # only our own `finish` reads it
        return future

    @quick_switches()
    @noting_failure
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Checks every rank's result and commits, or undoes the save and raises. Runs where the commit was begun."""
        session = self._session
        commit = session.commit
        assert commit is not None, "prepare_global_plan was not called"
        session.finishing = True
        session.phases.end("wait_s")
        handed_in: list[RankResult] = [result for of_rank in results for result in of_rank]  # type: ignore[misc]
        failed = {result.rank: result.error for result in handed_in if result.error is not None}
        try:
            check_handed_in(session, handed_in, failed)
            self._raise_if_cancelled(session)
            assembled = functools.partial(
                assemble,
                metadata,
                save_id=session.save_id,
                checkpoint_id=session.path,
                results=[result.written for result in handed_in],
                gaps=self._gaps(session),
            )
            checkpoint = assembled(user_metadata=self.user_metadata)
            session.phases.end("assemble_s")
            with explaining_unseen(session.path, handed_in):
                commit.check_files(checkpoint)
            if self.config.digest:
                text = with_digest(session, self.config, self.user_metadata, checkpoint, self._raise_if_cancelled)
                checkpoint = assembled(user_metadata=text)
            report = commit.commit(checkpoint)
            note_commit(session.path)
        except BaseException as error:
            try:
                in_doubt = any(getattr(reason, "errno", None) == ETIMEDOUT for reason in failed.values())
                commit.abort([name for result in handed_in for name in result.file_names], in_doubt)
            except CheckpointError as of_clean_up:
                say_files_stay(error, session.path, of_clean_up)
            raise
        finally:
            session.end()
        complete_metadata(metadata, checkpoint, session.path, session.rank if session.commits_alone else None)
        found = {fqn: names for result in handed_in for fqn, names in result.unsafe}
        report["warnings"] += [describe_unsafe(found)] if found else []
        for warning in report["warnings"]:
            warnings.warn(f"bytecheckpoint: {session.path}: {warning}", RuntimeWarning, stacklevel=2)
        session.phases.end("commit_s", "sweep_s", report["sweep_s"])
        self.last_report = report_of_all(session, handed_in, report, self.config)
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

    @contextmanager
    def _cancellable(self, session: SaveSession, job: _C.SaveJob) -> Iterator[None]:
        with self._cancelling:
            self._jobs.append(job)
        try:
            self._raise_if_cancelled(session)
            yield
        except CheckpointError:
            self._raise_if_cancelled(session)
            raise
        finally:
            with self._cancelling:
                self._jobs.remove(job)

    def _raise_if_cancelled(self, session: SaveSession) -> None:
        if self._is_cancelled:
            raise SaveCancelledError(f"save({session.path}): cancelled", session.path)

    def _progress_bar(self, session: SaveSession, job: _C.SaveJob, num_bytes: int) -> AbstractContextManager[None]:
        shown = progress_bar(f"saving {session.path}", num_bytes, lambda: job.bytes_done, session.phases.trace)
        return shown if self.config.progress and session.is_coordinator else nullcontext()

    def _gaps(self, session: SaveSession) -> str:
        return gaps_of_save(self.config, False if session.commits_alone else session.context.use_collectives)


_hooks = Hooks(BcpWriter)
