# SPDX-License-Identifier: Apache-2.0
"""A web server that serves a folder: Python's own, with the ranges that it lacks."""

from __future__ import annotations

import http.server
import re
import threading
from functools import partial
from pathlib import Path

__all__ = ["Site"]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Answers HEAD with the size of a file, and GET of a range with 206."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    @property
    def site(self) -> Site:
        assert isinstance(self.server, Site)
        return self.server

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        self.site.requests.append((self.command, self.path))
        if self.site.token is None or self.headers["authorization"] == self.site.token:
            return True
        self.send_error(401)
        return False

    def tag(self) -> str | None:
        path = Path(self.translate_path(self.path))
        if self.site.tags is None or not path.is_file():
            return None
        return f'{self.site.tags}"{path.stat().st_mtime_ns:x}"'

    def end_headers(self) -> None:
        if (tag := self.tag()) is not None:
            self.send_header("etag", tag)
        super().end_headers()

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if asked is None or not path.is_file() or not self.site.has_ranges:
            super().do_GET()
            return
        # A weak tag is never equal to that of a condition.
        if "if-match" in self.headers and (self.site.tags != "" or self.headers["if-match"] != self.tag()):
            self.send_error(412)
            return
        begin, end = int(asked[1]), int(asked[2]) + 1
        with path.open("rb") as file:
            file.seek(begin)
            part = file.read(end - begin)
        self.send_response(206)
        self.send_header("content-length", str(len(part)))
        self.send_header("content-range", f"bytes {begin}-{begin + len(part) - 1}/{path.stat().st_size}")
        self.end_headers()
        self.wfile.write(part)


class Site(http.server.ThreadingHTTPServer):
    """Serves the files of a folder on a free port.

    Attributes:
        url: Its address.
        requests: Method and path of each request.
        tags: What is before the tag of a file: "" for strong tags, "W/" for weak ones; None for no tags.
        token: The value of ``Authorization`` that every request must have; None for no such rule.
        has_ranges: False if it sends a whole file, whatever range was asked for.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, str]] = []
        self.tags: str | None = ""
        self.token: str | None = None
        self.has_ranges = True
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
