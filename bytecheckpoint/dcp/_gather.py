# SPDX-License-Identifier: Apache-2.0
"""What all ranks of a load have done, told to the coordinator at its end."""

from __future__ import annotations

import contextlib
import dataclasses
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint.dcp._held_interrupt import HeldInterrupt
from bytecheckpoint.dcp._intent import Chosen
from bytecheckpoint.dcp._peers import peers_of_call
from bytecheckpoint.report import RankLoadReport

__all__ = ["Gather"]

# Numbers go between ranks; the first says whether the others mean anything.
_FAILED, _DONE = 0.0, 1.0
# Whose rank it is follows from where it stands.
_FIELDS: dict[str, type] = {f.name: type(f.default) for f in dataclasses.fields(RankLoadReport) if f.name != "rank"}


class Gather:
    """A gather to the coordinator, to which every rank comes: with its report, or because it has failed.

    DCP throws away what its hooks return at the end of a load. This comes right before DCP's own last exchange, in
    which all ranks wait for one another in any case. A context manager.

    A rank comes with a single call of torch that does not wait. Whatever interrupts it, a signal or an error, it has
    either come or not, and then comes on the way out: collectives never get out of step.

    Collective: every rank of the load enters it before anything may fail.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._has_come = False

    def bring(self, report: RankLoadReport) -> list[RankLoadReport | None]:
        """Once. What every rank brought, by rank, None for one that failed; empty on all but the coordinator, and where
        it is not certain that all ranks would come."""
        chosen = self._plan.storage_data
        if isinstance(chosen, Chosen) and chosen.num_ranks == 1:
            return [report]
        return self._come([_DONE, *(getattr(report, name) for name in _FIELDS)])

    def _come(self, numbers: list[float]) -> list[RankLoadReport | None]:
        chosen = self._plan.storage_data
        peers = peers_of_call() if isinstance(chosen, Chosen) and chosen.all_come else None
        if peers is None:
            return []
        with HeldInterrupt():
            work, heard = peers.begin_gather(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
            self._has_come = True
        work.wait()
        return [_report(rank, said.tolist()) for rank, said in enumerate(heard)]

    def __enter__(self) -> Gather:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Comes to the others, if it has not."""
        if error is not None and not self._has_come:
            with contextlib.suppress(Exception):  # what this rank failed with comes first
                self._come([_FAILED, *(0.0 for _ in _FIELDS)])


def _report(rank: int, numbers: list[float]) -> RankLoadReport | None:
    if numbers[0] == _FAILED:
        return None
    values: dict[str, Any] = {name: kind(n) for (name, kind), n in zip(_FIELDS.items(), numbers[1:], strict=True)}
    return RankLoadReport(rank=rank, **values)
