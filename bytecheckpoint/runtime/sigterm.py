# SPDX-License-Identifier: Apache-2.0
"""Makes SIGTERM wait for background saves.

Python runs a signal handler in the main thread, between any two steps of it. The main thread may just be staging the
very state that is to be saved, and hold locks. So the handler only writes a byte to a wake-up pipe. A thread then waits
for the saves while the main thread goes on, and sends the signal again, to the handler that was there before.
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

from bytecheckpoint.runtime.per_process import HomeProcess

__all__ = ["handle_sigterm"]

_logger = logging.getLogger("bytecheckpoint")


class _Handler:
    """What SIGTERM does first.

    Args:
        before: What SIGTERM did before, as ``signal.getsignal`` returns it.
        wait: Waits until saves have ended, or the time for them has passed; gets the time of the signal.
    """

    def __init__(self, before: Any, wait: Callable[[float], None]) -> None:
        self._before = before
        self._wait = wait
        self._home = HomeProcess()
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        threading.Thread(target=self._run, name="bytecheckpoint-sigterm", daemon=True).start()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._before)  # for the signal that the thread sends, and for a user who sends a second
        if self._home.is_here():
            os.write(self._wakeup_writer, b"!")
        else:
            os.kill(os.getpid(), number)  # a forked child has neither the thread nor saves, so it need not wait

    def _run(self) -> None:
        os.read(self._wakeup_reader, 1)
        begin = time.monotonic()
        _logger.warning("SIGTERM: waiting for background saves")
        self._wait(begin)
        os.kill(os.getpid(), signal.SIGTERM)


def handle_sigterm(wait: Callable[[float], None]) -> None:
    """Makes SIGTERM wait for background saves before it does what it did before. No effect outside the main thread.

    Args:
        wait: Waits for the saves, in a thread of its own; gets the ``time.monotonic`` of the signal.
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
