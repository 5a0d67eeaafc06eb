# SPDX-License-Identifier: Apache-2.0
"""``StoreFolder``: the objects below a URL, or below a folder of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folder import Commit
from bytecheckpoint.storage.folder_files import StoredFile
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.commit import StoreCommit
from bytecheckpoint.storage.object_store.entries import is_tombstone
from bytecheckpoint.storage.object_store.save_notes import SaveNote
from bytecheckpoint.storage.object_store.stores import (
    MOST_FILE_BYTES,
    keep_known,
    place_in_store,
    use_store,
    with_store_ring,
)
from bytecheckpoint.storage.object_store.urls import is_http, joined, key_of_url
from bytecheckpoint.storage.paths import name_of, parent_of
from bytecheckpoint.storage.small_files import storage_errors

__all__ = ["StoreFolder"]

_MARK = ".metadata"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class StoreFolder:
    """The objects below a URL; see ``Folder``. A folder is there if an object is below it.

    Except for ``use``, ``begin_commit`` and what makes no request, methods need a URL that is known: that URL, or a
    folder above it, was passed to ``use`` of some object in this process.

    Args:
        place: A URL as ``store_url`` returns it.
    """

    keeps_journals = False
    commits_by_rank = False  # they would sweep one another's files: a store has no locks to tell them apart
    orders_commits = False
    is_of_one_machine = False
    lists_deep = True
    num_at_once = 16
    is_best_read_together = True  # a store is slower than ranks are to one another, and counts requests
    may_read_late = True
    most_file_bytes = MOST_FILE_BYTES

    def __init__(self, place: str) -> None:
        self.place = place
        self.has_listing = self.keeps_notes = not is_http(place)
        self._used: StoreClient | None = None
        self._note: SaveNote | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreFolder, (self.place,)  # clients are of one process

    @property
    def num_requests(self) -> int:
        return sum(each.num_requests for each in (self._used, self._note) if each is not None)

    def use(
        self, config: Config | None, extension: Any = None, on_request: Callable[[int, int], None] | None = None
    ) -> None:
        if self._used is not None or (config is None and keep_known(self.place, extension or _core)):
            return
        self._used = use_store(self.place, config or Config.from_env(), extension or _core)
        self._used.on_request = on_request

    def tuned(self, config: Config) -> Config:
        return with_store_ring(config)

    def key(self, io_timeout_s: float | None = None) -> tuple[int, int]:
        return key_of_url(self.place)

    def is_there(self) -> bool:
        if not self.has_listing:
            return self.has(_MARK)
        return name_of(self.place) in self._above().folders() and not self.is_removed()

    def is_absent(self) -> bool:
        """See ``Folder``: a run without steps is as good as none."""
        return False

    def is_gone(self) -> bool:
        """See ``Folder``: a store says so only when it is asked for objects."""
        return False

    def is_removed(self) -> bool:
        client, name = place_in_store(self.place)
        with storage_errors("list", self.place):
            return self.has_listing and all(each.is_tombstone for each in client.everything(name))

    def folders(self, *, follow_links: bool = False) -> list[str]:
        client, name = place_in_store(self.place)
        with storage_errors("list", self.place):
            return client.folders(name)

    def names(self) -> list[str]:
        client, name = place_in_store(self.place)
        with storage_errors("list", self.place):
            return client.names(name)

    def has(self, name: str) -> bool:
        client, folder = place_in_store(self.place)
        with storage_errors("head", self.place):
            return client.exists(joined(folder, name))

    def changed(self, name: str) -> int | None:
        client, folder = place_in_store(self.place)
        with storage_errors("head", self.place):
            found = client.head(joined(folder, name))
        return None if found is None or is_tombstone(found) else _nanoseconds(found["last_modified"])

    def file_times(self) -> dict[str, int]:
        client, name = place_in_store(self.place)
        with storage_errors("list", self.place):
            entries = [entry for entry in client.entries(name) if not entry.is_tombstone]
        return {entry.name: _nanoseconds(entry.last_modified) for entry in entries}

    def file(self, name: str) -> StoredFile | None:
        client, folder = place_in_store(self.place)
        with storage_errors("stat", joined(self.place, name)):
            meta = client.head(joined(folder, name))
        return None if meta is None or is_tombstone(meta) else StoredFile(name, meta["size"], meta["size"])

    def files(self, without: Collection[str] = ()) -> list[StoredFile]:
        if not self.has_listing:  # only the mark is sure to have this name
            return [file for file in [self.file(_MARK)] if file is not None]
        client, folder = place_in_store(self.place)
        with storage_errors("list", self.place):
            begin = len(folder) + 1 if folder else 0
            every = client.everything(folder)
        sizes = {each.name[begin:]: each.num_bytes for each in every if not each.is_tombstone}
        if not sizes:  # it may be an object itself
            file = self._above().file(name_of(self.place))
            return [] if file is None else [file]
        return [StoredFile(name, size, size) for name, size in sizes.items() if name.partition("/")[0] not in without]

    def is_same(self, other: str | os.PathLike[str]) -> bool:
        return self.place == os.fspath(other).rstrip("/")

    def sees(self, names: Collection[str]) -> bool:
        """See ``Folder``: an object is there for all as soon as it was put."""
        return True

    def shows_late(self, io_timeout_s: float) -> bool:
        return False

    def read_file(self, name: str, max_bytes: int) -> bytes | None:
        client, folder = place_in_store(self.place)
        with storage_errors("get", joined(self.place, name)):
            try:
                return client.get(joined(folder, name))
            except FileNotFoundError:
                return None

    def write_file(self, name: str, content: bytes) -> None:
        client, folder = place_in_store(self.place)
        with storage_errors("put", joined(self.place, name)):
            client.put(joined(folder, name), content)

    def remove_file(self, name: str) -> None:
        client, folder = place_in_store(self.place)
        with storage_errors("delete", joined(self.place, name)):
            client.delete([joined(folder, name)])

    def begin_commit(
        self,
        config: Config,
        *,
        save_id: str,
        rank: int | None,
        overwrite: bool,
        sync: bool,
        reserve_bytes: int,
        about: bytes = b"",
    ) -> Commit:
        if rank is not None:
            raise UnsupportedError(
                f"save({self.place}): use_collectives=False is for directories; save to a URL with collectives",
                self.place,
            )
        client = self._used or use_store(self.place, config)
        keeps_note = about and self.keeps_notes
        self._note = SaveNote(self.place, save_id, config, client.on_request) if keeps_note else None
        deadline_s = config.commit_deadline_s
        return StoreCommit(client, overwrite=overwrite, deadline_s=deadline_s, note=self._note, about=about)

    def _above(self) -> StoreFolder:
        return StoreFolder(str(parent_of(self.place)))


def _nanoseconds(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1) * 1000
