# SPDX-License-Identifier: Apache-2.0
"""Rounds in which the ranks of one load read together, so that only one of them reads each byte."""

from __future__ import annotations

import contextlib
import os
import pickle
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.distributed.channel import Peers
from bytecheckpoint.distributed.parcel import Parcel
from bytecheckpoint.errors import CheckpointError, InvalidPlanError, RankError, sendable
from bytecheckpoint.native import _C
from bytecheckpoint.runtime.interrupts import DeferredInterrupt
from bytecheckpoint.sharing.choice import AUTO, COOPERATIVE, INDEPENDENT, ReadStrategy, is_worth_sharing
from bytecheckpoint.sharing.memory import MemoryPlace, SharedMemory, are_together
from bytecheckpoint.sharing.messages import PeerMessages
from bytecheckpoint.sharing.relay import Relay
from bytecheckpoint.storage.folders import folder_at

__all__ = ["Exchange"]

# Version of the messages between ranks: all ranks must run code that gives them the same meaning.
_VERSION = 2


@dataclass(frozen=True)
class _Statement:
    """What a rank says at the beginning of a round.

    Attributes:
        version: Version of the messages.
        checkpoint: Identifies the checkpoint that the rank reads, and the numbering of its files.
        ranges: Byte ranges that the rank wants in this round.
        place: Where the memory is into which the rank reads. Said once, at the beginning of the exchange.
        opened: Ranks whose memory the rank has opened. Said once, behind ``place``.
        is_done: Whether the rank wants nothing more. It still comes, because others may want more.
        error: Why the rank has failed; None if it has not.
    """

    version: int
    checkpoint: str = ""
    ranges: bytes = b""
    place: MemoryPlace | None = None
    opened: frozenset[int] = frozenset()
    is_done: bool = False
    error: BaseException | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "error": None if self.error is None else Parcel(self.error)}


class Exchange:
    """Reads for a load together with the other ranks, in rounds that all ranks begin together. A context manager.

    In each round every rank says what it wants next, or that it is done, or why it has failed. Rounds go on until all
    ranks are done. The first failure ends them, and every rank raises it. Outside of rounds no rank waits for another.

    Collective: either every rank of the call makes one, or none does; each enters it before anything may fail.
    """

    def __init__(self, messages: PeerMessages, rank: int, reading: str) -> None:
        self._messages = messages
        self._rank = rank
        self._reading = reading
        self._checkpoint = ""
        self._memory: SharedMemory | None = None
        self._is_over = False

    @classmethod
    def of_plan(cls, plan: LoadPlan, peers: Peers | None) -> Exchange | None:
        """Makes an exchange with ``peers`` if the coordinator chose so in ``plan``; None if each reads for itself."""
        chosen = plan.storage_data
        if not isinstance(chosen, ReadStrategy) or chosen.reading == INDEPENDENT:
            return None
        if peers is None:
            return None
        return cls(PeerMessages(peers.connect(), peers.rank, peers.size), peers.rank, chosen.reading)

    @property
    def reading(self) -> str:
        """``cooperative`` or ``independent``, once ``agree`` has returned."""
        return self._reading

    def record(self, trace: CallTrace) -> None:
        """Makes waits for other ranks part of ``trace`` from now on."""
        self._messages.trace = trace

    def agree(self, checkpoint: _C.Checkpoint, job: _C.LoadJob, path: str) -> None:
        """Begins the exchange: checks that all ranks read the same checkpoint, and decides about ``auto``.

        Ranks of one machine open one another's memory.

        Raises:
            InvalidPlanError: Ranks read different checkpoints, or have different versions of this package.
            BaseException: What another rank failed with.
        """
        self._checkpoint = _identity(checkpoint, path)
        all_ranges = _C.all_ranges(job) if self._reading == AUTO else b""
        # A read that took too long may still write to the memory when the next round uses it.
        memory = None if folder_at(path).may_read_late else SharedMemory.made_for(job)
        place = None if memory is None else memory.place
        statements = self._exchanged(_Statement(_VERSION, self._checkpoint, all_ranges, place))
        if self._reading == AUTO:
            plan = _C.SharePlan([said.ranges for said in statements])
            saved = plan.bytes_wanted - plan.bytes_distinct
            self._reading = COOPERATIVE if is_worth_sharing(saved, plan.bytes_wanted) else INDEPENDENT
        self._is_over = self._reading == INDEPENDENT
        if not self._is_over:
            self._open(memory, [said.place for said in statements])

    def _open(self, memory: SharedMemory | None, places: list[MemoryPlace | None]) -> None:
        """Opens the memory of the other ranks of this machine, and finds out which of them have opened this rank's."""
        if not are_together(places):
            return
        if memory is not None:
            memory.open(self._rank, places)
        opened = frozenset[int]() if memory is None else memory.sources
        statements = self._exchanged(_Statement(_VERSION, self._checkpoint, opened=opened))
        if memory is not None:
            memory.readers = frozenset(rank for rank, said in enumerate(statements) if self._rank in said.opened)
            self._memory = memory

    def run(self, job: _C.LoadJob) -> dict[str, Any]:
        """Runs a round, or a few: fills all that was added to ``job``, from own reads and from what is received."""
        if self._is_over:
            return job.run()
        total: dict[str, Any] = {}
        while True:  # once, but where scales have to come before what they belong to
            done = self._round(job, _Statement(_VERSION, self._checkpoint, _C.next_ranges(job)))
            total = {name: value + total.get(name, 0) for name, value in done.items()}
            if self._is_over or not job.has_more:
                return total

    def _round(self, job: _C.LoadJob | None, statement: _Statement) -> dict[str, Any]:
        with DeferredInterrupt() as interrupt:
            statements = self._exchanged(statement)
            if self._is_over or job is None:
                return {}
            plan = _C.SharePlan([said.ranges for said in statements])
            memory = self._memory
            relay = Relay(
                self._messages,
                self._rank,
                plan.units(self._rank),
                lambda: _C.SharedRun(job, plan, self._rank, None if memory is None else memory.engine),
                interrupt,
                memory,
            )
            done = relay.run()
            if done is not None:
                return done
            self._exchanged(_Statement(_VERSION, self._checkpoint))
            raise CheckpointError("another rank stopped reading and did not say why")

    def _exchanged(self, statement: _Statement) -> list[_Statement]:
        """Exchanges statements with all ranks. Returns them, by rank, or raises another rank's failure."""
        with DeferredInterrupt():
            statements = self._gather(statement)
            for rank, said in enumerate(statements):
                if said.error is not None:
                    raise _from_rank(rank, said.error)
            self._is_over = all(said.is_done for said in statements)
            versions = {said.version for said in statements}
            checkpoints = {said.checkpoint for said in statements}
            if len(versions) > 1 or len(checkpoints) > 1:
                self._is_over = True
                what = "have different versions of this package" if len(versions) > 1 else "read different checkpoints"
                raise InvalidPlanError(f"ranks that share the reading of a load {what}")
            return statements

    def _gather(self, statement: _Statement) -> list[_Statement]:
        """Returns the statements of all ranks. After a failure, or the loss of a rank, nobody waits for this rank."""
        try:
            statements = [pickle.loads(said) for said in self._messages.gather(pickle.dumps(statement))]
        except BaseException:
            self._is_over = True
            raise
        self._is_over = any(said.error is not None for said in statements)
        return statements

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Takes part until all ranks are done; or tells them why this one has failed."""
        self._memory = None  # in the rounds that are left, this rank wants nothing
        if error is not None:
            self._tell(error)
            return
        try:
            while not self._is_over:
                self._round(None, _Statement(_VERSION, self._checkpoint, is_done=True))
        except BaseException as late:
            self._tell(late)
            raise

    def _tell(self, error: BaseException) -> None:
        """Tells the others what this rank failed with, so that they raise it; unless none of them waits any more."""
        if self._is_over:
            return
        with DeferredInterrupt(), contextlib.suppress(CheckpointError):  # the caller raises this rank's own error
            self._gather(_Statement(_VERSION, error=_for_others(error)))


def _identity(checkpoint: _C.Checkpoint, path: str) -> str:
    """Returns a text that is equal on all ranks if and only if they read the same checkpoint.

    It has the path for a checkpoint of another writer, because not every writer gives a save an id.
    """
    if checkpoint.foreign is None:
        return f"{_C.digest_of(checkpoint):08x}"
    return f"{_C.digest_of(checkpoint):08x} {checkpoint.foreign} {os.path.realpath(path)}"


def _from_rank(rank: int, error: BaseException) -> BaseException:
    """Returns the error of another rank, with a note that says which, to be raised here."""
    error.add_note(f"raised on rank {rank}, with which this rank shares its reading")
    return error


def _for_others(error: BaseException) -> BaseException:
    """Returns what the other ranks raise: the same error, unless it would stop more than a load, as Ctrl-C does."""
    if isinstance(error, Exception):
        return sendable(error)
    return RankError(f"{type(error).__qualname__}: {error}")
