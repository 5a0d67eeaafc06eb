# SPDX-License-Identifier: Apache-2.0
"""Reads the whole traces of ranks, which ``journal/trace_files.py`` keeps with ``Config(trace="full")``."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.journal.trace_files import TRACE_FOLDER, TRACE_NAME
from bytecheckpoint.report.rank_trace import RankTrace

__all__ = ["read_traces", "with_whole_traces"]

# The Unix clocks of machines differ; two calls at one step are farther apart.
_SAME_CALL_S = 2.0


def read_traces(folder: Path, kind: str, step: int | None) -> dict[int, RankTrace]:
    """Returns the traces of one call, by rank. A file that is damaged is left out.

    Args:
        folder: Folder of the journal.
        kind: ``save`` or ``load``.
        step: Number of the step; None if the checkpoint is none.
    """
    found = {}
    for path in (folder / TRACE_FOLDER).glob(f"{kind}.{'none' if step is None else step}.*.trace"):
        match = TRACE_NAME.fullmatch(path.name)
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
