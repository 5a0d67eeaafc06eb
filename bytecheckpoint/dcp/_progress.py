# SPDX-License-Identifier: Apache-2.0
"""A bar of the bytes that are done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

__all__ = ["progress_bar"]

_INTERVAL_S = 0.1
# A terminal that takes longer than this for the last lines goes without them.
_LAST_DRAW_S = 1.0


@contextmanager
def progress_bar(title: str, expected_bytes: int, bytes_done: Callable[[], int]) -> Iterator[None]:
    """Shows a bar on stderr while the ``with`` block runs. It ends full if the block does not raise.

    A thread draws it, so that the work neither waits for a slow terminal (a second in the end, at most) nor fails with
    one that is gone.

    Args:
        title: In front of the bar.
        expected_bytes: Its length. If more or less have been done in the end, that is the length.
        bytes_done: Any thread may call it until the block has ended, and where the terminal is stuck also later.
    """
    over, succeeded = threading.Event(), threading.Event()
    arguments = (title, expected_bytes, bytes_done, over, succeeded)
    thread = threading.Thread(target=_draw, args=arguments, name="bytecheckpoint-progress", daemon=True)
    thread.start()
    try:
        yield
        succeeded.set()
    finally:
        over.set()
        thread.join(_LAST_DRAW_S)


def _draw(
    title: str,
    expected_bytes: int,
    bytes_done: Callable[[], int],
    over: threading.Event,
    succeeded: threading.Event,
) -> None:
    tqdm: Any = import_module("tqdm").tqdm  # here, because few ask for it
    with tqdm(desc=title, total=expected_bytes, unit="B", unit_scale=True) as bar:
        while not over.wait(_INTERVAL_S):
            bar.update(min(bytes_done(), expected_bytes) - bar.n)
        done = bytes_done()
        if succeeded.is_set():
            bar.total = done
        bar.update(done - bar.n)
