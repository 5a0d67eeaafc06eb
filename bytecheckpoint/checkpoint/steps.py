# SPDX-License-Identifier: Apache-2.0
"""The step folders of a run, and what each of them holds. Needs no torch."""

from __future__ import annotations

import dataclasses
import os

from bytecheckpoint.checkpoint.keeping import IS_DRAINED, drains_of
from bytecheckpoint.checkpoint.verification import verify
from bytecheckpoint.config import Config
from bytecheckpoint.contents.foreign_formats import what_it_is
from bytecheckpoint.errors import CheckpointError, UnsupportedError
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.parts import inspect_step, is_bare
from bytecheckpoint.storage.paths import as_place, below, check_name, location
from bytecheckpoint.storage.step_folder import StepFolder, folder_of, step_paths
from bytecheckpoint.storage.step_places import has_all_files
from bytecheckpoint.storage.tiers import Tiers

__all__ = ["look_at_step", "scan_steps"]


def scan_steps(
    root: str | os.PathLike[str], *, pattern: str | None = None, deep: bool = False, config: Config | None = None
) -> list[StepFolder]:
    """Looks at all step folders of a run folder.

    Local. It changes nothing, takes no lock, and reads no data unless ``deep``, so it never disturbs a save. If a save
    is under way, the result may be out of date when the call returns. Symbolic links are left out.

    Args:
        root: Folder of a run, or its URL in an object store. Of ``Tiers``, the steps of all places are returned, each
            from the nearest in which it is complete; ``StepFolder.tiers`` says what is where.
        pattern: Regular expression that matches the whole name of a step folder. Its first group is the step, of at
            most 18 digits. None matches ``step-100``, ``step_100``, ``step100``, ``global_step_100``,
            ``checkpoint-100`` and ``100``; ``iter_0000100``, ``epoch_100`` and ``ep1-ba100``. Where there are
            checkpoints of several of the last three and the others, it must be passed.
        deep: Whether to verify every byte of the complete checkpoints. Damaged ones are ``corrupt``.
        config: Settings for ``deep``, see ``verify``; and for the store, if ``root`` is a URL.

    Returns:
        The step folders, sorted by step, then by name.

    Raises:
        ConfigError: ``pattern`` is not such an expression, or ``root`` is a URL of an unknown kind.
        StorageError: ``root`` cannot be listed.
    """
    if isinstance(root, Tiers):
        return _scan_tiers(root, pattern, deep)
    folders = []
    for step, path in step_paths(known(location(root), config), pattern):
        folder = look_at_step(step, path)
        if folder is not None:
            folders.append(_verified(folder, config) if deep and folder.is_complete else folder)
    return folders


def _scan_tiers(tiers: Tiers, pattern: str | None, deep: bool) -> list[StepFolder]:
    tiers.open()
    found: dict[tuple[int, str], dict[str, StepFolder]] = {}
    for tier, place in zip(tiers.names, tiers.places, strict=True):
        folders = (
            [] if folder_at(place).is_gone() else scan_steps(place, pattern=pattern, deep=deep, config=tiers.config)
        )
        for folder in folders:
            found.setdefault((folder.step, folder.name), {})[tier] = folder
    return [_in_tiers(by_tier) for _, by_tier in sorted(found.items())]


def _in_tiers(by_tier: dict[str, StepFolder]) -> StepFolder:
    """Returns a step as it is in the nearest place in which it is complete."""
    nearest = next((folder for folder in by_tier.values() if folder.is_complete), next(iter(by_tier.values())))
    states = {tier: folder.state for tier, folder in by_tier.items()}
    for tier, folder in by_tier.items():
        if folder.save_ids and nearest.save_ids and folder.save_ids != nearest.save_ids:
            states[tier] = "another save"
    memory, near = by_tier.get("memory"), by_tier.get("near")
    if memory is not None and not memory.is_complete and not has_all_files(memory.path):
        states["memory"] = "partial"
    note = "" if near is None else drains_of([near.path]).get(near.path, "")
    if note:
        states["durable"] = "draining" if note == IS_DRAINED else "waits"
    return dataclasses.replace(nearest, tiers=states)


def look_at_step(step: int, path: str) -> StepFolder | None:
    """Looks at one folder; returns None if it has gone. Anything wrong with the folder is its state, not an error."""
    try:
        check_name(path)
        found = inspect_step(path)
        if is_bare(found) and folder_at(path).is_removed():
            return None
        folder = folder_of(step, path, found)
        foreign = what_it_is(as_place(path)) if folder.state == "unknown" and not folder.has_mark else ""
        return dataclasses.replace(folder, reason=foreign) if foreign else folder
    except CheckpointError as error:
        if folder_at(path).is_gone():
            return None
        return StepFolder(step=step, path=path, state="unknown", reason=str(error))


def _verified(folder: StepFolder, config: Config | None) -> StepFolder:
    problems = []
    for path in [str(below(folder.path, name)) for name in folder.components] or [folder.path]:
        try:
            problems += verify(path, config=config).problems
        except UnsupportedError:
            continue  # nothing that we can verify
        except CheckpointError:
            return look_at_step(folder.step, folder.path) or folder  # it changed in the meantime
    if not problems:
        return folder
    first = f"{problems[0].file}: {problems[0].message}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return dataclasses.replace(folder, state="corrupt", reason=first + more)
