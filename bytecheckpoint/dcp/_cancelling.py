# SPDX-License-Identifier: Apache-2.0
"""Cancels the saves of a writer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bytecheckpoint.dcp._save_session import SaveSession
from bytecheckpoint.errors import CheckpointError, SaveCancelledError
from bytecheckpoint.native import _C
from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = ["Cancelling"]


class Cancelling:
    """Whether the saves of a writer are cancelled, and the jobs of it that write now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._is_cancelled = False
        self._jobs: list[_C.SaveJob] = []

    def cancel(self) -> None:
        """Cancels the jobs that write now, and all that come later."""
        with self._lock:
            self._is_cancelled = True
            for job in self._jobs:
                job.cancel()

    def raise_if_cancelled(self, session: SaveSession) -> None:
        """Raises a ``SaveCancelledError`` if the saves are cancelled."""
        if self._is_cancelled:
            raise SaveCancelledError(f"save({session.path}): cancelled", session.path)

    @contextmanager
    def cancellable(self, session: SaveSession, job: _C.SaveJob) -> Iterator[None]:
        """Makes ``cancel`` end ``job``, for the duration of a ``with`` block."""
        with self._lock:
            self._jobs.append(job)
        try:
            self.raise_if_cancelled(session)
            yield
        except CheckpointError:
            self.raise_if_cancelled(session)
            raise
        finally:
            with self._lock:
                self._jobs.remove(job)
