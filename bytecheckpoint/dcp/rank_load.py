# SPDX-License-Identifier: Apache-2.0
"""How one rank carries out its load plan: tensors in place or through host copies, then objects."""

from __future__ import annotations

import collections
import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from bytecheckpoint.calls.progress import progress_bar
from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.contents.damaged_keys import naming_keys
from bytecheckpoint.contents.safe_objects import load_plain_data, plain_object, plain_record
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner, as_plain, fills_state
from bytecheckpoint.errors import (
    CheckpointError,
    InvalidPlanError,
    ShapeMismatchError,
)
from bytecheckpoint.listing import listed
from bytecheckpoint.native import _C
from bytecheckpoint.planning.plan_items import source_of
from bytecheckpoint.probes.of_torch import LOADS_OF_GAPS
from bytecheckpoint.probes.probe import holds, require
from bytecheckpoint.sharing.exchange import Exchange
from bytecheckpoint.tensors.casts import Cast, keeps_values
from bytecheckpoint.tensors.dtensor_pieces import refuse_pieces
from bytecheckpoint.tensors.subclass_parts import plain_tensors_in

__all__ = ["Load", "check_requested", "plan_to_read"]

# DCP's own method, as it was when this module was imported.
_CREATE_LOCAL_PLAN = DefaultLoadPlanner.create_local_plan

# Tensors that cannot be filled in place are read through host copies, about this many bytes at a time.
_COPY_BYTES = 128 << 20

# A warning names no more keys than this.
_MOST_WARNED = 5


_Memory = TypeVar("_Memory", bytearray, torch.Tensor | bytearray)


def plan_to_read(checkpoint: _C.Checkpoint, plan: LoadPlan) -> _C.ReadPlan:
    """Returns the plan that our planner made for this checkpoint. For another planner, makes one from its items."""
    source = source_of(plan.items)
    if isinstance(source, _C.ReadPlan) and source.is_of(checkpoint):
        return source
    return _C.ReadPlan(checkpoint, plan.items)


def check_requested(checkpoint: _C.Checkpoint, planner: object) -> None:
    """Refuses what DCP's own planner would silently do wrong.

    It leaves out elements that no chunk of the checkpoint has, and fills DTensors of several pieces with elements of
    other places. Our planner has already checked this. Other planners are not checked, because it is not known what
    they want.

    Args:
        checkpoint: Checkpoint that is read.
        planner: Planner of the load; None if it is not known.

    Raises:
        InvalidPlanError: A requested tensor lacks elements, or a DTensor would be filled wrongly. The message names it.
        UnsupportedError: The checkpoint lacks elements, and with this torch the planner cannot be found out.
    """
    if planner is None and not holds(LOADS_OF_GAPS) and checkpoint.tensors_with_gaps():
        require(LOADS_OF_GAPS)
    if not isinstance(planner, DefaultLoadPlanner) or type(planner).create_local_plan is not _CREATE_LOCAL_PLAN:
        return
    refuse_pieces(planner.state_dict)
    requested = {fqn: planner.state_dict[fqn] for fqn in checkpoint.tensors_with_gaps() if fqn in planner.state_dict}
    if requested:
        _C.ReadPlan.of_state(checkpoint, requested, _compat.chunks_of, allow_partial=True)


class Load:
    """Reads what one rank wants. Call ``tensors``, then ``objects``, once each.

    Attributes:
        done: Totals of what was read so far; the keys are fields of a ``RankLoadReport``.
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
        trace: CallTrace,
    ) -> None:
        self._checkpoint = checkpoint
        self._planner = planner
        self._exchange = exchange
        self._config = config
        self._plan = plan_to_read(checkpoint, plan)
        # Our planner, if the engine may fill its state dict without calling its hooks; else None.
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
            visibility_timeout_s=config.visibility_timeout_s,
            trace=trace.spans,
            current_stream=_compat.current_stream,
        )
        trace.expect(self._job.bytes_wanted)
        self._path, self._trace = path, trace
        self.done: dict[str, Any] = {}
        self._lossy: dict[str, str] = {}  # casts that may lose values, by key
        self._early: dict[int, bytearray] = {}  # objects that were read before the tensors, by position
        if exchange is not None:
            exchange.record(trace)
            exchange.agree(checkpoint, self._job, path)

    @property
    def numbers(self) -> Sequence[Cast]:
        """Numbers that were loaded into tensors without dims: key, type of the number, dtype of the tensor."""
        return self._planner.numbers if isinstance(self._planner, BcpLoadPlanner) else ()

    def progress_bar(self) -> AbstractContextManager[None]:
        """Returns a context that shows how much of the wanted bytes has been read."""
        job = self._job
        return progress_bar(f"loading {self._path}", job.bytes_wanted, lambda: job.bytes_done, self._trace)

    def tensors(self) -> None:
        """Reads all tensors: in place where their memory allows it, the others through host copies, some at a time."""
        if self._plain is not None:
            self._check_numbers(self._plain)
            left_out = self._job.add_state(self._plain.state_dict)
            targets = {position: self._resolved(position) for position in left_out}
            self._check_memory(targets)
            self._run()
            self._through_copies(left_out, targets.__getitem__)
        elif fills_state(self._planner):
            self._in_place(0, self._plan.num_tensors)
        else:
            self._one_by_one()

    def _check_numbers(self, planner: BcpLoadPlanner) -> None:
        """Reads the objects that are to be loaded into tensors, so that nothing is filled if one of them cannot be.

        Raises:
            ShapeMismatchError: An object is no number, or the tensor's dtype does not have it.
        """
        wrong = []
        for position, buffer in self._read_in_turns(self._plan.objects_into_tensors(), self._add_object):
            fqn = self._plan.object_fqn(position)
            value = plain_object(fqn, buffer, self._config)
            wrong += [why for why in (planner.why_not_into_tensor(fqn, value),) if why]
            self._early[position] = buffer
        if wrong:
            raise ShapeMismatchError(f"load({self._path}): {listed(wrong)}", self._path)

    def _in_place(self, begin: int, end: int) -> None:
        """Reads a range of tensors in place. All of them are resolved before any is read."""
        targets = {position: self._resolved(position) for position in range(begin, end)}
        self._check_memory(targets)
        skipped = self._job.add_tensors(begin, [*targets.values()])
        self._run()
        filled = {position: targets[position] for position in sorted(targets.keys() - skipped)}
        _compat.increment_version([*filled.values()])
        for position, target in filled.items():
            self._planner.commit_tensor(self._plan.tensor_item(position), target)
        self._through_copies(skipped, targets.__getitem__)

    def _one_by_one(self) -> None:
        """Reads all tensors and commits each before the next is resolved.

        A planner may resolve all of them to the same memory. Tensors of up to ``_COPY_BYTES`` are read ahead, into host
        copies.
        """
        small = []
        for position in range(self._plan.num_tensors):
            if self._copy_bytes(position) <= _COPY_BYTES:
                small.append(position)
            else:
                self._in_place(position, position + 1)
        self._through_copies(small, self._resolved)

    def _copy_bytes(self, position: int) -> int:
        """Returns the number of bytes of a host copy of a tensor."""
        dtype = self._job.stored_dtype(position)
        if not dtype:
            return self._job.archive_bytes(position)
        return math.prod(self._plan.tensor_item(position).lengths) * int(getattr(torch, dtype).itemsize)

    def _resolved(self, position: int) -> torch.Tensor:
        return self._planner.resolve_tensor(self._plan.tensor_item(position)).detach()

    def _check_memory(self, targets: dict[int, torch.Tensor]) -> None:
        """Refuses targets without memory, or whose memory cannot be written to.

        What is read for a target on the meta device would be lost silently. A target whose storage was freed, or that
        is mapped for reading, would end the process.

        Raises:
            InvalidPlanError: There is such a target. The message names its key.
        """
        fqns = {self._plan.tensor_item(at).dest_index.fqn: None for at, target in targets.items() if target.is_meta}
        if fqns:
            raise InvalidPlanError(
                f"load({self._path}): tensors on the meta device hold no elements: {', '.join(map(repr, fqns))}; "
                "give these tensors memory first, for example with torch.empty_like(tensor, device='cpu')"
            )
        for at, target in targets.items():
            for tensor in plain_tensors_in(target):
                self._job.check_target(at, tensor)

    def _through_copies(self, positions: Iterable[int], resolve: Callable[[int], torch.Tensor]) -> None:
        """Fills tensors through host copies and ``copy_``.

        These are targets of another dtype, device or layout than the checkpoint's, and tensors in opaque records.

        Raises:
            ShapeMismatchError: A target has another shape than what is stored.
            InvalidPlanError: A target is quantized otherwise, is on the meta device, or cannot be copied to.
        """
        for position, source in self._read_in_turns(positions, self._add_copy):
            item, target = self._plan.tensor_item(position), resolve(position)
            value = self._unpacked(item, source) if isinstance(source, bytearray) else source
            self._check_memory({position: target})
            if target.shape != value.shape:
                raise ShapeMismatchError(
                    f"'{item.dest_index.fqn}': wanted {[*value.shape]}, got a tensor of {[*target.shape]}"
                )
            if not _compat.is_quantized_alike(value, target):
                raise InvalidPlanError(
                    f"'{item.dest_index.fqn}': the stored tensor is {_compat.quantization(value)}, but the tensor to "
                    f"fill is {_compat.quantization(target)}; both must be quantized in the same way"
                )
            if value.dtype != target.dtype:
                self._note_cast(item.dest_index.fqn, value.dtype, target.dtype)
            try:
                target.copy_(value)
            except Exception as error:  # a subclass may raise anything for what it does not support
                raise InvalidPlanError(
                    f"'{item.dest_index.fqn}': what is stored cannot be copied: a {type(value).__name__} into a "
                    f"{type(target).__name__}: {error}"
                ) from error
            self._planner.commit_tensor(item, target)

    def _note_cast(self, fqn: str, stored: torch.dtype, to: torch.dtype) -> None:
        names = str(stored).removeprefix("torch."), str(to).removeprefix("torch.")
        if not keeps_values(names[0], to):
            self._lossy[fqn] = f"'{fqn}' is {names[0]}, loaded into {names[1]}"

    def warn_of_casts(self) -> None:
        """Warns of tensors that were converted to a dtype that lacks some of their values.

        Not if a ``LoadSpec`` allowed it.
        """
        is_allowed = isinstance(self._planner, BcpLoadPlanner) and self._planner.spec is not None
        if isinstance(self._planner, BcpLoadPlanner):
            self._lossy |= self._planner.rounded
        if not self._lossy or is_allowed:
            return
        warnings.warn(
            f"load({self._path}): values may be lost, because the dtypes of the state are narrower than those "
            f"stored: {listed([*self._lossy.values()], _MOST_WARNED)}; "
            "BcpLoadPlanner(spec=LoadSpec(cast='any')) allows it, cast='widen' makes it an error",
            RuntimeWarning,
            stacklevel=3,
        )

    def _add_copy(self, position: int) -> torch.Tensor | bytearray:
        """Returns a host tensor that the next run fills; for an opaque record, a buffer."""
        dtype = self._job.stored_dtype(position)
        if not dtype:
            archive = bytearray(self._job.archive_bytes(position))
            self._job.add_archive(position, archive)
            return archive
        item = self._plan.tensor_item(position)
        # The copy is on the host, even if the default device is another.
        copy = torch.empty(item.lengths, dtype=getattr(torch, dtype), device="cpu")
        if self._job.add_tensors(position, [copy]):
            raise CheckpointError(f"'{item.dest_index.fqn}': its host copy cannot be filled")
        return copy

    def _unpacked(self, item: ReadItem, archive: bytearray) -> torch.Tensor:
        """Returns the wanted box of the tensor in an opaque record, which torch.save wrote."""
        fqn = item.storage_index.fqn
        value = load_plain_data(fqn, archive, self._config)
        if not isinstance(value, torch.Tensor):
            raise ShapeMismatchError(f"'{fqn}': must be a tensor, but the record holds a {type(value).__name__}")
        return _compat.narrow(value.detach(), item.storage_offsets, item.lengths)

    def objects(self) -> None:
        """Reads all objects and gives them to the planner.

        A planner that is not ours gets bytes and may unpickle them freely. So without ``allow_pickle`` it only gets
        bytes that are known to be plain data.
        """
        left = [position for position in range(self._plan.num_objects) if position not in self._early]
        read = self._read_in_turns(left, self._add_object)
        for position, buffer in itertools.chain(self._early.items(), read):
            if self._plain is not None:
                fqn = self._plan.object_fqn(position)
                self._plain.put_object(fqn, plain_object(fqn, buffer, self._config))
                continue
            item = self._plan.object_item(position)
            record: bytes | bytearray = buffer
            if not self._config.allow_pickle:
                record = plain_record(item.storage_index.fqn, buffer, self._config)
            self._planner.load_bytes(item, io.BytesIO(record))

    def _add_object(self, position: int) -> bytearray:
        buffer = bytearray(self._job.object_bytes(position))
        self._job.add_object(position, buffer)
        return buffer

    def _read_in_turns(self, positions: Iterable[int], add: Callable[[int], _Memory]) -> Iterator[tuple[int, _Memory]]:
        """Reads records in turns, so that only the memory of one turn is in use at a time.

        Args:
            positions: Positions of the records in the plan.
            add: Allocates the memory of a record, and adds it to the next run of the job.

        Yields:
            The position and the filled memory of each record, in order.
        """
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
        with naming_keys(self._checkpoint):
            done = self._job.run() if self._exchange is None else self._exchange.run(self._job)
        for name, value in done.items():
            self.done[name] = self.done.get(name, 0) + value
