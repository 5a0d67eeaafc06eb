# SPDX-License-Identifier: Apache-2.0
"""How much memory a call takes at its worst, as the kernel counts what is really there."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["REFUSAL_BYTES", "with_peak"]

T = TypeVar("T")

# What a refusal may take beyond what the process had before, whatever the metadata claim.
REFUSAL_BYTES = 64 << 20
_C = ctypes.CDLL(None)


def with_peak(call: Callable[[], T]) -> tuple[T, int]:
    """What ``call`` returns, and by how many bytes the process grew meanwhile, of which it may have given back all."""
    _C.malloc_trim(0)  # else it could take, unseen, what an earlier call has left to the allocator
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _peak()
    value = call()
    return value, _peak() - before


def _peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10
