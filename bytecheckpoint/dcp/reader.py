# SPDX-License-Identifier: Apache-2.0
"""The storage reader."""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bytecheckpoint import _C, _core
from bytecheckpoint.config import Config
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp._hooks import Hooks
from bytecheckpoint.dcp._plan_items import PlanItems, source_of
from bytecheckpoint.dcp.load_planner import as_plain
from bytecheckpoint.dcp.metadata import metadata_of
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidPlanError,
    ShapeMismatchError,
    UnsafeObjectError,
    sendable,
)
from bytecheckpoint.report import LoadReport

__all__ = ["BcpReader"]

# Tensors that cannot be filled in place are read through host copies, no more of them at a time than this.
_COPY_BYTES = 128 << 20
# What a rank says that reads its own part of a checkpoint without collectives, instead of a save id.
_ALONE = "a part of its own"

_Memory = TypeVar("_Memory", bytearray, torch.Tensor | bytearray)


class _FailedMetadata(Metadata):
    """Stands for metadata that could not be read, until a hook can raise the error on every rank.

    DCP turns what ``read_metadata`` raises into an AssertionError, after asking for the metadata of one rank.
    """

    def __init__(self, error: CheckpointError) -> None:
        self.__dict__["error"] = error

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
    each once. Of our own checkpoints each block is checked before a byte of it reaches a tensor; of stock ones the
    checksum of a record, where it has one, is compared once the whole record has been read. No code of the checkpoint
    is run: its pickles are read by C++ that knows a few names, objects and opaque tensors load under torch's
    ``weights_only`` rules, including what was added with ``torch.serialization.add_safe_globals``.

    Args:
        path: Directory of the checkpoint. ``checkpoint_id`` of ``dcp.load`` takes its place.
        _extension_registry: Not supported; transformed streams cannot be read in part.
        config: Settings; ``None`` reads ``BYTECHECKPOINT_*`` variables now.

    During a load, on all ranks and inside DCP's ``CheckpointException``: ``CheckpointNotFoundError``,
    ``CorruptCheckpointError`` (file and offset), ``CheckpointChangedError`` (a newer commit; load again),
    ``KeyMismatchError``, ``ShapeMismatchError``, ``UnsafeObjectError`` (names the key), ``FormatVersionError``,
    ``UnsupportedError``, ``StorageError``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: object | None = None,
        *,
        config: Config | None = None,
    ) -> None:
        super().__init__()
        if _extension_registry is not None:
            raise ValueError("_extension_registry: stream transforms cannot be honoured; leave it out")
        self.path = Path(path)
        self.config = config or Config.from_env()
        self.last_report: LoadReport | None = None
        self._load_id = str(uuid.uuid4())
        self._forget()

    def _forget(self) -> None:
        self._checkpoint: _C.Checkpoint | None = None
        self._rank: int | None = None  # whose part is read, of a checkpoint that was saved without collectives
        self._error: CheckpointError | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checkpoint": None, "_error": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Directory that is read."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Is it a local path, rather than a URL?"""
        return isinstance(checkpoint_id, os.PathLike) or "://" not in str(checkpoint_id)

    @property
    def user_metadata(self) -> Any:
        """What ``BcpWriter(user_metadata=...)`` was given, or None. Reads ``.metadata`` if no load has."""
        text = self._opened().user_metadata
        return json.loads(text) if text else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Directs the next load to ``checkpoint_id``, if given, and forgets what was read."""
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self._load_id = str(uuid.uuid4())
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
        try:
            self._checkpoint, self._rank = self._open(rank), rank
            return metadata_of(self._checkpoint, self._load_id)
        except Exception as error:
            # Remembered whatever it is: else DCP would go on to the metadata of one rank, which may be older.
            self._error = _typed(error)
            raise self._error from error

    def _read_metadata_after_all(self, rank: int, error: CheckpointError) -> Metadata:
        """DCP's second try, for the metadata of one rank. It hides what is raised now, so nothing is."""
        if not isinstance(error, CheckpointNotFoundError):
            return _FailedMetadata(error)  # if `.metadata` is there, its error is the error
        try:
            self._checkpoint = self._open(rank)
            metadata = metadata_of(self._checkpoint, self._load_id)
        except CheckpointNotFoundError:
            return _FailedMetadata(self._no_part_of(rank) or error)
        except Exception as of_rank:
            return _FailedMetadata(_typed(of_rank))
        self._rank, self._error = rank, None
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises here, where every rank gets it, what ``read_metadata`` could not."""
        if isinstance(metadata, _FailedMetadata):
            metadata._raise()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuses what the checkpoint does not have, and tells the coordinator which save this rank reads."""
        checkpoint = self._opened()
        to_read = _plan_to_read(checkpoint, plan)
        # Pages are touched in the background while ranks exchange their plans.
        _C.prepare_ring(self.config.ring_bytes, to_read.num_bytes)
        if isinstance(plan.items, PlanItems) and plan.items.may_stay and _hooks.are_own(self, "prepare_global_plan"):
            plan.items.stay()
        # Ranks that saved on their own have saves of their own; all of a load must read such, or none.
        return dataclasses.replace(plan, storage_data=checkpoint.save_id if self._rank is None else _ALONE)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: all ranks must be looking at the same save."""
        ids = sorted({str(plan.storage_data) for plan in plans})
        if len(ids) > 1:
            raise CheckpointChangedError(
                f"load({self.path}): ranks read different saves ({', '.join(ids)}): a newer commit came in between",
                str(self.path),
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads, verifies and scatters everything that ``plan`` asks for."""
        try:
            load = _Load(self._opened(), plan, str(self.path), self._rank, self.config, planner)
            load.tensors()
            load.objects()
        except Exception as error:
            sent = sendable(error)  # to every rank, by DCP
            if sent is error:
                raise
            raise sent from error
        self.last_report = load.report()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _opened(self) -> _C.Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = self._open(None)
        return self._checkpoint

    def _open(self, rank: int | None) -> _C.Checkpoint:
        return _C.Checkpoint.open(
            str(self.path), rank=rank, check_pickle=True, accept_rewritten=self.config.accept_rewritten_metadata
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


def _plan_to_read(checkpoint: _C.Checkpoint, plan: LoadPlan) -> _C.ReadPlan:
    """The plan that our planner made of this checkpoint, or one made of its items."""
    source = source_of(plan.items)
    if isinstance(source, _C.ReadPlan) and source.is_of(checkpoint):
        return source
    return _C.ReadPlan(checkpoint, plan.items)


_hooks = Hooks(BcpReader)


class _Load:
    """One rank's reading of one plan."""

    def __init__(
        self,
        checkpoint: _C.Checkpoint,
        plan: LoadPlan,
        path: str,
        rank: int | None,
        config: Config,
        planner: LoadPlanner,
    ) -> None:
        self._planner = planner
        self._config = config
        self._plan = _plan_to_read(checkpoint, plan)
        # The planner, if tensors and objects just go where its state dict says.
        self._plain = as_plain(planner) if source_of(plan.items) is self._plan else None
        self._job = _C.LoadJob(
            checkpoint,
            self._plan,
            directory=path,
            rank=rank,
            direct_io=config.direct_io,
            verify=config.verify,
            num_io_threads=config.io_threads,
            ring_bytes=config.ring_bytes,
        )
        self._totals: dict[str, Any] = {"path": path, "save_id": checkpoint.save_id}

    def tensors(self) -> None:
        """Straight into the destinations where their memory allows; the rest through host copies, a few at a time."""
        if self._plain is not None:
            left_out = self._job.add_state(self._plain.state_dict)
            self._run()
            self._through_copies({position: self._resolved(position) for position in left_out})
            return
        positions = range(self._plan.num_tensors)
        targets = [self._resolved(position) for position in positions]
        left_out = self._job.add_tensors(0, targets)
        self._run()
        skipped = set(left_out)
        filled = [position for position in positions if position not in skipped]
        _compat.increment_version([targets[position] for position in filled])
        for position in filled:
            self._planner.commit_tensor(self._plan.tensor_item(position), targets[position])
        self._through_copies({position: targets[position] for position in left_out})

    def _resolved(self, position: int) -> torch.Tensor:
        return self._planner.resolve_tensor(self._plan.tensor_item(position)).detach()

    def _through_copies(self, targets: dict[int, torch.Tensor]) -> None:
        """Fills tensors of other dtypes, devices or layouts, as ``copy_`` does, and those of opaque records."""
        for position, source in self._read_in_turns(targets, self._add_copy):
            item, target = self._plan.tensor_item(position), targets[position]
            value = self._unpacked(item, source) if isinstance(source, bytearray) else source
            if not _compat.is_quantized_alike(value, target):
                raise InvalidPlanError(
                    f"'{item.dest_index.fqn}': stored is a tensor of {_compat.quantization(value)}, to be filled "
                    f"one of {_compat.quantization(target)}; it must be quantized alike"
                )
            target.copy_(value)
            self._planner.commit_tensor(item, target)

    def _add_copy(self, position: int) -> torch.Tensor | bytearray:
        """A host tensor that the next run fills, or, for an opaque record, a buffer."""
        dtype = self._job.stored_dtype(position)
        if not dtype:
            archive = bytearray(self._job.archive_bytes(position))
            self._job.add_archive(position, archive)
            return archive
        item = self._plan.tensor_item(position)
        # On the host, whatever device is the default.
        copy = torch.empty(item.lengths, dtype=getattr(torch, dtype), device="cpu")
        if self._job.add_tensors(position, [copy]):
            raise CheckpointError(f"'{item.dest_index.fqn}': its host copy cannot be filled")
        return copy

    def _unpacked(self, item: ReadItem, archive: bytearray) -> torch.Tensor:
        """The wanted box of what torch.save wrote."""
        fqn = item.storage_index.fqn
        value = _load_plain_data(fqn, archive, self._config)
        if not isinstance(value, torch.Tensor):
            raise ShapeMismatchError(f"'{fqn}': a tensor wanted, the record holds a {type(value).__name__}")
        return _compat.narrow(value.detach(), item.storage_offsets, item.lengths)

    def objects(self) -> None:
        """Hands objects over; to a planner that unpickles freely, bytes that are known to be plain data."""
        for position, buffer in self._read_in_turns(range(self._plan.num_objects), self._add_object):
            if self._plain is not None:
                fqn = self._plan.object_fqn(position)
                self._plain.put_object(fqn, _plain_object(fqn, buffer, self._config))
                continue
            item = self._plan.object_item(position)
            record: bytes | bytearray = buffer
            if not self._config.allow_pickle:
                record = _plain_record(item.storage_index.fqn, buffer, self._config)
            self._planner.load_bytes(item, io.BytesIO(record))

    def _add_object(self, position: int) -> bytearray:
        buffer = bytearray(self._job.object_bytes(position))
        self._job.add_object(position, buffer)
        return buffer

    def _read_in_turns(self, positions: Iterable[int], add: Callable[[int], _Memory]) -> Iterator[tuple[int, _Memory]]:
        """Positions and the memory that ``add`` has had filled for each, no more of it at a time than a turn's."""
        waiting = collections.deque(positions)
        while waiting:
            turn: list[tuple[int, _Memory]] = []
            num_bytes = 0
            while waiting and num_bytes < _COPY_BYTES:
                position = waiting.popleft()
                memory = add(position)
                turn.append((position, memory))
                num_bytes += len(memory) if isinstance(memory, bytearray) else memory.nbytes
            self._run()
            yield from turn

    def report(self) -> LoadReport:
        return LoadReport(**self._totals)

    def _run(self) -> None:
        for name, value in self._job.run().items():
            self._totals[name] = self._totals.get(name, 0) + value


def _typed(error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"the metadata cannot be used: {type(error).__name__}: {error}")


def _plain_object(fqn: str, buffer: bytearray, config: Config) -> Any:
    """The object of a record: by C++ if it is made of builtin values, else by torch."""
    value = _builtin_of(fqn, buffer)
    return _load_plain_data(fqn, buffer, config, map_location=None) if value is None else value[0]


def _plain_record(fqn: str, buffer: bytearray, config: Config) -> bytes | bytearray:
    """A record that runs no code, whoever unpickles it.

    Builtin values are read by C++ and written anew: that what it read is harmless says nothing of what torch would find
    in bytes that were made to be read in two ways. All others torch loads itself, under its ``weights_only`` rules.
    """
    value = _builtin_of(fqn, buffer)
    record = None if value is None else _core.dump_builtin(value[0])
    if record is None:
        _load_plain_data(fqn, buffer, config)
        return buffer
    return record


def _builtin_of(fqn: str, buffer: bytearray) -> tuple[Any] | None:
    """The value of a record that is made of builtin values, in a tuple."""
    try:
        return _core.load_builtin(buffer)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"'{fqn}': {error}") from None


def _load_plain_data(fqn: str, buffer: bytearray, config: Config, map_location: str | None = "cpu") -> Any:
    """What torch.save wrote, under torch's ``weights_only`` rules unless ``config`` allows more."""
    load: Callable[..., Any] = torch.load
    try:
        return load(io.BytesIO(buffer), map_location=map_location, weights_only=not config.allow_pickle)
    except Exception as error:
        if config.allow_pickle:
            raise
        raise UnsafeObjectError(
            f"'{fqn}' is not plain data under torch's weights_only rules ({_offenders(buffer, error)}); if you trust "
            "this checkpoint, add its types with torch.serialization.add_safe_globals, or pass "
            "BcpReader(..., config=Config(allow_pickle=True)), which may run code of the checkpoint"
        ) from None


def _offenders(buffer: bytearray, error: Exception) -> str:
    """Names of the classes and functions that ``buffer`` asks for, or else what torch said."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(buffer))
    except Exception:
        names = []
    return ", ".join(sorted(names)) or str(error).strip().partition("\n")[0] or repr(error)
