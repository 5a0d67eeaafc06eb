# SPDX-License-Identifier: Apache-2.0
"""A server of S3 in this process that treats conditions as some store does that is not here, or that is broken."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from support.ports import new_address

__all__ = ["LIKE_CEPH_16", "LIKE_SWIFT", "S3StandIn", "Ways"]

_BUCKET = "checkpoints"


@dataclass(frozen=True)
class Ways:
    """How a server treats conditions and bodies.

    Attributes:
        obeys_none_match: Whether ``If-None-Match: *`` of a PUT counts.
        obeys_match: Whether ``If-Match`` of a PUT counts.
        obeys_match_of_get: Whether ``If-Match`` of a GET counts.
        matches_get: Whether an ETag matches there.
        form: What a PUT must send for an ETag that has quotes; None if nothing matches.
        status: Of the reply to a PUT with a condition; 0 if it is like that to any PUT.
        checks_sha256: Whether a body is compared with the SHA-256 in the signature.
        headers: Added to each reply.
    """

    obeys_none_match: bool = True
    obeys_match: bool = True
    obeys_match_of_get: bool = True
    matches_get: bool = True
    form: Callable[[str], str] | None = str
    status: int = 0
    checks_sha256: bool = True
    headers: dict[str, str] = field(default_factory=dict)


LIKE_CEPH_16 = Ways(
    form=lambda e_tag: e_tag.strip('"'),
    headers={"x-amz-request-id": "tx000003ccbc40f583b5ca3-006b0a40f5-100c-default"},
)
LIKE_SWIFT = Ways(status=501, headers={"X-Openstack-Request-Id": "tx65ae0a3ea7d94f7f83714-006b0a407d"})


class S3StandIn:
    """Listens on a free loopback port until ``close``, and has the bucket ``checkpoints``. It checks no signature.

    Attributes:
        ways: How it treats conditions, from the next request on.
        objects: What it holds, by key.
        requests: Method, target and headers of each request so far, the names of headers in lower case.
        options: The ``storage_options`` for it.
    """

    def __init__(self, ways: Ways) -> None:
        self.ways = ways
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer((new_address(), 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.options: dict[str, Any] = {
            "endpoint": "http://{}:{}".format(*self._server.server_address),
            "access_key_id": "key",
            "secret_access_key": "not-to-be-told",
            "region": "us-east-1",
            "client_options": {"pool_max_idle_per_host": "0"},  # no connection outlives a test
        }

    def change(self, **ways: Any) -> None:
        """Changes how it treats conditions."""
        self.ways = replace(self.ways, **ways)

    def conditional_puts(self) -> int:
        """Returns how many requests with a condition have come."""
        return sum(
            method == "PUT" and not {"if-match", "if-none-match"}.isdisjoint(headers)
            for method, _, headers in self.requests
        )

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    """Closes each connection after one reply, so that none outlives a test."""

    store: S3StandIn
    protocol_version = "HTTP/1.1"  # else boto3 waits 1 s before it sends a body
    server_version = "StandIn/1"

    def do_PUT(self) -> None:
        body, key, query = self._read()
        ways = self.store.ways
        claimed = self.headers.get("x-amz-content-sha256", "")
        if ways.checks_sha256 and claimed != hashlib.sha256(body).hexdigest():
            self._fail(400, "BadDigest")
        elif "partNumber" in query:
            self._reply(200, {"ETag": _etag(body)})
        else:
            with self.store.lock:
                status = self._status_of_put(ways, self.store.objects.get(key))
                if status == 200:
                    self.store.objects[key] = body
            if status == 200:
                self._reply(200, {"ETag": _etag(body)})
            else:
                self._fail(status, {412: "PreconditionFailed", 501: "NotImplemented"}.get(status, "InvalidArgument"))

    def _status_of_put(self, ways: Ways, old: bytes | None) -> int:
        none_match, match = self.headers.get("if-none-match"), self.headers.get("if-match")
        if ways.status and (none_match or match):
            return ways.status
        if none_match and ways.obeys_none_match and old is not None:
            return 412
        if match and ways.obeys_match:
            wanted = ways.form(_etag(old)) if ways.form is not None and old is not None else None
            return 200 if match == wanted else 412
        return 200

    def do_GET(self) -> None:
        _, key, query = self._read()
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0], is_deep="delimiter" not in query)
            return
        data = self.store.objects.get(key)
        match, ways = self.headers.get("if-match"), self.store.ways
        if data is None:
            self._fail(404, "NoSuchKey")
        elif match and ways.obeys_match_of_get and not (ways.matches_get and match == _etag(data)):
            self._fail(412, "PreconditionFailed")
        else:
            self._send(data)

    do_HEAD = do_GET

    def _send(self, data: bytes) -> None:
        headers = {"ETag": _etag(data), "Last-Modified": "Sat, 28 Nov 2026 02:48:23 GMT"}
        wanted = self.headers.get("range", "").removeprefix("bytes=")
        if not wanted:
            self._reply(200, headers, data)
        elif not data:
            self._fail(416, "InvalidRange")
        else:
            first, _, last = wanted.partition("-")
            begin = int(first) if first else max(len(data) - int(last), 0)
            end = min(int(last) + 1, len(data)) if first and last else len(data)
            self._reply(206, {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}, data[begin:end])

    def _list(self, prefix: str, *, is_deep: bool) -> None:
        found, folders = [], set()
        for key, data in sorted(self.store.objects.items()):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if "/" in rest and not is_deep:
                folders.add(prefix + rest.partition("/")[0] + "/")
                continue
            found.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-28T02:48:23.000Z</LastModified>"
                f"<ETag>{escape(_etag(data))}</ETag><Size>{len(data)}</Size></Contents>"
            )
        found += [f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)]
        self._reply(200, {}, f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(found)}</ListBucketResult>")

    def do_DELETE(self) -> None:
        _, key, _ = self._read()
        with self.store.lock:
            self.store.objects.pop(key, None)
        self._reply(204)

    def do_POST(self) -> None:
        body, _, query = self._read()
        if "uploads" in query:
            self._reply(
                200, {}, "<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            )
            return
        keys = [each.partition("</Key>")[0] for each in body.decode().split("<Key>")[1:]]
        with self.store.lock:
            for key in keys:
                self.store.objects.pop(key, None)
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._reply(200, {}, f"<DeleteResult>{gone}</DeleteResult>")

    def _read(self) -> tuple[bytes, str, dict[str, list[str]]]:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.store.requests.append((self.command, self.path, headers))
        place = urlsplit(self.path)
        key = unquote(place.path).removeprefix(f"/{_BUCKET}").lstrip("/")
        return body, key, parse_qs(place.query, keep_blank_values=True)

    def _fail(self, status: int, code: str) -> None:
        self._reply(status, {}, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>said</Message></Error>")

    def _reply(self, status: int, headers: dict[str, str] | None = None, body: bytes | str = b"") -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Connection", "close")
        for name, value in {**(headers or {}), **self.store.ways.headers}.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""
