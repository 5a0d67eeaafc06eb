# SPDX-License-Identifier: Apache-2.0
"""The objects below one URL: what the engine and the commit ask of a store, in terms of obstore."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.object_store.conditions import AS_GIVEN, Conditions, as_sent, try_conditions
from bytecheckpoint.storage.object_store.entries import Entry, entries_of, folders_of, is_tombstone
from bytecheckpoint.storage.object_store.object_ends import ObjectEnds
from bytecheckpoint.storage.object_store.refusals import errno_of, text_of
from bytecheckpoint.storage.object_store.servers import server_of
from bytecheckpoint.storage.object_store.urls import is_http, joined

__all__ = ["PART_BYTES", "StoreClient"]

# A slot of the engine's ring, which goes out as one part. Stores take parts from 5 MiB on, and 10,000 of them.
PART_BYTES = 8 << 20
_OBJECTS_A_PAGE = 1000
# In the text of errors: the store has replied, and its reply was final.
_HAVE_A_REASON = ("status code: 4", "redirect without LOCATION")
# Azure has no ranges that count from the end, and a web server need not have them.
_SEND_ENDS = ("S3Store", "GCSStore", "MemoryStore")
_TAIL_BYTES = 64 << 10
_conditions: PerProcess[dict[str, Conditions]] = PerProcess(dict)  # by bucket and server
_tails = PerProcess(ObjectEnds)


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
        bucket: Identifies the bucket, and the server that it is on, in this process.
        open_once: Returns the same store, which tries each request once.

    Attributes:
        is_http: Whether it is a folder of a web server, which can only be read, and has no listing.
        num_requests: Number of requests that were made. A request that obstore tried again counts once: it does not
            tell.
        on_request: Called with the begin and the end of each request, in nanoseconds of ``time.monotonic_ns``, by any
            thread; None: nobody asks. What obstore tries again, and the parts of one upload, are one request.
    """

    def __init__(
        self, url: str, store: Any, prefix: str, num_in_flight: int, bucket: str, open_once: Callable[[], Any]
    ) -> None:
        import obstore

        self.url = url
        self.is_http = is_http(url)
        self._obstore: Any = obstore
        self._store = store
        self._prefix = prefix
        self._num_in_flight = num_in_flight
        self._bucket = bucket
        self._open_once = open_once
        self._kind = type(store).__name__
        self.num_requests = 0
        self.on_request: Callable[[int, int], None] | None = None
        self._counting = threading.Lock()

    # What the engine calls; see csrc/bridge/python_store.h.

    def open(self, name: str) -> tuple[int, str]:
        """Returns the size of an object in bytes, and its version, which ``read`` takes. A tombstone is no object.

        Where the store can send the end of an object, that comes along, and ``read`` needs no further request for it:
        trailers and tables are at the end of our files, and a small ``.metadata`` is all in it.

        Raises:
            FileNotFoundError: There is no object.
            OSError: The store refused.
        """
        meta, tail = self._opened(name)
        if is_tombstone(meta):
            raise FileNotFoundError(errno.ENOENT, "it was removed")
        version = meta.get("e_tag") or ""
        # A weak tag matches no condition.
        version = "" if version.startswith("W/") else version
        if tail is not None and version:
            _tails.get().put((self.url, name, version), meta["size"] - len(tail), tail)
        return meta["size"], version

    def _opened(self, name: str) -> tuple[Any, memoryview | None]:
        if self._kind in _SEND_ENDS:
            try:
                with self._errors():
                    found = self._obstore.get(self._store, self._key(name), options={"range": {"suffix": _TAIL_BYTES}})
                    return found.meta, memoryview(found.bytes())
            except OSError as error:
                # An empty object has no range.
                is_empty = "416" in str(error) or self._kind == "MemoryStore"
                if isinstance(error, FileNotFoundError) or not is_empty:
                    raise
        return self._meta(name), None

    def read(self, name: str, version: str, offset: int, size: int) -> Any:
        """Returns a buffer of ``size`` bytes from ``offset`` on, fewer at the end of the object."""
        begin, tail = _tails.get().find((self.url, name, version))
        if tail is not None and offset >= begin:
            return tail[offset - begin : offset - begin + size]
        options: dict[str, Any] = {"range": (offset, offset + size)}
        if version:
            options["if_match"] = version
        with self._errors():
            return self._obstore.get(self._store, self._key(name), options=options).bytes()

    def upload(self, name: str, parts: Any) -> Future[None]:
        """Begins to upload an object of ``parts``, an iterator of buffers. The future says when the object exists."""
        future: Future[None] = Future()
        # A store in memory keeps what it is given, and each part is in a slot that is used again.
        buffers = map(bytes, parts) if self._kind == "MemoryStore" else parts

        def run() -> None:
            first: list[Any] = []  # the upload takes it from here: no reference may stay
            try:
                first.append(next(buffers, b""))
                is_all = memoryview(first[0]).nbytes < PART_BYTES  # a shorter part is the last
                with self._errors(1 if is_all else 2):  # to begin and to end; and one for each part
                    self._obstore.put(
                        self._store,
                        self._key(name),
                        first.pop() if is_all else map(self._of_upload, _taken(first, buffers)),
                        use_multipart=not is_all,
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
            first.clear()

        threading.Thread(target=run, name="bytecheckpoint-upload", daemon=True).start()
        return future

    def _of_upload(self, part: Any) -> Any:
        self._count(1)
        return part

    def copy(self, source: str, name: str) -> None:
        """Has the store copy an object to ``name``: no byte comes here.

        Args:
            source: URL of the object, which another folder of the same bucket has.
            name: Name of the copy.

        Raises:
            FileExistsError: There is an object of that name.
            OSError: ``source`` is in another bucket (EXDEV), or the store refused.
        """
        bucket = self.url.removesuffix(self._prefix).rstrip("/") + "/"
        if not source.startswith(bucket):
            raise OSError(errno.EXDEV, "it is in another bucket")
        if self.exists(name):
            raise FileExistsError(errno.EEXIST, "there is one already")
        with self._errors():
            self._obstore.copy(self._store, source.removeprefix(bucket), self._key(name))

    def names(self, folder: str = "") -> list[str]:
        """Returns the names right below ``folder``, which is relative to the URL: of objects, and of folders.

        Tombstones are left out. Over HTTP there is no listing, and no name.
        """
        if self.is_http:
            return []
        found = self._listed(folder)
        objects = [each.name for each in entries_of(found) if not each.is_tombstone]
        return objects + folders_of(found)

    # What Python calls.

    def entries(self, folder: str = "") -> list[Entry]:
        """Returns the objects right below ``folder``, which is relative to the URL; "" is the URL itself."""
        return entries_of(self._listed(folder))

    def folders(self, folder: str = "") -> list[str]:
        """Returns the names of the folders right below ``folder``: a folder is there if an object is in it."""
        return folders_of(self._listed(folder))

    def everything(self, folder: str) -> list[Entry]:
        """Returns all objects below ``folder``, in folders of it, too; their names are relative to the URL."""
        begin = len(self._prefix) + 1 if self._prefix else 0
        with self._errors():
            batches = self._obstore.list(self._store, prefix=self._key(folder) or None)
            found = [
                Entry(meta["path"][begin:], meta["size"], meta["last_modified"]) for batch in batches for meta in batch
            ]
        self._count_pages(len(found))
        return found

    def _listed(self, folder: str) -> Any:
        if self.is_http:
            raise OSError(errno.EOPNOTSUPP, "over HTTP there is no listing: pass the URL of the checkpoint itself")
        key = self._key(folder)
        with self._errors():
            found = self._obstore.list_with_delimiter(self._store, key or None)
        self._count_pages(len(found["objects"]) + len(found["common_prefixes"]))
        return found

    def head(self, name: str) -> dict[str, Any] | None:
        """Returns what the store says of an object; None if there is none."""
        try:
            return self._meta(name)
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """Whether there is an object. A tombstone is none."""
        meta = self.head(name)
        return meta is not None and not is_tombstone(meta)

    def get(self, name: str) -> bytes:
        """Returns all of an object."""
        return self.get_with_meta(name)[1]

    def get_with_meta(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Returns what ``head`` says of an object, and all of it: both of one version."""
        with self._errors():
            found = self._obstore.get(self._store, self._key(name))
            return found.meta, bytes(found.bytes())

    def put(self, name: str, data: bytes, *, once: bool = False) -> None:
        """Writes an object in one request, in place of one that is there.

        Args:
            name: Name of the object.
            data: Its bytes.
            once: Whether it is tried once, and for seconds only.
        """
        store = self._open_once() if once else self._store
        with self._errors():
            self._obstore.put(store, self._key(name), data, use_multipart=False)

    def put_if(self, name: str, data: bytes, replaces: dict[str, Any] | None) -> None:
        """Creates an object, or replaces one version of it, in one request. The first call tries the store; see below.

        Args:
            name: Name of the object.
            data: Its bytes.
            replaces: What ``head`` returned for the version to replace; None if there must be no object.

        Raises:
            FileExistsError: There is an object, where there must be none.
            OSError: There is another version of it (ESTALE), the store does not obey conditions (EOPNOTSUPP), or it
                refused for another reason.
        """
        conditions = self.conditions()
        if conditions.fault:
            raise OSError(errno.EOPNOTSUPP, conditions.fault)
        self.send_put_if(name, data, replaces, conditions.etag_form)

    def send_put_if(
        self, name: str, data: bytes, replaces: dict[str, Any] | None, etag_form: str = AS_GIVEN, *, once: bool = False
    ) -> None:
        """Does what ``put_if`` does, whatever the store makes of conditions; see ``Conditions.etag_form``.

        Args:
            name: Name of the object.
            data: Its bytes.
            replaces: See ``put_if``.
            etag_form: Form in which the ETag is sent.
            once: Whether it is tried once, and for seconds only.
        """
        version = {key: replaces[key] for key in ("e_tag", "version") if replaces.get(key)} if replaces else {}
        mode = "create" if replaces is None else as_sent(version, etag_form)
        store = self._open_once() if once else self._store
        with self._errors():
            self._obstore.put(store, self._key(name), data, mode=mode, use_multipart=False)

    def conditions(self) -> Conditions:
        """Returns which conditions of writes the store obeys. Tries it once in a process for each bucket and server.

        Raises:
            OSError: The store refused for a reason that has nothing to do with conditions.
        """
        known = _conditions.get()
        found = known.get(self._bucket)
        if found is None:
            found = try_conditions(self)
            if found.is_final:
                known[self._bucket] = found
        return found

    def get_if(self, name: str, e_tag: str) -> bytes:
        """Returns all of an object, if it still has that ETag; else it is an ESTALE."""
        with self._errors():
            return bytes(self._obstore.get(self._store, self._key(name), options={"if_match": e_tag}).bytes())

    def server(self) -> str:
        """Returns what is known of the server: its name and address, as far as it tells. Raises nothing."""
        self._count(1)
        return server_of(self._store)

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
            self._count_pages(len(names))

    def delete_once(self, name: str) -> None:
        """Removes an object in one request, which is not tried again. It is no error if it is already gone."""
        try:
            with self._errors():
                self._obstore.delete(self._open_once(), self._key(name))
        except FileNotFoundError:
            return

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
        return self._kind in ("S3Store", "MemoryStore")

    def _key(self, name: str) -> str:
        key = joined(self._prefix, name)
        if key and any(part in ("", ".", "..") for part in key.split("/")):
            raise OSError(errno.EINVAL, f"the key '{key}' has a part that is empty, '.' or '..', which obstore refuses")
        return key

    def _count(self, number: int) -> None:
        with self._counting:
            self.num_requests += number

    def _count_pages(self, num_objects: int) -> None:
        """Counts the requests for so many objects, but for the first: one request lists or removes 1,000."""
        self._count(max(num_objects - 1, 0) // _OBJECTS_A_PAGE)

    @contextmanager
    def _errors(self, num_requests: int = 1) -> Iterator[None]:
        """Counts requests, and turns what obstore raises into an OSError."""
        self._count(num_requests)
        begin_ns = time.monotonic_ns()
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
        finally:
            if self.on_request is not None:
                self.on_request(begin_ns, time.monotonic_ns())


def _taken(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """Yields what is in ``first``, and then ``rest``, and keeps no reference to any of it."""
    while first:
        yield first.pop()
    yield from rest
