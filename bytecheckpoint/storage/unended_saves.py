# SPDX-License-Identifier: Apache-2.0
"""Saves that died: what is known of them from what they leave in a folder. Needs no torch.

A save that is killed writes no line to a journal. It leaves its right to commit, ``.metadata.{save id}.tmp``, whose
lock is free, and the data files that its ranks had begun. In the tmp stands who saved (``about_save``), and later the
metadata. The next save to the folder, and a prune, remove all of that; before, it becomes a line of the journal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.runtime.place import own_place
from bytecheckpoint.storage.names import save_of_tmp
from bytecheckpoint.storage.save_records import about_of, record_of_unended
from bytecheckpoint.storage.small_files import read_head

__all__ = ["unended_saves"]

# A lock that another machine holds is not seen everywhere. So where others write, a save is taken for dead once nothing
# has changed in its folder for so many seconds.
_SILENCE_S = 60.0
_MOST_ABOUT = 4096  # bytes
_LOOK_S = 5.0
_SAME_TIME_S = 0.05  # of times that one file system gives


def unended_saves(folder: str | os.PathLike[str], *, silence_s: float = _SILENCE_S) -> list[dict[str, Any]]:
    """Returns the records of the saves that died in a folder, as ``failure_record_of`` makes them, with more fields.

    Nothing is changed. Saves that live, saves with ``Config(journal="off")`` and prunes that died are left out.

    Args:
        folder: A checkpoint, or a part of one.
        silence_s: A save of another machine counts if nothing has changed for so many seconds.
    """
    here = Path(folder)
    try:
        tmps = {name: save_id for name in os.listdir(here) if (save_id := save_of_tmp(name)) is not None}  # noqa: PTH208
        if not tmps:
            return []
        found = _core.inspect_folder(str(here))
    except (OSError, CheckpointError):
        return []
    if found["is_being_saved"]:  # which of several it is, is not known
        return []
    files = _times(here, _unnamed(here, found["data_files"]))
    records = [_record(here, name, save_id, files, silence_s) for name, save_id in tmps.items()]
    return [record for record in records if record is not None]


def _unnamed(folder: Path, names: Iterable[str]) -> list[str]:
    """Returns the data files that the commit mark does not name."""
    named: set[str] = set()
    with suppress(CheckpointError):
        named = {name for name, *_ in _core.Checkpoint.open(str(folder)).files()}
    return [name for name in names if name not in named]


def _times(folder: Path, names: Iterable[str]) -> dict[str, os.stat_result]:
    found = {}
    for name in names:
        with suppress(OSError):
            found[name] = (folder / name).stat()
    return found


def _record(
    folder: Path, tmp: str, save_id: str, files: dict[str, os.stat_result], silence_s: float
) -> dict[str, Any] | None:
    try:
        head = read_head(folder / tmp, _MOST_ABOUT) or b""
        status = (folder / tmp).lstat()
    except OSError:
        return None
    about = about_of(head)
    if about is None and not head.strip(b"\0"):
        return None
    if about is not None:  # what is older is of another save, or of the checkpoint that it was to replace
        files = {name: each for name, each in files.items() if _came_at(each) >= status.st_mtime - _SAME_TIME_S}
    last_at = max([status.st_mtime, *(_came_at(each) for each in files.values())])
    here = own_place().processes
    is_here = (bool(here) and (about or {}).get("processes") == here) or _core.is_local(str(folder), _LOOK_S)
    if not is_here and time.time() - last_at < silence_s:
        return None
    left = {name: (each.st_size, _came_at(each)) for name, each in files.items()}
    return record_of_unended(str(folder.absolute()), save_id, about, status.st_mtime, left)


def _came_at(file: os.stat_result) -> float:
    """Returns when a file was last written, or got another name: a save links files of the step before."""
    return max(file.st_mtime, file.st_ctime) if file.st_nlink > 1 else file.st_mtime
