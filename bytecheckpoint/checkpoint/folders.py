# SPDX-License-Identifier: Apache-2.0
"""What is in a folder: of a file system, or below the URL of an object store. Needs no torch.

A URL, or a folder above it, must have been made known before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bytecheckpoint.checkpoint.small_files import storage_errors
from bytecheckpoint.config import Config
from bytecheckpoint.native import _core
from bytecheckpoint.object_store.stores import keep_known, place_in_store, use_store
from bytecheckpoint.object_store.urls import is_store_url, joined

__all__ = [
    "Place",
    "below",
    "folders_in",
    "has_file",
    "is_folder",
    "is_removed",
    "known",
    "name_of",
    "names_in",
    "parent_of",
    "read_object",
    "write_object",
]

# A directory, or a URL as ``store_url`` returns it.
Place = Path | str
_T = TypeVar("_T")


def known(place: Place, config: Config | None = None) -> Place:
    """Makes the store of a URL known, for whatever is done below it, and returns the URL. A directory needs nothing.

    Args:
        place: A directory or a URL.
        config: Settings for the store. None keeps those that it is known with, else reads ``BYTECHECKPOINT_*``
            variables.

    Raises:
        ConfigError: An option of the store is unknown.
        UnsupportedError: obstore is not installed.
    """
    if isinstance(place, str) and not (config is None and keep_known(place)):
        use_store(place, config or Config.from_env())
    return place


def below(place: Place, *names: str) -> Place:
    """Returns the place that ``names`` lead to from ``place``."""
    return Path(place, *names) if isinstance(place, Path) else joined(place, *names)


def name_of(place: Place) -> str:
    """Returns the last name in a path or URL."""
    return place.name if isinstance(place, Path) else place.rpartition("/")[2]


def parent_of(place: Place) -> Place:
    """Returns the folder that ``place`` is in; above a bucket there is none, and it is its own."""
    if isinstance(place, Path):
        return place.parent
    above = place.rpartition("/")[0]
    return place if above.endswith("/") else above


def is_folder(place: Place) -> bool:
    """Whether there is such a folder.

    Raises:
        StorageError: The storage refused to say.
    """
    with storage_errors("stat", place):
        if isinstance(place, Path):
            return place.is_dir() or (_core.look_anew(str(place)) and place.is_dir())
        client, _ = place_in_store(place)
        if client.is_http:
            return has_file(place, ".metadata")
        return name_of(place) in folders_in(parent_of(place)) and not is_removed(place)


def folders_in(place: str | os.PathLike[str], *, follow_links: bool = False) -> list[str]:
    """Returns the names of the folders in a folder. In a store a folder is there if an object is below it.

    Args:
        place: The folder.
        follow_links: Whether to return symbolic links, too, wherever they lead.

    Raises:
        StorageError: The folder cannot be listed.
    """
    with storage_errors("list", place):
        if is_store_url(place):
            client, name = place_in_store(os.fspath(place))
            return client.folders(name)
        with _seen(place, lambda: os.scandir(place)) as entries:
            return [e.name for e in entries if e.is_dir(follow_symlinks=False) or (follow_links and e.is_symlink())]


def _seen(place: str | os.PathLike[str], ask: Callable[[], _T]) -> _T:
    """Returns what ``ask`` returns; asks again where another machine may have made ``place`` a moment ago."""
    try:
        return ask()
    except FileNotFoundError:
        if not _core.look_anew(os.fspath(place)):
            raise
        return ask()


def names_in(place: str | os.PathLike[str]) -> list[str]:
    """Returns the names in a folder, of files and of folders.

    Raises:
        StorageError: The folder cannot be listed.
    """
    with storage_errors("list", place):
        if is_store_url(place):
            client, name = place_in_store(os.fspath(place))
            return client.names(name)
        return _seen(place, lambda: os.listdir(place))  # noqa: PTH208


def has_file(place: str | os.PathLike[str], name: str) -> bool:
    """Whether anything has the name ``name`` in the folder ``place``.

    Raises:
        StorageError: The store refused to say. A directory that cannot be looked at counts as one without the file.
    """
    if not is_store_url(place):
        return os.path.lexists(os.path.join(place, name))  # noqa: PTH118
    client, folder = place_in_store(os.fspath(place))
    with storage_errors("head", place):
        return client.exists(joined(folder, name))


def is_removed(place: str | os.PathLike[str]) -> bool:
    """Whether a folder is in a store, and has nothing but what a prune, or a save that died, has left to mark it.

    Raises:
        StorageError: The store refused to say.
    """
    if not is_store_url(place):
        return False
    client, name = place_in_store(os.fspath(place))
    with storage_errors("list", place):
        return not client.is_http and all(each.is_tombstone for each in client.everything(name))


def read_object(url: str, name: str) -> bytes | None:
    """Returns all of a small object below ``url``; None if there is none.

    Raises:
        StorageError: The store refused.
    """
    client, folder = place_in_store(url)
    with storage_errors("get", below(url, name)):
        try:
            return client.get(joined(folder, name))
        except FileNotFoundError:
            return None


def write_object(url: str, name: str, data: bytes) -> None:
    """Writes a small object below ``url``, in place of one that is there.

    Raises:
        StorageError: The store refused.
    """
    client, folder = place_in_store(url)
    with storage_errors("put", below(url, name)):
        client.put(joined(folder, name), data)
