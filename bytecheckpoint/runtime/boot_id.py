# SPDX-License-Identifier: Apache-2.0
"""Which machine this is, and since which start of it."""

from __future__ import annotations

import functools
from pathlib import Path

__all__ = ["boot_id"]


@functools.cache
def boot_id() -> str:
    """Returns the id that the kernel drew when the machine started. Containers of a machine have the same.

    Raises:
        OSError: The system does not tell.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
