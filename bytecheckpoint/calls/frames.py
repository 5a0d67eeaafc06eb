# SPDX-License-Identifier: Apache-2.0
"""Finds the calls that a thread is in by looking at its frames. No other module of this package looks at frames.

DCP tells nobody when a call of it has ended. So for a bare call of DCP, looking at frames is the only way to know.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeAlias

from bytecheckpoint.calls.call import Call
from bytecheckpoint.native import _core

__all__ = [
    "Found",
    "FoundCall",
    "Function",
    "find_calls",
    "is_any_thread_in",
    "is_called_by",
    "is_called_by_executor",
    "line_of_caller",
]

Function: TypeAlias = tuple[str, str]
"""A function, by the names of its module and of itself."""


class FoundCall(Call):
    """A call that the current thread was in when this object was made. Looking at frames tells whether it has ended.

    The object does not keep the frame, because the frame holds the state dict.
    """

    def __init__(self, frame: FrameType) -> None:
        super().__init__()
        self._frame = id(frame)
        self._code: CodeType = frame.f_code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FoundCall) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[threading.Thread, int, CodeType]:
        return self._thread, self._frame, self._code

    def is_running(self) -> bool:
        """Returns whether the call has not returned yet. Any thread may ask."""
        # The main thread counts as dead while functions that were registered with `atexit` run.
        is_alive = self._thread.is_alive() or self._thread is threading.main_thread()
        return is_alive and _core.is_in_call(self._thread.ident or 0, self._frame, self._code)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@dataclass(frozen=True)
class Found:
    """What one look at the frames of a thread finds. Do not keep it: the variables keep the state dict alive.

    Attributes:
        variables: Local variables of the innermost call of each function that was looked for, if there is one.
        calls: The same calls.
        outermost: The outermost call of a function of the modules that were looked for; None if there is none.
    """

    variables: dict[Function, dict[str, Any]]
    calls: dict[Function, FoundCall]
    outermost: FoundCall | None


def find_calls(*functions: Function, outermost: tuple[str, ...] = ()) -> Found:
    """Looks once, from the inside to the outside, for calls that this thread is in.

    Args:
        functions: Functions; of each the innermost call counts.
        outermost: Modules; of the calls of their functions the outermost counts.
    """
    wanted, frames, last = set(functions), {}, None
    for frame in _outwards(sys._getframe()):
        module = frame.f_globals.get("__name__")
        function = (module, frame.f_code.co_name)
        if function in wanted:
            wanted.remove(function)
            frames[function] = frame
        if module in outermost:
            last = frame
        if not wanted and not outermost:
            break
    calls = {function: FoundCall(frame) for function, frame in frames.items()}
    variables = {function: dict(frame.f_locals) for function, frame in frames.items()}
    return Found(variables, calls, None if last is None else FoundCall(last))


def is_called_by(module: str, function: str, depth: int) -> bool:
    """Returns whether the frame ``depth`` levels above this function belongs to ``function`` of ``module``.

    With a depth of 1 that is the caller of this function.
    """
    caller = sys._getframe(depth)
    return caller.f_code.co_name == function and caller.f_globals.get("__name__") == module


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
