# SPDX-License-Identifier: Apache-2.0
"""What each place of a run has of a step."""

from __future__ import annotations

from pathlib import Path

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.names import is_mark
from bytecheckpoint.storage.object_store.urls import HELD
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.storage.paths import Place, below
from bytecheckpoint.storage.save_ids import begin_of_save

__all__ = ["begin_of", "has_mark", "is_whole_in_memory"]

_MARK = ".metadata"


def has_mark(place: Place) -> bool:
    """Whether a checkpoint is committed in a step, whole, by ranks, or in parts."""
    folder = folder_at(place)
    return (
        folder.has(_MARK)
        or folder_at(below(place, PARTS[-1])).has(_MARK)
        or (isinstance(place, Path) and not folder.is_gone() and any(map(is_mark, folder.names())))
    )


def is_whole_in_memory(place: Place) -> bool:
    """Whether a step in memory has all data files, here or on machines that are known; True for any other place."""
    if not str(place).startswith(f"{HELD}://"):
        return True
    for at in (place, *(below(place, part) for part in PARTS)):
        if not folder_at(at).has(_MARK):
            continue
        names = {*HolderClient(str(at)).names()}
        try:
            files = _core.Checkpoint.open(str(at), max_whole_bytes=0).files()
        except CheckpointError:
            return True  # it is damaged, which a load says
        if any(name not in names for name, *_ in files):
            return False
    return True


def begin_of(place: Place) -> int:
    """Returns when the save of a step began, in nanoseconds since 1970; 0 if nobody knows, and -1 if it is damaged."""
    at = place if folder_at(place).has(_MARK) else below(place, PARTS[-1])
    try:
        return begin_of_save(_core.Checkpoint.open(str(at), max_whole_bytes=0).save_id)
    except CheckpointError:
        return -1
