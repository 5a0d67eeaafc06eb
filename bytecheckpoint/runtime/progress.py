# SPDX-License-Identifier: Apache-2.0
"""A progress bar of the bytes that are written or read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

__all__ = ["progress_bar"]

_INTERVAL_S = 0.1
# The call does not wait longer than this for the terminal to draw the last lines.
_LAST_DRAW_S = 1.0


@contextmanager
def progress_bar(title: str, expected_bytes: int, bytes_done: Callable[[], int]) -> Iterator[None]:
    """Shows a bar on stderr while the ``with`` block runs. It ends full if the block does not raise.

    A thread draws the bar. So the work does not wait for a slow terminal (for a second at the end, at most), and does
    not fail if the terminal is gone.

    Args:
        title: Text in front of the bar.
        expected_bytes: Length of the bar. If the block succeeds with more or fewer bytes, that becomes the length.
        bytes_done: Returns the bytes done so far. The drawing thread calls it until the block has ended, and even later
            if the terminal is stuck.
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
    tqdm: Any = import_module("tqdm").tqdm  # imported here, because few users ask for a bar
    with tqdm(desc=title, total=expected_bytes, unit="B", unit_scale=True) as bar:
        while not over.wait(_INTERVAL_S):
            bar.update(min(bytes_done(), expected_bytes) - bar.n)
        done = bytes_done()
        if succeeded.is_set():
            bar.total = done
        bar.update(done - bar.n)
