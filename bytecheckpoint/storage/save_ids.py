# SPDX-License-Identifier: Apache-2.0
"""What the id of a save says."""

from __future__ import annotations

import time
import uuid

__all__ = ["begin_of_save"]

_A_DAY = 24 * 3_600 * 10**9  # nanoseconds
_FIRST_ID = 1_795_000_000 * 10**9  # November 2026: earlier builds wrote no time into their ids


def begin_of_save(save_id: str) -> int:
    """Returns the time in a save id; 0 if it has none: it is of an earlier build, or of another writer."""
    drawn = uuid.UUID(hex=save_id)
    began = (drawn.int >> 80) * 1_000_000
    # Of random ids, one in 64 has this version and variant.
    return began if drawn.version == 7 and _FIRST_ID < began < time.time_ns() + _A_DAY else 0
