# SPDX-License-Identifier: Apache-2.0
"""Quick switches of the GIL between threads.

A thread that asks for the GIL while another thread runs Python code without a pause waits for the interpreter's switch
interval, 5 ms. A save asks some twenty times. Beside a busy loop this would take longer than writing a small state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.runtime.per_process import HomeProcess

__all__ = ["quick_switches"]

_INTERVAL_S = 0.0005

_lock = ForkSafeLock()
_holders = 0
_before = 0.0


@contextmanager
def quick_switches() -> Iterator[None]:
    """Makes the threads of this process take turns at the GIL every half millisecond. Reentrant; any thread.

    For a ``with`` block, or as the decorator ``@quick_switches()`` for a whole function.
    """
    global _holders, _before
    home = HomeProcess()
    with _lock:
        _holders += 1
        if _holders == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, _INTERVAL_S))
    try:
        yield
    finally:
        with _lock:
            if home.is_here():  # a child that was forked in the block has begun anew
                _holders -= 1
                if _holders == 0:
                    sys.setswitchinterval(_before)


def _begin_anew() -> None:
    """Ends all blocks in a forked child: the other threads that were in one do not exist there."""
    global _holders
    if _holders > 0:
        _holders = 0
        sys.setswitchinterval(_before)


os.register_at_fork(after_in_child=_begin_anew)
