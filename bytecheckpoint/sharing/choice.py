# SPDX-License-Identifier: Apache-2.0
"""Decides how the ranks of a load read: what they tell the coordinator with their plans, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint.config import Config
from bytecheckpoint.native import _C
from bytecheckpoint.runtime.place import Place, own_place
from bytecheckpoint.sharing.asked_keys import RequestedKeys
from bytecheckpoint.storage.folders import folder_at

__all__ = [
    "AUTO",
    "COOPERATIVE",
    "INDEPENDENT",
    "ReadPreferences",
    "ReadStrategy",
    "choose_reading",
    "is_worth_sharing",
]

INDEPENDENT, COOPERATIVE, AUTO = "independent", "cooperative", "auto"
# `auto` shares if that saves at least this many bytes, and at least this part of what all ranks would read. From there
# on sharing was measured to be no slower than reading twice, on one machine with a fast disk (benchmarks/sharing.py).
_LEAST_SAVED_BYTES = 256 << 20
_LEAST_SAVED_PART = 0.2
# To share, each rank tells every other rank what it wants. Above this number of ranks `auto` does not do so.
_MOST_RANKS = 512


class Reader(Protocol):
    """What this module needs of a storage reader."""

    path: Path | str
    config: Config


@dataclass(frozen=True)
class ReadPreferences:
    """What a rank tells the coordinator with its plan.

    Attributes:
        save: Id of the save that the rank reads.
        reads_with_others: Whether the rank's peers are known, and all of them come to the exchange in ``read_data`` if
            it does.
        setting: ``Config.shared_reading``.
        is_in_memory: Whether the checkpoint is on a file system in the memory of the rank's machine.
        num_bytes: Bytes of the records of which the rank wants something.
        asked: The keys that the rank asks for.
        path: Path of the checkpoint, as it was passed on the rank.
        place: Where the rank runs.
        visible_within_s: Seconds within which the rank may still see a newer commit of another machine; 0 for a local
            file system.
    """

    save: str
    reads_with_others: bool
    setting: str
    is_in_memory: bool
    num_bytes: int
    asked: RequestedKeys
    path: str = ""
    place: Place | None = None
    visible_within_s: float = 0.0

    @classmethod
    def by(
        cls, reader: Reader, save: str, asked: RequestedKeys, *, reads_with_others: bool, num_bytes: int
    ) -> ReadPreferences:
        path, config = str(reader.path), reader.config
        is_in_memory = _C.is_in_memory(path, config.io_timeout_s)
        folder = folder_at(path)
        setting = config.shared_reading
        if setting == AUTO and folder.is_best_read_together:
            setting = COOPERATIVE
        within_s = config.visibility_timeout_s if folder.shows_late(config.io_timeout_s) else 0.0
        return cls(save, reads_with_others, setting, is_in_memory, num_bytes, asked, path, own_place(), within_s)


@dataclass(frozen=True)
class ReadStrategy:
    """What the coordinator answers with the plan: how all ranks read.

    Attributes:
        reading: ``independent``, ``cooperative``, or ``auto`` if the ranks have to find out together.
        all_ranks_read: Whether ``ReadPreferences.reads_with_others`` holds for all ranks.
        num_ranks: Number of ranks in the load.
    """

    reading: str
    all_ranks_read: bool
    num_ranks: int


def choose_reading(plans: Sequence[LoadPlan]) -> list[LoadPlan]:
    """Returns the plans with one answer for all ranks. Called on the coordinator.

    ``auto`` becomes ``independent`` if sharing cannot be worth it; otherwise the ranks find out.
    """
    intents = [plan.storage_data for plan in plans]
    reading = AUTO
    all_ranks_read = all(isinstance(t, ReadPreferences) and t.reads_with_others for t in intents)
    settings = {t.setting for t in intents} if all_ranks_read else {INDEPENDENT}
    for setting in (COOPERATIVE, INDEPENDENT):
        if setting in settings:
            reading = setting
    if reading == AUTO:
        wanted = sum(t.num_bytes for t in intents)
        saved_at_most = wanted * (len(intents) - 1) // len(intents)
        if len(intents) > _MOST_RANKS or saved_at_most < _LEAST_SAVED_BYTES or all(t.is_in_memory for t in intents):
            reading = INDEPENDENT
    return [replace(plan, storage_data=ReadStrategy(reading, all_ranks_read, len(plans))) for plan in plans]


def is_worth_sharing(bytes_saved: int, bytes_wanted: int) -> bool:
    """Whether ``auto`` shares reading.

    Args:
        bytes_saved: Bytes that need not be read again.
        bytes_wanted: Bytes that all ranks together want; what two ranks want counts twice.
    """
    return bytes_saved >= max(_LEAST_SAVED_BYTES, _LEAST_SAVED_PART * bytes_wanted)
