# SPDX-License-Identifier: Apache-2.0
"""Delays Ctrl-C until a moment when other ranks can be told of it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["DeferredInterrupt"]


class DeferredInterrupt:
    """Context that keeps the first SIGINT until ``raise_if_any`` or its end; a second one acts at once.

    Without it Python may run the handler between any two bytecodes, also between the two halves of a message.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # SIGINT is neither ignored nor left to the system
                self._handler = handler
                signal.signal(signal.SIGINT, self._hold)
        return self

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held is not None:
            self._held = None
            self._handler(number, frame)
        self._held = (number, frame)

    def raise_if_any(self) -> None:
        """Runs the original handler if a signal came."""
        if self._held is not None:
            number, frame = self._held
            self._held = None
            self._handler(number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if error is None:
                self.raise_if_any()
