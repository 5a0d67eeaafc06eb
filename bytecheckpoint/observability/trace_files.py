# SPDX-License-Identifier: Apache-2.0
"""Whole traces, with ``Config(trace="full")``: each rank keeps its own, in the folder ``traces`` beside the journal.

A file is named by kind, step and rank: ``save.100.3.trace``. A rank keeps its last ``_MOST_KEPT`` files in a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.report.rank_trace import RankTrace
from bytecheckpoint.storage.small_files import write_small_file

__all__ = ["keep_trace", "read_traces", "with_whole_traces"]

_FOLDER = "traces"
_MOST_KEPT = 16
# The Unix clocks of machines differ; two calls at one step are farther apart.
_SAME_CALL_S = 2.0
_NAME = re.compile(r"(save|load)\.(\w+)\.(\d+)\.trace")


def keep_trace(folder: Path, kind: str, step: int | None, rank: int, trace: RankTrace) -> None:
    """Writes the trace of one rank, and removes the oldest ones of that rank.

    Args:
        folder: Folder of the journal. It is made if its parent exists.
        kind: ``save`` or ``load``.
        step: Number of the step; None if the checkpoint is none.
        rank: Number of the rank.
        trace: What it did.

    Raises:
        OSError: The file system refuses.
    """
    for each in (folder, folder / _FOLDER):
        with suppress(FileExistsError):
            each.mkdir()
    path = folder / _FOLDER / f"{kind}.{'none' if step is None else step}.{rank}.trace"
    write_small_file(path, trace.to_bytes(), sync=False)
    own = [other for other in path.parent.iterdir() if (m := _NAME.fullmatch(other.name)) and int(m[3]) == rank]
    by_age = sorted(own, key=lambda other: other.stat().st_mtime)
    for other in by_age[:-_MOST_KEPT]:
        other.unlink(missing_ok=True)


def read_traces(folder: Path, kind: str, step: int | None) -> dict[int, RankTrace]:
    """Returns the traces of one call, by rank. A file that is damaged is left out.

    Args:
        folder: Folder of the journal.
        kind: ``save`` or ``load``.
        step: Number of the step; None if the checkpoint is none.
    """
    found = {}
    for path in (folder / _FOLDER).glob(f"{kind}.{'none' if step is None else step}.*.trace"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        with suppress(CorruptCheckpointError, OSError):
            trace = RankTrace.from_bytes(path.read_bytes())
            _ = trace.summary  # reads all of it
            found[int(match[3])] = trace
    return dict(sorted(found.items()))


def with_whole_traces(record: dict[str, Any], folders: Iterable[Path]) -> dict[str, Any]:
    """Returns a record whose timelines are the whole traces of its ranks, where these were kept.

    Args:
        record: Record of a call.
        folders: Folders of journals that may be beside its traces.
    """
    for folder in folders:
        record = _with_traces(record, read_traces(folder, record["kind"], record.get("step")))
    return record


def _with_traces(record: dict[str, Any], traces: dict[int, RankTrace]) -> dict[str, Any]:
    ranks = record.get("ranks") or {}
    arrived = dict(zip(ranks.get("rank", ()), ranks.get("arrived_s", ()), strict=False))
    of_call = {
        # A file of another call at this step, before or after, is not of this record.
        str(rank): {"lanes": trace.lanes(arrived.get(rank, 0.0))}
        for rank, trace in traces.items()
        if abs(trace.began_at - record["at"] - arrived.get(rank, 0.0)) < _SAME_CALL_S
    }
    return record if not of_call else {**record, "timelines": {**(record.get("timelines") or {}), **of_call}}
