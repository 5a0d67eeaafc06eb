# SPDX-License-Identifier: Apache-2.0
"""The storage reader."""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
import warnings
from contextlib import nullcontext
from typing import Any, NoReturn

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bytecheckpoint import _C
from bytecheckpoint._described import described
from bytecheckpoint._in_use import Hold, hold_directory
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._asked import Asked, Unfilled, compare
from bytecheckpoint.dcp._calls import LOAD, call_in, is_called_by
from bytecheckpoint.dcp._exchange import Exchange
from bytecheckpoint.dcp._gather import Gather
from bytecheckpoint.dcp._groups import watch_of_call
from bytecheckpoint.dcp._hooks import Hooks
from bytecheckpoint.dcp._intent import Intent, choose_reading
from bytecheckpoint.dcp._load import Load, check_requested, plan_to_read
from bytecheckpoint.dcp._peers import rank_of_call
from bytecheckpoint.dcp._phases import Phases
from bytecheckpoint.dcp._plan_items import PlanItems
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.metadata import metadata_of
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    sendable,
)
from bytecheckpoint.local_path import is_local, local_path, path_to_read
from bytecheckpoint.parts import parsed_user_metadata
from bytecheckpoint.probes.of_torch import SAVE_AND_LOAD
from bytecheckpoint.probes.probe import require
from bytecheckpoint.report import LoadReport, RankLoadReport
from bytecheckpoint.wrong_path import explaining

__all__ = ["BcpReader"]

# Of metadata that are larger each rank reads only what its state asks for: what 10,000 ranks write is half a gigabyte.
_MAX_WHOLE_METADATA_BYTES = 32 << 20
# What a rank says that reads its own part of a checkpoint without collectives, instead of a save id.
_ALONE = "a part of its own"

_logger = logging.getLogger("bytecheckpoint")


class _FailedMetadata(Metadata):
    """Stands for metadata that could not be read, until a hook can raise the error on every rank.

    DCP logs what ``read_metadata`` raises with its traceback, asks for the metadata of one rank, and turns what that
    raises into an AssertionError.
    """

    def __init__(self, error: CheckpointError) -> None:
        self.__dict__["error"] = error

    def __bool__(self) -> bool:
        # Of what is false DCP asks for the metadata of one rank. If `.metadata` is there, its error is the error.
        return not isinstance(self.__dict__["error"], CheckpointNotFoundError)

    def _raise(self) -> NoReturn:
        raise self.__dict__["error"]

    # Properties, because dataclass fields have class attributes that __getattr__ would never see.
    state_dict_metadata = property(_raise)
    planner_data = property(_raise)
    storage_data = property(_raise)
    storage_meta = property(_raise)
    version = property(_raise)


class BcpReader(StorageReader):
    """Reads checkpoints of ``BcpWriter`` and of stock DCP, onto any world size and layout, in place.

    Collective: used by ``dcp.load`` alone; constructing it is local. Only the blocks that hold wanted bytes are read,
    each once; by all ranks together where they share their reading (``Config.shared_reading``). Of our own checkpoints
    each block is checked before a byte of it reaches a tensor; of stock ones the checksum of a record, where it has
    one, is compared once the whole record has been read. No code of the checkpoint is run: its pickles are read by C++
    that knows a few names, and objects of builtin and standard types are, too; other objects and opaque tensors load
    under torch's ``weights_only`` rules, including what was added with ``torch.serialization.add_safe_globals``.

    Args:
        path: Directory of the checkpoint. ``checkpoint_id`` of ``dcp.load`` takes its place. None, which ``latest``
            gives if a run has none yet, is a ``CheckpointNotFoundError``.
        _extension_registry: Not supported; transformed streams cannot be read in part.
        config: Settings; ``None`` reads ``BYTECHECKPOINT_*`` variables now.

    Attributes:
        last_report: Of the last load in which this rank got all that it wanted, on the coordinator of the last in which
            all ranks did; None before the first.
        load_id: In the metadata that DCP gets; a new one after ``reset``.
        rank: Of the load that began last, as DCP gives it; None if it gives none.
        use_collectives: Of the load that began last.
        storage_data: DCP's places of the checkpoint that was opened last, made when asked for; empty before.
        fs: DCP's ``FileSystem``, for callers of its methods. The engine does its own I/O, so it cannot be replaced.
            There are no ``transforms``.

    During a load, on all ranks and inside DCP's ``CheckpointException``: ``CheckpointNotFoundError``,
    ``CorruptCheckpointError`` (file and offset), ``CheckpointChangedError`` (a newer commit; load again),
    ``KeyMismatchError``, ``ShapeMismatchError``, ``UnsafeObjectError`` (names the key), ``FormatVersionError``,
    ``UnsupportedError``, ``StorageError``.
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
        if _extension_registry is not None:
            raise ValueError("_extension_registry: stream transforms cannot be honoured; leave it out")
        self.path = path_to_read(path)
        self.rank: int | None = None
        self.use_collectives = True
        self.config = config or Config.from_env()
        self.last_report: LoadReport | None = None
        self.load_id = str(uuid.uuid4())
        self._hold: Hold | None = None
        self._forget()

    def _forget(self) -> None:
        self._let_go()
        self._checkpoint: _C.Checkpoint | None = None
        self._directory: tuple[int, int] | None = None  # as it was when the metadata were read
        self._rank: int | None = None  # whose part is read, of a checkpoint that was saved without collectives
        self._error: CheckpointError | None = None
        self._is_coordinator = False
        self._number = 0  # of this rank among those that load
        self._phases = Phases()
        self._unfilled = Unfilled()  # of this rank; on the coordinator, of all

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checkpoint": None, "_error": None, "_hold": None, "_directory": None}

    def __repr__(self) -> str:
        return described(self, str(self.path))

    @property
    def fs(self) -> FileSystem:
        """DCP's own, for callers of its methods."""
        return FileSystem()

    @property
    def storage_data(self) -> dict[Any, Any]:
        """DCP's places of what was read last; made at every look, as no load needs them."""
        if self._checkpoint is None:
            return {}
        places: dict[Any, Any] = metadata_of(self._checkpoint, self.load_id).storage_data
        return places

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Directory that is read."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Is it a local path, rather than a URL of another scheme than ``file``?"""
        return is_local(checkpoint_id)

    @property
    def user_metadata(self) -> Any:
        """What ``BcpWriter(user_metadata=...)`` was given, or None. Reads ``.metadata`` if no load has."""
        return parsed_user_metadata(self._opened().user_metadata, self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Directs the next load to ``checkpoint_id``, if given, and forgets what was read."""
        if checkpoint_id:
            self.path = local_path(checkpoint_id)
        self.load_id = str(uuid.uuid4())
        self._forget()

    # The hooks, in the order in which DCP calls them.

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata of the checkpoint, built from our manifest; its pickle is never run. Works on its own.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError, UnsupportedError, StorageError
        """
        rank = kwargs.get("rank")
        if rank is not None and self._error is not None:
            return self._read_metadata_after_all(rank, self._error)
        self._forget()
        watch, call = watch_of_call(), call_in(*LOAD)
        if watch is not None and call is not None:
            watch.note_call(call)
        try:
            self._directory = _C.directory_id(str(self.path), self.config.io_timeout_s)
            self._hold_in_call()
            self._checkpoint, self._rank = self._open(rank), rank
            metadata = metadata_of(self._checkpoint, self.load_id)
        except Exception as error:
            # Remembered whatever it is: else DCP would go on to the metadata of one rank, which may be older.
            self._error = _typed(error)
            if is_called_by(LOAD[0], "local_step"):
                return _FailedMetadata(self._error)
            raise self._error from error
        self._phases.end("metadata_s")
        return metadata

    def _read_metadata_after_all(self, rank: int, error: CheckpointError) -> Metadata:
        """DCP's second try, for the metadata of one rank. It hides what is raised now, so nothing is."""
        if not isinstance(error, CheckpointNotFoundError):
            return _FailedMetadata(error)  # if `.metadata` is there, its error is the error
        try:
            self._checkpoint = self._open(rank)
            metadata = metadata_of(self._checkpoint, self.load_id)
        except CheckpointNotFoundError:
            return _FailedMetadata(self._no_part_of(rank) or error)
        except Exception as of_rank:
            return _FailedMetadata(_typed(of_rank))
        self._rank, self._error = rank, None
        self._phases.end("metadata_s")
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises here, where every rank gets it, what ``read_metadata`` could not."""
        if isinstance(metadata, _FailedMetadata):
            metadata._raise()
        if self._hold is None:
            # Whoever calls the hooks by hand reads in the end, or drops the reader.
            self._directory = self._directory or _C.directory_id(str(self.path), self.config.io_timeout_s)
            self._hold = hold_directory(self._directory)
        self.rank, self.use_collectives = kwargs.get("rank"), kwargs.get("use_collectives", True)
        self._is_coordinator = is_coordinator
        self._number = rank_of_call(kwargs)
        if "metadata_s" not in self._phases.seconds:
            self._phases = Phases()  # the metadata were read for an earlier load

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuses what the checkpoint does not have, and tells the coordinator which save this rank reads."""
        checkpoint = self._opened()
        check_requested(checkpoint, plan)
        to_read = plan_to_read(checkpoint, plan)
        # Pages are touched in the background while ranks exchange their plans.
        _C.prepare_ring(self.config.ring_bytes, to_read.num_bytes)
        if isinstance(plan.items, PlanItems) and plan.items.may_stay and _hooks.are_own(self, "prepare_global_plan"):
            plan.items.stay()
        self._phases.end("plan_s")
        # Ranks that saved on their own have saves of their own; all of a load must read such, or none.
        is_alone = self._rank is not None  # then DCP plans with collectives, and reads without
        asked = _asked_by(plan, checkpoint)
        self._unfilled = compare(checkpoint.names, [asked]) if is_alone else Unfilled(asked.missing, asked.num_missing)
        intent = Intent.by(
            self,
            _ALONE if is_alone else checkpoint.save_id,
            asked,
            reads_by_own_hook=not is_alone and _hooks.are_own(self, "read_data"),
            num_bytes=to_read.num_bytes,
        )
        return dataclasses.replace(plan, storage_data=intent)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: all ranks must be looking at the same save, and read it in the same way."""
        ids = sorted({str(getattr(plan.storage_data, "save", None)) for plan in plans})
        if len(ids) > 1:
            raise CheckpointChangedError(
                f"load({self.path}): ranks read different saves ({', '.join(ids)}): a newer commit came in between",
                str(self.path),
            )
        intents = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Intent)]
        if self._rank is None and len(intents) == len(plans):
            self._unfilled = compare(self._opened().names, [intent.asked for intent in intents])
        return choose_reading(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads, verifies and scatters everything that ``plan`` asks for."""
        try:
            with Gather(plan) as gather:
                self._read(plan, planner, gather)
        except Exception as error:
            sent = sendable(error)  # to every rank, by DCP
            if sent is error:
                raise
            raise sent from error
        finally:
            self._hold_in_call()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, plan: LoadPlan, planner: LoadPlanner, gather: Gather) -> None:
        phases, self._phases = self._phases, Phases()
        phases.end("exchange_s")
        checkpoint = self._opened()
        with Exchange.of_call(plan) or nullcontext() as exchange:
            load = Load(checkpoint, plan, str(self.path), self._rank, self.config, planner, exchange)
            with load.progress_bar() if self.config.progress and self._is_coordinator else nullcontext():
                load.tensors()
                phases.end("read_s")
                load.objects()
            phases.end("objects_s")
            own: dict[str, Any] = {"rank": self._number, **load.done, **phases.seconds}
        ranks = gather.bring(RankLoadReport(**own))
        phases.end("wait_s")
        whole = tuple(of_rank for of_rank in ranks if of_rank is not None)
        if len(whole) < len(ranks):
            return  # some have failed, which DCP raises on all ranks
        self.last_report = LoadReport(
            path=str(self.path),
            save_id=checkpoint.save_id,
            reading="independent" if exchange is None else exchange.reading,
            **own,
            wait_s=phases.seconds["wait_s"],
            total_s=phases.total_s,
            ranks=whole,
            **dataclasses.asdict(self._unfilled),
        )
        if self._is_coordinator:
            _logger.info("%s", self.last_report.summary())
            warning = self._unfilled.warning(str(self.path))
            if warning is not None and _is_meant_to_fill(planner):
                warnings.warn(warning, RuntimeWarning, stacklevel=2)

    def _hold_in_call(self) -> None:
        """Keeps this process from deleting what it reads, for as long as DCP's call lasts that this thread is in."""
        self._let_go()
        call = call_in(*LOAD)
        if call is not None:
            self._hold = hold_directory(self._directory, call.is_running)

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.end()
        self._hold = None

    def _opened(self) -> _C.Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = self._open(None)
        return self._checkpoint

    def _open(self, rank: int | None) -> _C.Checkpoint:
        # Of a rank that has no part of its own DCP asks for that first.
        with explaining(self.path) if rank is None else nullcontext():
            return _C.Checkpoint.open(
                str(self.path),
                rank=rank,
                check_pickle=True,
                accept_rewritten=self.config.accept_rewritten_metadata,
                max_whole_bytes=_MAX_WHOLE_METADATA_BYTES,
                io_timeout_s=self.config.io_timeout_s,
            )

    def _no_part_of(self, rank: int) -> CheckpointNotFoundError | None:
        """The error if other ranks have parts; None if there are none at all."""
        parts = sorted(part.name for part in self.path.glob("__*.metadata"))
        if not parts:
            return None
        return CheckpointNotFoundError(
            f"open({self.path}): saved without collectives by ranks of which {rank} is none ({', '.join(parts)}); each "
            "part is read by the rank of its number",
            str(self.path),
        )


_hooks = Hooks(BcpReader)


def _asked_by(plan: LoadPlan, checkpoint: _C.Checkpoint) -> Asked:
    """The keys that this rank asks for."""
    stored = checkpoint.names()
    fills = plan.items.fills if isinstance(plan.items, PlanItems) else None
    if fills is not None:
        return Asked.of(stored, fills.flat, fills.tops)
    # Of another planner the items tell; those of a tensor without elements there are none of.
    keys = {item.storage_index.fqn for item in plan.items}
    empty = {name for name, _, shape, *_ in checkpoint.contents() if 0 in shape} if len(keys) < len(stored) else set()
    return Asked.of(stored, keys | empty, keys)


def _is_meant_to_fill(planner: LoadPlanner) -> bool:
    """Whether the planner loads all of the state dict that it was given; others choose on purpose."""
    return planner.warns if isinstance(planner, BcpLoadPlanner) else type(planner) is DefaultLoadPlanner


def _typed(error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"the metadata cannot be used: {type(error).__name__}: {error}")
