# SPDX-License-Identifier: Apache-2.0
"""Loads that begin again if a newer commit replaces the checkpoint. Our entry points and ``register()`` use it."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.errors import CheckpointChangedError

__all__ = ["load_until_unchanged"]

# A whole save must commit during each failed attempt, so this many failures mean that something else is wrong.
_MAX_ATTEMPTS = 100


def load_until_unchanged(load: Callable[[], None], reader: BcpReader) -> None:
    """Calls ``load`` again until no newer commit came while it ran.

    Collective: DCP gives all ranks the same failures, so all of them call ``load`` equally often.

    Args:
        load: A whole load with ``reader`` and a new planner. It fills again what an earlier attempt filled.
        reader: Reader that ``load`` uses; reset before each new attempt.

    Raises:
        CheckpointException: The load failed for another reason, or again and again.
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
