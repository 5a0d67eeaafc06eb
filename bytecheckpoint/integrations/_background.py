# SPDX-License-Identifier: Apache-2.0
"""The background save of a Lightning trainer: one at a time, and what goes when it is committed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from bytecheckpoint.checkpoint.keeping import pins_of
from bytecheckpoint.checkpoint.steps import look_at_step
from bytecheckpoint.config import Config
from bytecheckpoint.report import SaveReport
from bytecheckpoint.staging.background import shutdown
from bytecheckpoint.staging.save_handle import SaveHandle
from bytecheckpoint.storage.removals import removal_in

__all__ = ["Background"]

_logger = logging.getLogger("bytecheckpoint")


class Background:
    """The save under way, and the checkpoints that go when it is committed."""

    def __init__(self, config: Config | None) -> None:
        self.config = config
        self._saving: SaveHandle[SaveReport] | None = None
        self._committed: str | None = None
        self._going: list[str] = []

    def begin(self, save: Callable[[], SaveHandle[SaveReport]]) -> None:
        """Begins a save when the one before is committed."""
        self.wait()
        self._saving = save()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint as soon as what is being saved now is committed."""
        self._going.append(os.path.abspath(path))  # noqa: PTH100
        if self._saving is None:
            self._remove_all()

    def wait(self) -> None:
        """Waits for the save, and removes what was to be removed.

        Raises:
            CheckpointError: The save failed; then nothing is removed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.committed.result()
            except Exception:
                self._going.clear()
                raise
            self._committed = os.path.abspath(saving.path)  # noqa: PTH100
        self._remove_all()

    def end(self) -> None:
        """Waits until nothing writes any more. Raises as ``wait`` does."""
        self.wait()
        shutdown()

    def _remove_all(self) -> None:
        going, self._going = self._going, []
        for path in going:
            if not self._remove(path):
                _logger.warning("%s is not removed", path)

    def _remove(self, path: str) -> bool:
        """Removes a checkpoint, its commit mark first. What cannot be removed is logged, and stays."""
        if not Path(path).exists():
            return True
        folder = look_at_step(0, path)
        kept = None if self._committed in (None, path) else look_at_step(1, self._committed or "")
        pinned = pins_of([path])
        if folder is None or pinned:
            _logger.info("%s stays: %s", path, pinned.get(path, "it has gone"))
            return True
        grace_s = Config.commit_deadline_s
        parent = Path(path).parent
        removal = removal_in(parent, remove_others=True, remove_foreign=True, grace_s=grace_s, config=self.config)
        if kept is not None and kept.is_complete and Path(kept.path).parent == Path(path).parent:
            removal.secure([kept], [folder])
        outcome = removal.remove(folder)
        for text in (*outcome.failures, *filter(None, [outcome.skipped])):
            _logger.warning("removing %s: %s", path, text)
        return not outcome.is_loadable and not outcome.failures
