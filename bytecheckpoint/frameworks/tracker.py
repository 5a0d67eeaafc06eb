# SPDX-License-Identifier: Apache-2.0
"""The file that names the newest checkpoint of a run."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from bytecheckpoint import _core
from bytecheckpoint._fork_locks import ForkSafeLock
from bytecheckpoint.errors import ConfigError, StorageError
from bytecheckpoint.frameworks.roles import check_role, folder_of_role
from bytecheckpoint.local_path import local_path
from bytecheckpoint.newest import newest_whole
from bytecheckpoint.small_files import read_small_file, replacing
from bytecheckpoint.step_names import MOST_DIGITS, step_number
from bytecheckpoint.steps import look_at_step

__all__ = ["TRACKER", "find_latest_ckpt_path", "step_folder", "write_tracker"]

TRACKER = "latest_checkpointed_iteration.txt"

_MAX_BYTES = 4096  # of it; the number of a step takes 18

_writing = ForkSafeLock()  # saves of one process may end at the same time


def step_folder(root: str | os.PathLike[str], step: int) -> Path:
    """Of one step of a run.

    Raises:
        ConfigError: A number that no run reaches, whose folder would not be found again.
    """
    if isinstance(step, int) and step >= 10**MOST_DIGITS:
        raise ConfigError(f"global_steps: a number of {MOST_DIGITS} digits at most wanted")
    return Path(root) / f"global_step_{step}"


def write_tracker(root: str | os.PathLike[str], step: int) -> None:
    """Says durably that ``step`` is the newest; before, it was another or none, never half a number.

    Raises:
        StorageError: The file system refused, or something else than a file is in the place of the tracker or of its
            temporary file; the tracker says what it said.
    """
    # The same name each time: what a killed process left goes.
    with _writing:
        try:
            directory = _core.Directory(str(root))
            with replacing(directory, TRACKER, f".{TRACKER}.tmp") as file:
                file.write(str(step).encode("ascii"))
        except StorageError as error:
            error.add_note(f"{step_folder(root, step)} is committed and loads; only {TRACKER} does not name it")
            raise
        directory.sync()


def find_latest_ckpt_path(root: str | os.PathLike[str], role: str = "") -> str | None:
    """The step folder that the tracker of a run names, for ``bytecheckpoint.load``; None if the run has none yet.

    Local, and of what is on disk: a save that is under way does not count; wait for its handle if it should. If the
    step that the tracker names is gone, or not whole, or there is no tracker, it is the whole one of the highest step,
    with a warning, and one for each step folder that is passed over; what None means, and what is an error, is said at
    ``latest``. A step is whole if all parts that were saved together are there.

    Args:
        root: ``ckpt_path`` of ``bytecheckpoint.save``.
        role: As it was saved with.

    Raises:
        ConfigError: An unknown role; a URL.
        StorageError: The tracker or the folder cannot be read.
        CheckpointError, UnsupportedError: As ``latest``.
    """
    folder = folder_of_role(local_path(root), check_role(role))
    tracker = folder / TRACKER
    found = read_small_file(tracker, _MAX_BYTES)
    text = (found or b"").decode("ascii", errors="replace").strip()
    named = step_number(text)
    if named is not None:
        path = str(step_folder(folder, named))
        step = look_at_step(named, path)
        if step is not None and step.is_complete:
            return path
    newest = newest_whole(folder, r"global_step_(\d+)", "find_latest_ckpt_path")
    if newest is not None or text:
        why = f"names step {text[:MOST_DIGITS]!r}, which is not there whole" if text else "is not there"
        warnings.warn(f"{tracker} {why}: taking {newest or 'none'}", RuntimeWarning, stacklevel=2)
    return newest
