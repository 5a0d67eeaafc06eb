# SPDX-License-Identifier: Apache-2.0
"""What ``bcp ls`` and ``bcp verify`` do with a place in which a ``Publisher`` publishes."""

from __future__ import annotations

from bytecheckpoint.cli.text import columns, counted
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.publishing.published import Published, Versions
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.paths import as_place, below

__all__ = ["lines_of", "names_in", "published_in"]


def names_in(path: str) -> list[str]:
    """Returns the names of the committed bases and deltas in a place, the oldest first; none if it is no such place."""
    try:
        place = as_place(path)
        if folder_at(place).has(".metadata"):
            return []
        names = Versions(place, Config.from_env()).names().values()
        return [name for name in names if folder_at(below(place, name)).has(".metadata")]
    except CheckpointError:
        return []  # whatever looks for a checkpoint there says what is wrong


def published_in(path: str, names: list[str]) -> list[Published]:
    """Returns those of the bases and deltas whose commit mark can be read."""
    versions = Versions(as_place(path), Config.from_env())
    return [found for name in names if (found := versions.find(name)) is not None]


def lines_of(published: list[Published]) -> list[str]:
    """Returns lines for people: each base and delta, what it builds on, and who has published it."""
    rows = [("NAME", "BUILDS ON", "BYTES", "PUBLISHER")]
    for each in published:
        builds_on = "" if each.builds_on is None else str(each.builds_on)
        rows.append((each.name, builds_on, f"{each.num_bytes:,}", each.publisher[:8]))
    num_bases = sum(each.builds_on is None for each in published)
    return [
        *columns(rows, right=frozenset({1, 2})),
        f"{counted(num_bases, 'base')}, {counted(len(published) - num_bases, 'delta')}; "
        f"{sum(each.num_bytes for each in published):,} bytes",
    ]
