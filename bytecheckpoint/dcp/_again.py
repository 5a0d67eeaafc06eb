# SPDX-License-Identifier: Apache-2.0
"""Loads that begin again after a newer commit, as those of our own entry points and of ``register()`` do."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.errors import CheckpointChangedError

__all__ = ["load_until_unchanged"]

# Every attempt but the last was overtaken by a whole save, so this many mean that something else is wrong.
_MAX_ATTEMPTS = 100


def load_until_unchanged(load: Callable[[], None], reader: BcpReader) -> None:
    """Calls ``load`` until no newer commit came in between. Collective: all ranks see the same failures, from DCP.

    Args:
        load: A whole load with ``reader`` and a planner of its own; what an earlier attempt filled it fills again.
    """
    for attempts_left in reversed(range(_MAX_ATTEMPTS)):
        try:
            load()
            return
        except CheckpointException as exception:
            failures = [failure for failure, _ in exception.failures.values()]
            if attempts_left == 0 or not all(isinstance(failure, CheckpointChangedError) for failure in failures):
                raise
        reader.reset()
