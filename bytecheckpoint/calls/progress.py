# SPDX-License-Identifier: Apache-2.0
"""A progress bar of the bytes that are written or read."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.runtime.live_pages import LiveCall, ranks_here

__all__ = ["progress_bar"]

_INTERVAL_S = 0.1
# A file, to which batch systems send stderr, keeps each line that is drawn.
_FILE_INTERVAL_S = 10.0
# Looking for other ranks reads the descriptors of all processes. It may take this part of the time.
_RANKS_INTERVAL_S = 1.0
_RANKS_SHARE = 0.02
# The call does not wait longer than this for the terminal to draw the last lines.
_LAST_DRAW_S = 1.0


@contextmanager
def progress_bar(
    title: str, expected_bytes: int, bytes_done: Callable[[], int], trace: CallTrace | None = None
) -> Iterator[None]:
    """Shows a bar on stderr, or in a notebook, while the ``with`` block runs. It ends full if the block does not raise.

    A thread draws the bar. So the work does not wait for a slow terminal (for a second at the end, at most), and does
    not fail if the terminal is gone. Where stderr is no terminal, it draws every 10 s and at the end.

    Args:
        title: Text in front of the bar.
        expected_bytes: Length of the bar. If the block succeeds with more or fewer bytes, that becomes the length.
        bytes_done: Returns the bytes done so far. The drawing thread calls it until the block has ended, and even later
            if the terminal is stuck.
        trace: Trace of the call: the phase stands behind the bar, and the rank of this machine that is furthest behind.
    """
    over, succeeded = threading.Event(), threading.Event()
    status = _Status(trace)
    arguments = (title, expected_bytes, bytes_done, status, over, succeeded)
    thread = threading.Thread(target=_draw, args=arguments, name="bytecheckpoint-progress", daemon=True)
    thread.start()
    try:
        yield
        succeeded.set()
    finally:
        over.set()
        thread.join(_LAST_DRAW_S)


class _Status:
    """What stands behind the bar."""

    def __init__(self, trace: CallTrace | None) -> None:
        self._trace = trace
        self._slowest = ""
        self._look_at = 0.0

    def text(self) -> str:
        """Returns the phase of this rank, and the rank on this machine that has done the smallest part."""
        trace = self._trace
        if trace is None or trace.spans is None:
            return ""
        begin = time.monotonic()
        if begin >= self._look_at:
            self._slowest, end = _slowest(ranks_here(trace.kind, trace.path)), time.monotonic()
            self._look_at = end + max(_RANKS_INTERVAL_S, (end - begin) / _RANKS_SHARE)
        return ", ".join(filter(None, (trace.spans.phase, self._slowest)))


def _slowest(calls: list[LiveCall]) -> str:
    shares = [(call.bytes_done / call.bytes_expected, call) for call in calls if call.bytes_expected]
    if len(shares) < 2:
        return ""
    share, call = min(shares, key=lambda pair: (pair[0], pair[1].rank))
    return f"slowest rank {call.rank}: {100 * min(share, 1.0):.0f} %" + (" (stopped)" if call.is_stopped else "")


def _draw(
    title: str,
    expected_bytes: int,
    bytes_done: Callable[[], int],
    status: _Status,
    over: threading.Event,
    succeeded: threading.Event,
) -> None:
    tqdm: Any = import_module("tqdm.auto").tqdm  # imported here, because few users ask for a bar
    is_file = "ipykernel" not in sys.modules and not _is_terminal()
    options: dict[str, Any] = {"mininterval": _FILE_INTERVAL_S} if is_file else {"dynamic_ncols": True}
    with tqdm(desc=title, total=expected_bytes, unit="B", unit_scale=True, **options) as bar:
        shown = ""
        while not over.wait(_INTERVAL_S):
            before, shown = shown, status.text()
            bar.set_postfix_str(shown, refresh=shown != before and not is_file)
            bar.update(min(bytes_done(), expected_bytes) - bar.n)
        done = bytes_done()
        if succeeded.is_set():
            bar.total = done
        bar.set_postfix_str("", refresh=False)
        bar.update(done - bar.n)


def _is_terminal() -> bool:
    try:
        return os.isatty(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # a stream of Python code
        return False
