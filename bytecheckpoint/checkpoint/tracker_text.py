# SPDX-License-Identifier: Apache-2.0
"""Reads the tracker: the file of a run that names the step that was saved last. Needs no torch."""

from __future__ import annotations

from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.paths import Place

__all__ = ["TRACKER", "tracker_text"]

TRACKER = "latest_checkpointed_iteration.txt"

_MAX_BYTES = 4096  # the number of a step takes 18


def tracker_text(run: Place) -> str:
    """Returns what the tracker of a run says, as a rule the number of a step; "" if there is none.

    Raises:
        StorageError: It is there and cannot be read.
    """
    found = folder_at(run).read_file(TRACKER, _MAX_BYTES)
    return (found or b"").decode("ascii", errors="replace").strip()
