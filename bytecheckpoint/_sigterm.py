# SPDX-License-Identifier: Apache-2.0
"""SIGTERM that waits for background saves.

Python runs a handler in the main thread, between any two steps of what that is at: it may be staging the very state
that is to be saved, and hold locks. So the handler only writes a byte. A thread waits for the saves, while the main
thread goes on, and then sends the signal again, to whatever would have got it without us.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["handle_sigterm"]

_logger = logging.getLogger("bytecheckpoint")


class _Handler:
    """What SIGTERM does first.

    Args:
        before: What it did, as ``signal.getsignal`` says.
        wait: Until saves have ended, or the time for them has passed.
    """

    def __init__(self, before: Any, wait: Callable[[float], None]) -> None:
        self._before = before
        self._wait = wait
        self._pid = os.getpid()
        self._bell, self._clapper = os.pipe()
        threading.Thread(target=self._run, name="bytecheckpoint-sigterm", daemon=True).start()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._before)  # for the signal of the thread, and for whoever does not want to wait
        if self._pid == os.getpid():
            os.write(self._clapper, b"!")
        else:
            os.kill(os.getpid(), number)  # a forked child has neither the thread nor saves

    def _run(self) -> None:
        os.read(self._bell, 1)
        begin = time.monotonic()
        _logger.warning("SIGTERM: waiting for background saves")
        self._wait(begin)
        os.kill(os.getpid(), signal.SIGTERM)


def handle_sigterm(wait: Callable[[float], None]) -> None:
    """From now on SIGTERM waits for background saves before it does what it did. In the main thread; else no effect.

    Args:
        wait: Waits for them, of a signal that came at that time, in a thread of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_IGN or before is None or isinstance(before, _Handler):
        return
    try:
        handler = _Handler(before, wait)
    except (OSError, RuntimeError) as error:
        _logger.warning("SIGTERM will not wait for background saves: %s", error)  # no descriptor, or no thread
        return
    signal.signal(signal.SIGTERM, handler)
