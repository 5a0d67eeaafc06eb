# SPDX-License-Identifier: Apache-2.0
"""Removes step folders from an object store. Needs no torch.

A store has no locks, and its deletes have no conditions. So a removal does this:

1. It lists all objects of the folder, and opens the checkpoint.
2. It replaces each commit mark, in one conditional request, by a small object that stands for "removed" (a tombstone);
   where there is no mark, it creates one. From then on there is no checkpoint, and a save that had begun at the mark
   cannot commit: it is not what that save has seen. A save that had begun where there was none still can, after step 4.
   Its files are there, because of step 3.
3. It removes the data files that the checkpoint named. It removes others only if they are older than a grace, by the
   clock of the store: a save may be writing them.
4. It removes the tombstones, unless a save has put its own in their place. If a mark was so young that a request of its
   commit may still be on its way, its tombstone stays for a later prune.

If the process dies in between, a tombstone stays. Readers and saves take it for no checkpoint, and a later removal goes
on. tests/model/store_commit.pml is a model of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.storage.in_use import unheld
from bytecheckpoint.storage.names import is_data, is_mark, is_of_other_library
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.entries import Entry, is_tombstone
from bytecheckpoint.storage.object_store.marks import named_files
from bytecheckpoint.storage.object_store.save_notes import forget_saves
from bytecheckpoint.storage.object_store.stores import place_in_store
from bytecheckpoint.storage.object_store.tombstones import bury
from bytecheckpoint.storage.object_store.urls import joined, key_of_url
from bytecheckpoint.storage.parts import inspect_step
from bytecheckpoint.storage.removal import Outcome
from bytecheckpoint.storage.small_files import storage_errors
from bytecheckpoint.storage.step_folder import StepFolder

__all__ = ["StoreRemoval"]

_IS_READ = "a load of this process reads it"
_IS_REPLACED = "it has changed since this prune looked at it"
# A request is carried out, if ever, before its signature expires, which is after 15 minutes on S3.
_LONGEST_REQUEST = timedelta(minutes=15)


class StoreRemoval:
    """Removes steps from an object store; see ``StepRemoval``.

    Ages are counted up to the last change of the newest checkpoint, so that they depend on no clock but the store's.

    Args:
        remove_others: See ``removal_in``.
        remove_foreign: See ``removal_in``.
        grace_s: See ``removal_in``.
        config: See ``removal_in``.
    """

    def __init__(self, *, remove_others: bool, remove_foreign: bool, grace_s: float, config: Config | None) -> None:
        self._remove_others = remove_others
        self._remove_foreign = remove_foreign
        self._grace_s = grace_s
        self._config = config
        self._now: datetime | None = None

    def begin(self, newest: StepFolder) -> list[str]:
        try:
            self._now = _last_change(newest)
        except OSError as error:
            return [f"{newest.name}: {error}"]
        return []

    def is_dead(self, folder: StepFolder, newest: StepFolder) -> bool:
        """See ``StepRemoval``. Only time shows it."""
        try:
            changed = _last_change(folder)
        except (CheckpointError, OSError):
            return False
        if self._now is None:
            return False
        return changed is None or (self._now - changed).total_seconds() >= self._grace_s

    def has_begun(self, folder: StepFolder) -> bool:
        """See ``StepRemoval``. A tombstone that no save has put says so."""
        client, name = place_in_store(folder.path)
        with storage_errors("list", folder.path):
            return any(each.is_tombstone and not each.is_claim for each in client.everything(name))

    def bytes_of(self, folder: StepFolder) -> int:
        """See ``StepRemoval``, if no save may be writing there."""
        client, name = place_in_store(folder.path)
        parts = [joined(name, component) for component in folder.components] or [name]
        with storage_errors("list", folder.path):
            every, _ = _without_nested(client.everything(name), name, parts, self._remove_foreign)
        return sum(each.num_bytes for each in _going(every, [name, *parts], self._remove_others))

    def secure(self, kept: Sequence[StepFolder], going: Sequence[StepFolder]) -> list[str]:
        return []  # what a store has answered stays, and it has no journals

    def remove(self, folder: StepFolder) -> Outcome:
        try:
            return _remove_folder(
                folder,
                remove_others=self._remove_others,
                remove_foreign=self._remove_foreign,
                grace_s=self._grace_s,
            )
        except (CheckpointError, OSError) as error:
            return Outcome(failures=[str(error)])

    def end(self, paths: Iterable[str]) -> list[str]:
        if self._now is None:
            return []
        config = self._config or Config.from_env()
        grace_s = max(self._grace_s, config.commit_deadline_s)
        failures = []
        for path in paths:
            try:
                _remove_tombstones(path, self._now, grace_s=grace_s)
            except OSError as error:
                failures.append(f"{path}: {error}")
        return failures


def _remove_folder(folder: StepFolder, *, remove_others: bool, remove_foreign: bool, grace_s: float) -> Outcome:
    """Removes a step folder that holds a checkpoint, or what is left of one, if it is as it was when it was looked at.

    Args:
        folder: The folder, as it was when it was looked at.
        remove_others: Whether to remove objects that are not of a checkpoint, too.
        remove_foreign: Whether to remove checkpoints of other libraries below the folder, too.
        grace_s: Seconds. A data file that the checkpoint does not name stays if it is younger.

    Raises:
        CheckpointError: The folder cannot be looked at.
        OSError: The store refused. A later call goes on.
    """
    outcome = Outcome()
    client, name = place_in_store(folder.path)
    # In the reverse of the order in which a save commits them: the model first.
    parts = [joined(name, component) for component in folder.components[::-1]] or [name]
    every, nested = _without_nested(client.everything(name), name, parts, remove_foreign)
    versions = {part: {mark: client.head(mark) for mark in _marks_of(part, every)} for part in parts}
    named = set(named_files(client, [mark for of_part in versions.values() for mark in of_part], strict=False))
    if tuple(inspect_step(folder.path)["save_ids"]) != folder.save_ids:
        outcome.skipped = _IS_REPLACED
        return outcome
    tombstones: dict[str, dict[str, Any]] = {}
    for part, of_part in versions.items():
        with unheld(key_of_url(joined(client.url, part))) as is_free:
            for mark, version in of_part.items() if is_free else ():
                tombstone = bury(client, mark, version)
                if tombstone is not None:
                    tombstones[mark] = tombstone
        why = _IS_REPLACED if is_free else _IS_READ
        is_buried = is_free and of_part.keys() <= tombstones.keys()
        if not is_buried and outcome.is_loadable:
            outcome.skipped = why
            return outcome
        if not is_buried:
            outcome.fail(f"{part}: {why}")
            return outcome
        outcome.is_loadable = False
    now = max(tombstone["last_modified"] for tombstone in tombstones.values())
    going = _going(every, [name, *parts], remove_others)
    young = [each for each in going if _may_be_written(each, named, now, grace_s)]
    going = [each for each in going if each not in young]
    try:
        client.delete([each.name for each in going if not is_mark(each.name)])
        forget_saves(folder.path, folder.save_ids)
        for mark, version in ((mark, version) for of_part in versions.values() for mark, version in of_part.items()):
            if _is_settled(version, tombstones[mark]):
                _unbury(client, mark, tombstones[mark])
    except OSError as error:
        outcome.fail(f"it is no checkpoint any more, but not all of it is gone: {error.strerror}")
        return outcome
    outcome.bytes_freed = sum(each.num_bytes for each in going)
    outcome.stays += [f"{place}, a checkpoint of its own" for place in nested]
    if young:
        outcome.stays.append(f"{len(young)} data files that a save may be writing; a later prune removes them")
    others = [each for each in every if not each.is_tombstone]
    if len(going) + len(young) < len(others):
        outcome.stays.append(f"{len(others) - len(going) - len(young)} objects that are not of a checkpoint")
    return outcome


def _remove_tombstones(path: str, now: datetime, *, grace_s: float) -> None:
    """Removes what a prune has left of a folder, if nothing but old tombstones is in it.

    Args:
        path: URL of the folder.
        now: Up to when the age of tombstones is counted; see ``_last_change``.
        grace_s: Seconds that a save may take.

    Raises:
        OSError: The store refused.
    """
    client, name = place_in_store(path)
    every = client.everything(name)
    if not all(each.is_tombstone for each in every):
        return
    for each in every:
        tombstone = client.head(each.name)
        least_age = _LONGEST_REQUEST + timedelta(seconds=grace_s if each.is_claim else 0)
        if tombstone is not None and now - tombstone["last_modified"] >= least_age:
            _unbury(client, each.name, tombstone)


def _last_change(folder: StepFolder) -> datetime | None:
    """Returns when anything in a folder last changed, by the clock of the store; None if nothing is in it.

    Tombstones of removals do not count, those of saves do. The ages of folders in a run are counted up to the last
    change of the newest checkpoint, so that they depend on no other clock.
    """
    client, name = place_in_store(folder.path)
    changes = [each.last_modified for each in client.everything(name) if each.is_claim or not each.is_tombstone]
    return max(changes, default=None)


def _may_be_written(entry: Entry, named: set[str], now: datetime, grace_s: float) -> bool:
    """Whether it is a data file that no checkpoint has named, and younger than any that a dead save has left."""
    return is_data(entry.name) and entry.name not in named and now - entry.last_modified < timedelta(seconds=grace_s)


def _is_settled(version: Mapping[str, Any] | None, tombstone: Mapping[str, Any]) -> bool:
    """Whether no request of the commit that put ``version`` can still be on its way when its tombstone is put."""
    if version is None:
        return True
    age: timedelta = tombstone["last_modified"] - version["last_modified"]
    return age >= _LONGEST_REQUEST


def _unbury(client: StoreClient, mark: str, tombstone: Mapping[str, Any]) -> None:
    """Deletes a tombstone, unless another object has taken its place.

    The delete is tried once, and given up after seconds: a save that begins meanwhile must not end before it arrives.
    """
    found = client.head(mark)
    if found is not None and is_tombstone(found) and found.get("e_tag") == tombstone.get("e_tag"):
        client.delete_once(mark)


def _without_nested(
    every: list[Entry], step: str, parts: list[str], remove_foreign: bool
) -> tuple[list[Entry], list[str]]:
    """Leaves out what is below folders that hold a checkpoint and are none of ``parts``; returns these, too."""
    there = [each.name for each in every if not each.is_tombstone]
    tells = [name for name in there if is_mark(name) and name.rpartition("/")[0] not in parts]
    tells += [name for name in there if not remove_foreign and is_of_other_library(name.rpartition("/")[2])]
    nested = sorted({_first_below(name, [*parts, step]) for name in tells} - {""})
    below_nested = tuple(f"{place}/" for place in nested)
    return [each for each in every if not each.name.startswith(below_nested)], nested


def _first_below(name: str, places: list[str]) -> str:
    """Returns the folder of an object right below the first place that it is below; "" if it is right in that.

    All of it stays: other libraries spread a checkpoint over folders, as Orbax does with arrays.
    """
    above = next(prefix for prefix in (f"{place}/" if place else "" for place in places) if name.startswith(prefix))
    folder, has_folder, _ = name[len(above) :].partition("/")
    return above + folder if has_folder else ""


def _going(every: list[Entry], folders: list[str], remove_others: bool) -> list[Entry]:
    """Returns what is removed: files of the checkpoint right below ``folders``, or all. Tombstones are left out."""
    return [
        each
        for each in every
        if not each.is_tombstone
        and (remove_others or (each.name.rpartition("/")[0] in folders and (is_data(each.name) or is_mark(each.name))))
    ]


def _marks_of(folder: str, every: list[Entry]) -> list[str]:
    """Returns the commit marks right below a folder; if there are none, the name that one would have."""
    here = [each.name for each in every if each.name.rpartition("/")[0] == folder]
    marks = [name for name in here if is_mark(name)]
    return sorted(marks) or [joined(folder, ".metadata")]
