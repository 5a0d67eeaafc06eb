# SPDX-License-Identifier: Apache-2.0
"""Lines of the journal: in which folder the line of a call goes, and how it is appended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.storage.journal_files import FOLDER
from bytecheckpoint.storage.journal_files import append as append_line
from bytecheckpoint.storage.step_names import DEFAULT_PATTERN, compile_pattern, step_number

__all__ = ["append", "place_of", "run_of"]

_STEP = compile_pattern(DEFAULT_PATTERN)


def place_of(path: str, config: Config, *, is_save: bool) -> tuple[Path | None, str, int | None]:
    """Returns where the line of a call goes. Looks at no storage.

    Args:
        path: Path of the checkpoint: an absolute one, or a URL.
        config: Settings. ``journal`` is ``auto``, ``off`` or a folder.
        is_save: Whether the call is a save. A load has a line only where a folder was named.

    Returns:
        The folder of the journal, None if there is none; the path of the checkpoint, relative to the folder of the run
        if it is a step of a run; and the number of the step, None if it is none.
    """
    if config.journal == "off":
        return None, path, None
    run, step = _step_of(path)
    relative = path if run is None else os.path.relpath(path, run)
    if config.journal != "auto":
        return Path(config.journal), relative, step
    if "://" in path or not is_save:
        return None, relative, step
    return Path(path) / FOLDER, os.path.relpath(path, run_of(path)), step


def run_of(path: str) -> str:
    """Returns the folder of the run that a checkpoint is a step of, or a part of a step; else the one that it is in."""
    run, _ = _step_of(path)
    return os.path.dirname(path) if run is None else str(run)  # noqa: PTH120


def _step_of(path: str) -> tuple[Path | None, int | None]:
    """Returns the folder of the run that a checkpoint is a step of, or a part of a step; and the step."""
    if "://" in path:
        return None, None
    for folder in (Path(path), Path(path).parent):
        match = _STEP.fullmatch(folder.name)
        step = None if match is None else step_number(match[1] or "")
        if step is not None:
            return folder.parent, step
    return None, None


def append(folder: Path, record: dict[str, Any]) -> None:
    """Appends a record to the journal in ``folder``, which is made if its parent exists.

    Raises:
        OSError: The file system refuses, or has less than 1 MiB left.
    """
    append_line(folder, json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n")
