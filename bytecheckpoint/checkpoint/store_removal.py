# SPDX-License-Identifier: Apache-2.0
"""Removes one step folder from an object store. Needs no torch.

A store has no locks, and its deletes have no conditions. So a removal does this:

1. It lists all objects of the folder.
2. It replaces each commit mark, in one conditional request, by a small object that stands for "removed" (a tombstone);
   where there is no mark, it creates one. From then on there is no checkpoint, and no save that had begun before can
   commit: the mark is not what that save has seen.
3. It removes the objects of step 1. A save that begins later has files of other names.
4. It removes the tombstones, unless a save has replaced them meanwhile. A save that does so between the look and the
   delete finds that its mark is gone, and puts it again.

If the process dies in between, a tombstone stays. Readers and saves take it for no checkpoint, and a later removal goes
on.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from bytecheckpoint.checkpoint.in_use import key_of_url, unheld
from bytecheckpoint.checkpoint.parts import inspect_step
from bytecheckpoint.checkpoint.removal import Outcome
from bytecheckpoint.checkpoint.small_files import storage_errors
from bytecheckpoint.checkpoint.steps import StepFolder
from bytecheckpoint.object_store.client import Entry
from bytecheckpoint.object_store.stores import place_in_store
from bytecheckpoint.object_store.urls import joined

__all__ = ["bytes_in_store", "remove_folder_in_store", "unchanged_for"]

_IS_READ = "a load of this process reads it"
_IS_REPLACED = "it has changed since this prune looked at it"
_OF_MARK = re.compile(r"(.*/)?(__\d+)?\.metadata")
_OF_CHECKPOINT = re.compile(r"(.*/)?(__\d+_\d+(\.[0-9a-f]{16})?\.distcp|(__\d+)?\.metadata)")


def remove_folder_in_store(folder: StepFolder, *, remove_others: bool) -> Outcome:
    """Removes a step folder that holds a checkpoint, or what is left of one, if it is as it was when it was looked at.

    Args:
        folder: The folder, as it was when it was looked at.
        remove_others: Whether to remove objects that are not of a checkpoint, too.

    Raises:
        CheckpointError: The folder cannot be looked at.
        OSError: The store refused. A later call goes on.
    """
    outcome = Outcome()
    client, name = place_in_store(folder.path)
    # In the reverse of the order in which a save commits them: the model first.
    parts = [joined(name, component) for component in folder.components[::-1]] or [name]
    every, nested = _without_nested(client.everything(name), parts)
    versions = {part: {mark: client.head(mark) for mark in _marks_of(part, every)} for part in parts}
    if tuple(inspect_step(folder.path)["save_ids"]) != folder.save_ids:
        outcome.skipped = _IS_REPLACED
        return outcome
    for part, of_part in versions.items():
        with unheld(key_of_url(joined(client.url, part))) as is_free:
            is_buried = is_free and all(client.bury(mark, version) for mark, version in of_part.items())
        why = _IS_REPLACED if is_free else _IS_READ
        if not is_buried and outcome.is_loadable:
            outcome.skipped = why
            return outcome
        if not is_buried:
            outcome.fail(f"{part}: {why}")
            return outcome
        outcome.is_loadable = False
    marks = [mark for of_part in versions.values() for mark in of_part]
    going = _going(every, [name, *parts], remove_others)
    client.delete([each.name for each in going if each.name not in marks])
    for mark in marks:
        if client.is_buried(mark):  # else a save has replaced it
            client.delete([mark])
    outcome.bytes_freed = sum(each.num_bytes for each in going)
    outcome.stays += [f"{place}, a checkpoint of its own" for place in nested]
    if len(going) < len(every):
        outcome.stays.append(f"{len(every) - len(going)} objects that are not of a checkpoint")
    return outcome


def bytes_in_store(folder: StepFolder, *, remove_others: bool) -> int:
    """Returns what ``remove_folder_in_store`` would report as ``bytes_freed``."""
    client, name = place_in_store(folder.path)
    parts = [joined(name, component) for component in folder.components] or [name]
    with storage_errors("list", folder.path):
        every, _ = _without_nested(client.everything(name), parts)
    return sum(each.num_bytes for each in _going(every, [name, *parts], remove_others))


def unchanged_for(folder: StepFolder, newest: StepFolder) -> timedelta:
    """Returns how long nothing in ``folder`` had changed when ``newest`` last changed, by the clock of the store alone.

    Tombstones do not count: a removal puts them, and no save.

    Args:
        folder: A folder of the run.
        newest: Another one, with a checkpoint.
    """
    changes, of_newest = _changes(folder), _changes(newest)
    if not of_newest:
        return timedelta.min  # somebody has removed it meanwhile
    return max(of_newest) - max(changes) if changes else timedelta.max


def _changes(folder: StepFolder) -> list[datetime]:
    client, name = place_in_store(folder.path)
    return [each.last_modified for each in client.everything(name) if not each.is_tombstone]


def _without_nested(every: list[Entry], parts: list[str]) -> tuple[list[Entry], list[str]]:
    """Leaves out what is below a folder with a commit mark that is none of ``parts``; returns these folders, too."""
    marked = {each.name.rpartition("/")[0] for each in every if _OF_MARK.fullmatch(each.name)}
    nested = sorted(marked - {*parts})
    below_nested = tuple(f"{place}/" for place in nested)
    return [each for each in every if not each.name.startswith(below_nested)], nested


def _going(every: list[Entry], folders: list[str], remove_others: bool) -> list[Entry]:
    """Returns what is removed: files of the checkpoint right below ``folders``, or all."""
    return [
        each
        for each in every
        if remove_others or (each.name.rpartition("/")[0] in folders and _OF_CHECKPOINT.fullmatch(each.name))
    ]


def _marks_of(folder: str, every: list[Entry]) -> list[str]:
    """Returns the commit marks right below a folder; if there are none, the name that one would have."""
    here = [each.name for each in every if each.name.rpartition("/")[0] == folder]
    marks = [name for name in here if _OF_MARK.fullmatch(name)]
    return sorted(marks) or [joined(folder, ".metadata")]
