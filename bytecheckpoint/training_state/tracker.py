# SPDX-License-Identifier: Apache-2.0
"""The tracker: the file that names the newest checkpoint of a run."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from bytecheckpoint.checkpoint.newest import Newest, newest_whole
from bytecheckpoint.checkpoint.tracker_text import TRACKER, tracker_text
from bytecheckpoint.config import Config
from bytecheckpoint.errors import ConfigError, StorageError
from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.paths import Place, below
from bytecheckpoint.storage.step_names import MOST_DIGITS, step_number
from bytecheckpoint.training_state.latest import one_look

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["TRACKER", "find_latest_ckpt_path", "step_folder", "write_tracker"]

_writing = ForkSafeLock()  # saves of one process may end at the same time


def step_folder(root: Place, step: int) -> Place:
    """Returns the folder of one step of a run.

    Raises:
        ConfigError: The step has so many digits that its folder would not be found again. No run gets that far.
    """
    if isinstance(step, int) and step >= 10**MOST_DIGITS:
        raise ConfigError(f"global_steps: must have at most {MOST_DIGITS} digits")
    return below(root, f"global_step_{step}")


def write_tracker(root: Place, step: int) -> None:
    """Durably writes ``step`` to the tracker as the newest step. A reader never sees half a number.

    Raises:
        StorageError: The file system refused, or something other than a file is in the place of the tracker or of its
            temporary file. The tracker is unchanged then; or it names the step, and a power cut may undo that.
    """
    text = str(step).encode("ascii")
    with _writing:
        try:
            folder_at(root).write_file(TRACKER, text)
        except StorageError as error:
            now = _text_now(root)
            if now == str(step):  # it is in place, and was only not synced
                raise
            names = f"still names step {now}" if now else "names no step"
            raise StorageError(
                f"{error}: {step_folder(root, step)} is committed, all parts, and loads; the tracker {names}",
                error.path,
                error.errno or 0,
            ) from error


def _text_now(root: Place) -> str:
    try:
        return tracker_text(root)
    except StorageError:
        return ""


def find_latest_ckpt_path(
    root: str | os.PathLike[str],
    role: str = "",
    *,
    process_group: dist.ProcessGroup | None = None,
    config: Config | None = None,
) -> str | None:
    """Returns what ``latest`` does, under ByteCheckpoint's name, of the step folders of ``bytecheckpoint.save`` alone.

    One more warning says if there is no tracker, or it names a step that is not whole. A save under way does not count;
    wait for its handle if it should.

    Args:
        root: ``ckpt_path`` of ``bytecheckpoint.save``.
        role: The role that it was saved with.
        process_group: Group of the ranks that will load, of which the lowest looks for all; None looks on this rank
            alone. See ``latest``.
        config: Settings for the store, if ``root`` is a URL; None reads ``BYTECHECKPOINT_*`` variables.

    Raises:
        ConfigError: The role is unknown, or ``root`` is a URL of an unknown kind.
        StorageError: The folder cannot be read, or the tracker in a store; see ``latest``.
        CheckpointError: See ``latest``.
        UnsupportedError: See ``latest``.
    """
    found = one_look("find_latest_ckpt_path", root, role, config, process_group, _newest_of_tracker)
    for text in found.warnings:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return found.path


def _newest_of_tracker(folder: Place) -> Newest:
    newest = newest_whole(folder, r"global_step_(\d+)", "find_latest_ckpt_path")
    try:
        text = tracker_text(folder)
    except StorageError:
        if isinstance(folder, str):
            raise  # the store does not answer
        return newest  # with a warning that says so
    named = step_number(text)
    if (newest.path is None and not text) or (named is not None and newest.path == str(step_folder(folder, named))):
        return newest
    why = f"names step {text[:MOST_DIGITS]!r}, which is not whole" if text else "is not there"
    return Newest(newest.path, (*newest.warnings, f"{below(folder, TRACKER)} {why}: taking {newest.path or 'none'}"))
