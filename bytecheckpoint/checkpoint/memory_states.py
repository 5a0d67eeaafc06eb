# SPDX-License-Identifier: Apache-2.0
"""Which states of a run stay in memory. Needs no torch."""

from __future__ import annotations

from bytecheckpoint.checkpoint.commit_order import commit_order
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.in_use import unheld
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.names import is_mark
from bytecheckpoint.storage.small_files import storage_errors
from bytecheckpoint.storage.step_folder import step_paths

__all__ = ["keep_newest"]


def keep_newest(run: str, keep: int) -> None:
    """Frees all states of a run in memory but the newest.

    Args:
        run: URL of the run in memory, which is known.
        keep: How many stay.

    Raises:
        StorageError: The holder refused, or has gone.
    """
    for _, path in commit_order(run, step_paths(run)).by_time[keep:]:
        memory, key = HolderClient(path), folder_at(path).key()
        assert key is not None  # it is a URL
        with storage_errors("delete", path):
            names = [each.name for each in memory.everything("")]
            memory.delete(list(filter(is_mark, names)))  # first: a step that is half gone is none
            with unheld(key) as is_free:
                memory.delete(names, spares=is_free)  # else somebody reads it, and it must not change
