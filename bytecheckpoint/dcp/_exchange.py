# SPDX-License-Identifier: Apache-2.0
"""Rounds in which the ranks of one load read together, so that each byte is read by one of them."""

from __future__ import annotations

import contextlib
import os
import pickle
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint import _C
from bytecheckpoint.dcp._held_interrupt import HeldInterrupt
from bytecheckpoint.dcp._intent import AUTO, COOPERATIVE, INDEPENDENT, Chosen, is_worth_sharing
from bytecheckpoint.dcp._mail import Mail
from bytecheckpoint.dcp._peers import peers_of_call
from bytecheckpoint.dcp._relay import Relay
from bytecheckpoint.errors import CheckpointError, InvalidPlanError, RankError, sendable

__all__ = ["Exchange"]

# Of messages between ranks: all must run code that means the same by them.
_VERSION = 1


@dataclass(frozen=True)
class _Statement:
    """What a rank says at the begin of a round.

    Attributes:
        checkpoint: Which it reads, and what numbers of files mean in it.
        ranges: What it wants in this round.
        is_done: It wants nothing more, and comes because others may.
        error: It has failed.
    """

    version: int
    checkpoint: str = ""
    ranges: bytes = b""
    is_done: bool = False
    error: BaseException | None = None


class Exchange:
    """A load's reading by several ranks, in rounds that all of them begin together. A context manager.

    In each round every rank says what it wants next, or that it is done, or why it has failed. Rounds go on until all
    are done; the first failure ends them on all ranks, each of which raises it. Outside of rounds no rank waits for
    another.

    Collective: every rank of the call makes one, or none does, and enters it before anything may fail.
    """

    def __init__(self, mail: Mail, rank: int, reading: str) -> None:
        self._mail = mail
        self._rank = rank
        self._reading = reading
        self._checkpoint = ""
        self._is_over = False

    @classmethod
    def of_call(cls, plan: LoadPlan) -> Exchange | None:
        """With the peers of this call; None if each rank reads for itself."""
        chosen = plan.storage_data
        if not isinstance(chosen, Chosen) or chosen.reading == INDEPENDENT:
            return None
        peers = peers_of_call()
        if peers is None:
            return None
        return cls(Mail(peers.connect(), peers.rank, peers.size), peers.rank, chosen.reading)

    @property
    def reading(self) -> str:
        """``cooperative`` or ``independent``, once ``agree`` has returned."""
        return self._reading

    def agree(self, checkpoint: _C.Checkpoint, job: _C.LoadJob, path: str) -> None:
        """Begins: all must look at the same checkpoint; ``auto`` becomes one of the others.

        Raises:
            InvalidPlanError: They do not.
            BaseException: What another rank failed with.
        """
        self._checkpoint = _identity(checkpoint, path)
        all_ranges = _C.all_ranges(job) if self._reading == AUTO else b""
        ranges = self._say(_Statement(_VERSION, self._checkpoint, all_ranges))
        if self._reading == AUTO:
            plan = _C.SharePlan(ranges)
            saved = plan.bytes_wanted - plan.bytes_distinct
            self._reading = COOPERATIVE if is_worth_sharing(saved, plan.bytes_wanted) else INDEPENDENT
        self._is_over = self._reading == INDEPENDENT

    def run(self, job: _C.LoadJob) -> dict[str, Any]:
        """A round: fills all that was added to ``job``. Each rank's own reads, and what it receives."""
        if self._is_over:
            return job.run()
        return self._round(job, _Statement(_VERSION, self._checkpoint, _C.next_ranges(job)))

    def _round(self, job: _C.LoadJob | None, statement: _Statement) -> dict[str, Any]:
        with HeldInterrupt() as interrupt:
            ranges = self._say(statement)
            if self._is_over or job is None:
                return {}
            plan = _C.SharePlan(ranges)
            relay = Relay(
                self._mail,
                self._rank,
                plan.units(self._rank),
                lambda: _C.SharedRun(job, plan, self._rank),
                interrupt,
            )
            done = relay.run()
            if done is not None:
                return done
            self._say(_Statement(_VERSION, self._checkpoint))
            raise CheckpointError("another rank stopped reading and did not say why")

    def _say(self, statement: _Statement) -> list[bytes]:
        """Hears all. Returns the ranges that each rank wants, or raises what another failed with."""
        with HeldInterrupt():
            heard = self._gather(statement)
            for rank, said in enumerate(heard):
                if said.error is not None:
                    raise _from_rank(rank, said.error)
            self._is_over = all(said.is_done for said in heard)
            versions = {said.version for said in heard}
            checkpoints = {said.checkpoint for said in heard}
            if len(versions) > 1 or len(checkpoints) > 1:
                self._is_over = True
                what = "have different versions of this package" if len(versions) > 1 else "read different checkpoints"
                raise InvalidPlanError(f"ranks that share the reading of a load {what}")
            return [said.ranges for said in heard]

    def _gather(self, statement: _Statement) -> list[_Statement]:
        """What all ranks say. After a failure, or the loss of a rank, nobody waits for this one any more."""
        try:
            heard = [pickle.loads(said) for said in self._mail.gather(pickle.dumps(statement))]
        except BaseException:
            self._is_over = True
            raise
        self._is_over = any(said.error is not None for said in heard)
        return heard

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Takes part until all ranks are done, or tells them why this one is not."""
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
        """Lets the others raise what this rank failed with, unless none of them waits any more."""
        if self._is_over:
            return
        with HeldInterrupt(), contextlib.suppress(CheckpointError):  # what this rank failed with comes first
            self._gather(_Statement(_VERSION, error=_for_others(error)))


def _identity(checkpoint: _C.Checkpoint, path: str) -> str:
    """Equal on all ranks if and only if they read the same. Of other writers not all give a save an id."""
    if checkpoint.foreign is None:
        return f"{_C.digest_of(checkpoint):08x}"
    return f"{_C.digest_of(checkpoint):08x} {checkpoint.foreign} {os.path.realpath(path)}"


def _from_rank(rank: int, error: BaseException) -> BaseException:
    """What that rank failed with, to be raised here."""
    error.add_note(f"raised on rank {rank}, with which this rank shares its reading")
    return error


def _for_others(error: BaseException) -> BaseException:
    """What the others raise: the same, unless that would stop more than a load."""
    if isinstance(error, Exception):
        return sendable(error)
    return RankError(f"{type(error).__qualname__}: {error}")
