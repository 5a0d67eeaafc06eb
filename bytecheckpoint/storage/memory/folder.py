# SPDX-License-Identifier: Apache-2.0
"""``MemoryFolder``: a folder of a run in the memory of this machine."""

from __future__ import annotations

from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.storage.memory.connection import run_of
from bytecheckpoint.storage.memory.peers import peers_of
from bytecheckpoint.storage.object_store.folder import StoreFolder

__all__ = ["MemoryFolder"]


class MemoryFolder(StoreFolder):
    """The objects below a URL of a holder; see ``Folder``. They are committed as in a store, and are as near as can be.

    Args:
        place: See ``StoreFolder``.
    """

    orders_commits = True
    num_at_once = 1
    is_best_read_together = False
    may_read_late = False
    most_file_bytes = 0

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.keeps_notes = False  # of a process that died, nothing stays

    @property
    def is_of_one_machine(self) -> bool:  # type: ignore[override]
        return peers_of(run_of(str(self.place))) is None

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryFolder, (self.place,)

    def tuned(self, config: Config) -> Config:
        return config
