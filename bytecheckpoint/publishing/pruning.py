# SPDX-License-Identifier: Apache-2.0
"""Which versions of a place nobody needs any more, and their removal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from bytecheckpoint.checkpoint.steps import look_at_step
from bytecheckpoint.config import Config
from bytecheckpoint.publishing.published import BASE, Versions
from bytecheckpoint.publishing.registrations import Registration, Registrations
from bytecheckpoint.storage.paths import Place, below
from bytecheckpoint.storage.removals import removal_in

__all__ = ["prune", "removable"]

_logger = logging.getLogger("bytecheckpoint")


def removable(
    committed: Iterable[tuple[int, str]], registrations: Iterable[Registration], keep_versions: int
) -> list[tuple[int, str]]:
    """Returns which bases and deltas may go, the oldest first. Pure.

    The newest base stays, and all of its version and behind it; so do the newest ``keep_versions`` versions, and the
    deltas that lead on from where a subscriber stands, or from the base that it is loading.

    Args:
        committed: Version and kind of all that is committed.
        registrations: The subscribers.
        keep_versions: At least 1.
    """
    there = sorted(committed)
    bases = [version for version, kind in there if kind == BASE]
    if not bases:
        return []
    newest = sorted({version for version, _ in there})[-keep_versions:]
    needed = [registration.oldest for registration in registrations]
    oldest = min((version + 1 for version in needed if version is not None), default=bases[-1])
    keep_from = min(bases[-1], newest[0])
    read = {registration.reads for registration in registrations}
    return [
        (version, kind)
        for version, kind in there
        if version < keep_from and (version not in read if kind == BASE else version < oldest)
    ]


def prune(place: Place, versions: Versions, keep_versions: int, config: Config, gone: set[str]) -> list[str]:
    """Removes what nobody needs any more, and what publishers have left that died. Local.

    Only the publisher that has the right to publish may call it. What fails is said in the log.

    Args:
        place: Where the versions are.
        versions: The versions there.
        keep_versions: See ``removable``.
        config: Settings of the saves.
        gone: Names that were removed before. In a store, marks of them stay for a while; they are not looked at again.

    Returns:
        The names of the folders that were removed; they are added to ``gone``.

    Raises:
        CheckpointError: The place cannot be looked at.
    """
    listed = versions.names()
    gone &= {*listed.values()}
    names = {key: name for key, name in listed.items() if name not in gone}
    committed = {key for key, name in names.items() if versions.find(name) is not None}
    going = removable(committed, Registrations(place).alive(), keep_versions)
    newest = max((version for version, _ in committed), default=-1)
    going += [key for key in names if key not in committed and key[0] <= newest]
    if not going:
        return []
    removal = removal_in(place, remove_others=True, remove_foreign=True, grace_s=0.0, config=config)
    folders = {key: look_at_step(key[0], str(below(place, names[key]))) for key in going}
    kept = look_at_step(newest, str(below(place, names[max(committed)])))
    if kept is not None:
        _say(place, names[max(committed)], removal.begin(kept))
        _say(place, names[max(committed)], removal.secure([kept], [each for each in folders.values() if each]))
    removed = []
    for key, folder in folders.items():
        outcome = None if folder is None else removal.remove(folder)
        if outcome is not None:
            _say(place, names[key], outcome.failures)
        if outcome is None or not (outcome.failures or outcome.skipped):
            gone.add(names[key])
            removed += [] if outcome is None else [names[key]]
    if any(kind == BASE for _, kind in going):  # now and then, for each of them is asked for
        _say(place, "what was removed", removal.end(str(below(place, name)) for name in sorted(gone)))
    return removed


def _say(place: Place, name: str, failures: Sequence[str]) -> None:
    if failures:
        _logger.warning("publish(%s): %s: %s", place, name, "; ".join(failures))
