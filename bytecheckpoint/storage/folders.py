# SPDX-License-Identifier: Apache-2.0
"""The folder at a path or URL."""

from __future__ import annotations

import os
from pathlib import Path

from bytecheckpoint.config import Config
from bytecheckpoint.storage.folder import Folder
from bytecheckpoint.storage.local_folder import LocalFolder
from bytecheckpoint.storage.memory.folder import MemoryFolder
from bytecheckpoint.storage.object_store.folder import StoreFolder
from bytecheckpoint.storage.object_store.stores import can_use_stores
from bytecheckpoint.storage.object_store.urls import is_held, is_known_store
from bytecheckpoint.storage.paths import Place, as_place

__all__ = ["can_open_url", "folder_at", "known"]


def folder_at(place: str | os.PathLike[str]) -> Folder:
    """Returns the folder at a path, or at a URL as ``store_url`` returns it. Looks at nothing."""
    at = as_place(place)
    if isinstance(at, Path):
        return LocalFolder(at)
    return MemoryFolder(at) if is_held(at) else StoreFolder(at)


def can_open_url(path: object) -> bool:
    """Whether ``path`` is the URL of a kind of store that we know, and the package for these is installed."""
    return is_known_store(path) and (is_held(path) or can_use_stores())


def known(place: Place, config: Config | None = None) -> Place:
    """Makes the store of a URL known, for whatever is done below it, and returns the URL. A directory needs nothing.

    Args:
        place: A directory or a URL.
        config: Settings for the store; see ``Folder.use``.

    Raises:
        ConfigError: An option of the store is unknown.
        UnsupportedError: obstore is not installed.
    """
    folder_at(place).use(config)
    return place
