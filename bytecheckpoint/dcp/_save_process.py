# SPDX-License-Identifier: Apache-2.0
"""The process in which DCP saves (``AsyncCheckpointerType.PROCESS``), and the ranks that it was made for."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch.distributed as dist

from bytecheckpoint.dcp._groups import ranks_of
from bytecheckpoint.probes.of_torch import PROCESS_MODE
from bytecheckpoint.probes.probe import find, require

__all__ = ["forget_process_of_other_ranks"]

_logger = logging.getLogger("bytecheckpoint")
_executor: Any = find("torch.distributed.checkpoint._async_process_executor")
# What DCP's process belongs to: the group that was the default one then, and the global ranks that save.
_made_for: tuple[weakref.ref[dist.ProcessGroup], tuple[int, ...]] | None = None


def forget_process_of_other_ranks(group: dist.ProcessGroup | None) -> None:
    """Ends DCP's process if it saves with other ranks than those of ``group``, so that this save begins a new one.

    DCP makes one process in a process, with the world of the first save, and hands every later save to it, also after
    the groups were destroyed and made anew with other ranks. Local; all ranks of a group come to the same answer.

    Raises:
        UnsupportedError: DCP keeps its process elsewhere.
    """
    require(PROCESS_MODE)
    global _made_for
    world = dist.group.WORLD
    if world is None:
        return  # DCP refuses the call
    ranks = ranks_of(group or world)
    is_for_others = _made_for is not None and (_made_for[0]() is not world or _made_for[1] != ranks)
    if _executor._CHECKPOINT_PROCESS is not None and is_for_others:
        _logger.info("the process for background saves is begun anew: it was made for other ranks")
        # It ends with its last user: a save that is under way has it, too.
        _executor._CHECKPOINT_PROCESS = None
    if _executor._CHECKPOINT_PROCESS is None:
        _made_for = weakref.ref(world), ranks
