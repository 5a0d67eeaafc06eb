# SPDX-License-Identifier: Apache-2.0
"""What each place of a run has of a step."""

from __future__ import annotations

from pathlib import Path

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.names import RECORDS, is_mark
from bytecheckpoint.storage.object_store.urls import HELD
from bytecheckpoint.storage.own_parts import ranks_of_own_part
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.storage.paths import Place, below
from bytecheckpoint.storage.save_ids import begin_of_save

__all__ = ["begin_of", "has_all_files", "has_mark"]

_MARK = ".metadata"


def has_mark(place: Place) -> bool:
    """Whether a checkpoint is committed in a step, whole, by ranks, or in parts."""
    folder = folder_at(place)
    return (
        folder.has(_MARK)
        or folder_at(below(place, PARTS[-1])).has(_MARK)
        or (isinstance(place, Path) and not folder.is_gone() and any(map(is_mark, folder.names())))
    )


def has_all_files(place: Place) -> bool:
    """Whether a step has all data files, as far as a place may have a part: in memory, and on a disk of this machine.

    Of memory, what machines have that are known counts, too.
    """
    if isinstance(place, Path):
        return not any(_is_part(at) for at in (place, *(place / part for part in PARTS)))
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


def _is_part(folder: Path) -> bool:
    """Whether a note says that other machines have files of it, on disks of their own."""
    if not (folder / RECORDS).is_dir():
        return False
    try:
        mark = _core.Checkpoint.open(str(folder), max_whole_bytes=0)
        here = ranks_of_own_part(folder, mark.save_id)
        return here is not None and any(rank not in here for _, _, rank, _ in mark.files())
    except CheckpointError:
        return False  # it is damaged, which a load says


def begin_of(place: Place) -> int:
    """Returns when the save of a step began, in nanoseconds since 1970; 0 if nobody knows, and -1 if it is damaged."""
    at = place if folder_at(place).has(_MARK) else below(place, PARTS[-1])
    try:
        return begin_of_save(_core.Checkpoint.open(str(at), max_whole_bytes=0).save_id)
    except CheckpointError:
        return -1
