# SPDX-License-Identifier: Apache-2.0
"""The process in which DCP saves with ``AsyncCheckpointerType.PROCESS``, and the ranks that it was made for."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch.distributed as dist

from bytecheckpoint.distributed.groups import ranks_of
from bytecheckpoint.probes.of_torch import PROCESS_MODE
from bytecheckpoint.probes.probe import find, require

__all__ = ["forget_process_of_other_ranks"]

_logger = logging.getLogger("bytecheckpoint")
_executor: Any = find("torch.distributed.checkpoint._async_process_executor")
# What DCP's process was made for: the default group at that time, and the global ranks that save.
_made_for: tuple[weakref.ref[dist.ProcessGroup], tuple[int, ...]] | None = None


def forget_process_of_other_ranks(group: dist.ProcessGroup | None) -> None:
    """Drops DCP's process if it was made for other ranks than those of ``group``, so that this save starts a new one.

    DCP starts one saving process per process, with the ranks of the first save. It passes every later save to that
    process, even if the groups were destroyed and made anew with other ranks. The call is local; all ranks of a group
    decide alike.

    Raises:
        UnsupportedError: This version of DCP keeps its process elsewhere.
    """
    require(PROCESS_MODE)
    global _made_for
    world = dist.group.WORLD
    if world is None:
        return  # DCP refuses the call
    ranks = ranks_of(group or world)
    is_for_others = _made_for is not None and (_made_for[0]() is not world or _made_for[1] != ranks)
    if _executor._CHECKPOINT_PROCESS is not None and is_for_others:
        _logger.info("a new process for background saves is started, because the old one was made for other ranks")
        # The process ends with its last user; a save that still runs is one.
        _executor._CHECKPOINT_PROCESS = None
    if _executor._CHECKPOINT_PROCESS is None:
        _made_for = weakref.ref(world), ranks
