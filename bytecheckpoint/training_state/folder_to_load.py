# SPDX-License-Identifier: Apache-2.0
"""The folder that a path means for ``load``; and if there is no checkpoint, what there is nearby."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bytecheckpoint.checkpoint.local_path import path_to_read
from bytecheckpoint.checkpoint.roles import folder_of_role, known_roles
from bytecheckpoint.checkpoint.small_files import storage_errors
from bytecheckpoint.checkpoint.steps import scan_steps
from bytecheckpoint.checkpoint.wrong_path import refuse_reference
from bytecheckpoint.errors import CheckpointNotFoundError, StorageError
from bytecheckpoint.training_state.tracker import step_folder

__all__ = ["folder_to_load"]

# A message names no more steps than this.
_MOST_STEPS = 20


def folder_to_load(ckpt_path: str | os.PathLike[str] | None, role: str) -> Path:
    """Returns the folder of the parts: ``ckpt_path`` itself or, with a role, the role's folder in the run.

    Raises:
        CheckpointNotFoundError: No model was saved there. The message says what was saved nearby.
        UnsupportedError: ByteCheckpoint 0.0.2 or 0.0.3 wrote the checkpoint there.
        StorageError: The file system refused to look there.
        ConfigError: The path is a URL.
    """
    path = path_to_read(ckpt_path)
    tried = [path]
    if role:
        tried += [folder_of_role(path, role), folder_of_role(path.parent, role) / path.name]
        tried = [folder for folder in tried if role in (folder.name, folder.parent.name)]
    with storage_errors("load", path):
        for folder in tried:
            if (folder / "model").is_dir():
                return folder
    refuse_reference(path, "load")
    of_role = f" of role {role!r}" if role else ""
    near = [path, path.parent, path.parent.parent] if role else [path, path.parent]
    hint = _what_there_is([folder_of_role(folder, role) for folder in near])
    if os.path.lexists(path / ".metadata"):
        hint = f", but one of a state dict, which load_state_dict loads{hint}"
    raise CheckpointNotFoundError(
        f"load({path}): no checkpoint of bytecheckpoint.save{of_role} in {' or '.join(map(str, tried))}{hint}",
        str(path),
    )


def _what_there_is(folders: Sequence[Path]) -> str:
    """Returns a hint for a user who asked for a step that does not exist."""
    for folder in folders:
        steps = _steps_in(folder)
        if steps:
            return (
                f"; {folder} has the steps {', '.join(map(str, steps[-_MOST_STEPS:]))}: pass "
                f"'{step_folder(folder, steps[-1])}', or what find_latest_ckpt_path gives"
            )
    for folder in folders:
        roles = [role for role in known_roles() if _steps_in(folder_of_role(folder, role))]
        if roles:
            return f"; {folder} has steps of the roles {', '.join(roles)}: pass role={roles[0]!r}"
    return (
        ": pass the folder of a step, as find_latest_ckpt_path gives it; a plain DCP checkpoint loads with "
        "load_state_dict"
    )


def _steps_in(folder: Path) -> list[int]:
    try:
        return [step.step for step in scan_steps(folder, pattern=r"global_step_(\d+)")]
    except StorageError:
        return []  # it is not a folder, or cannot be listed
