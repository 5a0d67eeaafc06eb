# SPDX-License-Identifier: Apache-2.0
"""Process groups in which the loss of a rank is an error on the others, and not a wait."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from bytecheckpoint.dcp._groups import watched_group
from bytecheckpoint.errors import ConfigError

__all__ = ["new_group"]

_MIN_S, _MAX_S = 1.0, 86400.0


def new_group(ranks: Sequence[int] | None = None, *, stall_timeout: float | timedelta = 60.0) -> dist.ProcessGroup:
    """A gloo process group for saves and loads whose ranks notice when one of them is lost.

    Give it to ``dcp.save``, ``dcp.async_save``, ``dcp.load`` or our own entry points as ``process_group``. While a call
    of them is under way, a rank that dies is noticed at once, and one that stops after ``stall_timeout``; every other
    rank then raises, our own entry points a ``RankLostError`` that names it, DCP's what torch raises. The right to
    commit of a coordinator that stopped is taken away, so that it commits nothing when it goes on. The group is of no
    use afterwards; make another one, of the ranks that are left. Between calls a rank may be silent.

    Besides gloo's connections each rank has one to the first rank of the group, and a thread that uses it once in a
    quarter of ``stall_timeout``. Both end with ``destroy_process_group``, and with the process.

    Collective over ``ranks``; other ranks need not call it.

    Args:
        ranks: In the default group; None for all of them.
        stall_timeout: Seconds, 1 to 86400, without a sign of life, after which a rank has stopped. Code that holds the
            GIL for longer counts as stopped, too.

    Raises:
        ConfigError: ``stall_timeout`` is out of range.
        ValueError: This rank is none of ``ranks``.
        CheckpointError: A rank cannot be reached from another.
    """
    seconds = stall_timeout.total_seconds() if isinstance(stall_timeout, timedelta) else float(stall_timeout)
    if not _MIN_S <= seconds <= _MAX_S:
        raise ConfigError(f"new_group(stall_timeout={stall_timeout!r}): {_MIN_S:g} to {_MAX_S:g} seconds wanted")
    if ranks is not None and dist.get_rank() not in ranks:
        raise ValueError(f"new_group({list(ranks)}): called on rank {dist.get_rank()}, which is none of them")
    return watched_group(ranks, seconds)
