# SPDX-License-Identifier: Apache-2.0
"""Process groups in which the other ranks raise an error when a rank is lost, instead of waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from bytecheckpoint.distributed.groups import watched_group
from bytecheckpoint.errors import ConfigError

__all__ = ["new_group"]

_MIN_S, _MAX_S = 1.0, 86400.0


def new_group(ranks: Sequence[int] | None = None, *, stall_timeout: float | timedelta = 60.0) -> dist.ProcessGroup:
    """Makes a gloo process group for saves and loads whose ranks notice when one of them is lost.

    Pass it as ``process_group`` to ``dcp.save``, ``dcp.async_save``, ``dcp.load`` or our own entry points. During such
    a call, the other ranks notice at once if a rank dies, and after ``stall_timeout`` if it stops. Every other rank
    then raises: our own entry points raise a ``RankLostError`` that names the lost rank, DCP's raise what torch raises.
    A coordinator that stopped loses its right to commit, so that it commits nothing if it goes on later. Afterwards the
    group cannot be used any more; make a new one of the ranks that are left. Between calls a rank may be silent.

    Besides gloo's connections, each rank has one connection to the first rank of the group, and a thread that uses it
    every quarter of ``stall_timeout``. Both end with ``destroy_process_group``, and with the process.

    Collective over ``ranks``; other ranks need not call it.

    Args:
        ranks: Ranks of the default group; None takes all of them.
        stall_timeout: Seconds without a sign of life, 1 to 86400, after which a rank counts as stopped. A rank also
            counts as stopped if code on it holds the GIL for longer than that.

    Returns:
        The group, with a liveness monitor.

    Raises:
        ConfigError: ``stall_timeout`` is out of range.
        ValueError: This rank is not one of ``ranks``.
        CheckpointError: One rank cannot reach another.
    """
    seconds = stall_timeout.total_seconds() if isinstance(stall_timeout, timedelta) else float(stall_timeout)
    if not _MIN_S <= seconds <= _MAX_S:
        raise ConfigError(f"new_group(stall_timeout={stall_timeout!r}): must be {_MIN_S:g} to {_MAX_S:g} seconds")
    if ranks is not None and dist.get_rank() not in ranks:
        raise ValueError(f"new_group({list(ranks)}): called on rank {dist.get_rank()}, which is not one of them")
    return watched_group(ranks, seconds)
