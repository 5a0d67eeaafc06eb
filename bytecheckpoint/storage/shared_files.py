# SPDX-License-Identifier: Apache-2.0
"""Data files that several steps of a run have: a save linked them, because nothing in them had changed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.parts import step_and_part

__all__ = ["others_that_have", "shared_with"]


def others_that_have(folder: Path, name: str) -> list[str]:
    """Returns the other steps of a run that have the same file, by name. Empty if that cannot be found out.

    Args:
        folder: A step, or a part of one.
        name: Name of a data file in it.
    """
    step, part = step_and_part(folder)
    step = Path(step)
    try:
        own = (folder / name).stat()
        steps = [] if own.st_nlink < 2 else [each.name for each in os.scandir(step.parent) if each.is_dir()]
    except OSError:
        return []

    def has_it(other: str) -> bool:
        try:
            return os.path.samestat(own, (step.parent / other / part / name).stat())
        except OSError:
            return False

    return sorted(other for other in steps if other != step.name and has_it(other))


def shared_with(going: Iterable[str], kept: Iterable[str]) -> dict[str, list[str]]:
    """Returns, for each of the steps ``going`` that has files of steps in ``kept``, the names of these.

    Args:
        going: Paths of steps that are to be removed.
        kept: Paths of those that stay; they are looked at only if a step that goes has linked files.
    """
    linked = {path: _linked_files(path) for path in going}
    if not any(linked.values()):
        return {}
    of_kept = {path: _linked_files(path) for path in kept}
    found = {
        path: sorted(os.path.basename(other) for other, files in of_kept.items() if files & of_path)  # noqa: PTH119
        for path, of_path in linked.items()
    }
    return {path: names for path, names in found.items() if names}


def _linked_files(path: str) -> set[tuple[int, int] | None]:
    """Returns device and inode of the files of a step that have several names; none if it cannot be looked at."""
    try:
        return {file.inode for file in folder_at(path).files() if file.num_links > 1}
    except StorageError:
        return set()
