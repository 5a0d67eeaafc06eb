# SPDX-License-Identifier: Apache-2.0
"""Records of saves that died, made of what they leave: who saved, and the data files. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.listing import listed
from bytecheckpoint.report.text import size_text, utc_text
from bytecheckpoint.runtime.place import own_place
from bytecheckpoint.storage.names import rank_of_data
from bytecheckpoint.storage.step_names import run_and_step, run_of

__all__ = ["FORMAT", "UNENDED", "about_of", "about_save", "path_in_run", "record_of_unended"]

FORMAT = 1
"""Number of the format of records. A field may be added without a new number."""

UNENDED = "UnendedSave"
"""Stands in the journal where the name of the error class would, if there was no error."""

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


def about_of(head: bytes) -> dict[str, Any] | None:
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


def path_in_run(path: str) -> str:
    """Returns the path of a checkpoint relative to the folder of its run; its name if it is no step of one."""
    run = run_of(path)
    return path[len(run) :].lstrip("/") if path.startswith(f"{run}/") else os.path.relpath(path, run)


def record_of_unended(
    path: str,
    save_id: str,
    about: Mapping[str, Any] | None,
    begun: float,
    files: Mapping[str, tuple[int, float]],
    *,
    may_run: bool = False,
) -> dict[str, Any]:
    """Returns the record of a save that did not end, with the fields of ``failure_record_of`` and more.

    Args:
        path: Absolute path of the checkpoint, or its URL.
        save_id: Id of the save.
        about: What ``about_of`` returned; None if the metadata stand where that stood.
        begun: Unix time at which the save began, where ``about`` does not say it.
        files: Bytes and time of the last change of the data files that it has left, by name.
        may_run: Whether the save may still be running.
    """
    phase = "commit" if about is None else "write" if files else "begin"
    about = about or {}
    last_at = max([begun, *(changed for _, changed in files.values())])
    began_at = about.get("at", begun)
    ranks = {name: rank for name in files if (rank := rank_of_data(name)) is not None}
    last = max(ranks, key=lambda name: files[name][1], default=None)
    world_size = about.get("world_size", 0)
    missing = sorted({*range(world_size)} - {*ranks.values()})
    num_bytes = sum(size for size, _ in files.values())
    last_rank = None if last is None else ranks[last]
    return {
        "format": FORMAT,
        "kind": "failure",
        "at": round(began_at, 3),
        "of": "save",
        "path": path_in_run(path),
        "step": run_and_step(path)[1],
        "rank": about.get("rank", 0),
        "total_s": round(max(last_at - began_at, 0.0), 6),
        "error_type": UNENDED,
        "message": _message(about, phase, last_at, last_rank, num_bytes, missing, may_run),
        "save_id": save_id,
        "phase": phase,
        "may_run": may_run,
        "last_rank": last_rank,
        "num_bytes": num_bytes,
        "ranks_without_files": missing,
        "host": about.get("host", ""),
        "pid": about.get("pid"),
        "world_size": world_size,
        "is_async": about.get("is_async", False),
    }


def _message(
    about: Mapping[str, Any],
    phase: str,
    last_at: float,
    last_rank: int | None,
    num_bytes: int,
    missing: list[int],
    may_run: bool,
) -> str:
    texts = [f"the save ended without an error, in phase {phase}: its processes were killed, or lost their machine"]
    if may_run:
        texts = [f"the save has not ended: it runs in phase {phase}, or its processes were killed"]
    texts.append(f"its last sign of life was at {utc_text(last_at)}")
    if about:
        on = f" on {about['host']}" if about["host"] else ""
        texts.append(f"its coordinator was rank {about['rank']}{on}, process {about['pid']}")
    if last_rank is not None:
        texts.append(f"rank {last_rank} wrote last, and all ranks together {size_text(num_bytes)}")
    if missing and about["world_size"] > 1:
        texts.append(f"there is no file of {'rank' if len(missing) == 1 else 'ranks'} {listed([*map(str, missing)])}")
    return "; ".join(texts)
