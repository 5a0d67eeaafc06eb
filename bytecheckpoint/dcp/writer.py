# SPDX-License-Identifier: Apache-2.0
"""``BcpWriter``, the storage writer for DCP."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from bytecheckpoint.calls.frames import is_called_by_executor
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._cancelling import Cancelling
from bytecheckpoint.dcp._hooks import Hooks, noting_failure
from bytecheckpoint.dcp._plain_call import plan_save
from bytecheckpoint.dcp._save_session import (
    RankResult,
    SaveSession,
    begin_session,
)
from bytecheckpoint.dcp._save_steps import SaveOptions, commit_save, take_right, write_part
from bytecheckpoint.dcp._unsafe import refuse_unsafe
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.dcp.metadata import SAVE_ID_PREFIX
from bytecheckpoint.dcp.stager import BcpStager
from bytecheckpoint.dcp.stateful import speed_up_dcp
from bytecheckpoint.dcp.whole_plans import send_little
from bytecheckpoint.errors import CheckpointError, ConfigError
from bytecheckpoint.native import _C
from bytecheckpoint.observability.observers import note_call
from bytecheckpoint.planning.inventory import bytes_of
from bytecheckpoint.probes.of_torch import SAVE_AND_LOAD
from bytecheckpoint.probes.probe import require
from bytecheckpoint.report import SaveReport
from bytecheckpoint.runtime.descriptions import described
from bytecheckpoint.runtime.gil_interval import quick_switches
from bytecheckpoint.staging.staged_state import note_upload
from bytecheckpoint.storage.paths import can_be_place, location, working_directory

__all__ = ["BcpWriter"]


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
        self._cancelling = Cancelling()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_of_thread", "_cancelling")
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
        self._cancelling.cancel()

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

    @property
    def _options(self) -> SaveOptions:
        one_file_a_record = not self.single_file_per_rank
        return SaveOptions(self.config, self.overwrite, self.sync_files, one_file_a_record, self.user_metadata)


_hooks = Hooks(BcpWriter)
