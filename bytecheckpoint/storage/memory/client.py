# SPDX-License-Identifier: Apache-2.0
"""``HolderClient``: the objects that the holder of a run has, as the engine and the commit ask for them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from bytecheckpoint.storage.memory.connection import connection_to
from bytecheckpoint.storage.memory.machine_memory import require_memory
from bytecheckpoint.storage.memory.peers import is_data_file, peers_of
from bytecheckpoint.storage.object_store.conditions import AS_GIVEN, Conditions
from bytecheckpoint.storage.object_store.entries import Entry, is_tombstone
from bytecheckpoint.storage.object_store.urls import joined

__all__ = ["HolderClient"]


class HolderClient:
    """The objects below a URL of a run in memory; has what ``StoreClient`` has, and what ``MemoryObjects`` asks for.

    Thread-safe. A run without a holder has no objects; the first object starts one.

    Args:
        url: URL of the folder.
    """

    is_http = False

    def __init__(self, url: str) -> None:
        self.url = url
        run, _, self._prefix = url.partition("://")[2].partition("/")
        self._to = connection_to(run)
        self.num_requests = 0
        self.on_request: Callable[[int, int], None] | None = None

    # What the engine calls; see csrc/io/object_store.h.

    def open(self, name: str) -> tuple[int, str]:
        """Returns the size of an object in bytes, and its version; of one of another machine with where it is."""
        own = self.head(name)
        if own is not None and not is_tombstone(own):
            return own["size"], own["e_tag"]
        peers = peers_of(self._to.run)
        found = peers.find(self.key(name)) if peers is not None and is_data_file(name) else None
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no holder that answers has it")
        machine, meta = found
        return meta["size"], f"{machine} {meta['e_tag']}"

    def read(self, name: str, version: str, offset: int, num_bytes: int) -> bytes | bytearray:
        """Returns bytes of what ``open`` has found on another machine."""
        machine, _, e_tag = version.partition(" ")
        peers = peers_of(self._to.run)
        if peers is None:
            raise FileNotFoundError(errno.ENOENT, "it is in the memory of another machine")
        return peers.read(int(machine), self.key(name), e_tag, offset, num_bytes)

    def descriptor(self, name: str) -> int:
        """Returns a descriptor of an object, which the caller closes; -1 for a data file that others may have."""
        try:
            meta, fd = self._got(name)
        except FileNotFoundError:
            if is_data_file(name) and peers_of(self._to.run) is not None:
                return -1
            raise
        if is_tombstone(meta):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "it was removed")
        return fd

    def spare(self, name: str) -> int:
        """Returns a descriptor of memory for a new object, which the caller closes; -1 if there is none to spare."""
        _, fd = self._to.ask({"op": "spare", "name": self.key(name)}, starts=True)
        return -1 if fd is None else fd

    def reserve(self, name: str, num_bytes: int, there: int = 0) -> None:
        """Asks for memory, of the holder and of the machine; of the latter without ``there`` bytes, which it has."""
        require_memory(num_bytes, there)
        self._asked({"op": "reserve", "name": self.key(name), "bytes": num_bytes}, starts=True)

    def keep(self, name: str, fd: int) -> None:
        """Gives an object to the holder. It goes with this process until there is a commit mark beside it."""
        self._asked({"op": "put", "name": self.key(name), "stays": False}, fd, starts=True)

    def discard(self) -> None:
        """Frees what this process has kept below the URL, and no commit mark stands beside."""
        self._asked_if_there({"op": "discard", "below": f"{self._prefix}/"})

    def names(self, folder: str = "") -> list[str]:
        """Returns the names right below ``folder``, of objects and of folders; without tombstones.

        With the data files of other machines, as far as it was said what they have.
        """
        own = [each.name for each in self.entries(folder) if not each.is_tombstone] + self.folders(folder)
        peers = peers_of(self._to.run)
        return own if peers is None else [*dict.fromkeys([*own, *peers.names_in(self.key(folder))])]

    # Of the holder itself.

    def listen(self, address: str, token: bytes) -> int:
        """Makes the holder listen for other machines, and starts it if there is none.

        Args:
            address: IP address of this machine.
            token: Whom it lets in.

        Returns:
            The port.
        """
        port: int = self._asked({"op": "listen", "address": address, "token": token.hex()}, starts=True)["port"]
        return port

    # What Python calls.

    def entries(self, folder: str = "") -> list[Entry]:
        """Returns the objects right below ``folder``."""
        return [each for each in self._below(folder) if "/" not in each.name]

    def folders(self, folder: str = "") -> list[str]:
        """Returns the names of the folders right below ``folder``."""
        return sorted({each.name.partition("/")[0] for each in self._below(folder) if "/" in each.name})

    def everything(self, folder: str) -> list[Entry]:
        """Returns all objects below ``folder``; their names are relative to the URL."""
        return [Entry(joined(folder, each.name), each.num_bytes, each.last_modified) for each in self._below(folder)]

    def _below(self, folder: str) -> list[Entry]:
        key = self.key(folder)
        below = f"{key}/" if key else ""
        found = self._asked_if_there({"op": "list", "below": below})
        objects = [] if found is None else found["objects"]
        return [Entry(each["path"][len(below) :], each["size"], _time(each["last_modified"])) for each in objects]

    def head(self, name: str) -> dict[str, Any] | None:
        """Returns what is known of an object; None if there is none."""
        try:
            found = self._asked_if_there({"op": "head", "name": self.key(name)})
        except FileNotFoundError:
            return None
        return None if found is None else _meta(found)

    def exists(self, name: str) -> bool:
        """Whether there is an object. A tombstone is none."""
        meta = self.head(name)
        return meta is not None and not is_tombstone(meta)

    def get(self, name: str) -> bytes:
        """Returns all of an object."""
        return self.get_with_meta(name)[1]

    def get_with_meta(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Returns what ``head`` says of an object, and all of it."""
        meta, fd = self._got(name)
        try:
            return meta, os.pread(fd, meta["size"], 0)
        finally:
            os.close(fd)

    def get_if(self, name: str, e_tag: str) -> bytes:
        """Returns all of an object, if it still has that ETag; else it is an ESTALE."""
        meta, data = self.get_with_meta(name)
        if meta["e_tag"] != e_tag:
            raise OSError(errno.ESTALE, "there is another version")
        return data

    def put(self, name: str, data: bytes, *, once: bool = False) -> None:
        """Writes an object, in place of one that is there."""
        with _in_memory(data) as fd:
            self._asked({"op": "put", "name": self.key(name), "stays": True}, fd, starts=True)

    def put_if(self, name: str, data: bytes, replaces: dict[str, Any] | None) -> None:
        """Creates an object, or replaces one version of it; see ``StoreClient.put_if``."""
        self.send_put_if(name, data, replaces)

    def send_put_if(
        self, name: str, data: bytes, replaces: dict[str, Any] | None, etag_form: str = AS_GIVEN, *, once: bool = False
    ) -> None:
        """Does what ``put_if`` does."""
        request = {"op": "put", "name": self.key(name), "stays": True, "if": replaces and replaces["e_tag"]}
        with _in_memory(data) as fd:
            self._asked(request, fd, starts=True)

    def conditions(self) -> Conditions:
        """Returns which conditions of writes a holder obeys: all."""
        return Conditions((), AS_GIVEN, self.url, self.server(), is_final=True)

    def server(self) -> str:
        """Returns what holds the objects."""
        return f"the holder of {self._to.run}"

    def delete(self, names: Sequence[str], *, spares: bool = False) -> None:
        """Removes objects. Those that are already gone are no error.

        Args:
            names: Their names.
            spares: Whether their memory is kept for objects that are made next, until others are removed.
        """
        self._asked_if_there({"op": "delete", "names": [self.key(name) for name in names], "spares": spares})

    def delete_once(self, name: str) -> None:
        """Removes an object."""
        self.delete([name])

    def _got(self, name: str) -> tuple[dict[str, Any], int]:
        try:
            found, fd = self._to.ask({"op": "get", "name": self.key(name)})
        except ConnectionRefusedError:
            raise FileNotFoundError(errno.ENOENT, f"{self.server()} does not run") from None
        if fd is None:
            raise OSError(errno.EPROTO, f"{self.server()} has sent no descriptor")
        return _meta(found), fd

    def _asked(self, request: dict[str, Any], fd: int | None = None, *, starts: bool = False) -> dict[str, Any]:
        answer: dict[str, Any] = self._to.ask(request, fd, starts=starts)[0]
        return answer

    def _asked_if_there(self, request: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return self._asked(request)
        except ConnectionRefusedError:
            return None

    def key(self, name: str) -> str:
        """Returns the name in the run of an object."""
        return joined(self._prefix, name)


@contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("bytecheckpoint", os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
        yield fd
    finally:
        os.close(fd)


def _meta(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "last_modified": _time(found["last_modified"])}


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
