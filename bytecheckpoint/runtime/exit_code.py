# SPDX-License-Identifier: Apache-2.0
"""The exit code of a process whose end has begun. Python has no way to change it from a function of ``atexit``."""

from __future__ import annotations

import ctypes

__all__ = ["end_with"]


def end_with(code: int) -> None:
    """Makes the process end with ``code``, after everything that Python does at the end, such as functions of `atexit`.

    libc then calls ``_exit(code)`` in the place of what C and C++ code has registered with it before, such as
    destructors of static objects. Files of C are flushed before.

    Args:
        code: Exit code, 1 to 255.
    """
    libc = ctypes.CDLL(None)
    register = libc["__cxa_atexit"]
    # The last one that is registered runs first.
    register(libc["_exit"], ctypes.c_void_p(code), None)
    register(libc["fflush"], None, None)
