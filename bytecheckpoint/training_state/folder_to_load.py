# SPDX-License-Identifier: Apache-2.0
"""The folder that a path means for ``load``; and if there is no checkpoint, what there is nearby."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from bytecheckpoint.checkpoint.roles import folder_of_role, known_roles
from bytecheckpoint.checkpoint.steps import scan_steps
from bytecheckpoint.config import Config
from bytecheckpoint.contents.wrong_path import refuse_reference
from bytecheckpoint.errors import CheckpointNotFoundError, StorageError, UnsupportedError
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.paths import Place, TieredPath, below, location_to_read, name_of, parent_of
from bytecheckpoint.storage.step_places import has_all_files
from bytecheckpoint.training_state.tracker import step_folder

__all__ = ["folder_to_load"]

# A message names no more steps than this.
_MOST_STEPS = 20


def folder_to_load(ckpt_path: str | os.PathLike[str] | None, role: str, config: Config) -> Place:
    """Returns the folder of the parts: ``ckpt_path`` itself or, with a role, the role's folder in the run.

    Args:
        ckpt_path: Path or URL that the user passed; of a step in ``Tiers``, the nearest place with a model is taken.
        role: A role that ``check_role`` returned.
        config: Settings for the store, if it is a URL.

    Raises:
        CheckpointNotFoundError: No model was saved there. The message says what was saved nearby.
        UnsupportedError: ByteCheckpoint 0.0.2 or 0.0.3 wrote the checkpoint there.
        StorageError: The file system refused to look there.
        ConfigError: The path is a URL of an unknown kind.
    """
    if isinstance(ckpt_path, TieredPath):
        ckpt_path.open()
        for place in ckpt_path.places[:-1]:
            with suppress(CheckpointNotFoundError):
                folder = folder_to_load(place, role, config)
                if has_all_files(folder):
                    return folder
        ckpt_path = ckpt_path.places[-1]
    path = known(location_to_read(ckpt_path), config)
    above = parent_of(path)
    known(parent_of(above), config)  # where else to look
    tried = [path]
    if role:
        tried += [folder_of_role(path, role), below(folder_of_role(above, role), name_of(path))]
        tried = [folder for folder in tried if role in (name_of(folder), name_of(parent_of(folder)))]
    for folder in tried:
        if folder_at(below(folder, "model")).is_there():
            return folder
    refuse_reference(path, "load")
    of_role = f" of role {role!r}" if role else ""
    near = [path, above, parent_of(above)] if role else [path, above]
    hint = _what_there_is([folder_of_role(folder, role) for folder in near], config)
    if folder_at(path).has(".metadata"):
        hint = f", but one of a state dict, which load_state_dict loads{hint}"
    raise CheckpointNotFoundError(
        f"load({path}): no checkpoint of bytecheckpoint.save{of_role} in {' or '.join(map(str, tried))}{hint}",
        str(path),
    )


def _what_there_is(folders: Sequence[Place], config: Config) -> str:
    """Returns a hint for a user who asked for a step that does not exist."""
    for folder in folders:
        steps = _steps_in(folder, config)
        if steps:
            return (
                f"; {folder} has the steps {', '.join(map(str, steps[-_MOST_STEPS:]))}: pass "
                f"'{step_folder(folder, steps[-1])}', or what find_latest_ckpt_path gives"
            )
    for folder in folders:
        roles = [role for role in known_roles() if _steps_in(folder_of_role(folder, role), config)]
        if roles:
            return f"; {folder} has steps of the roles {', '.join(roles)}: pass role={roles[0]!r}"
    return (
        ": pass the folder of a step, as find_latest_ckpt_path gives it; a plain DCP checkpoint loads with "
        "load_state_dict"
    )


def _steps_in(folder: Place, config: Config) -> list[int]:
    try:
        return [step.step for step in scan_steps(folder, pattern=r"global_step_(\d+)", config=config)]
    except (StorageError, UnsupportedError):
        return []  # it is not a folder, cannot be listed, or is above what this call may look at
