# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a load tell the coordinator with their plans, and what it answers: how all of them read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint import _C
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._asked import Asked
from bytecheckpoint.dcp._peers import peers_of_call, planned_by_own_hooks

__all__ = ["AUTO", "COOPERATIVE", "INDEPENDENT", "Chosen", "Intent", "choose_reading", "is_worth_sharing"]

INDEPENDENT, COOPERATIVE, AUTO = "independent", "cooperative", "auto"
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
        comes: Its peers are known, and all of them will come to what follows in ``read_data`` if this one does.
        setting: ``Config.shared_reading``.
        is_in_memory: The checkpoint is on a file system that is memory of its machine.
        num_bytes: Of the records that it wants something of.
        asked: Which keys it asks for.
    """

    save: str
    comes: bool
    setting: str
    is_in_memory: bool
    num_bytes: int
    asked: Asked

    @classmethod
    def by(cls, reader: Reader, save: str, asked: Asked, *, reads_by_own_hook: bool, num_bytes: int) -> Intent:
        """``reads_by_own_hook``: ``read_data`` of the reader is our own, so that nothing fails before its exchange."""
        comes = reads_by_own_hook and peers_of_call() is not None and planned_by_own_hooks(reader)
        is_in_memory = _C.is_in_memory(str(reader.path), reader.config.io_timeout_s)
        return cls(save, comes, reader.config.shared_reading, is_in_memory, num_bytes, asked)


@dataclass(frozen=True)
class Chosen:
    """What the coordinator answers with the plan: how all ranks read.

    Attributes:
        reading: ``independent``, ``cooperative``, or ``auto`` where the ranks have to find out together.
        all_come: ``Intent.comes`` of all ranks.
        num_ranks: Of the load.
    """

    reading: str
    all_come: bool
    num_ranks: int


def choose_reading(plans: Sequence[LoadPlan]) -> list[LoadPlan]:
    """Coordinator: the plans, with one answer for all. ``auto`` is left to the ranks where it may be worth it."""
    intents = [plan.storage_data for plan in plans]
    reading = AUTO
    all_come = all(isinstance(t, Intent) and t.comes for t in intents)
    settings = {t.setting for t in intents} if all_come else {INDEPENDENT}
    for setting in (COOPERATIVE, INDEPENDENT):
        if setting in settings:
            reading = setting
    if reading == AUTO:
        wanted = sum(t.num_bytes for t in intents)
        saved_at_most = wanted * (len(intents) - 1) // len(intents)
        if len(intents) > _MOST_RANKS or saved_at_most < _LEAST_SAVED_BYTES or all(t.is_in_memory for t in intents):
            reading = INDEPENDENT
    return [replace(plan, storage_data=Chosen(reading, all_come, len(plans))) for plan in plans]


def is_worth_sharing(bytes_saved: int, bytes_wanted: int) -> bool:
    """Does ``auto`` share the reading of ``bytes_wanted`` by all ranks, where that many need not be read twice?"""
    return bytes_saved >= max(_LEAST_SAVED_BYTES, _LEAST_SAVED_PART * bytes_wanted)
