# SPDX-License-Identifier: Apache-2.0
"""What the page of a run holds, as one JSON value.

A page has room for some hundred thousand figures of ranks. The newest save and load have all of theirs, then the calls
with the costliest findings, then the newest ones. Of the others the page has the largest figure of each block of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.findings.figures import RankFigures, rank_figures, report_of, text_of
from bytecheckpoint.findings.findings import Finding
from bytecheckpoint.observability.page.rank_columns import num_cells, num_spans, of_blocks, of_ranks, timelines_of
from bytecheckpoint.observability.page.untrusted import cleaned, shown
from bytecheckpoint.observability.run_folder import Run, holds_steps
from bytecheckpoint.observability.summary import Trouble, failure_text
from bytecheckpoint.observability.whole_calls import num_calls, part_of

__all__ = ["LargestTensors", "Space", "StepSpace", "page_contents"]

_MOST_CELLS = 400_000
_MOST_SPANS = 25_000
_MOST_TROUBLES, _MOST_FAILURES = 30, 10


@dataclass(frozen=True)
class LargestTensors:
    """The largest tensors of a checkpoint.

    Attributes:
        path: The checkpoint.
        num_tensors: Number of its tensors.
        num_bytes: Bytes of them all.
        rows: Name, dtype, shape as text, bytes and number of chunks of the largest, the largest first.
    """

    path: str
    num_tensors: int
    num_bytes: int
    rows: Sequence[tuple[str, str, str, int, int]]


@dataclass(frozen=True)
class StepSpace:
    """What one step takes on disk.

    Attributes:
        path: The step, relative to the run folder.
        step: Its number.
        own_bytes: What the disk has for it alone.
        linked_bytes: What the disk has of files that have other names, too, such as those of other steps.
        unnamed_bytes: Bytes of its files that no commit mark names: left by a save that died, or of one under way.
        is_readable: Whether everything in it could be read.
    """

    path: str
    step: int | None
    own_bytes: int
    linked_bytes: int
    unnamed_bytes: int
    is_readable: bool


@dataclass(frozen=True)
class Space:
    """What the steps of a run take on disk.

    Attributes:
        allocated_bytes: What all of them take; a file with several names counts once.
        shared_bytes: What hard links save: the difference to one file for each name.
        steps: Each step that is there, sorted by step.
    """

    allocated_bytes: int
    shared_bytes: int
    steps: Sequence[StepSpace]


def page_contents(
    run: Run,
    found: Sequence[Sequence[Finding]],
    of_run: Sequence[Trouble],
    *,
    tensors: LargestTensors | None = None,
    space: Space | None = None,
    reload_s: float = 0.0,
) -> dict[str, Any]:
    """Returns what the script of the page reads.

    Args:
        run: The records.
        found: The findings of each record.
        of_run: What to look at in all of them together.
        tensors: The largest tensors of the newest checkpoint, if it could be read.
        space: What the steps take on disk, if the run folder could be read.
        reload_s: Seconds after which the page loads itself again; 0 for never.
    """
    figures = [rank_figures(record) for record in run.records]
    with_ranks, with_timelines = _detailed(run.records, figures, found)
    newest = run.records[-1] if run.records else {}
    return {
        "format": 1,
        "run": shown(run.path.name or str(run.path)),
        "path": shown(str(run.path)),
        "skipped": run.num_skipped,
        "num_saves": num_calls(run.records, "save"),
        "num_loads": num_calls(run.records, "load"),
        "config": cleaned(newest.get("config")),
        "versions": cleaned(newest.get("versions")),
        "reload_s": reload_s,
        "failures": [shown(failure_text(record)) for record in run.failures[: -_MOST_FAILURES - 1 : -1]],
        "num_failures": len(run.failures),
        "troubles": [_trouble(trouble) for trouble in of_run[:_MOST_TROUBLES]],
        "num_troubles": len(of_run),
        "tensors": _tensors(tensors),
        "space": _space(space),
        "calls": [
            _call(
                run.path,
                record,
                of_record,
                of_ranks(of_figures) if at in with_ranks else of_blocks(of_figures),
                timelines_of(record) if at in with_timelines else {},
            )
            for at, (record, of_record, of_figures) in enumerate(zip(run.records, found, figures, strict=True))
        ],
    }


def _detailed(
    records: Sequence[Mapping[str, Any]], figures: Sequence[RankFigures], found: Sequence[Sequence[Finding]]
) -> tuple[set[int], set[int]]:
    """Returns which records have the figures of all their ranks, and which have their timelines."""
    newest_first = range(len(records) - 1, -1, -1)
    first = [next((at for at in newest_first if records[at]["kind"] == kind), None) for kind in ("save", "load")]
    by_cost = sorted(newest_first, key=lambda at: -sum(finding.seconds for finding in found[at]))
    order = [*(at for at in first if at is not None), *by_cost]
    return (
        _within(order, [num_cells(each) for each in figures], _MOST_CELLS),
        _within(order, [num_spans(record) for record in records], _MOST_SPANS),
    )


def _within(order: Iterable[int], costs: Sequence[int], most: int) -> set[int]:
    """Returns those that fit into a budget; the first one always does."""
    chosen: set[int] = set()
    for at in order:
        if at not in chosen and (not chosen or costs[at] <= most):
            chosen.add(at)
            most -= costs[at]
    return chosen


def _trouble(trouble: Trouble) -> dict[str, Any]:
    return _finding(trouble.finding) | {
        "calls": list(trouble.calls),
        "worst": trouble.worst,
        "all_s": round(trouble.seconds, 6),
        "how_often": trouble.how_often(),
        "of": trouble.kind,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    made: dict[str, Any] = cleaned(finding.to_dict())
    return made


def _call(
    run: Path,
    record: Mapping[str, Any],
    found: Sequence[Finding],
    ranks: dict[str, Any],
    timelines: dict[str, Any],
) -> dict[str, Any]:
    names = ("kind", "at", "path", "step", "save_id", "world_size", "rank", "is_async", "mesh", "sizes")
    return {
        **{name: cleaned(record.get(name)) for name in names},
        "report": cleaned({name: value for name, value in report_of(record).items() if name != "ranks"}),
        "part": part_of(record),
        "is_there": _is_there(run, record),
        "findings": [_finding(finding) for finding in found],
        "ranks": ranks,
        "timelines": timelines,
    }


def _is_there(run: Path, record: Mapping[str, Any]) -> bool | None:
    """Whether the checkpoint is still on disk; None of loads, and of paths that are not local."""
    path = text_of(record, "path")
    if not holds_steps(run):
        return None
    if record.get("kind") != "save" or not path or "://" in path or "\0" in path:
        return None
    try:
        return (run / path / ".metadata").exists()
    except OSError:
        return None


def _space(space: Space | None) -> dict[str, Any] | None:
    if space is None:
        return None
    return {
        "allocated_bytes": space.allocated_bytes,
        "shared_bytes": space.shared_bytes,
        "steps": [{**asdict(step), "path": shown(step.path)} for step in space.steps],
    }


def _tensors(tensors: LargestTensors | None) -> dict[str, Any] | None:
    if tensors is None:
        return None
    return {
        "path": shown(tensors.path),
        "num_tensors": tensors.num_tensors,
        "num_bytes": tensors.num_bytes,
        "rows": [[shown(name), shown(dtype), shape, num, chunks] for name, dtype, shape, num, chunks in tensors.rows],
    }
