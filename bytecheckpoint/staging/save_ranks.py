# SPDX-License-Identifier: Apache-2.0
"""The ranks that ``dcp.async_save`` was called with. DCP looks its groups up again when it begins to save."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from bytecheckpoint.calls.of_dcp import AsyncSaveCall, DcpSave
from bytecheckpoint.errors import ProcessGroupChangedError

__all__ = ["SaveRanks"]

_logger = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True)
class SaveRanks:
    """The ranks of one call of ``dcp.async_save``.

    Attributes:
        rank: Number of this rank in the group.
        size: Number of ranks in the group; 1 without a group.
        group: The group that the save goes over, in the process of the call; None if the rank saves alone.
    """

    rank: int
    size: int
    group: weakref.ref[dist.ProcessGroup] | None

    @classmethod
    def of(cls, call: AsyncSaveCall) -> SaveRanks:
        """Returns the ranks of ``call``."""
        group = call.group or dist.group.WORLD
        if group is None or call.no_dist:
            return cls(0, 1, None)
        return cls(group.rank(), group.size(), weakref.ref(group))

    def check_begin(self) -> None:
        """Checks that DCP saves with the ranks of the call. Called when DCP begins to save in a thread of its own.

        Raises:
            ProcessGroupChangedError: DCP would save with others, or alone.
        """
        save = DcpSave.of_thread()
        if save is None:
            return
        now = save.group
        # If the group was destroyed, the object may be gone, too: then `self.group()` is None.
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
        """Checks that DCP saves with the ranks of the call. Called when DCP begins to save in a process of its own.

        DCP makes that process for the ranks of its first save.

        Raises:
            ProcessGroupChangedError: The ranks of the process are not those of the call.
        """
        save = DcpSave.of_thread()
        if save is None or save.group is None or (dist.get_rank(), dist.get_world_size()) == (self.rank, self.size):
            return
        raise ProcessGroupChangedError(
            f"the save was called on rank {self.rank} of {self.size}, and DCP's process for saves was made for rank "
            f"{dist.get_rank()} of {dist.get_world_size()}. Nothing is saved. After register() a process is made for "
            "the ranks of each call"
        )

    def __reduce__(self) -> tuple[type[SaveRanks], tuple[int, int, None]]:
        return SaveRanks, (self.rank, self.size, None)
