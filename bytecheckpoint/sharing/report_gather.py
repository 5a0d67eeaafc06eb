# SPDX-License-Identifier: Apache-2.0
"""Tells the coordinator at the end of a load what all ranks have done."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import struct
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint.calls.trace import MOST_TRACE_BYTES
from bytecheckpoint.distributed.channel import Peers
from bytecheckpoint.report import RankLoadReport
from bytecheckpoint.report.rank_trace import RankTrace
from bytecheckpoint.runtime.interrupts import DeferredInterrupt
from bytecheckpoint.sharing.choice import ReadStrategy

__all__ = ["ReportGather"]

# What travels between ranks are numbers; the first says whether the others mean anything.
_FAILED, _DONE = 0.0, 1.0
# The rank is left out, because the position in the gathered list gives it.
_FIELDS: dict[str, type] = {
    f.name: type(f.default) for f in dataclasses.fields(RankLoadReport) if f.name not in ("rank", "trace")
}
# Behind the numbers, the trace of the rank: its length, and room for as much as any rank may send.
_LENGTH = struct.Struct("<q")
_MOST_BYTES = 2 * MOST_TRACE_BYTES
_NUMBERS = struct.Struct(f"<{1 + len(_FIELDS)}d")


class ReportGather:
    """Gathers the reports of all ranks at the coordinator. A rank that has failed comes without one. A context manager.

    It exists because DCP drops what its hooks return at the end of a load. It comes right before DCP's own last
    exchange, in which all ranks wait for one another anyway.

    A rank comes with a single call of torch that does not wait. A signal or an error may interrupt it before or after
    that call; if it was before, the rank makes the call on its way out. So collectives never get out of step.

    Collective: every rank of the load enters it before anything may fail.
    """

    def __init__(self, plan: LoadPlan, peers: Peers | None) -> None:
        self._plan = plan
        self._peers = peers
        self._has_come = False

    def gather(self, report: RankLoadReport) -> list[RankLoadReport | None]:
        """Brings the report of this rank. Call it once.

        Returns:
            On the coordinator the report of each rank, by rank; None for a rank that failed. Empty on the other ranks,
            and if it is not certain that all ranks would come.
        """
        chosen = self._plan.storage_data
        if isinstance(chosen, ReadStrategy) and chosen.num_ranks == 1:
            return [report]
        trace = b"" if report.trace is None else report.trace.to_bytes()
        return self._exchange([_DONE, *(getattr(report, name) for name in _FIELDS)], trace)

    def _exchange(self, numbers: list[float], trace: bytes = b"") -> list[RankLoadReport | None]:
        chosen = self._plan.storage_data
        peers = self._peers if isinstance(chosen, ReadStrategy) and chosen.all_ranks_read else None
        if peers is None:
            return []
        with DeferredInterrupt():
            work, gathered = peers.begin_gather(torch.frombuffer(_packed(numbers, trace), dtype=torch.uint8))
            self._has_come = True
        work.wait()
        return [_report(rank, ctypes.string_at(said.data_ptr(), said.nbytes)) for rank, said in enumerate(gathered)]

    def __enter__(self) -> ReportGather:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Comes to the other ranks if this one has failed before it did."""
        if error is not None and not self._has_come:
            with contextlib.suppress(Exception):  # the caller raises this rank's own error
                self._exchange([_FAILED, *(0.0 for _ in _FIELDS)])


def _packed(numbers: list[float], trace: bytes) -> bytearray:
    """Returns a message, which is as long on every rank."""
    trace = trace if len(trace) <= _MOST_BYTES else b""
    return bytearray(_NUMBERS.pack(*numbers) + _LENGTH.pack(len(trace)) + trace.ljust(_MOST_BYTES, b"\0"))


def _report(rank: int, message: bytes) -> RankLoadReport | None:
    numbers = _NUMBERS.unpack_from(message)
    if numbers[0] == _FAILED:
        return None
    (length,) = _LENGTH.unpack_from(message, _NUMBERS.size)
    begin = _NUMBERS.size + _LENGTH.size
    values: dict[str, Any] = {name: kind(n) for (name, kind), n in zip(_FIELDS.items(), numbers[1:], strict=True)}
    trace = RankTrace.from_bytes(message[begin : begin + length]) if length else None
    return RankLoadReport(rank=rank, trace=trace, **values)
