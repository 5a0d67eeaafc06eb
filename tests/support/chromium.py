# SPDX-License-Identifier: Apache-2.0
"""The headless Chromium of the system, driven by playwright, and a server on the loopback address for what it opens."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["chromium", "serving"]


@contextmanager
def chromium() -> Iterator[Any]:
    """Starts the browser, and yields it; skips the test where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("PAGE NOT OPENED: no Chromium; tests/system_packages.sh installs it")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("PAGE NOT OPENED: playwright is missing; `make environment` installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Root needs no sandbox of its own, and /dev/shm of a container may be too small.
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serves the files of a folder, and yields the address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
