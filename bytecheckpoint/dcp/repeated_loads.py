# SPDX-License-Identifier: Apache-2.0
"""Loads that begin again if a newer commit replaces the checkpoint, or if some ranks do not see it yet.

Our entry points and ``register()`` use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.errors import CheckpointChangedError, CheckpointNotFoundError
from bytecheckpoint.native import _core

__all__ = ["load_until_unchanged"]

# A whole save must commit during each failed attempt, so this many failures mean that something else is wrong.
_MAX_ATTEMPTS = 100
# Between attempts, where what other machines have done is shown late.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


def load_until_unchanged(load: Callable[[], None], reader: BcpReader) -> None:
    """Calls ``load`` again until no newer commit came while it ran, and all ranks see what some of them see.

    Collective: DCP gives all ranks the same failures, so all of them call ``load`` equally often.

    Args:
        load: A whole load with ``reader`` and a new planner. It fills again what an earlier attempt filled.
        reader: Reader that ``load`` uses; reset before each new attempt.

    Raises:
        CheckpointException: The load failed for another reason, or again and again.
    """
    waited_s, pause_s = 0.0, _FIRST_PAUSE_S
    for attempts_left in reversed(range(_MAX_ATTEMPTS)):
        try:
            load()
            return
        except CheckpointException as exception:
            failures = [failure for failure, _ in exception.failures.values()]
            if attempts_left == 0 or not _may_end(failures, reader.num_ranks, waited_s):
                raise
        if _core.look_anew(str(reader.path)):
            time.sleep(pause_s)
        waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
        reader.reset()


def _may_end(failures: Sequence[BaseException], num_ranks: int, waited_s: float) -> bool:
    """Whether a later attempt may succeed. All ranks decide alike: they have the same failures, and wait as often."""
    unseen = [failure for failure in failures if isinstance(failure, CheckpointNotFoundError)]
    if any(failure not in unseen and not isinstance(failure, CheckpointChangedError) for failure in failures):
        return False
    return not unseen or (len(unseen) < num_ranks and waited_s < max(failure.visible_within_s for failure in unseen))
