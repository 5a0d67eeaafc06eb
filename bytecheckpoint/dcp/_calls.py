# SPDX-License-Identifier: Apache-2.0
"""Calls of DCP that a thread is in. DCP tells nobody when a call of it has ended; whoever needs to know looks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from bytecheckpoint import _core

__all__ = [
    "ASYNC_SAVE",
    "DCP_SAVE",
    "LOAD",
    "SAVE",
    "Call",
    "call_in",
    "is_any_thread_in",
    "is_called_by",
    "is_called_by_executor",
    "is_called_from",
    "is_in_greenlet",
    "line_of_caller",
    "local_of_call",
    "outermost_call",
]

# The calls that are looked for: module and function.
_SAVER = "torch.distributed.checkpoint.state_dict_saver"
ASYNC_SAVE = (_SAVER, "async_save")  # and the functions within it
DCP_SAVE = (_SAVER, "save")
SAVE = (_SAVER, "_save_state_dict")
LOAD = ("torch.distributed.checkpoint.state_dict_loader", "_load_state_dict")


class Call:
    """A call that its thread was in when this was made.

    The frame itself is not kept: it holds the state dict.
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
        """Is it the asking thread that is in it?"""
        return self._thread is threading.current_thread()

    def is_running(self) -> bool:
        """Has it not returned yet? Any thread may ask."""
        # The main thread counts as dead while functions run that were registered with `atexit`.
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


def call_in(module: str, function: str) -> Call | None:
    """The innermost call of ``function`` that this thread is in; None if it is in none."""
    frame = _find(module, function)
    return None if frame is None else Call(frame)


def is_called_by(module: str, function: str) -> bool:
    """Whether who asks was called by ``function`` itself, with nobody's function between them."""
    caller = sys._getframe(2)
    return caller.f_code.co_name == function and caller.f_globals.get("__name__") == module


def is_in_greenlet() -> bool:
    """Whether this is run by a greenlet: while that has yielded, its frames are in no thread."""
    greenlets = sys.modules.get("greenlet")
    return greenlets is not None and greenlets.getcurrent().parent is not None


def outermost_call(modules: tuple[str, ...]) -> Call | None:
    """The outermost call of a function of ``modules`` that this thread is in; None if it is in none."""
    found = None
    for frame in _outwards(sys._getframe()):
        if frame.f_globals.get("__name__") in modules:
            found = frame
    return None if found is None else Call(found)


def is_called_from(module: str, passing: tuple[str, ...]) -> bool:
    """Whether this thread's innermost function that is in none of the modules ``passing`` is in ``module``."""
    for frame in _outwards(sys._getframe(1)):
        if frame.f_globals.get("__name__") not in passing:
            return frame.f_globals.get("__name__") == module
    return False


def is_called_by_executor() -> bool:
    """Whether a thread or process of an executor has called DCP, which may be long after somebody asked for it."""
    for frame in _outwards(sys._getframe(1)):
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("bytecheckpoint.", "torch.distributed.checkpoint.")):
            return bool(name.startswith(("concurrent.futures.", "multiprocessing.")))
    return False


def line_of_caller() -> str:
    """File and line of this thread's innermost function that is of neither this package nor torch."""
    for frame in _outwards(sys._getframe(1)):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("bytecheckpoint", "torch"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "an unknown place"


def is_any_thread_in(modules: tuple[str, ...]) -> bool:
    """Whether a thread is in a function of ``modules``. One that leaves a generator meanwhile may be missed."""
    frames = (frame for top in sys._current_frames().values() for frame in _outwards(top))
    return any(frame.f_globals.get("__name__") in modules for frame in frames)


def local_of_call(module: str, function: str, name: str) -> Any:
    """What ``name`` is in the innermost call of ``function`` that this thread is in; None if it is in none."""
    frame = _find(module, function)
    return None if frame is None else frame.f_locals.get(name)
