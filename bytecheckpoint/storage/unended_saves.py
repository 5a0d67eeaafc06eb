# SPDX-License-Identifier: Apache-2.0
"""Saves that died: what is known of them from what they leave in a folder. Needs no torch.

A save that is killed writes no line to a journal. It leaves its right to commit, ``.metadata.{save id}.tmp``, whose
lock is free, and the data files that its ranks had begun. In the tmp stands who saved (``about_save``), and later the
metadata. The next save to the folder, and a prune, remove all of that; before, it becomes a line of the journal.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.listing import listed
from bytecheckpoint.native import _core
from bytecheckpoint.report.text import size_text, utc_text
from bytecheckpoint.runtime.place import own_place
from bytecheckpoint.storage.journal_files import FORMAT
from bytecheckpoint.storage.names import rank_of_data, save_of_tmp
from bytecheckpoint.storage.small_files import read_head
from bytecheckpoint.storage.step_names import run_and_step, run_of

__all__ = ["UNENDED", "about_save", "unended_saves"]

UNENDED = "UnendedSave"
"""Stands in the journal where the name of the error class would, if there was no error."""

# A lock that another machine holds is not seen everywhere. So where others write, a save is taken for dead once nothing
# has changed in its folder for so many seconds.
_SILENCE_S = 60.0
_MOST_ABOUT = 4096  # bytes
_LOOK_S = 5.0
_SAME_TIME_S = 0.05  # of times that one file system gives
_MOST_RANKS = 1 << 20


def about_save(*, rank: int, world_size: int, began_at: float, is_async: bool, with_host: bool) -> bytes:
    """Returns what a save leaves of itself if it dies, in this process.

    Args:
        rank: Number of its coordinator.
        world_size: Number of its ranks; 0 if it is not known.
        began_at: Unix time.
        is_async: Whether it runs in the background.
        with_host: Whether to name the host.
    """
    place = own_place()
    about = {
        "format": FORMAT,
        "at": began_at,
        "rank": rank,
        "world_size": world_size,
        "is_async": is_async,
        "pid": os.getpid(),
        "host": place.host if with_host else "",
        "processes": place.processes if with_host else "",
    }
    return json.dumps(about, separators=(",", ":")).encode()


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
    about = _about_of(head)
    if about is None and not head.strip(b"\0"):
        return None
    if about is not None:  # what is older is of another save, or of the checkpoint that it was to replace
        files = {name: each for name, each in files.items() if each.st_mtime >= status.st_mtime - _SAME_TIME_S}
    about = about or {}
    last_at = max([status.st_mtime, *(each.st_mtime for each in files.values())])
    here = own_place().processes
    is_here = (bool(here) and about.get("processes") == here) or _core.is_local(str(folder), _LOOK_S)
    if not is_here and time.time() - last_at < silence_s:
        return None
    began_at = about.get("at", status.st_mtime)
    ranks = {name: rank for name in files if (rank := rank_of_data(name)) is not None}
    last = max(ranks, key=lambda name: files[name].st_mtime, default=None)
    phase = "commit" if not about else "write" if files else "begin"
    path = str(folder.absolute())
    world_size = about.get("world_size", 0)
    missing = sorted({*range(world_size)} - {*ranks.values()})
    num_bytes = sum(each.st_size for each in files.values())
    return {
        "format": FORMAT,
        "kind": "failure",
        "at": round(began_at, 3),
        "of": "save",
        "path": os.path.relpath(path, run_of(path)),
        "step": run_and_step(path)[1],
        "rank": about.get("rank", 0),
        "total_s": round(max(last_at - began_at, 0.0), 6),
        "error_type": UNENDED,
        "message": _message(about, phase, last_at, None if last is None else ranks[last], num_bytes, missing),
        "save_id": save_id,
        "phase": phase,
        "last_rank": None if last is None else ranks[last],
        "num_bytes": num_bytes,
        "ranks_without_files": missing,
        "host": about.get("host", ""),
        "pid": about.get("pid"),
        "world_size": world_size,
        "is_async": about.get("is_async", False),
    }


def _about_of(head: bytes) -> dict[str, Any] | None:
    """Returns what ``about_save`` has written; None if something else stands there. Anybody may have written it."""
    try:
        about = json.loads(head.partition(b"\n")[0])
        at, rank, world_size = float(about["at"]), int(about["rank"]), int(about["world_size"])
        known = {
            "at": at,
            "rank": rank,
            "world_size": world_size,
            "is_async": about["is_async"] is True,
            "pid": int(about["pid"]),
            "host": str(about["host"])[:256],
            "processes": str(about["processes"])[:1024],
        }
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    return known if 0 <= at < 1e12 and 0 <= rank < _MOST_RANKS and 0 <= world_size < _MOST_RANKS else None


def _message(
    about: dict[str, Any], phase: str, last_at: float, last_rank: int | None, num_bytes: int, missing: list[int]
) -> str:
    texts = [f"the save ended without an error, in phase {phase}: its processes were killed, or lost their machine"]
    texts.append(f"its last sign of life was at {utc_text(last_at)}")
    if about:
        on = f" on {about['host']}" if about["host"] else ""
        texts.append(f"its coordinator was rank {about['rank']}{on}, process {about['pid']}")
    if last_rank is not None:
        texts.append(f"rank {last_rank} wrote last, and all ranks together {size_text(num_bytes)}")
    if missing and about["world_size"] > 1:
        texts.append(f"there is no file of {'rank' if len(missing) == 1 else 'ranks'} {listed([*map(str, missing)])}")
    return "; ".join(texts)
