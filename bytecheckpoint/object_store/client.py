# SPDX-License-Identifier: Apache-2.0
"""The objects below one URL: what the engine and the commit ask of a store, in terms of obstore."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bytecheckpoint.object_store.refusals import errno_of, text_of

__all__ = ["PART_BYTES", "Entry", "StoreClient"]

# A slot of the engine's ring, which goes out as one part. Stores take parts from 5 MiB on, and 10,000 of them.
PART_BYTES = 8 << 20
# In the text of errors: the store has replied, and its reply was final.
_HAVE_A_REASON = ("status code: 4", "redirect without LOCATION")


@dataclass(frozen=True)
class Entry:
    """One object in a listing. ``last_modified`` is by the clock of the store."""

    name: str
    num_bytes: int
    last_modified: datetime


class StoreClient:
    """The objects below ``url``.

    Thread-safe. Calls let go of the GIL while they wait. They raise OSErrors, with the errno that a file system would
    have: ENOENT, ENODEV (there is no such bucket), EACCES, EEXIST (there is an object), ESTALE (an object was
    replaced), EINVAL (the store does not take the request), EOPNOTSUPP, ETIMEDOUT, EIO. No message has a query of a
    URL, which may hold a signature.

    Args:
        url: URL of the folder, for messages.
        store: A store of obstore.
        prefix: Key of the folder in ``store``.
        num_in_flight: Number of parts of an upload that are under way at once.
    """

    def __init__(self, url: str, store: Any, prefix: str, num_in_flight: int) -> None:
        import obstore

        self.url = url
        self._obstore: Any = obstore
        self._store = store
        self._prefix = prefix
        self._num_in_flight = num_in_flight

    # What the engine calls; see csrc/bridge/python_store.h.

    def open(self, name: str) -> tuple[int, str]:
        """Returns the size of an object in bytes, and its version, which ``read`` takes."""
        meta = self._meta(name)
        return meta["size"], meta.get("e_tag") or ""

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
        """Returns the names of the objects right below the URL."""
        return [entry.name for entry in self.entries()]

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
            return self._meta(name)
        except FileNotFoundError:
            return None

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

    def _meta(self, name: str) -> dict[str, Any]:
        meta: dict[str, Any]
        try:
            with self._errors():
                meta = self._obstore.head(self._store, self._key(name))
        except OSError as error:
            if not any(mark in str(error) for mark in _HAVE_A_REASON):
                raise
            # The reply to a HEAD has no body. That to a GET says why: NoSuchBucket or NoSuchKey, ExpiredToken, ...
            with self._errors():
                meta = self._obstore.get(self._store, self._key(name)).meta
        return meta

    def _deletes_in_bulk(self) -> bool:
        return type(self._store).__name__ in ("S3Store", "MemoryStore")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno is not None:
                raise
            # obstore's FileNotFoundError has a text alone.
            text = text_of(error)
            raise OSError(errno.ENODEV if "NoSuchBucket" in text else errno.ENOENT, text) from None
        except Exception as error:
            number = errno_of(error)
            if number is None and not isinstance(error, self._obstore.exceptions.BaseError):
                raise  # what the parts raise: the failure of another rank's thread, a cancelled save
            raise OSError(number or errno.EIO, text_of(error)) from None
