# SPDX-License-Identifier: Apache-2.0
"""``BcpReader``, the storage reader for DCP."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.futures import Future

from bytecheckpoint.calls.phases import Phases
from bytecheckpoint.checkpoint.tier_drains import go_on
from bytecheckpoint.dcp._failed_metadata import FailedMetadata, typed
from bytecheckpoint.dcp._hooks import Hooks, noting_failure
from bytecheckpoint.dcp._load_steps import LoadPart, no_part_of, prepare_to_read, read_part
from bytecheckpoint.dcp._loaded_keys import LoadedKeys, asked_by, planned_view
from bytecheckpoint.dcp._plain_call import plan_load
from bytecheckpoint.dcp._reader_base import ReaderBase
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.dcp.metadata import metadata_of
from bytecheckpoint.dcp.whole_plans import note_looks, send_handle
from bytecheckpoint.distributed.call_order import check_same_kind
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, sendable
from bytecheckpoint.sharing.choice import ReadPreferences, choose_reading
from bytecheckpoint.sharing.report_gather import ReportGather

__all__ = ["BcpReader"]

# What a rank sends instead of a save id if it reads its own part of a checkpoint that was saved without collectives.
_ALONE = "a part of its own"


class BcpReader(ReaderBase):
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
    ``CheckpointNotFoundError``, ``CorruptCheckpointError`` (file, offset and keys), ``CheckpointChangedError`` (there
    is a newer commit; load again), ``KeyMismatchError``, ``ShapeMismatchError``, ``UnsafeObjectError`` (names the
    key), ``FormatVersionError``, ``UnsupportedError``, ``StorageError``.
    """

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
        self._hold_until_read()
        self.rank, self.use_collectives = kwargs.get("rank"), kwargs.get("use_collectives", True)
        self._is_coordinator = is_coordinator
        if is_coordinator:
            go_on(str(self.path))
        self._number = self._call.rank_or(kwargs)
        if "metadata_s" not in self._phases.seconds:
            self._begin_trace()  # the metadata were read in an earlier load
        self._phases.trace.enter("plan")

    @noting_failure
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuses what the checkpoint does not have, and tells the coordinator which save this rank reads."""
        checkpoint = self._checkpoint = planned_view(plan, self._opened())
        self._keys = LoadedKeys(plan)
        num_bytes = prepare_to_read(checkpoint, plan, self._call.planner, self.config)
        sends_handle = _hooks.are_own(self, "prepare_global_plan") and send_handle(plan)
        self._phases.end("plan_s")
        # Ranks that saved without collectives made one save each, so their ids differ. Either all ranks of a load read
        # such a part, or none does.
        is_alone = self._rank is not None  # DCP then plans with collectives and reads without
        asked = asked_by(plan, checkpoint, self._call.planner)
        self._keys.note_missing(asked)
        if is_alone:
            self._keys.compare(str(self.path), checkpoint, [asked])
        intent = ReadPreferences.by(
            self,
            _ALONE if is_alone else checkpoint.save_id,
            asked,
            # If `read_data` is ours, nothing in it fails before its exchange.
            reads_with_others=not is_alone and _hooks.are_own(self, "read_data") and self._call.all_ranks_read(self),
            num_bytes=num_bytes,
        )
        plan = dataclasses.replace(plan, storage_data=intent)
        note_looks(plan, self._is_coordinator and not sends_handle)
        return plan

    @noting_failure
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks on the coordinator that all ranks read the same save, and decides whether they share the reading.

        Raises:
            OutOfStepError: Ranks save meanwhile.
            CheckpointChangedError: A newer commit came while the ranks opened the checkpoint.
            ConfigError: Ranks were given different paths, or do not see the same files there.
        """
        self._phases.trace.mark("heard_ns")
        savers = {rank: "save" for rank, plan in enumerate(plans) if isinstance(plan, SavePlan)}
        check_same_kind("load", str(self.path), savers)
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


_hooks = Hooks(BcpReader)
