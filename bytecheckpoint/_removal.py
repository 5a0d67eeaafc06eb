# SPDX-License-Identifier: Apache-2.0
"""The removal of one step folder. Needs no torch.

Everything is removed through open directories, and no symbolic link is followed (``csrc/io/remove_entry.h``): whoever
swaps a folder for a link meanwhile does not make it reach anything outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bytecheckpoint import _core
from bytecheckpoint._in_use import unheld
from bytecheckpoint.errors import CheckpointBusyError, CheckpointError
from bytecheckpoint.parts import inspect_step
from bytecheckpoint.steps import StepFolder, folder_of

__all__ = ["Outcome", "bytes_to_remove", "remove_folder"]

_MAX_FAILURES = 5
_IS_READ = "a load of this process reads it"


@dataclass
class Outcome:
    """What became of a folder that was to go.

    Attributes:
        is_loadable: Its commit mark is still there.
        bytes_freed: Of files whose names were removed.
        skipped: Why it was left alone; "" if it was not.
        failures: Deletes that failed; the first few.
        stays: What was left in it on purpose.
    """

    is_loadable: bool = True
    bytes_freed: int = 0
    skipped: str = ""
    failures: list[str] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)

    def fail(self, *failures: str) -> None:
        self.failures += failures[: _MAX_FAILURES - len(self.failures)]


def remove_folder(folder: StepFolder, root: _core.Directory, *, remove_others: bool) -> Outcome:
    """Removes a step folder that holds a checkpoint, or what is left of one, if it still is as it was looked at.

    The order is the point. First the right to commit there, so that no save is under way and none begins; then the
    commit marks, and that is synced; then everything else; the tmp that is the right goes last. Whoever dies in between
    leaves a folder without a mark and with a free tmp: half a checkpoint, which a later call removes.

    Args:
        root: That the folder is in.
    """
    outcome = Outcome()
    if folder.state != "complete" and not os.listdir(folder.path):  # noqa: PTH208
        # Nothing is in it, not even for a moment a tmp of ours: a save that has just made it may be about to begin.
        _remove_empty(root, folder.name, outcome)
        return outcome
    step = root.below(folder.name)
    # Of a folder with components: those that are there, the last that a save commits first.
    names = folder.components[::-1] or ("",)
    directories = {name: step.below(name) if name else step for name in names}
    try:
        rights = {name: _core.Removal(directory) for name, directory in directories.items()}
    except CheckpointBusyError:
        outcome.skipped = "a save, or another prune, is at it"
        return outcome
    found = inspect_step(folder.path, {name: right.tmp for name, right in rights.items()})
    now = folder_of(folder.step, folder.path, found)
    if _identity(now) != _identity(folder):
        outcome.skipped = f"it has changed since it was looked at, and is {now.state} now"
        return outcome
    if _core.Directory(folder.path).id != step.id:
        outcome.skipped = "another folder has taken its place since it was looked at"
        return outcome
    found_in = found["components"] or {"": found}
    if not all(_is_free(directory) for directory in directories.values()):
        outcome.skipped = _IS_READ
        return outcome
    for name, directory in directories.items():
        with unheld(directory.id) as is_free:
            if not is_free:
                if outcome.is_loadable:
                    outcome.skipped = _IS_READ
                else:
                    outcome.failures.append(f"{name}: {_IS_READ}")
                return outcome
            marks_bytes = rights[name].remove_marks()
        outcome.is_loadable = False
        outcome.bytes_freed += marks_bytes
    try:
        if folder.components:
            _remove_others(step, found["others"], None, outcome, remove_others)
        for name, directory in directories.items():
            stays = len(outcome.stays)
            _remove_contents(directory, found_in[name], rights[name], outcome, remove_others)
            if outcome.failures:  # the tmps stay, free from now on, and say that a later prune may go on here
                break
            rights[name].finish()
            if name and len(outcome.stays) == stays:
                _remove_empty(step, name, outcome)
    except CheckpointError as error:
        outcome.fail(str(error))
    if not outcome.failures and not outcome.stays:
        _remove_empty(root, folder.name, outcome)
    return outcome


def bytes_to_remove(folder: StepFolder, *, remove_others: bool) -> int:
    """What ``remove_folder`` would give as ``bytes_freed`` now; what cannot be looked at does not count."""
    try:
        found = inspect_step(folder.path)
        step = _core.Directory(folder.path)
        size = 0
        for part, of_part in (("", found), *found["components"].items()):
            directory = step.below(part) if part else step
            names = [*of_part["marks"], *of_part["data_files"], *of_part["tmps"]]
            names += of_part["others"] if remove_others else []
            size += sum(directory.remove(name, dry_run=True)[0] for name in names)
        return size
    except CheckpointError:
        return 0


def _identity(folder: StepFolder) -> tuple[object, ...]:
    return folder.state, folder.save_ids, folder.parts, folder.components


def _is_free(directory: _core.Directory) -> bool:
    with unheld(directory.id) as is_free:
        return is_free


def _remove_contents(
    directory: _core.Directory, found: dict[str, Any], right: _core.Removal, outcome: Outcome, remove_others: bool
) -> None:
    """Other files go first: as long as there are data files, the rest of a removal is known for what it is."""
    _remove_others(directory, found["others"], right, outcome, remove_others)
    _remove(directory, (*found["data_files"], *found["tmps"]), right, outcome)


def _remove_others(
    directory: _core.Directory, names: list[str], right: _core.Removal | None, outcome: Outcome, remove_others: bool
) -> None:
    if remove_others:
        _remove(directory, names, right, outcome)
    else:
        outcome.stays += [f"{name}: not of a checkpoint" for name in names]


def _remove(directory: _core.Directory, names: Iterable[str], right: _core.Removal | None, outcome: Outcome) -> None:
    """Files, symbolic links, and folders that hold no checkpoint of their own."""
    for name in names:
        bytes_freed, failures, kept = directory.remove(name, right)
        outcome.bytes_freed += bytes_freed
        outcome.fail(*failures)
        if kept:
            outcome.stays.append(f"{name}: {kept}")


def _remove_empty(directory: _core.Directory, name: str, outcome: Outcome) -> None:
    try:
        directory.remove_empty(name)
        outcome.is_loadable = False
    except CheckpointError as error:
        outcome.fail(str(error))
