# SPDX-License-Identifier: Apache-2.0
"""The place of a publication, the right to publish there, and what one rank decides for all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from bytecheckpoint.config import Config
from bytecheckpoint.distributed.agreement import all_together, of_first
from bytecheckpoint.errors import CheckpointBusyError, CheckpointError
from bytecheckpoint.native import _C
from bytecheckpoint.storage.folder import Commit
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.paths import Place, TieredPath, below, location

__all__ = ["Right", "place_of", "said_by_the_first"]

T = TypeVar("T")

_FOLDER = "publisher"  # in the place; it never holds a checkpoint


def place_of(place: str | os.PathLike[str]) -> Place:
    """Returns where versions are published; of tiers, the nearest place.

    Raises:
        ConfigError: It is a URL of an unknown kind.
    """
    if isinstance(place, TieredPath):
        place.open()
        return place.places[0]
    return location(place)


class Right:
    """The right to publish in a place, which one publisher has at a time. Local.

    It is the right to commit in a folder of its own: on a file system a lock, which ends with the process. A store has
    no locks; there a second publisher is noticed by what it has published.

    Args:
        place: Where is published.
        config: Settings of the saves.
    """

    def __init__(self, place: Place, config: Config) -> None:
        self._place, self._config = place, config
        self._commit: Commit | None = None

    def take(self, publisher: str) -> None:
        """Takes it. Waits a moment if another publisher has it.

        Raises:
            CheckpointBusyError: Another publisher has it.
        """
        known(self._place, self._config)
        folder = folder_at(below(self._place, _FOLDER))
        folder.use(self._config, _C)
        try:
            self._commit = folder.begin_commit(
                self._config,
                save_id=_C.draw_save_id(),
                rank=None,
                overwrite=True,
                sync=False,
                reserve_bytes=0,
            )
        except CheckpointBusyError as error:
            raise CheckpointBusyError(
                f"publish({self._place}): another publisher is publishing there: {error}", str(self._place)
            ) from error

    def give_back(self) -> None:
        """Gives it back, if this rank has it."""
        commit, self._commit = self._commit, None
        if commit is not None:
            with suppress(CheckpointError):
                commit.abort([], False)


def said_by_the_first(group: dist.ProcessGroup | None, call: tuple[str, str], step: Callable[[], T]) -> T:
    """Returns what ``step`` returns on the lowest rank, on all ranks. Collective over ``group``.

    Raises:
        Exception: What it raises there, on all ranks.
    """
    if group is None or group.size() == 1:
        return step()
    value: Any = all_together(group, *call, lambda: step() if group.rank() == 0 else None)
    said: T = of_first(group, *call, value)
    return said
