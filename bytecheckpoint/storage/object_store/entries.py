# SPDX-License-Identifier: Apache-2.0
"""What listings of a store say of objects, and of the tombstones that stand for removed commit marks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

__all__ = ["CLAIMED", "REMOVED", "Entry", "entries_of", "entry_of", "folders_of", "is_tombstone"]

# How a tombstone begins: a prune has put it, or a save that begins there. 32 hex digits follow.
REMOVED, CLAIMED = "removed ", "saving "
_REMOVED_BYTES, _CLAIMED_BYTES = len(REMOVED) + 32, len(CLAIMED) + 32


@dataclass(frozen=True)
class Entry:
    """One object in a listing. ``last_modified`` is by the clock of the store."""

    name: str
    num_bytes: int
    last_modified: datetime

    @property
    def is_tombstone(self) -> bool:
        """Whether it stands for a removed commit mark. No writer's mark is that short."""
        return self.name.endswith(".metadata") and self.num_bytes <= _REMOVED_BYTES

    @property
    def is_claim(self) -> bool:
        """Whether it is a tombstone that a save has put."""
        return self.is_tombstone and self.num_bytes == _CLAIMED_BYTES


def is_tombstone(meta: Any) -> bool:
    """Whether what ``StoreClient.head`` returned is of a tombstone."""
    return entry_of(meta).is_tombstone


def entry_of(meta: Any) -> Entry:
    """Returns the entry of what obstore says of an object; its name is that in its folder."""
    return Entry(meta["path"].rpartition("/")[2], meta["size"], meta["last_modified"])


def entries_of(listed: Any) -> list[Entry]:
    """Returns the objects of a listing by obstore."""
    return [entry_of(meta) for meta in listed["objects"]]


def folders_of(listed: Any) -> list[str]:
    """Returns the names of the folders of a listing by obstore."""
    return [prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"]]
