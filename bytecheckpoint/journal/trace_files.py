# SPDX-License-Identifier: Apache-2.0
"""Whole traces, with ``Config(trace="full")``: each rank keeps its own, in the folder ``traces`` beside the journal.

A file is named by kind, step and rank: ``save.100.3.trace``. A rank keeps its last ``_MOST_KEPT`` files in a folder.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from bytecheckpoint.report.rank_trace import RankTrace
from bytecheckpoint.storage.small_files import write_small_file

__all__ = ["TRACE_FOLDER", "TRACE_NAME", "keep_trace"]

TRACE_FOLDER = "traces"
TRACE_NAME = re.compile(r"(save|load)\.(\w+)\.(\d+)\.trace")
_MOST_KEPT = 16


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
    for each in (folder, folder / TRACE_FOLDER):
        with suppress(FileExistsError):
            each.mkdir()
    path = folder / TRACE_FOLDER / f"{kind}.{'none' if step is None else step}.{rank}.trace"
    write_small_file(path, trace.to_bytes(), sync=False)
    own = [other for other in path.parent.iterdir() if (m := TRACE_NAME.fullmatch(other.name)) and int(m[3]) == rank]
    by_age = sorted(own, key=lambda other: other.stat().st_mtime)
    for other in by_age[:-_MOST_KEPT]:
        other.unlink(missing_ok=True)
