# SPDX-License-Identifier: Apache-2.0
"""The removal of steps in the folder at a path or URL."""

from __future__ import annotations

import os
from pathlib import Path

from bytecheckpoint.config import Config
from bytecheckpoint.storage.local_removal import LocalRemoval
from bytecheckpoint.storage.object_store.removal import StoreRemoval
from bytecheckpoint.storage.paths import as_place
from bytecheckpoint.storage.removal import StepRemoval

__all__ = ["removal_in"]


def removal_in(
    run: str | os.PathLike[str],
    *,
    remove_others: bool,
    remove_foreign: bool,
    grace_s: float,
    config: Config | None,
) -> StepRemoval:
    """Returns what removes steps of a run.

    Args:
        run: Path, or URL as ``store_url`` returns it, of the run.
        remove_others: Whether to remove files that are not of a checkpoint, too.
        remove_foreign: Whether to remove checkpoints of other libraries that are folders in a step, too.
        grace_s: Seconds after which nobody will go on with what nobody has changed.
        config: Settings of the saves of the run; None reads ``BYTECHECKPOINT_*`` variables, if they are needed.

    Raises:
        StorageError: The folder cannot be opened.
    """
    place = as_place(run)
    if isinstance(place, Path):
        return LocalRemoval(place, remove_others=remove_others, remove_foreign=remove_foreign, grace_s=grace_s)
    return StoreRemoval(remove_others=remove_others, remove_foreign=remove_foreign, grace_s=grace_s, config=config)
