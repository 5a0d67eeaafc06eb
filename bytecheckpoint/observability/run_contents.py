# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of a run hold, and take on disk, for the page of the run."""

from __future__ import annotations

import os

from bytecheckpoint.checkpoint.disk_usage import disk_usage
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import open_contents, place_text
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.findings.figures import text_of
from bytecheckpoint.native import _core
from bytecheckpoint.observability.page.contents import LargestTensors, Space, StepSpace
from bytecheckpoint.observability.run_folder import Run, holds_steps

__all__ = ["largest_tensors", "space_of"]

_MOST_TENSORS = 30
_MOST_TRIES = 5  # the newest may be removed, or be written again


def largest_tensors(run: Run) -> LargestTensors | None:
    """Returns the largest tensors of the newest checkpoint that is still there; None if none can be read."""
    saves = [record for record in run.records if record["kind"] == "save"]
    for record in saves[: -_MOST_TRIES - 1 : -1]:
        path = text_of(record, "path")
        if not path or "://" in path or "\0" in path:
            continue
        try:
            contents = open_contents(str(run.path / path), config=Config.from_env(), kind=_core.Checkpoint)
        except (CheckpointError, OSError):
            continue
        tensors = [item for item in contents.items if item.dtype is not None]
        largest = sorted(tensors, key=lambda item: -item.num_bytes)[:_MOST_TENSORS]
        rows = [
            (
                place_text(item.component, item.rank) + item.name,
                str(item.dtype),
                str(list(item.shape)),
                item.num_bytes,
                item.num_chunks,
            )
            for item in largest
        ]
        return LargestTensors(path, len(tensors), sum(item.num_bytes for item in tensors), rows)
    return None


def space_of(run: Run) -> Space | None:
    """Returns what the steps of a run take on disk; None if the journal is elsewhere, or the folder cannot be read."""
    if not holds_steps(run.path):
        return None
    try:
        usage = disk_usage(run.path, depth=0)
    except (CheckpointError, OSError):
        return None
    if not usage.is_run:
        return None
    return Space(
        usage.allocated_bytes,
        usage.shared_bytes,
        [
            StepSpace(
                path=os.path.relpath(step.path, usage.path),
                step=step.step,
                own_bytes=step.allocated_bytes - step.linked_bytes,
                linked_bytes=step.linked_bytes,
                unnamed_bytes=step.unreferenced_bytes + step.unfinished_bytes,
                is_readable=not step.problems,
            )
            for step in usage.checkpoints
        ],
    )
