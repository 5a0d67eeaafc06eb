# SPDX-License-Identifier: Apache-2.0
"""What all ranks of a load have to say at its end."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Generic, TypeVar

from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint.dcp._held_interrupt import HeldInterrupt
from bytecheckpoint.dcp._intent import Chosen
from bytecheckpoint.dcp._peers import Peers, peers_of_call

__all__ = ["Gather"]

T = TypeVar("T")


class Gather(Generic[T]):
    """A gather to the coordinator, to which every rank comes: with its value, or because it has failed.

    DCP throws away what its hooks return at the end of a load. This comes right before DCP's own last exchange, in
    which all ranks wait for one another in any case. A context manager.

    Collective: every rank of the call enters it, or none does, and before anything may fail.

    Args:
        peers: All ranks; None if there are no others, or none that would come.
        is_alone: There are no others.
    """

    def __init__(self, peers: Peers | None, *, is_alone: bool) -> None:
        self._peers = peers
        self._is_alone = is_alone

    @classmethod
    def of_call(cls, plan: LoadPlan) -> Gather[T]:
        """As the coordinator has chosen for the load of ``plan``."""
        chosen = plan.storage_data
        if not isinstance(chosen, Chosen):
            return cls(None, is_alone=False)
        return cls(peers_of_call() if chosen.all_come else None, is_alone=chosen.num_ranks == 1)

    def bring(self, value: T) -> list[T | None]:
        """Once. What every rank brought, by rank, None for one that failed; empty on all but the coordinator, and where
        no gather takes place."""
        if self._peers is not None:
            return self._meet(value)
        return [value] if self._is_alone else []

    def _meet(self, value: T | None) -> list[T | None]:
        peers, self._peers = self._peers, None
        assert peers is not None
        with HeldInterrupt():  # a rank that left before the end would mix up the collectives of all
            return peers.gather(value) or []

    def __enter__(self) -> Gather[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Comes to the others, if it has not."""
        if self._peers is not None:
            with contextlib.suppress(Exception):  # what this rank failed with comes first
                self._meet(None)
