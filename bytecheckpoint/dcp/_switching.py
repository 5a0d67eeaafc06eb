# SPDX-License-Identifier: Apache-2.0
"""Quick turns at the GIL.

Whoever asks for the GIL beside a thread that never lets go of it waits for the interpreter's switch interval, 5 ms. A
save asks some twenty times, which beside a busy loop would take longer than writing a small state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bytecheckpoint._fork_locks import ForkSafeLock

__all__ = ["quick_switches"]

_INTERVAL_S = 0.0005

_lock = ForkSafeLock()
_holders = 0
_before = 0.0


@contextmanager
def quick_switches() -> Iterator[None]:
    """Within it threads of this process take turns at the GIL every half millisecond. Reentrant; any thread.

    ``@quick_switches()`` makes it so within a function.
    """
    global _holders, _before
    with _lock:
        _holders += 1
        if _holders == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, _INTERVAL_S))
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0:
                sys.setswitchinterval(_before)
