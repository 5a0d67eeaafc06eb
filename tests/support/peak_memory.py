# SPDX-License-Identifier: Apache-2.0
"""Measures the peak memory of a call, as the kernel counts resident memory."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["REFUSAL_BYTES", "with_peak"]

T = TypeVar("T")

# By so many bytes a process may grow while it refuses a checkpoint, whatever the metadata claim.
REFUSAL_BYTES = 64 << 20
_C = ctypes.CDLL(None)


def with_peak(call: Callable[[], T]) -> tuple[T, int]:
    """Returns what ``call`` returns, and by how many bytes the process grew at the peak. They may be free again."""
    # Otherwise the call could use memory that an earlier call left in the allocator, and that would not show.
    _C.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _peak()
    value = call()
    return value, _peak() - before


def _peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10
