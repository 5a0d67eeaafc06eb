# SPDX-License-Identifier: Apache-2.0
"""The files below a folder, with what each takes on disk. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from bytecheckpoint.checkpoint.folders import Place, below, name_of, parent_of
from bytecheckpoint.checkpoint.small_files import storage_errors
from bytecheckpoint.object_store.entries import is_tombstone
from bytecheckpoint.object_store.stores import place_in_store
from bytecheckpoint.object_store.urls import joined

__all__ = ["StoredFile", "files_below", "files_by_folder", "stored_file"]

_STAT_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own blocks are


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


def files_below(place: Place, without: Collection[str] = ()) -> list[StoredFile]:
    """Returns the files below a folder, in folders of it, too; or the one at ``place``. Follows no symbolic link.

    A folder that goes away meanwhile counts as empty. Tombstones of a store are left out.

    Args:
        place: A folder or a file.
        without: Names right below the folder that are not looked at.

    Raises:
        StorageError: A folder cannot be listed. Over HTTP none can.
    """
    if isinstance(place, Path):
        with storage_errors("list", place):
            status = place.stat()  # through a link, as everything that is done with the path
            return [*_files_of(str(place), "", without)] if place.is_dir() else [_of_status(place.name, status)]
    client, folder = place_in_store(place)
    with storage_errors("list", place):
        begin = len(folder) + 1 if folder else 0
        every = client.everything(folder)
        sizes = {each.name[begin:]: each.num_bytes for each in every if not each.is_tombstone}
        found = [StoredFile(name, size, size) for name, size in sizes.items() if name.partition("/")[0] not in without]
    file = None if sizes else stored_file(parent_of(place), name_of(place))
    return found if file is None else [file]


def files_by_folder(files: list[StoredFile]) -> dict[str, list[StoredFile]]:
    """Returns files by the folder that they are in, relative to what was listed; "" is that itself."""
    found: dict[str, list[StoredFile]] = {}
    for file in files:
        found.setdefault(file.name.rpartition("/")[0], []).append(file)
    return found


def stored_file(folder: Place, name: str) -> StoredFile | None:
    """Returns one file of a folder, or what a symbolic link there leads to; None if there is none.

    Raises:
        StorageError: The storage refused to say.
    """
    with storage_errors("stat", below(folder, name)):
        if isinstance(folder, Path):
            try:
                return _of_status(name, (folder / name).stat())
            except FileNotFoundError:
                return None
        client, prefix = place_in_store(folder)
        meta = client.head(joined(prefix, name))
        return None if meta is None or is_tombstone(meta) else StoredFile(name, meta["size"], meta["size"])


def _files_of(path: str, prefix: str, without: Collection[str] = ()) -> Iterator[StoredFile]:
    try:
        entries = os.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        if not prefix:
            raise
        return
    with entries:
        for entry in entries:
            if entry.name in without:
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files_of(entry.path, f"{prefix}{entry.name}/")
                else:
                    yield _of_status(prefix + entry.name, entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue  # it was removed meanwhile


def _of_status(name: str, status: os.stat_result) -> StoredFile:
    allocated = status.st_blocks * _STAT_BLOCK_BYTES
    return StoredFile(name, status.st_size, allocated, (status.st_dev, status.st_ino), status.st_nlink)
