# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one load tell one another, so that each byte is read by one of them."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint import _C
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._held_interrupt import HeldInterrupt
from bytecheckpoint.dcp._mail import Mail
from bytecheckpoint.dcp._peers import peers_of_call, planned_by_own_hooks
from bytecheckpoint.dcp._relay import Relay
from bytecheckpoint.errors import CheckpointError, InvalidPlanError, RankError, sendable

__all__ = ["Exchange", "Intent", "choose_reading"]

_INDEPENDENT, _COOPERATIVE, _AUTO = "independent", "cooperative", "auto"
# Of messages between ranks: all must run code that means the same by them.
_VERSION = 1
# `auto` shares where that saves as many bytes as this, and this part of what all ranks would read: what was measured to
# be no slower than reading twice, on one machine with a fast disk (benchmarks/sharing.py).
_LEAST_SAVED_BYTES = 256 << 20
_LEAST_SAVED_PART = 0.2
# Each rank tells each other what it wants: beyond so many, `auto` does not ask.
_MOST_RANKS = 512


class Reader(Protocol):
    """What is asked of a storage reader."""

    path: Path
    config: Config


@dataclass(frozen=True)
class Intent:
    """What a rank tells the coordinator with its plan.

    Attributes:
        save: Id of the save that it reads.
        can_share: Its peers are known, and all of them will come to the exchange if this one does.
        setting: ``Config.shared_reading``.
        is_in_memory: The checkpoint is on a file system that is memory of its machine.
        num_bytes: Of the records that it wants something of.
    """

    save: str
    can_share: bool
    setting: str
    is_in_memory: bool
    num_bytes: int

    @classmethod
    def by(cls, reader: Reader, save: str, *, comes: bool, num_bytes: int) -> Intent:
        """``comes``: ``read_data`` of the reader is our own, so that nothing fails before its exchange."""
        can_share = comes and peers_of_call() is not None and planned_by_own_hooks(reader)
        is_in_memory = _C.is_in_memory(str(reader.path))
        return cls(save, can_share, reader.config.shared_reading, is_in_memory, num_bytes)


@dataclass(frozen=True)
class _Chosen:
    """What the coordinator answers with the plan: how all ranks read."""

    reading: str


def choose_reading(plans: Sequence[LoadPlan]) -> list[LoadPlan]:
    """Coordinator: the plans, with one answer for all. ``auto`` is left to the ranks where it may be worth it."""
    intents = [plan.storage_data for plan in plans]
    reading = _AUTO
    settings = {t.setting if isinstance(t, Intent) and t.can_share else _INDEPENDENT for t in intents}
    for setting in (_COOPERATIVE, _INDEPENDENT):
        if setting in settings:
            reading = setting
    if reading == _AUTO:
        wanted = sum(t.num_bytes for t in intents)
        saved_at_most = wanted * (len(intents) - 1) // len(intents)
        if len(intents) > _MOST_RANKS or saved_at_most < _LEAST_SAVED_BYTES or all(t.is_in_memory for t in intents):
            reading = _INDEPENDENT
    return [replace(plan, storage_data=_Chosen(reading)) for plan in plans]


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
        if not isinstance(chosen, _Chosen) or chosen.reading == _INDEPENDENT:
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
        all_ranges = _C.all_ranges(job) if self._reading == _AUTO else b""
        ranges = self._say(_Statement(_VERSION, self._checkpoint, all_ranges))
        if self._reading == _AUTO:
            plan = _C.SharePlan(ranges)
            saved = plan.bytes_wanted - plan.bytes_distinct
            is_worth_it = saved >= max(_LEAST_SAVED_BYTES, _LEAST_SAVED_PART * plan.bytes_wanted)
            self._reading = _COOPERATIVE if is_worth_it else _INDEPENDENT
        self._is_over = self._reading == _INDEPENDENT

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
