# SPDX-License-Identifier: Apache-2.0
"""The objects below one URL: what the engine and the commit ask of a store, in terms of obstore."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

__all__ = ["PART_BYTES", "Entry", "StoreClient"]

# A slot of the engine's ring, which goes out as one part. Stores take parts from 5 MiB on, and 10,000 of them.
PART_BYTES = 8 << 20
_QUERY = re.compile(r"\?[^\s\"']*")
_MOST_TEXT = 600


@dataclass(frozen=True)
class Entry:
    """One object in a listing. ``last_modified`` is by the clock of the store."""

    name: str
    num_bytes: int
    last_modified: datetime


class StoreClient:
    """The objects below ``url``.

    Thread-safe. Calls let go of the GIL while they wait. They raise OSErrors, with the errno that a file system would
    have: ENOENT, EACCES, EEXIST (there is an object), ESTALE (an object was replaced), EOPNOTSUPP, ETIMEDOUT, EIO. No
    message has a query of a URL, which may hold a signature.

    Args:
        url: URL of the folder, for messages.
        store: A store of obstore.
        prefix: Key of the folder in ``store``.
        num_in_flight: Number of parts of an upload that are under way at once.

    Attributes:
        is_http: Whether it is a folder of a web server, which can only be read, and has no listing.
    """

    def __init__(self, url: str, store: Any, prefix: str, num_in_flight: int) -> None:
        import obstore

        self.url = url
        self.is_http = url.startswith(("http://", "https://"))
        self._obstore: Any = obstore
        self._store = store
        self._prefix = prefix
        self._num_in_flight = num_in_flight

    # What the engine calls; see csrc/bridge/python_store.h.

    def open(self, name: str) -> tuple[int, str]:
        """Returns the size of an object in bytes, and its version, which ``read`` takes."""
        with self._errors():
            meta = self._obstore.head(self._store, self._key(name))
        version = meta.get("e_tag") or ""
        # A weak tag matches no condition.
        return meta["size"], "" if version.startswith("W/") else version

    def read(self, name: str, version: str, offset: int, size: int) -> Any:
        """Returns a buffer of ``size`` bytes from ``offset`` on, fewer at the end of the object."""
        options: dict[str, Any] = {"range": (offset, offset + size)}
        if version:
            options["if_match"] = version
        with self._errors():
            return self._obstore.get(self._store, self._key(name), options=options).bytes()

    def upload(self, name: str, parts: Any) -> Future[None]:
        """Begins to upload an object of ``parts``, an iterator of buffers. The future says when the object exists."""
        future: Future[None] = Future()
        # A store in memory keeps what it is given, and each part is in a slot that is used again.
        buffers = map(bytes, parts) if type(self._store).__name__ == "MemoryStore" else parts

        def run() -> None:
            try:
                with self._errors():
                    self._obstore.put(
                        self._store,
                        self._key(name),
                        buffers,
                        use_multipart=True,
                        chunk_size=PART_BYTES,
                        max_concurrency=self._num_in_flight,
                    )
            except OSError as error:
                parts.fail(error.errno or errno.EIO, f"put({self.url}/{name}): {error.strerror}")
                future.set_exception(error)
            except BaseException as error:
                parts.fail(errno.EIO, f"put({self.url}/{name}): {error!r}")
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name="bytecheckpoint-upload", daemon=True).start()
        return future

    def names(self) -> list[str]:
        """Returns the names of the objects right below the URL; none over HTTP."""
        return [] if self.is_http else [entry.name for entry in self.entries()]

    # What the commit calls.

    def entries(self) -> list[Entry]:
        """Returns the objects right below the URL."""
        with self._errors():
            found = self._obstore.list_with_delimiter(self._store, self._prefix or None)
            return [
                Entry(meta["path"].rpartition("/")[2], meta["size"], meta["last_modified"]) for meta in found["objects"]
            ]

    def head(self, name: str) -> dict[str, Any] | None:
        """Returns what the store says of an object; None if there is none."""
        try:
            with self._errors():
                meta: dict[str, Any] = self._obstore.head(self._store, self._key(name))
        except FileNotFoundError:
            return None
        return meta

    def get(self, name: str) -> bytes:
        """Returns all of an object."""
        with self._errors():
            return bytes(self._obstore.get(self._store, self._key(name)).bytes())

    def put_if(self, name: str, data: bytes, replaces: dict[str, Any] | None) -> None:
        """Creates an object, or replaces one version of it, in one request.

        Args:
            name: Name of the object.
            data: Its bytes.
            replaces: What ``head`` returned for the version to replace; None if there must be no object.

        Raises:
            FileExistsError: There is an object, or another version of it.
        """
        version = {key: replaces[key] for key in ("e_tag", "version") if replaces.get(key)} if replaces else {}
        mode = "create" if replaces is None else version
        with self._errors():
            self._obstore.put(self._store, self._key(name), data, mode=mode, use_multipart=False)

    def delete(self, names: Sequence[str]) -> None:
        """Removes objects. Those that are already gone are no error."""
        for name in names if not self._deletes_in_bulk() else ():
            try:
                with self._errors():
                    self._obstore.delete(self._store, self._key(name))
            except FileNotFoundError:
                continue
        if names and self._deletes_in_bulk():
            with self._errors():
                self._obstore.delete(self._store, [self._key(name) for name in names])

    def _deletes_in_bulk(self) -> bool:
        return type(self._store).__name__ in ("S3Store", "MemoryStore")

    def _key(self, name: str) -> str:
        key = f"{self._prefix}/{name}" if self._prefix else name
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise OSError(errno.EINVAL, f"the key '{key}' has a part that is empty, '.' or '..', which obstore refuses")
        return key

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno is not None:
                raise
            # obstore's FileNotFoundError has a text alone.
            raise FileNotFoundError(errno.ENOENT, _text(error)) from None
        except Exception as error:
            kind = _ERRNO_OF.get(type(error).__name__)
            if kind is None and not isinstance(error, self._obstore.exceptions.BaseError):
                raise  # what the parts raise: the failure of another rank's thread, a cancelled save
            raise OSError(kind(str(error)) if callable(kind) else kind or errno.EIO, _text(error)) from None


def _errno_of_text(text: str) -> int:
    return errno.ETIMEDOUT if "timed out" in text else errno.EIO


_ERRNO_OF: dict[str, int | Callable[[str], int]] = {
    "AlreadyExistsError": errno.EEXIST,
    "GenericError": _errno_of_text,
    "NotSupportedError": errno.EOPNOTSUPP,
    "PermissionDeniedError": errno.EACCES,
    "PreconditionError": errno.ESTALE,
    "UnauthenticatedError": errno.EACCES,
}


def _text(error: BaseException) -> str:
    """Returns the first line of a message: obstore adds a listing of its cause."""
    first = _QUERY.sub("?...", str(error).strip().partition("\n\nDebug source:")[0].replace("\n", " "))
    return first if len(first) <= _MOST_TEXT else f"{first[:_MOST_TEXT]}..."
