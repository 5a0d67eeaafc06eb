# SPDX-License-Identifier: Apache-2.0
"""One rank's reading of one plan."""

from __future__ import annotations

import collections
import io
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from bytecheckpoint import _C, _core
from bytecheckpoint.config import Config
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp._calls import LOAD, local_of_call
from bytecheckpoint.dcp._exchange import Exchange
from bytecheckpoint.dcp._plan_items import source_of
from bytecheckpoint.dcp._progress import progress_bar
from bytecheckpoint.dcp.load_planner import as_plain, fills_state
from bytecheckpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidPlanError,
    ShapeMismatchError,
    UnsafeObjectError,
)
from bytecheckpoint.probes.of_torch import LOADS_OF_GAPS
from bytecheckpoint.probes.probe import holds, require

__all__ = ["Load", "check_requested", "load_plain_data", "plain_object", "plan_to_read"]

# As it was when this was imported.
_CREATE_LOCAL_PLAN = DefaultLoadPlanner.create_local_plan

# Tensors that cannot be filled in place are read through host copies, no more of them at a time than this.
_COPY_BYTES = 128 << 20

# Files of torch.save from before there were archives: five pickles, then elements.
_PICKLES_OF_OLD_FILES = 5
# As many times as it has bytes an archive may hold. torch.save compresses nothing.
_MOST_INFLATED = 16

# Earlier protocols lose the fold of a time, and whether an array may be written to.
_KEEPS_ALL = 5

_Memory = TypeVar("_Memory", bytearray, torch.Tensor | bytearray)


def plan_to_read(checkpoint: _C.Checkpoint, plan: LoadPlan) -> _C.ReadPlan:
    """The plan that our planner made of this checkpoint, or one made of its items."""
    source = source_of(plan.items)
    if isinstance(source, _C.ReadPlan) and source.is_of(checkpoint):
        return source
    return _C.ReadPlan(checkpoint, plan.items)


def check_requested(checkpoint: _C.Checkpoint, plan: LoadPlan) -> None:
    """Refuses what DCP's own planner leaves out without a word: elements of a requested tensor that no chunk has.

    Our planner has looked already. Of others, which plan in a way of their own, it is not known what they want.

    Raises:
        InvalidPlanError: Names the tensor, and the elements.
        UnsupportedError: The checkpoint lacks elements, and who plans cannot be known with this torch.
    """
    if not holds(LOADS_OF_GAPS) and checkpoint.tensors_with_gaps():
        require(LOADS_OF_GAPS)
    planner = local_of_call(*LOAD, "planner")
    if not isinstance(planner, DefaultLoadPlanner) or type(planner).create_local_plan is not _CREATE_LOCAL_PLAN:
        return
    requested = {fqn: planner.state_dict[fqn] for fqn in checkpoint.tensors_with_gaps() if fqn in planner.state_dict}
    if requested:
        _C.ReadPlan.of_state(checkpoint, requested, _compat.chunks_of, allow_partial=True)


class Load:
    """One rank's reading of one plan.

    Attributes:
        done: What was read so far, by the fields of a ``RankLoadReport``.
    """

    def __init__(
        self,
        checkpoint: _C.Checkpoint,
        plan: LoadPlan,
        path: str,
        rank: int | None,
        config: Config,
        planner: LoadPlanner,
        exchange: Exchange | None,
    ) -> None:
        self._planner = planner
        self._exchange = exchange
        self._config = config
        self._plan = plan_to_read(checkpoint, plan)
        # The planner, if tensors and objects just go where its state dict says.
        self._plain = as_plain(planner) if source_of(plan.items) is self._plan else None
        self._job = _C.LoadJob(
            checkpoint,
            self._plan,
            directory=path,
            rank=rank,
            direct_io=config.direct_io,
            verify=config.verify,
            num_io_threads=config.load_io_threads or config.io_threads,
            ring_bytes=config.ring_bytes,
            io_timeout_s=config.io_timeout_s,
        )
        self._path = path
        self.done: dict[str, Any] = {}
        if exchange is not None:
            exchange.agree(checkpoint, self._job, path)

    def progress_bar(self) -> AbstractContextManager[None]:
        """Shows, in a ``with`` block, how much of what is wanted has been read."""
        job = self._job
        return progress_bar(f"loading {self._path}", job.bytes_wanted, lambda: job.bytes_done)

    def tensors(self) -> None:
        """Straight into the destinations where their memory allows; the rest through host copies, a few at a time."""
        if self._plain is not None:
            left_out = self._job.add_state(self._plain.state_dict)
            targets = {position: self._resolved(position) for position in left_out}
            self._refuse_meta(targets)
            self._run()
            self._through_copies(left_out, targets.__getitem__)
        elif fills_state(self._planner):
            self._in_place(0, self._plan.num_tensors)
        else:
            self._one_by_one()

    def _in_place(self, begin: int, end: int) -> None:
        """A range of tensors, all of which are resolved before one of them is read."""
        targets = {position: self._resolved(position) for position in range(begin, end)}
        self._refuse_meta(targets)
        skipped = self._job.add_tensors(begin, [*targets.values()])
        self._run()
        filled = {position: targets[position] for position in sorted(targets.keys() - skipped)}
        _compat.increment_version([*filled.values()])
        for position, target in filled.items():
            self._planner.commit_tensor(self._plan.tensor_item(position), target)
        self._through_copies(skipped, targets.__getitem__)

    def _one_by_one(self) -> None:
        """All tensors, each committed before the next is resolved: a planner may resolve all of them to one memory.

        Small ones are read ahead, into host copies.
        """
        small = []
        for position in range(self._plan.num_tensors):
            if self._copy_bytes(position) <= _COPY_BYTES:
                small.append(position)
            else:
                self._in_place(position, position + 1)
        self._through_copies(small, self._resolved)

    def _copy_bytes(self, position: int) -> int:
        """What a host copy of a tensor takes."""
        dtype = self._job.stored_dtype(position)
        if not dtype:
            return self._job.archive_bytes(position)
        return math.prod(self._plan.tensor_item(position).lengths) * int(getattr(torch, dtype).itemsize)

    def _resolved(self, position: int) -> torch.Tensor:
        return self._planner.resolve_tensor(self._plan.tensor_item(position)).detach()

    def _refuse_meta(self, targets: dict[int, torch.Tensor]) -> None:
        """Refuses tensors without memory, where what is read would be lost without a word."""
        fqns = {self._plan.tensor_item(at).dest_index.fqn: None for at, target in targets.items() if target.is_meta}
        if fqns:
            raise InvalidPlanError(
                f"load({self._path}): on the meta device, which holds no elements: {', '.join(map(repr, fqns))}; "
                "give these tensors memory first, for example with torch.empty_like(tensor, device='cpu')"
            )

    def _through_copies(self, positions: Iterable[int], resolve: Callable[[int], torch.Tensor]) -> None:
        """Fills tensors of other dtypes, devices or layouts, as ``copy_`` does, and those of opaque records."""
        for position, source in self._read_in_turns(positions, self._add_copy):
            item, target = self._plan.tensor_item(position), resolve(position)
            value = self._unpacked(item, source) if isinstance(source, bytearray) else source
            self._refuse_meta({position: target})
            if target.shape != value.shape:
                raise ShapeMismatchError(
                    f"'{item.dest_index.fqn}': wanted {[*value.shape]}, got a tensor of {[*target.shape]}"
                )
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
        value = load_plain_data(fqn, archive, self._config)
        if not isinstance(value, torch.Tensor):
            raise ShapeMismatchError(f"'{fqn}': a tensor wanted, the record holds a {type(value).__name__}")
        return _compat.narrow(value.detach(), item.storage_offsets, item.lengths)

    def objects(self) -> None:
        """Hands objects over; to a planner that unpickles freely, bytes that are known to be plain data."""
        for position, buffer in self._read_in_turns(range(self._plan.num_objects), self._add_object):
            if self._plain is not None:
                fqn = self._plan.object_fqn(position)
                self._plain.put_object(fqn, plain_object(fqn, buffer, self._config))
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

    def _run(self) -> None:
        done = self._job.run() if self._exchange is None else self._exchange.run(self._job)
        for name, value in done.items():
            self.done[name] = self.done.get(name, 0) + value


def plain_object(fqn: str, buffer: bytearray, config: Config) -> Any:
    """The object of a record: by C++ if it is made of builtin values and standard types, else by torch."""
    value = _read_by_cpp(fqn, buffer, _core.load_builtin) or _read_by_cpp(fqn, buffer, _core.load_standard)
    return load_plain_data(fqn, buffer, config, map_location=None) if value is None else value[0]


def _plain_record(fqn: str, buffer: bytearray, config: Config) -> bytes | bytearray:
    """A record that runs no code of the checkpoint, whoever unpickles it.

    Values that C++ can read are written anew: that what it read is harmless says nothing of what torch would find in
    bytes that were made to be read in two ways. All others torch loads itself, under its ``weights_only`` rules.
    """
    value = _read_by_cpp(fqn, buffer, _core.load_builtin)
    record = None if value is None else _core.dump_builtin(value[0])
    if record is not None:
        return record
    value = value or _read_by_cpp(fqn, buffer, _core.load_standard)
    if value is not None:
        again = io.BytesIO()
        torch.save(value[0], again, pickle_protocol=_KEEPS_ALL)
        return again.getvalue()
    load_plain_data(fqn, buffer, config)
    return buffer


def _read_by_cpp(fqn: str, buffer: bytearray, read: Callable[[bytearray], tuple[Any] | None]) -> tuple[Any] | None:
    """The value of a record in a tuple, or None for what ``read`` does not know."""
    try:
        return read(buffer)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"'{fqn}': {error}") from None


def load_plain_data(fqn: str, buffer: bytearray, config: Config, map_location: str | None = "cpu") -> Any:
    """What torch.save wrote, under torch's ``weights_only`` rules unless ``config`` allows more."""
    load: Callable[..., Any] = torch.load
    file = io.BytesIO(buffer)
    if not config.allow_pickle:
        _check_memo(fqn, buffer, file)
    try:
        return load(file, map_location=map_location, weights_only=not config.allow_pickle)
    except Exception as error:
        if config.allow_pickle:
            raise
        raise UnsafeObjectError(
            f"'{fqn}' is not plain data under torch's weights_only rules ({_offenders(buffer, error)}); if you trust "
            "this checkpoint, add its types with torch.serialization.add_safe_globals, or pass "
            "BcpReader(..., config=Config(allow_pickle=True)), which may run code of the checkpoint"
        ) from None


def _check_memo(fqn: str, buffer: bytearray, file: io.BytesIO) -> None:
    """Refuses pickles whose memo would be far larger than they are.

    To torch's ``weights_only`` an entry is an entry. But a planner of others gives what passes to Python's unpickler,
    whose memo is an array: five bytes make it 64 GiB.
    """
    _refuse_inflation(fqn, buffer, file)
    try:
        pickled = _compat.archived_pickle(file)
    except RuntimeError:
        return  # no archive that torch can read: it says why
    finally:
        file.seek(0)
    try:
        if pickled is None:
            _core.check_memo(buffer, _PICKLES_OF_OLD_FILES)
        else:
            _core.check_memo(pickled, 1)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"'{fqn}': {error}") from None


def _refuse_inflation(fqn: str, buffer: bytearray, file: io.BytesIO) -> None:
    """Refuses archives that say they are compressed far better than anything honest: torch would inflate them."""
    try:
        with zipfile.ZipFile(file) as archive:
            num_bytes = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return  # no archive, or none that Python knows
    finally:
        file.seek(0)
    if num_bytes > _MOST_INFLATED * len(buffer):
        raise CorruptCheckpointError(f"'{fqn}': an archive of {len(buffer):,} bytes says that it holds {num_bytes:,}")


def _offenders(buffer: bytearray, error: Exception) -> str:
    """Names of the classes and functions that ``buffer`` asks for, or else what torch said."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(buffer))
    except Exception:
        names = []
    return ", ".join(sorted(names)) or str(error).strip().partition("\n")[0] or repr(error)
