# SPDX-License-Identifier: Apache-2.0
"""The removal of one step folder. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
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

    def fail(self, error: Exception) -> None:
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(str(error))


def remove_folder(folder: StepFolder, *, remove_others: bool) -> Outcome:
    """Removes a step folder that holds a checkpoint, or what is left of one, if it still is as it was looked at.

    The order is the point. First the right to commit there, so that no save is under way and none begins; then the
    commit marks, and that is synced; then everything else; the tmp that is the right goes last. Whoever dies in between
    leaves a folder without a mark and with a free tmp: half a checkpoint, which a later call removes.
    """
    outcome = Outcome()
    if folder.state != "complete" and not os.listdir(folder.path):  # noqa: PTH208
        # Nothing is in it, not even for a moment a tmp of ours: a save that has just made it may be about to begin.
        _remove_empty(folder.path, outcome)
        return outcome
    # Of a folder with components: those that are there, the last that a save commits first.
    names = folder.components[::-1] or ("",)
    paths = {name: os.path.join(folder.path, name) if name else folder.path for name in names}  # noqa: PTH118
    try:
        rights = {name: _core.Removal(path) for name, path in paths.items()}
    except CheckpointBusyError:
        outcome.skipped = "a save, or another prune, is at it"
        return outcome
    found = inspect_step(folder.path, {name: right.tmp for name, right in rights.items()})
    now = folder_of(folder.step, folder.path, found)
    if _identity(now) != _identity(folder):
        outcome.skipped = f"it has changed since it was looked at, and is {now.state} now"
        return outcome
    found_in = found["components"] or {"": found}
    if not all(_is_free(path) for path in paths.values()):
        outcome.skipped = _IS_READ
        return outcome
    for name, path in paths.items():
        with unheld(path) as is_free:
            if not is_free:
                if outcome.is_loadable:
                    outcome.skipped = _IS_READ
                else:
                    outcome.failures.append(f"{name}: {_IS_READ}")
                return outcome
            marks_bytes = sum(os.lstat(os.path.join(path, mark)).st_size for mark in found_in[name]["marks"])  # noqa: PTH118
            rights[name].remove_marks()
        outcome.is_loadable = False
        outcome.bytes_freed += marks_bytes
    try:
        if folder.components:
            _remove_others(folder.path, found["others"], outcome, remove_others)
        for name, path in paths.items():
            stays = len(outcome.stays)
            _remove_contents(path, found_in[name], rights[name], outcome, remove_others)
            if outcome.failures:  # the tmps stay, free from now on, and say that a later prune may go on here
                break
            rights[name].finish()
            if name and len(outcome.stays) == stays:
                _remove_empty(path, outcome)
    except CheckpointError as error:
        outcome.fail(error)
    if not outcome.failures and not outcome.stays:
        _remove_empty(folder.path, outcome)
    return outcome


def bytes_to_remove(folder: StepFolder, *, remove_others: bool) -> int:
    """What ``remove_folder`` would give as ``bytes_freed`` now; what cannot be looked at does not count."""
    try:
        found = inspect_step(folder.path)
        size = 0
        for name, of_part in (("", found), *found["components"].items()):
            path = os.path.join(folder.path, name)  # noqa: PTH118
            files = [*of_part["marks"], *of_part["data_files"], *of_part["tmps"]]
            size += sum(_size(os.path.join(path, file)) for file in files)  # noqa: PTH118
            if remove_others:
                size += sum(_size_of_other(os.path.join(path, other), path) for other in of_part["others"])  # noqa: PTH118
        return size
    except CheckpointError:
        return 0


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _size_of_other(path: str, folder: str) -> int:
    """As ``_remove_other``."""
    try:
        if not _is_folder(path):
            return _size(path)
        if _why_kept(path, os.lstat(folder).st_dev):
            return 0
        return sum(_size(below) for below, is_folder in _below(path) if not is_folder)
    except OSError:
        return 0


def _identity(folder: StepFolder) -> tuple[object, ...]:
    return folder.state, folder.save_ids, folder.parts, folder.components


def _is_free(path: str) -> bool:
    with unheld(path) as is_free:
        return is_free


def _remove_contents(
    path: str, found: dict[str, Any], right: _core.Removal, outcome: Outcome, remove_others: bool
) -> None:
    """Other files go first: as long as there are data files, the rest of a removal is known for what it is."""
    _remove_others(path, found["others"], outcome, remove_others, right)
    for name in (*found["data_files"], *found["tmps"]):
        right.check_right()
        _unlink(os.path.join(path, name), outcome)  # noqa: PTH118


def _remove_others(
    path: str, names: list[str], outcome: Outcome, remove_others: bool, right: _core.Removal | None = None
) -> None:
    for name in names:
        if not remove_others:
            outcome.stays.append(f"{name}: not of a checkpoint")
            continue
        if right is not None:
            right.check_right()
        _remove_other(os.path.join(path, name), path, outcome)  # noqa: PTH118


def _remove_other(path: str, folder: str, outcome: Outcome) -> None:
    """A file, a symbolic link, which is not followed, or a folder that holds no checkpoint of its own."""
    try:
        if not _is_folder(path):
            _unlink(path, outcome)
            return
        kept = _why_kept(path, os.lstat(folder).st_dev)
        if kept:
            outcome.stays.append(f"{Path(path).name}: {kept}")
            return
        for below, is_folder in _below(path):
            (_remove_empty if is_folder else _unlink)(below, outcome)
    except OSError as error:
        outcome.fail(error)


def _below(path: str) -> Iterator[tuple[str, bool]]:
    """All that is in a folder, then the folder itself; and whether each is a folder. Links are none."""
    for parent, folders, files in os.walk(path, topdown=False, onerror=_raise):
        for name in (*files, *(name for name in folders if Path(parent, name).is_symlink())):
            yield os.path.join(parent, name), False  # noqa: PTH118
        yield parent, True


def _is_folder(path: str) -> bool:
    return Path(path).is_dir() and not Path(path).is_symlink()


def _why_kept(path: str, device: int) -> str:
    """Why nothing below ``path`` may go; "" if all of it may."""
    for parent, _, files in os.walk(path, onerror=_raise):
        if any(name == ".metadata" or (name.startswith("__") and name.endswith(".metadata")) for name in files):
            return "a checkpoint of its own"
        if os.lstat(parent).st_dev != device:
            return "another file system is mounted there"
    return ""


def _raise(error: OSError) -> None:
    raise error


def _unlink(path: str, outcome: Outcome) -> None:
    try:
        size = os.lstat(path).st_size
        os.unlink(path)  # noqa: PTH108
        outcome.bytes_freed += size
    except FileNotFoundError:
        pass
    except OSError as error:
        outcome.fail(error)


def _remove_empty(path: str, outcome: Outcome) -> None:
    try:
        os.rmdir(path)  # noqa: PTH106
        outcome.is_loadable = False
    except FileNotFoundError:
        outcome.is_loadable = False
    except OSError as error:
        outcome.fail(error)
