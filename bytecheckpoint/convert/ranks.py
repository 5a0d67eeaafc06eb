# SPDX-License-Identifier: Apache-2.0
"""The ranks that share a conversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bytecheckpoint.config import Config

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """All ranks of a group, or this process alone. Nothing here is imported, or sent, for one process.

    Args:
        group: The group; None for this process alone.
        config: Settings, of which ``stall_timeout_s`` is used.
        target: What is made, for errors.
    """

    def __init__(self, group: dist.ProcessGroup | None, config: Config, target: Path | str) -> None:
        self._target = str(target)
        self._group = group
        if group is not None:
            from bytecheckpoint.distributed.groups import own_group

            self._group = own_group(group, False, "convert", config.stall_timeout_s, ("convert", self._target))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self._group is None else self._group.size()

    @property
    def is_first(self) -> bool:
        """Whether this rank does what one rank does for all."""
        return self._group is None or self._group.rank() == 0

    def together(self, step: Callable[[], T]) -> T:
        """Takes a step that succeeds on all ranks or on none.

        Raises:
            Exception: What the step of a rank raised, on all ranks.
        """
        if self._group is None:
            return step()
        from bytecheckpoint.distributed.agreement import all_together

        return all_together(self._group, "convert", self._target, step)

    def shared(self, value: T) -> T:
        """Returns the value of the first rank."""
        if self._group is None:
            return value
        from bytecheckpoint.distributed.agreement import gathered

        first: T = gathered(self._group, "convert", self._target, value if self.is_first else None)[0]
        return first

    def own_of(self, pieces: Sequence[T]) -> Sequence[T]:
        """Returns what this rank does of a list that is the same on all ranks."""
        return pieces if self._group is None else pieces[self._group.rank() :: self._group.size()]
