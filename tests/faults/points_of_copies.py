# SPDX-License-Identifier: Apache-2.0
"""The points of its commit at which a copy is killed."""

from __future__ import annotations

__all__ = ["COMMITTED", "POINTS"]

# In the order in which a copy reaches them.
POINTS = (
    "begin_tmp_created",
    "begin_locked",
    "begin_swept",
    "commit_checked",
    "commit_metadata_synced",
    "commit_decided",
    "commit_renamed",
    "commit_done",
)
COMMITTED = POINTS.index("commit_renamed")
