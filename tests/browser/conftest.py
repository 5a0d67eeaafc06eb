# SPDX-License-Identifier: Apache-2.0
"""One browser for all tests of a worker, and pages that fail the test on an error or a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chromium import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file, and waits until its charts are there. A complaint, or a request, of the page fails the test."""
    faults: list[str] = []
    contexts = []

    def opened(path: Path, *, fragment: str = "", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1400, "height": 1000}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda asked: None if is_own(asked.url) else faults.append(f"request: {asked.url}"))
        page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(f"file://{path}{fragment}")
        page.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
        return page

    def is_own(url: str) -> bool:
        return url.startswith(("file:///", "data:", "blob:"))

    yield opened
    for context in contexts:
        context.close()
    assert faults == []
