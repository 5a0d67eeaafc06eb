# SPDX-License-Identifier: Apache-2.0
"""The ranks that ``dcp.async_save`` was called with: DCP asks for its groups anew when it begins to save."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from bytecheckpoint.dcp._calls import ASYNC_SAVE, DCP_SAVE, call_in, local_of_call
from bytecheckpoint.errors import ProcessGroupChangedError

__all__ = ["World"]

_logger = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True)
class World:
    """The ranks of one call of ``dcp.async_save``.

    Attributes:
        rank: In the group.
        size: Of the group; 1 without a group.
        group: That the save goes over, in the process of the call; None if it saves alone.
    """

    rank: int
    size: int
    group: weakref.ref[dist.ProcessGroup] | None

    @classmethod
    def of_call(cls) -> World:
        """Of the call of ``async_save`` that this thread is in."""
        group = local_of_call(*ASYNC_SAVE, "process_group") or dist.group.WORLD
        if group is None or local_of_call(*ASYNC_SAVE, "no_dist"):
            return cls(0, 1, None)
        return cls(group.rank(), group.size(), weakref.ref(group))

    def check_begin(self) -> None:
        """Called when DCP begins to save in a thread of its own: it must save with the ranks of the call.

        Raises:
            ProcessGroupChangedError: It would save with others, or alone.
        """
        if call_in(*DCP_SAVE) is None:
            return
        given = local_of_call(*DCP_SAVE, "process_group") or dist.group.WORLD
        now = None if local_of_call(*DCP_SAVE, "no_dist") else given
        # A group that was destroyed may be gone altogether.
        is_same = now is None if self.group is None else now is not None and now is self.group()
        if is_same:
            return
        error = ProcessGroupChangedError(
            f"the save was called on rank {self.rank} of {self.size}, and begins "
            f"{'without a' if now is None else 'with another'} process group: the one of the call was destroyed. "
            "Nothing is saved. Wait for the save before destroy_process_group(), or use register() or "
            "async_save_state_dict(), whose saves go on"
        )
        _logger.error("%s", error)  # the script may have ended, and nobody looks at DCP's future
        raise error

    def check_process(self) -> None:
        """Called when DCP begins to save in a process of its own, whose ranks are those of the first save.

        Raises:
            ProcessGroupChangedError: They are others than those of the call.
        """
        is_alone = call_in(*DCP_SAVE) is None or local_of_call(*DCP_SAVE, "no_dist")
        if is_alone or (dist.get_rank(), dist.get_world_size()) == (self.rank, self.size):
            return
        raise ProcessGroupChangedError(
            f"the save was called on rank {self.rank} of {self.size}, and DCP's process for saves was made for rank "
            f"{dist.get_rank()} of {dist.get_world_size()}. Nothing is saved. After register() a process is made for "
            "the ranks of each call"
        )

    def __reduce__(self) -> tuple[type[World], tuple[int, int, None]]:
        return World, (self.rank, self.size, None)
