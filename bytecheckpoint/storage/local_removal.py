# SPDX-License-Identifier: Apache-2.0
"""Removes step folders from directories. Needs no torch.

Everything is removed through open directories, and no symbolic link is followed (``csrc/io/remove_entry.h``). So if
somebody replaces a folder by a link during the removal, nothing outside is reached.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bytecheckpoint.errors import CheckpointBusyError, CheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.in_use import unheld
from bytecheckpoint.storage.journal_files import FOLDER, append, carried_bytes, carry_lines
from bytecheckpoint.storage.names import OF_OTHER_LIBRARIES, is_mark, save_of_tmp
from bytecheckpoint.storage.parts import inspect_step
from bytecheckpoint.storage.removal import Outcome
from bytecheckpoint.storage.step_folder import StepFolder, folder_of
from bytecheckpoint.storage.unended_saves import unended_saves

__all__ = ["LocalRemoval"]

_IS_READ = "a load in this process is reading it"


class _Rules(NamedTuple):
    """What a removal takes besides the files of a checkpoint.

    Attributes:
        remove_others: Whether it takes all else.
        stays: Globs of names of files that keep a folder in the step, because they are of a checkpoint.
    """

    remove_others: bool
    stays: Sequence[str]


class LocalRemoval:
    """Removes steps from a directory; see ``StepRemoval``.

    Args:
        root: Directory of the run. It is opened now, so that removals stay in it, wherever its path leads later.
        remove_others: See ``removal_in``.
        remove_foreign: See ``removal_in``.
        grace_s: See ``removal_in``.

    Raises:
        StorageError: It cannot be opened.
    """

    def __init__(self, root: Path, *, remove_others: bool, remove_foreign: bool, grace_s: float) -> None:
        self._path = root
        self._root = _core.Directory(str(root))
        self._rules = _Rules(remove_others, () if remove_foreign else OF_OTHER_LIBRARIES)
        self._grace_s = grace_s

    def begin(self, newest: StepFolder) -> list[str]:
        return []  # ages are counted up to now

    def is_dead(self, folder: StepFolder, newest: StepFolder) -> bool:
        """See ``StepRemoval``. An unlocked tmp shows it.

        An empty folder counts too, because a save that is about to fill it loses nothing.
        """
        try:
            found = inspect_step(folder.path)
            every = [found, *found["components"].values()]
            is_empty = not any(of[kind] for of in every for kind in ("marks", "tmps", "data_files", "others"))
            says_so = is_empty or any(of["tmps"] for of in every)
            return (says_so and folder.step < newest.step) or _unchanged_s(folder.path) >= self._grace_s
        except (CheckpointError, OSError):
            return False  # it is changing right now

    def has_begun(self, folder: StepFolder) -> bool:
        """See ``StepRemoval``. The tmp of a removal says so."""
        places = [Path(folder.path, name) for name in folder.components or (".",)]
        with suppress(OSError):
            tmps = [path for place in places for path in place.iterdir() if save_of_tmp(path.name) is not None]
            return any(path.read_bytes() == _core.REMOVAL_NOTE for path in tmps)
        return False

    def bytes_of(self, folder: StepFolder) -> int:
        """See ``StepRemoval``. What cannot be looked at does not count."""
        try:
            found = inspect_step(folder.path)
            step = _core.Directory(folder.path)
            size = 0
            for part, of_part in (("", found), *found["components"].items()):
                directory = step.below(part) if part else step
                names = [*of_part["marks"], *of_part["records"], *of_part["data_files"], *of_part["tmps"]]
                names += of_part["others"] if self._rules.remove_others else []
                size += sum(directory.remove(name, stays=self._rules.stays, dry_run=True)[0] for name in names)
                size -= carried_bytes(Path(folder.path, part))  # a step that stays gets these lines
            return size
        except (CheckpointError, OSError):
            return 0

    def secure(self, kept: Sequence[StepFolder], going: Sequence[StepFolder]) -> list[str]:
        """See ``StepRemoval``. The rename of a newer checkpoint need not be on disk yet: this syncs what stays."""
        marked = [Path(folder.path, name) for folder in kept for name in folder.components or (".",)]
        of_parts = [Path(folder.path) for folder in kept if folder.components]
        for directory in (self._path, *of_parts, *marked):
            _core.sync_directory(str(directory))
        failures = carry_lines(self._root.fileno(), [folder.name for folder in going], kept[0].name)
        return [*failures, *_note_unended(going, Path(kept[0].path, FOLDER))]

    def remove(self, folder: StepFolder) -> Outcome:
        try:
            return _remove_folder(folder, self._root, self._rules)
        except (CheckpointError, OSError) as error:
            is_there = Path(folder.path).exists()
            return Outcome(failures=[str(error)]) if is_there else Outcome(skipped="another prune removed it first")

    def end(self, paths: Iterable[str]) -> list[str]:
        return []  # a directory is removed at once


def _note_unended(going: Sequence[StepFolder], journal: Path) -> list[str]:
    """Writes lines of the saves that died in steps that are about to be removed. Returns what failed."""
    places = [place for folder in going for place in (folder.path, *(f"{folder.path}/{n}" for n in folder.components))]
    records = [record for place in places for record in unended_saves(place)]
    try:
        for record in records:
            append(journal, json.dumps(record, separators=(",", ":")).encode() + b"\n")
    except OSError as error:
        return [f"{len(records)} saves that died have no line in {journal}: {error.strerror or error}"]
    return []


def _remove_folder(folder: StepFolder, root: _core.Directory, rules: _Rules) -> Outcome:
    """Removes a step folder that holds a checkpoint, or what is left of one, if it is unchanged since it was looked at.

    The order matters. First it takes the right to commit there, so that no save is under way and none begins. Then it
    removes the commit marks and syncs that, then everything else, and last the tmp that is the right to commit. If the
    process dies in between, it leaves a folder without a mark and with a free tmp: a ``half`` checkpoint, which a later
    call removes.

    Args:
        folder: The folder, as it was when it was looked at.
        root: Directory that the folder is in.
        rules: What goes besides the files of the checkpoint.
    """
    outcome = Outcome()
    if folder.state != "complete" and not os.listdir(folder.path):  # noqa: PTH208
        # An empty folder is removed without a tmp of ours in it, even for a moment: a save that has just made the
        # folder may be about to begin.
        _remove_empty(root, folder.name, outcome)
        return outcome
    step = root.below(folder.name)
    # Remove components in the reverse of the order in which a save commits them: the model first.
    names = folder.components[::-1] or ("",)
    directories = {name: step.below(name) if name else step for name in names}
    try:
        rights = {name: _core.Removal(directory) for name, directory in directories.items()}
    except CheckpointBusyError:
        outcome.skipped = "a save or another prune is working on it"
        return outcome
    found = inspect_step(folder.path, {name: right.tmp for name, right in rights.items()})
    now = folder_of(folder.step, folder.path, found)
    if _identity(now) != _identity(folder):
        outcome.skipped = f"it has changed since this prune looked at it, and is now {now.state}"
        return outcome
    if _core.Directory(folder.path).id != step.id:
        outcome.skipped = "another folder has replaced it since this prune looked at it"
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
                    outcome.fail(f"{name}: {_IS_READ}")
                return outcome
            of_another = [mark for mark in found_in[name]["marks"] if not is_mark(mark)]
            _remove(directory, of_another, rights[name], outcome, rules)
            if outcome.failures:
                return outcome
            marks_bytes = rights[name].remove_marks()
        outcome.is_loadable = False
        outcome.bytes_freed += marks_bytes
    try:
        if folder.components:
            _remove_others(step, found["others"], None, outcome, rules)
            _remove(step, found["records"], None, outcome, rules)
        for name, directory in directories.items():
            stays = len(outcome.stays)
            _remove_contents(directory, found_in[name], rights[name], outcome, rules)
            if outcome.failures:  # the tmps stay, unlocked: a later prune sees that it may go on here
                break
            rights[name].finish()
            if name and len(outcome.stays) == stays:
                _remove_empty(step, name, outcome)
    except CheckpointError as error:
        outcome.fail(str(error))
    if not outcome.failures and not outcome.stays:
        _remove_empty(root, folder.name, outcome)
    return outcome


def _identity(folder: StepFolder) -> tuple[object, ...]:
    return folder.state, folder.save_ids, folder.parts, folder.components


def _is_free(directory: _core.Directory) -> bool:
    with unheld(directory.id) as is_free:
        return is_free


def _remove_contents(
    directory: _core.Directory, found: dict[str, Any], right: _core.Removal, outcome: Outcome, rules: _Rules
) -> None:
    """Removes other files first: as long as data files remain, the folder is recognized as an unfinished removal."""
    _remove_others(directory, found["others"], right, outcome, rules)
    _remove(directory, (*found["records"], *found["data_files"], *found["tmps"]), right, outcome, rules)


def _remove_others(
    directory: _core.Directory, names: list[str], right: _core.Removal | None, outcome: Outcome, rules: _Rules
) -> None:
    if rules.remove_others:
        _remove(directory, names, right, outcome, rules)
    else:
        outcome.stays += [f"{name}: it is not a file of a checkpoint" for name in names]


def _remove(
    directory: _core.Directory, names: Iterable[str], right: _core.Removal | None, outcome: Outcome, rules: _Rules
) -> None:
    """Removes files, symbolic links, and folders that hold no checkpoint of their own."""
    for name in names:
        bytes_freed, failures, kept = directory.remove(name, right, stays=rules.stays)
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


def _unchanged_s(path: str) -> float:
    """Returns the seconds since anything in a folder changed, by its modification times."""
    newest = max(Path(parent, name).lstat().st_mtime for parent, _, names in os.walk(path) for name in (".", *names))
    return time.time() - newest
