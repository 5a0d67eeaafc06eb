# SPDX-License-Identifier: Apache-2.0
"""``BcpReader``, the storage reader for DCP."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import uuid
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bytecheckpoint.calls.phases import Phases
from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._failed_metadata import FailedMetadata, typed
from bytecheckpoint.dcp._hooks import Hooks, noting_failure
from bytecheckpoint.dcp._load_steps import LoadPart, no_part_of, open_to_load, read_part
from bytecheckpoint.dcp._loaded_keys import LoadedKeys, asked_by, planned_view
from bytecheckpoint.dcp._places import SavesSeen
from bytecheckpoint.dcp._plain_call import plan_load
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.dcp.metadata import metadata_of
from bytecheckpoint.dcp.rank_load import check_requested, plan_to_read
from bytecheckpoint.dcp.stateful import speed_up_dcp
from bytecheckpoint.dcp.whole_plans import note_looks
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, sendable
from bytecheckpoint.native import _C
from bytecheckpoint.planning.plan_items import PlanItems
from bytecheckpoint.probes.of_torch import SAVE_AND_LOAD
from bytecheckpoint.probes.probe import require
from bytecheckpoint.report import LoadReport
from bytecheckpoint.runtime.descriptions import described
from bytecheckpoint.sharing.asked_keys import Unfilled
from bytecheckpoint.sharing.choice import ReadPreferences, choose_reading
from bytecheckpoint.sharing.report_gather import ReportGather
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.in_use import Hold, hold_directory
from bytecheckpoint.storage.parts import parsed_user_metadata
from bytecheckpoint.storage.paths import can_be_place, location, location_to_read

__all__ = ["BcpReader"]

# If `.metadata` is larger than this, each rank reads only the parts of it that its state asks for: 10,000 ranks write a
# `.metadata` of half a gigabyte.
_MAX_WHOLE_METADATA_BYTES = 32 << 20
# What a rank sends instead of a save id if it reads its own part of a checkpoint that was saved without collectives.
_ALONE = "a part of its own"
_logger = logging.getLogger("bytecheckpoint")


class BcpReader(StorageReader):
    """Reads checkpoints of ``BcpWriter`` and of stock DCP, onto any world size and layout, in place.

    Pass it to ``dcp.load`` as ``storage_reader``. Constructing it is local. Its hooks are collective, and only DCP
    calls them, except that ``read_metadata`` also works on its own.

    A rank reads only the blocks that hold bytes which it wants, and each of them once. If the ranks share their reading
    (``Config.shared_reading``), all ranks together read each block once. The reader checks each block of our own
    checkpoints before a byte of it reaches a tensor. In stock checkpoints only records may have a checksum, so the
    reader compares it when it has read the whole record.

    The reader runs no code of the checkpoint. C++ code that knows a few names reads the pickles of the checkpoint, and
    objects of builtin and standard types. Other objects and opaque tensors load under torch's ``weights_only`` rules,
    which allow what was added with ``torch.serialization.add_safe_globals``.

    Args:
        path: Directory of the checkpoint. ``checkpoint_id`` of ``dcp.load`` replaces it. ``None`` raises a
            ``CheckpointNotFoundError``: ``latest`` returns None if a run has no checkpoint yet.
        _extension_registry: Not supported, because transformed streams cannot be read in part.
        config: Settings. ``None`` reads the ``BYTECHECKPOINT_*`` variables when the reader is made.

    Attributes:
        last_report: Report of the last load in which this rank got all that it wanted; on the coordinator, of the last
            load in which all ranks did. None before the first.
        load_id: Id in the metadata that DCP gets. ``reset`` draws a new one.
        rank: Rank of this process in the load that began last, as DCP passes it; None if DCP passes none.
        use_collectives: ``use_collectives`` of the load that began last.
        storage_data: DCP's ``storage_data`` of the checkpoint that was opened last. It is built at each access, and
            empty if no checkpoint was opened.
        fs: DCP's ``FileSystem``, for code that calls its methods. The engine does its own I/O, so replacing it is not
            possible. There are no ``transforms``.

    A load may fail with these errors, on all ranks and inside DCP's ``CheckpointException``:
    ``CheckpointNotFoundError``, ``CorruptCheckpointError`` (file and offset), ``CheckpointChangedError`` (there is a
    newer commit; load again), ``KeyMismatchError``, ``ShapeMismatchError``, ``UnsafeObjectError`` (names the key),
    ``FormatVersionError``, ``UnsupportedError``, ``StorageError``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        _extension_registry: object | None = None,
        *,
        config: Config | None = None,
    ) -> None:
        super().__init__()
        require(SAVE_AND_LOAD)
        speed_up_dcp()
        if _extension_registry is not None:
            raise ValueError("_extension_registry: stream transforms are not supported; leave it out")
        self.path = location_to_read(path)
        self.rank: int | None = None
        self.use_collectives = True
        self.config = config or Config.from_env()
        self.last_report: LoadReport | None = None
        self.load_id = str(uuid.uuid4())
        self._hold: Hold | None = None
        self._call = CallContext()  # the load that began last
        self._saves_seen = SavesSeen()
        self._has_begun = False  # `read_metadata` began the load; a caller may also keep metadata for later loads
        self._forget()

    def _forget(self) -> None:
        self._let_go()
        self._checkpoint: _C.Checkpoint | None = None
        self._folder = folder_at(self.path)
        self._directory: tuple[int, int] | None = None  # its id when the metadata were read
        self._rank: int | None = None  # the rank whose part is read, if it was saved without collectives
        self._error: CheckpointError | None = None
        self._is_coordinator = False
        self._number = 0  # number of this rank in the load
        self._phases = Phases()
        self._keys = LoadedKeys()

    def __getstate__(self) -> dict[str, Any]:
        of_process = dict.fromkeys(("_checkpoint", "_error", "_hold", "_directory"))
        return {**self.__dict__, **of_process, "_call": CallContext(), "_has_begun": False}

    def __repr__(self) -> str:
        return described(self, str(self.path))

    @property
    def fs(self) -> FileSystem:
        """DCP's ``FileSystem``, for code that calls its methods. The engine does not use it."""
        return FileSystem()

    @property
    def storage_data(self) -> dict[Any, Any]:
        """DCP's ``storage_data`` of the checkpoint opened last. It is built at each access, since no load needs it."""
        if self._checkpoint is None:
            return {}
        places: dict[Any, Any] = metadata_of(self._checkpoint, self.load_id).storage_data
        return places

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory that is read."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether ``checkpoint_id`` is a local path, or a URL of an object store that obstore can read."""
        return can_be_place(checkpoint_id)

    @property
    def user_metadata(self) -> Any:
        """The value passed to ``BcpWriter(user_metadata=...)``, or None. Reads ``.metadata`` if no load has."""
        return parsed_user_metadata(self._opened().user_metadata, self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Directs the next load to ``checkpoint_id``, if given, and forgets what was read."""
        if checkpoint_id:
            self.path = location(checkpoint_id)
        self.load_id = str(uuid.uuid4())
        self._forget()

    # The hooks, in the order in which DCP calls them.

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns DCP's metadata of the checkpoint. It may be called without a load.

        The metadata are built from our manifest; the pickle in ``.metadata`` is never run.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at the path.
            CorruptCheckpointError: The bytes of ``.metadata`` are not what was written.
            FormatVersionError: A newer version of the format wrote the checkpoint.
            UnsupportedError: The checkpoint is valid, but this version cannot read it.
            StorageError: The file system refused, or did not answer in time.
        """
        rank = kwargs.get("rank")
        if rank is not None and self._error is not None:
            return self._read_metadata_after_all(rank, self._error)
        self._forget()
        earlier = self._call.call if self._has_begun else None
        plan = functools.partial(plan_load, self, config=self.config)
        self._call, self._has_begun = CallContext.of_load(self, plan), True
        self._begin_trace()
        self._call.watch_ranks(self._phases.trace)
        try:
            self._directory = self._directory_id()
            self._hold_in_call()
            self._checkpoint, self._rank = self._open(rank), rank
            metadata = metadata_of(self._checkpoint, self.load_id)
            self._phases.end("metadata_s")
            return metadata
        except Exception as error:
            # Any error is remembered: else DCP would go on to the metadata of one rank, which may be older.
            self._error = typed(error)
            # If this is DCP's first request of a call, DCP goes on to `set_up_storage_reader`, where all ranks get the
            # error. Any other caller gets it now.
            if self._call.call != earlier and self._call.is_with(self) and _hooks.are_own(self, "read_metadata"):
                return FailedMetadata(self._error)
            raise self._error from error
        finally:
            if self._call.call is None:  # nobody knows whether a load follows
                self._phases.trace.leave()

    def _read_metadata_after_all(self, rank: int, error: CheckpointError) -> Metadata:
        """Reads the metadata of ``rank`` alone, which DCP asks for after ``read_metadata`` failed with ``error``.

        It raises nothing, because DCP would hide the exception. A failure is returned as ``FailedMetadata``.
        """
        if not isinstance(error, CheckpointNotFoundError):
            return FailedMetadata(error)  # `.metadata` exists, so its error is the one to raise
        try:
            self._checkpoint = self._open(rank)
            metadata = metadata_of(self._checkpoint, self.load_id)
        except CheckpointNotFoundError:
            return FailedMetadata(no_part_of(self._folder, rank) or error)
        except Exception as of_rank:
            return FailedMetadata(typed(of_rank))
        self._rank, self._error = rank, None
        self._phases.end("metadata_s")
        return metadata

    @noting_failure
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins the load, or raises the error that ``read_metadata`` kept: here every rank gets it."""
        if not self._has_begun:
            self._call = CallContext.of_load(self)
        self._has_begun = False
        if isinstance(metadata, FailedMetadata):
            metadata.raise_it()
        if self._hold is None:
            # A caller that runs the hooks by hand will read in the end, or drop the reader; both end the hold.
            self._directory = self._directory or self._directory_id()
            self._hold = hold_directory(self._directory)
        self.rank, self.use_collectives = kwargs.get("rank"), kwargs.get("use_collectives", True)
        self._is_coordinator = is_coordinator
        self._number = self._call.rank_or(kwargs)
        if "metadata_s" not in self._phases.seconds:
            self._begin_trace()  # the metadata were read in an earlier load
        self._phases.trace.enter("plan")

    @noting_failure
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuses what the checkpoint does not have, and tells the coordinator which save this rank reads."""
        checkpoint = self._checkpoint = planned_view(plan, self._opened())
        self._keys = LoadedKeys(plan)
        check_requested(checkpoint, self._call.planner)
        to_read = plan_to_read(checkpoint, plan)
        # The ring's pages are touched in the background while the ranks exchange their plans.
        _C.prepare_ring(self.config.ring_bytes, to_read.num_bytes)
        items, sends_handle = plan.items, False
        if isinstance(items, PlanItems) and items.may_send_handle and _hooks.are_own(self, "prepare_global_plan"):
            items.send_handle()
            sends_handle = True
        self._phases.end("plan_s")
        # Ranks that saved without collectives made one save each, so their ids differ. Either all ranks of a load read
        # such a part, or none does.
        is_alone = self._rank is not None  # DCP then plans with collectives and reads without
        asked = asked_by(plan, checkpoint, self._call.planner)
        self._keys.unfilled = Unfilled(asked.missing, asked.num_missing, missing_parts=asked.missing_parts)
        if is_alone:
            self._keys.compare(str(self.path), checkpoint, [asked])
        intent = ReadPreferences.by(
            self,
            _ALONE if is_alone else checkpoint.save_id,
            asked,
            # If `read_data` is ours, nothing in it fails before its exchange.
            reads_with_others=not is_alone and _hooks.are_own(self, "read_data") and self._call.all_ranks_read(self),
            num_bytes=to_read.num_bytes,
        )
        plan = dataclasses.replace(plan, storage_data=intent)
        note_looks(plan, self._is_coordinator and not sends_handle)
        return plan

    @noting_failure
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks on the coordinator that all ranks read the same save, and decides whether they share the reading.

        Raises:
            CheckpointChangedError: A newer commit came while the ranks opened the checkpoint.
            ConfigError: Ranks were given different paths, or do not see the same files there.
        """
        self._phases.trace.mark("heard_ns")
        said = [plan.storage_data if isinstance(plan.storage_data, ReadPreferences) else None for plan in plans]
        self._saves_seen.refuse_others(str(self.path), said, self._number)
        intents = [of_rank for of_rank in said if of_rank is not None]
        if self._rank is None and len(intents) == len(plans):
            self._keys.compare(str(self.path), self._opened(), [intent.asked for intent in intents])
        chosen = choose_reading(plans)
        self._phases.trace.mark("answered_ns")
        return chosen

    @noting_failure
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads and verifies everything that ``plan`` asks for, and scatters it into the tensors."""
        phases, self._phases = self._phases, Phases()
        try:
            with ReportGather(plan, self._call.peers) as gather:
                report = read_part(self._part(), plan, planner, gather, phases)
                self.last_report = report or self.last_report
        except Exception as error:
            sent = sendable(error)  # DCP sends it to every rank
            if sent is error:
                raise
            raise sent from error
        finally:
            self._hold_in_call()
            if self._call.call is None:  # nobody tells when the load ends
                phases.trace.leave()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _part(self) -> LoadPart:
        return LoadPart(
            str(self.path),
            self._folder,
            self._opened(),
            self._rank,
            self._number,
            self._is_coordinator,
            self.config,
            self._call,
            self._keys,
        )

    def _begin_trace(self) -> None:
        call = self._call
        self._phases = Phases(CallTrace(self.config, "load", str(self.path), call.rank_or({}), call.size), call.call)

    def _hold_in_call(self) -> None:
        """Keeps this process from deleting the checkpoint that it reads, until DCP's call of this thread has ended."""
        self._let_go()
        call = self._call.call
        if call is not None:
            self._hold = hold_directory(self._directory, call.is_running)

    def _directory_id(self) -> tuple[int, int] | None:
        return folder_at(self.path).key(self.config.io_timeout_s)

    def _let_go(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.end()

    def _opened(self) -> _C.Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = self._open(None)
        return self._checkpoint

    def _open(self, rank: int | None) -> _C.Checkpoint:
        self._folder = folder_at(self.path)
        self._folder.use(self.config, _C, self._phases.trace.note_request)
        return open_to_load(self._folder, self.config, rank, _MAX_WHOLE_METADATA_BYTES)

    @property
    def num_ranks(self) -> int:
        """How many ranks take part in the latest load."""
        return max(1, self._call.size)


_hooks = Hooks(BcpReader)
