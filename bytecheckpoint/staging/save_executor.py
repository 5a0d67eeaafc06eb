# SPDX-License-Identifier: Apache-2.0
"""The executor in which DCP runs one background save."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from bytecheckpoint.config import Config
from bytecheckpoint.staging.background import BackgroundFuture, submit
from bytecheckpoint.staging.staged_state import end_of_save, note_submitted

__all__ = ["SaveExecutor"]

T = TypeVar("T")


class SaveExecutor(Executor):
    """Takes the place of the executor in which DCP runs one background save.

    Args:
        path: See ``submit``.
        staged: The state that is saved, or a future of it.
        give_up: See ``submit``.
        config: ``exit_timeout_s`` and ``failed_save_exit_code`` are used.

    Attributes:
        queue: See ``submit``.
    """

    def __init__(self, path: str, staged: Any, give_up: Callable[[], None], config: Config) -> None:
        self.queue: str | None = None
        self._submit = partial(
            submit,
            path,
            give_up=give_up,
            exit_timeout_s=config.exit_timeout_s,
            exit_code=config.failed_save_exit_code,
        )
        self._staged = staged

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> BackgroundFuture[T]:
        """Runs ``fn`` in the background, as any executor does."""
        # The save takes its state out of this list. If it fails, its frames keep all that `run` refers to.
        taken = [(self._staged, partial(fn, *args, **kwargs))]
        note_submitted(self._staged)
        self._staged = None

        def run() -> T:
            staged, save = taken.pop()
            try:
                value = save()
            finally:
                end_of_save(staged)
            # The state is destroyed only after the future is done: freeing a tensor releases the GIL, and it may take a
            # while to get that back.
            taken.append((staged, save))
            return value

        return self._submit(run, self.queue)

    def give_back(self) -> None:
        """Gives the memory of the state back if the save was never submitted."""
        end_of_save(self._staged)
