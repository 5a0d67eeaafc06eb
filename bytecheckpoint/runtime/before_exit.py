# SPDX-License-Identifier: Apache-2.0
"""What runs when the main thread has ended, while threads can still be started."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["before_exit"]


def before_exit(run: Callable[[], None]) -> bool:
    """Has ``run`` called when the main thread has ended. Returns False if the process has already begun to end.

    ``concurrent.futures`` does the same. Functions of ``atexit`` run too late: no thread can be started then.
    """
    try:
        threading._register_atexit(run)  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True
