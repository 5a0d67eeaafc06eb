# SPDX-License-Identifier: Apache-2.0
"""Data files that several steps of a run have: a save linked them, because nothing in them had changed."""

from __future__ import annotations

import os
from pathlib import Path

from bytecheckpoint.storage.parts import step_and_part

__all__ = ["others_that_have"]


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
