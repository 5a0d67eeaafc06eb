# SPDX-License-Identifier: Apache-2.0
"""What was published in a place: bases and deltas by version, and the fewest bytes that lead to the newest one."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from bytecheckpoint.config import Config
from bytecheckpoint.contents.opening import open_checkpoint
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.parts import parsed_user_metadata
from bytecheckpoint.storage.paths import Place, below
from bytecheckpoint.storage.small_files import storage_errors

__all__ = ["BASE", "DELTA", "MOST_VERSION", "Published", "Standing", "Versions", "folder_name", "noted"]

BASE, DELTA = "base", "delta"
_DIGITS = 12  # so that names are sorted by version
MOST_VERSION = 10**_DIGITS - 1

_NAME = re.compile(rf"({BASE}|{DELTA})-(\d{{{_DIGITS}}})")
_logger = logging.getLogger("bytecheckpoint")

_KEY = "bytecheckpoint.published"  # in the user metadata of a base or a delta


class Standing(NamedTuple):
    """What a copy of the weights is: a version of one publisher, which publishes each version once."""

    version: int
    publisher: str


@dataclass(frozen=True)
class Published:
    """A base or a delta that is committed.

    Attributes:
        name: Name of its folder.
        version: The version that it leads to.
        publisher: Id of its publisher.
        builds_on: The version of the same publisher to which a delta is applied; None for a base.
        save_id: Id of its save, 32 hex digits.
        num_bytes: Bytes of its data files.
        user_metadata: What was passed to ``publish``.
    """

    name: str
    version: int
    publisher: str
    builds_on: int | None
    save_id: str
    num_bytes: int
    user_metadata: Any = None

    @property
    def standing(self) -> Standing:
        """What a copy is that it was loaded into, or applied to."""
        return Standing(self.version, self.publisher)


def folder_name(kind: str, version: int) -> str:
    """Returns the name of the folder of a base or a delta."""
    return f"{kind}-{version:0{_DIGITS}d}"


def noted(standing: Standing, builds_on: int | None, user_metadata: Any) -> dict[str, Any]:
    """Returns the user metadata of the checkpoint that is saved for a version."""
    about = {"version": standing.version, "publisher": standing.publisher, "builds_on": builds_on}
    return {_KEY: about, "user_metadata": user_metadata}


class Versions:
    """The versions in a place, as they are when they are asked for. Local.

    What was opened once is remembered: a base or a delta never changes, and is removed as a whole.

    Args:
        place: Folder, or its URL, of all versions.
        config: Settings for the storage.
    """

    def __init__(self, place: Place, config: Config) -> None:
        self._place = place
        self._config = config
        self._known: dict[str, Published] = {}
        self._damaged: dict[str, CorruptCheckpointError] = {}

    def names(self) -> dict[tuple[int, str], str]:
        """Returns the names of the folders, by version and kind, the oldest first. They need not be committed.

        Raises:
            StorageError: The place cannot be listed.
        """
        folder = folder_at(self._place)
        folder.use(self._config)
        with storage_errors("list", self._place):
            if folder.is_absent():
                return {}
        found = {name: match for name in folder.folders() if (match := _NAME.fullmatch(name))}
        self._known = {name: each for name, each in self._known.items() if name in found}
        return dict(sorted(((int(match[2]), match[1]), name) for name, match in found.items()))

    def find(self, name: str) -> Published | None:
        """Returns what is committed in a folder; None if nothing is, or something else, or its commit mark is damaged.

        Raises:
            CheckpointError: Its commit mark cannot be read.
        """
        if name not in self._known:
            try:
                found = self._looked_at(name)
            except CorruptCheckpointError as error:
                if name not in self._damaged:
                    _logger.warning("%s: %s is damaged: %s", self._place, name, str(error))
                self._damaged[name] = error
                return None
            if found is None:
                return None
            self._known[name] = found
        return self._known[name]

    def damage_after(self, at: Standing | None) -> CorruptCheckpointError | None:
        """Returns why what was published after ``at`` cannot be looked at; None if nothing damaged was seen there."""
        newer = [name for (version, _), name in self.names().items() if at is None or version > at.version]
        return next((self._damaged[name] for name in reversed(newer) if name in self._damaged), None)

    def newest(self) -> Published | None:
        """Returns the newest version that is committed; None if there is none. Of base and delta it is either."""
        return next((found for name in reversed(self.names().values()) if (found := self.find(name))), None)

    def other_publisher(self, than: str) -> Published | None:
        """Returns what another publisher has published as the newest version; None if nobody has."""
        newest = self.newest()
        found = [] if newest is None else [self._find(newest.version, kind, self.names()) for kind in (BASE, DELTA)]
        return next((each for each in found if each is not None and each.publisher != than), None)

    def is_gone(self, step: Published) -> bool:
        """Whether a base or a delta was removed since it was looked at."""
        self._known.pop(step.name, None)
        found = self.find(step.name)
        return found is None or found.save_id != step.save_id

    def way(self, at: Standing | None, avoided: Collection[str] = ()) -> list[Published] | None:
        """Returns what leads from ``at`` to the newest version that can be reached, of the fewest bytes.

        It is deltas in the order in which they are applied, or a base and the deltas behind it. If nothing leads to
        what is newer, all is looked at again: somebody may have emptied the place and begun anew.

        Args:
            at: Where to begin; None needs a base.
            avoided: Names of folders that are found damaged.

        Returns:
            The steps; None if nothing newer can be reached.
        """
        names = {key: name for key, name in self.names().items() if name not in avoided}
        steps = self._newest_way(at, names)
        if steps is None and self._known and any(at is None or version > at.version for version, _ in names):
            self._known.clear()
            steps = self._newest_way(at, names)
        return steps

    def _newest_way(self, at: Standing | None, names: dict[tuple[int, str], str]) -> list[Published] | None:
        for version in sorted({version for version, _ in names}, reverse=True):
            if at is not None and version <= at.version:
                break
            steps = self._way_to(version, at, names)
            if steps is not None:
                return steps
        return None

    def _way_to(self, version: int, at: Standing | None, names: dict[tuple[int, str], str]) -> list[Published] | None:
        best: list[Published] | None = None
        least = 0
        deltas: list[Published] = []
        for here, behind in self._back(version, names):
            deltas = behind
            num_bytes = sum(step.num_bytes for step in deltas)
            if here == at:
                return best if best is not None and least < num_bytes else deltas
            base = self._find(here.version, BASE, names)
            is_there = base is not None and here in (base.standing, Standing(here.version, ""))
            if base is not None and is_there and (best is None or num_bytes + base.num_bytes < least):
                best, least = [base, *deltas], num_bytes + base.num_bytes
            if best is not None and num_bytes >= least:
                break
        return best

    def _back(self, version: int, names: dict[tuple[int, str], str]) -> Iterator[tuple[Standing, list[Published]]]:
        """Yields what can be left behind, step by step, with the deltas that lead from there to ``version``.

        The first one is of no publisher: whatever base has the version counts.
        """
        here, deltas = Standing(version, ""), list[Published]()
        while True:
            yield here, deltas
            delta = self._find(here.version, DELTA, names)
            if delta is None or delta.builds_on is None or here.publisher not in ("", delta.publisher):
                return
            deltas = [delta, *deltas]
            here = Standing(delta.builds_on, delta.publisher)

    def _find(self, version: int, kind: str, names: dict[tuple[int, str], str]) -> Published | None:
        name = names.get((version, kind))
        return None if name is None else self.find(name)

    def _looked_at(self, name: str) -> Published | None:
        path = below(self._place, name)
        try:
            stored = open_checkpoint(path, self._config, kind=_core.Checkpoint, explain=False).stored
        except CheckpointNotFoundError:
            return None
        found = parsed_user_metadata(stored.user_metadata, path)
        about = found.get(_KEY) if isinstance(found, dict) else None
        match = _NAME.fullmatch(name)
        if not isinstance(about, dict) or match is None or about.get("version") != int(match[2]):
            return None
        builds_on = about.get("builds_on")
        is_delta = isinstance(builds_on, int) and builds_on < int(match[2])
        if is_delta != (match[1] == DELTA):
            return None
        num_bytes = sum(size for _, size, *_ in stored.files())
        publisher, of_user = str(about.get("publisher")), found.get("user_metadata")
        return Published(name, int(match[2]), publisher, builds_on, stored.save_id, num_bytes, of_user)
