# SPDX-License-Identifier: Apache-2.0
"""The newest whole checkpoint of a run, to resume from. Needs no torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from bytecheckpoint.errors import CheckpointError, ConfigError, StorageError, UnsupportedError
from bytecheckpoint.frameworks.roles import check_role, folder_of_role
from bytecheckpoint.local_path import local_path
from bytecheckpoint.parts import PARTS, REFERENCE
from bytecheckpoint.step_names import step_paths
from bytecheckpoint.steps import StepFolder, look_at_step

__all__ = ["latest", "newest_whole"]

_MOST_NAMED = 5


def latest(run: str | os.PathLike[str], role: str = "") -> str | None:
    """The folder of the newest whole checkpoint of a run; None if the run has none yet.

    Give it to ``load_state_dict``, ``BcpReader`` or, of what ``bytecheckpoint.save`` saved, ``bytecheckpoint.load``::

        path = bytecheckpoint.latest("run")
        if path is not None:
            bytecheckpoint.load_state_dict(path, state)

    Local: it looks at what is on disk now, and changes nothing; where ranks may see different things, ask on one and
    broadcast. The newest is the one of the highest step, as for ``Retention``; the tracker of ``bytecheckpoint.save``
    is not asked (``find_latest_ckpt_path`` does so). Step folders are those that ``scan_steps`` knows by name, whoever
    wrote them, and symbolic links of such names. Each newer one that is passed over is a ``RuntimeWarning`` that says
    why.

    None means that training may begin at step 0: there is no such folder, no step folder in it, or none in which a
    checkpoint was ever committed: they are empty, hold other things, or are what the first saves left that died. If
    none is whole and one was committed, or cannot be looked at, it is an error, as training from step 0 would in the
    end replace what may be rescued.

    Args:
        run: Folder of the run.
        role: As the checkpoint was saved with, by ``bytecheckpoint.save``.

    Raises:
        UnsupportedError: The steps are those of ByteCheckpoint 0.0.2 or 0.0.3.
        CheckpointError: There are step folders, and none is whole: what they are instead, newest first.
        ConfigError: A URL, an unknown role, or ``run`` is itself a checkpoint rather than a folder of step folders.
        StorageError: The folder cannot be listed.
    """
    return newest_whole(folder_of_role(local_path(run), check_role(role)), None, "latest")


def newest_whole(run: Path, pattern: str | None, asked: str) -> str | None:
    """The same for step folders of any names.

    Args:
        pattern: As for ``scan_steps``.
        asked: Name of the function that is called, for messages.
    """
    try:
        run.lstat()  # of a link: where a disk is not mounted it leads nowhere, and the run is not new
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{asked}({run}): {error.strerror}", str(run), error.errno or 0) from error
    paths = step_paths(run, pattern, follow_links=True)
    if not paths:
        _refuse_a_checkpoint(run, asked)
    passed: list[StepFolder] = []
    found: StepFolder | None = None
    for step, path in reversed(paths):
        folder = look_at_step(step, path)
        if folder is None and Path(path).is_symlink():
            folder = StepFolder(step=step, path=path, state="unknown", reason="a symbolic link that leads to no folder")
        if folder is not None and folder.is_complete:
            found = folder
            break
        if folder is not None:
            passed.append(folder)
    if found is None:
        _refuse_loss(run, passed, asked)
    for folder in passed:
        if found is None or folder.step > found.step:
            instead = "no other is whole" if found is None else f"taking {found.path}"
            warnings.warn(
                f"{asked}({run}): passing over {folder.path}, which is {_why_not(folder)}; {instead}",
                RuntimeWarning,
                stacklevel=3,  # who calls that function
            )
    return None if found is None else found.path


def _why_not(folder: StepFolder) -> str:
    return f"{folder.state}: {folder.reason}" if folder.reason else folder.state


def _was_committed(folder: StepFolder) -> bool:
    """Whether a checkpoint was there at some time, or may have been, as far as that can be told."""
    if folder.state in ("half", "saving"):
        # Without a model nothing was ever whole. Of ranks that save on their own, one may have been faster.
        return bool(folder.components) and folder.has_mark
    return folder.has_mark


def _refuse_loss(run: Path, folders: Sequence[StepFolder], asked: str) -> None:
    lost = [folder for folder in folders if _was_committed(folder)]
    if not lost:
        return
    if any(folder.reason == REFERENCE for folder in lost):
        raise UnsupportedError(f"{asked}({run}): {lost[0].path}: {REFERENCE}", str(run))
    named = [f"{folder.name} is {_why_not(folder)}" for folder in lost[:_MOST_NAMED]]
    if len(lost) > _MOST_NAMED:
        named.append(f"and {len(lost) - _MOST_NAMED} more")
    raise CheckpointError(
        f"{asked}({run}): there are checkpoints, and none is whole: {'; '.join(named)}. To begin at step 0, use "
        "another folder, or move these away",
        str(run),
    )


def _refuse_a_checkpoint(run: Path, asked: str) -> None:
    if any(os.path.lexists(run / name / ".metadata") for name in ("", *PARTS)):
        raise ConfigError(
            f"{asked}({run}): this folder is a checkpoint itself, and has no step folders: pass its path to the load, "
            "or the folder of the run",
            str(run),
        )
