# SPDX-License-Identifier: Apache-2.0
"""The storage reader."""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bytecheckpoint import _C
from bytecheckpoint.config import Config
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp.metadata import metadata_of
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    InvalidPlanError,
    ShapeMismatchError,
    UnsafeObjectError,
    UnsupportedError,
    sendable,
)
from bytecheckpoint.report import LoadReport

__all__ = ["BcpReader"]

# Tensors that cannot be filled in place are read through host copies, no more of them at a time than this.
_COPY_BYTES = 128 << 20


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
    """Reads checkpoints that ``BcpWriter`` wrote, onto any world size and layout, in place.

    Collective: used by ``dcp.load`` alone; constructing it is local. Only the blocks that hold wanted bytes are read,
    each once, and each is checked before a byte of it reaches a tensor. No code of the checkpoint is run: objects load
    under torch's ``weights_only`` rules, including what was added with ``torch.serialization.add_safe_globals``.

    Args:
        path: Directory of the checkpoint. ``checkpoint_id`` of ``dcp.load`` takes its place.
        _extension_registry: Not supported; our checkpoints have no transformed streams.
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
        self._forget()

    def _forget(self) -> None:
        self._checkpoint: _C.Checkpoint | None = None
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
        self._forget()

    # The hooks, in the order in which DCP calls them.

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata of the checkpoint, built from our manifest; its pickle is never run. Works on its own.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError, UnsupportedError, StorageError
        """
        rank = kwargs.get("rank")
        if rank is not None and self._error is not None:
            # DCP's second try, for the metadata of one rank. If `.metadata` is there, its error is the error.
            return _FailedMetadata(self._error)
        self._forget()
        try:
            self._checkpoint = _C.Checkpoint.open(str(self.path), False)
            return metadata_of(self._checkpoint)
        except CheckpointError as error:
            self._error = self._without_collectives() if isinstance(error, CheckpointNotFoundError) else None
            self._error = self._error or error
            raise self._error from None

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises here, where every rank gets it, what ``read_metadata`` could not; the coordinator checks the rest."""
        if isinstance(metadata, _FailedMetadata):
            metadata._raise()
        checkpoint = self._opened()
        if is_coordinator and _C.Checkpoint.open(str(self.path), True).save_id != checkpoint.save_id:
            raise CheckpointChangedError(f"load({self.path}): a newer commit replaced the checkpoint", str(self.path))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuses what the checkpoint does not have, and tells the coordinator which save this rank reads."""
        checkpoint = self._opened()
        for item in plan.items:
            dtype, sizes, _ = checkpoint.record(*_place(item))
            if (item.type == LoadItemType.BYTE_IO) != (dtype == ""):
                stored = "bytes" if dtype == "" else "a tensor"
                raise InvalidPlanError(f"'{item.dest_index.fqn}': {item.type} wanted, stored is {stored}")
            if item.type == LoadItemType.TENSOR and not _fits(item, sizes):
                raise ShapeMismatchError(
                    f"'{item.dest_index.fqn}': wanted {list(item.lengths)} at {list(item.storage_offsets)} of a stored "
                    f"chunk, got a chunk of {list(sizes)}"
                )
        return dataclasses.replace(plan, storage_data=checkpoint.save_id)

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
            load = _Load(self._opened(), str(self.path), self.config, planner)
            load.tensors([item for item in plan.items if item.type == LoadItemType.TENSOR])
            load.objects([item for item in plan.items if item.type == LoadItemType.BYTE_IO])
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
            self._checkpoint = _C.Checkpoint.open(str(self.path), False)
        return self._checkpoint

    def _without_collectives(self) -> UnsupportedError | None:
        if not any(self.path.glob("__*.metadata")):
            return None
        return UnsupportedError(f"load({self.path}): written with use_collectives=False, not supported yet")


class _Load:
    """One rank's reading of one plan."""

    def __init__(self, checkpoint: _C.Checkpoint, path: str, config: Config, planner: LoadPlanner) -> None:
        self._checkpoint = checkpoint
        self._path = path
        self._config = config
        self._planner = planner
        self._totals: dict[str, Any] = {}

    def tensors(self, items: list[ReadItem]) -> None:
        """Straight into the destinations where their memory allows; the rest through host copies, a few at a time."""
        job = self._job()
        direct: list[tuple[ReadItem, torch.Tensor]] = []
        through_copy: list[tuple[ReadItem, torch.Tensor]] = []
        for item in items:
            target = self._planner.resolve_tensor(item).detach()
            if target.size() != item.lengths:
                raise ShapeMismatchError(
                    f"'{item.dest_index.fqn}': wanted {list(item.lengths)}, got a tensor of {list(target.size())}"
                )
            filled = job.add_tensor(*_place(item), tuple(item.storage_offsets), tuple(item.lengths), target)
            (direct if filled else through_copy).append((item, target))
        self._run(job)
        _compat.increment_version([target for _, target in direct])
        for item, target in direct:
            self._planner.commit_tensor(item, target)
        self._through_copies(through_copy)

    def _through_copies(self, pairs: list[tuple[ReadItem, torch.Tensor]]) -> None:
        """Fills tensors of other dtypes, devices or layouts, as ``copy_`` does."""
        waiting = collections.deque(pairs)
        while waiting:
            job = self._job()
            copies: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
            num_bytes = 0
            while waiting and num_bytes < _COPY_BYTES:
                item, target = waiting.popleft()
                dtype, _, _ = self._checkpoint.record(*_place(item))
                copy = torch.empty(item.lengths, dtype=getattr(torch, dtype))
                job.add_tensor(*_place(item), tuple(item.storage_offsets), tuple(item.lengths), copy)
                copies.append((item, target, copy))
                num_bytes += copy.nbytes
            self._run(job)
            for item, target, copy in copies:
                target.copy_(copy)
                self._planner.commit_tensor(item, target)

    def objects(self, items: list[ReadItem]) -> None:
        """Hands bytes to the planner, once they are known to be plain data."""
        job = self._job()
        buffers: list[bytearray] = []
        for item in items:
            buffer = bytearray(self._checkpoint.record(*_place(item))[2])
            job.add_bytes(item.storage_index.fqn, buffer)
            buffers.append(buffer)
        self._run(job)
        for item, buffer in zip(items, buffers, strict=True):
            if not self._config.allow_pickle:
                _check_plain_data(item.storage_index.fqn, buffer)
            self._planner.load_bytes(item, io.BytesIO(buffer))

    def report(self) -> LoadReport:
        return LoadReport(path=self._path, save_id=self._checkpoint.save_id, **self._totals)

    def _job(self) -> _C.LoadJob:
        return _C.LoadJob(
            self._checkpoint,
            directory=self._path,
            direct_io=self._config.direct_io,
            verify=self._config.verify,
            num_io_threads=self._config.io_threads,
            ring_bytes=self._config.ring_bytes,
        )

    def _run(self, job: _C.LoadJob) -> None:
        for name, value in job.run().items():
            self._totals[name] = self._totals.get(name, 0) + value


def _place(item: ReadItem) -> tuple[str, tuple[int, ...], int]:
    """Name, chunk offsets and position hint of what ``item`` wants to read."""
    index = item.storage_index
    hint = -1 if index.index is None else index.index
    return index.fqn, () if index.offset is None else tuple(index.offset), hint


def _fits(item: ReadItem, chunk_sizes: tuple[int, ...]) -> bool:
    wanted = zip(item.storage_offsets, item.lengths, chunk_sizes, strict=False)
    return len(item.lengths) == len(chunk_sizes) and all(o >= 0 and o + n <= size for o, n, size in wanted)


def _check_plain_data(fqn: str, buffer: bytearray) -> None:
    """The planner unpickles freely, so the bytes are loaded under torch's rules before it sees them."""
    load: Callable[..., Any] = torch.load
    try:
        load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
    except Exception as error:
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
