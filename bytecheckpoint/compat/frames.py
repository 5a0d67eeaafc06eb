# SPDX-License-Identifier: Apache-2.0
"""Finds the calls that a thread is in by looking at its frames. No other module of this package looks at frames.

DCP tells nobody when a call of it has ended. So for a bare call of DCP, looking at frames is the only way to know.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from bytecheckpoint.native import _core

__all__ = [
    "Call",
    "ExplicitCall",
    "find_call",
    "is_any_thread_in",
    "is_called_by",
    "is_called_by_executor",
    "line_of_caller",
    "outermost_call",
]


class ExplicitCall:
    """A call of the thread that makes this object. It ends when somebody calls ``end``."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._is_over = False

    def is_of_this_thread(self) -> bool:
        """Returns whether the call was made in the current thread."""
        return self._thread is threading.current_thread()

    def is_running(self) -> bool:
        """Returns whether ``end`` was not called yet. Any thread may ask."""
        return not self._is_over

    def end(self) -> None:
        """Marks the call as ended. Any thread may call it."""
        self._is_over = True


class Call:
    """A call that the current thread was in when this object was made. Looking at frames tells whether it has ended.

    The object does not keep the frame, because the frame holds the state dict.
    """

    def __init__(self, frame: FrameType) -> None:
        self._thread = threading.current_thread()
        self._frame = id(frame)
        self._code: CodeType = frame.f_code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self._frame, self._code))

    def is_of_this_thread(self) -> bool:
        """Returns whether the call was made in the current thread."""
        return self._thread is threading.current_thread()

    def is_running(self) -> bool:
        """Returns whether the call has not returned yet. Any thread may ask."""
        # The main thread counts as dead while functions that were registered with `atexit` run.
        is_alive = self._thread.is_alive() or self._thread is threading.main_thread()
        return is_alive and _core.is_in_call(self._thread.ident or 0, self._frame, self._code)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _find(module: str, function: str) -> FrameType | None:
    for frame in _outwards(sys._getframe()):
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return frame
    return None


def find_call(module: str, function: str) -> tuple[Call | None, dict[str, Any]]:
    """Returns the innermost call of ``function`` of ``module`` that this thread is in, and its local variables.

    If the thread is in none, the call is None and the variables are empty.
    """
    frame = _find(module, function)
    return (None, {}) if frame is None else (Call(frame), dict(frame.f_locals))


def is_called_by(module: str, function: str, depth: int) -> bool:
    """Returns whether the frame ``depth`` levels above this function belongs to ``function`` of ``module``.

    With a depth of 1 that is the caller of this function.
    """
    caller = sys._getframe(depth)
    return caller.f_code.co_name == function and caller.f_globals.get("__name__") == module


def outermost_call(modules: tuple[str, ...]) -> Call | None:
    """Returns the outermost call of a function of ``modules`` that this thread is in; None if it is in none."""
    found = None
    for frame in _outwards(sys._getframe()):
        if frame.f_globals.get("__name__") in modules:
            found = frame
    return None if found is None else Call(found)


def is_called_by_executor() -> bool:
    """Returns whether an executor of threads or processes called DCP.

    Such a call may run long after somebody asked for it.
    """
    for frame in _outwards(sys._getframe(1)):
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("bytecheckpoint.", "torch.distributed.checkpoint.")):
            return bool(name.startswith(("concurrent.futures.", "multiprocessing.")))
    return False


def line_of_caller() -> str:
    """Returns file and line of this thread's innermost function that is neither of this package nor of torch."""
    for frame in _outwards(sys._getframe(1)):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("bytecheckpoint", "torch"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "an unknown place"


def is_any_thread_in(modules: tuple[str, ...]) -> bool:
    """Returns whether any thread is in a function of ``modules``.

    It may miss a thread that leaves a generator while this function looks.
    """
    frames = (frame for top in sys._current_frames().values() for frame in _outwards(top))
    return any(frame.f_globals.get("__name__") in modules for frame in frames)
