# SPDX-License-Identifier: Apache-2.0
"""Files of a folder, with what each takes on disk."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StoredFile", "files_by_folder"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, or an object of a store.

    Attributes:
        name: Its name, relative to the folder that was listed.
        num_bytes: Its length.
        allocated_bytes: What it takes on disk: less than its length if it has holes, more if room is reserved. In a
            store, its length.
        inode: Device and inode, which all names of a file have in common; None in a store.
        num_links: How many names it has, wherever they are.
    """

    name: str
    num_bytes: int
    allocated_bytes: int
    inode: tuple[int, int] | None = None
    num_links: int = 1


def files_by_folder(files: list[StoredFile]) -> dict[str, list[StoredFile]]:
    """Returns files by the folder that they are in, relative to what was listed; "" is that itself."""
    found: dict[str, list[StoredFile]] = {}
    for file in files:
        found.setdefault(file.name.rpartition("/")[0], []).append(file)
    return found
