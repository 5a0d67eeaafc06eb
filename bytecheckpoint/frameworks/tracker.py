# SPDX-License-Identifier: Apache-2.0
"""The file that names the newest checkpoint of a run."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path

from bytecheckpoint import _core
from bytecheckpoint.errors import StorageError
from bytecheckpoint.frameworks.roles import check_role, folder_of_role
from bytecheckpoint.local_path import local_path
from bytecheckpoint.parts import is_whole
from bytecheckpoint.steps import scan_steps

__all__ = ["TRACKER", "find_latest_ckpt_path", "step_folder", "write_tracker"]

TRACKER = "latest_checkpointed_iteration.txt"

_writing = threading.Lock()  # saves of one process may end at the same time


def step_folder(root: str | os.PathLike[str], step: int) -> Path:
    """Of one step of a run."""
    return Path(root) / f"global_step_{step}"


def write_tracker(root: str | os.PathLike[str], step: int) -> None:
    """Says durably that ``step`` is the newest; before, it was another or none, never half a number.

    Raises:
        StorageError: The file system refused; the tracker says what it said.
    """
    tracker = Path(root) / TRACKER
    # The same name each time: what a killed process left is written over.
    tmp = tracker.with_name(f".{TRACKER}.tmp")
    with _writing:
        try:
            try:
                with tmp.open("w", encoding="ascii") as file:
                    file.write(str(step))
                    file.flush()
                    os.fsync(file.fileno())
                tmp.rename(tracker)
            finally:
                tmp.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"write({tracker}): {error.strerror}", str(tracker), error.errno or 0) from error
        _core.sync_directory(str(root))


def find_latest_ckpt_path(root: str | os.PathLike[str], role: str = "") -> str | None:
    """The step folder of the newest checkpoint of a run, for ``bytecheckpoint.load``; None if there is none.

    Local, and of what is on disk: a save that is under way does not count; wait for its handle if it should. It is the
    step that the tracker names; if that is gone, or not whole, or there is no tracker, the whole one of the highest
    step, with a warning. A step is whole if all parts that were saved together are there.

    Args:
        root: ``ckpt_path`` of ``bytecheckpoint.save``.
        role: As it was saved with.

    Raises:
        ConfigError: An unknown role; a URL.
        StorageError: The tracker or the folder cannot be read.
    """
    folder = folder_of_role(local_path(root), check_role(role))
    tracker = folder / TRACKER
    try:
        text = tracker.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        text = ""
    except OSError as error:
        raise StorageError(f"read({tracker}): {error.strerror}", str(tracker), error.errno or 0) from error
    if text.isdecimal() and is_whole(step_folder(folder, int(text))):
        return str(step_folder(folder, int(text)))
    if not folder.is_dir():
        return None
    complete = [step.path for step in scan_steps(folder, pattern=r"global_step_(\d+)") if is_whole(step.path)]
    if not complete:
        return None
    why = f"names step {text!r}, which is not there whole" if text else "is not there"
    warnings.warn(f"{tracker} {why}: taking {complete[-1]}", RuntimeWarning, stacklevel=2)
    return complete[-1]
