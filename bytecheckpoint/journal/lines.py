# SPDX-License-Identifier: Apache-2.0
"""Lines of the journal: in which folder the line of a call goes, and how it is appended."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.storage.journal_files import FOLDER, journal_folders, journal_paths
from bytecheckpoint.storage.journal_files import append as append_line
from bytecheckpoint.storage.names import is_own_file
from bytecheckpoint.storage.step_names import run_and_step, run_of

__all__ = ["append", "folder_of_failure", "place_of"]


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
    run, step = run_and_step(path)
    relative = path if run is None or "://" in path else os.path.relpath(path, run)
    if config.journal != "auto":
        return Path(config.journal), relative, step
    if "://" in path or not is_save:
        return None, relative, step
    return Path(path) / FOLDER, os.path.relpath(path, run_of(path)), step


def folder_of_failure(path: str) -> Path | None:
    """Returns the folder of a journal that takes the line of a save that failed; None if there is none yet.

    It is that of the folder of the save, if a checkpoint or a part of one is in it; else that of the step of the run
    which was written last, as with the lines of steps that are removed. No folder is made or kept for a line.
    """
    own = Path(path)
    with suppress(OSError), os.scandir(own) as entries:
        if any(entry.name == FOLDER or (is_own_file(entry.name) and entry.is_file()) for entry in entries):
            return own / FOLDER
    run, _ = run_and_step(path)
    newest: tuple[float, Path] | None = None
    with suppress(OSError):
        for folder in journal_folders(Path(run)) if run is not None and Path(run).is_dir() else []:
            with suppress(OSError):
                written = max(file.stat().st_mtime for file in journal_paths(folder)[:1])
                newest = max(newest or (0.0, folder), (written, folder))
    return None if newest is None else newest[1]


def append(folder: Path, record: dict[str, Any]) -> None:
    """Appends a record to the journal in ``folder``, which is made if its parent exists.

    Raises:
        OSError: The file system refuses, or has less than 1 MiB left.
    """
    append_line(folder, json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n")
