# SPDX-License-Identifier: Apache-2.0
"""Numbers of saves and loads for the metrics logger of torchtitan's trainer, which writes to TensorBoard and W&B."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from bytecheckpoint.observability.exporters.metrics import scalars_of
from bytecheckpoint.report import LoadReport, SaveReport
from bytecheckpoint.staging.background import BackgroundFuture

__all__ = ["TrainerMetrics"]

_logger = logging.getLogger("bytecheckpoint")
_OF_ALL_RANKS = ("total_bytes", "total_bytes_wanted", "total_bytes_read", "gb_per_s", "balance")


class TrainerMetrics:
    """Logs ``checkpoint/save_duration_s`` and the like with the logger of the trainer.

    It logs in the thread that trains. A background save is logged at the first step after it is durable, because
    Weights & Biases drops what is logged for a step before its last one; ``checkpoint/saved_step`` is the step that was
    saved. A rank that is not the coordinator has no numbers of all ranks, and logs its own times.

    Args:
        states: The states of the checkpoint manager. The trainer, if there is one, is ``train_state``.
    """

    def __init__(self, states: Mapping[str, Any]) -> None:
        self._states = states
        self._pending: list[tuple[int, BackgroundFuture[SaveReport]]] = []
        self._has_failed = False

    def note(self, step: int, saving: Future[Any] | None) -> None:
        """Notes a background save of ``step``, whose report is logged when it is there."""
        if isinstance(saving, BackgroundFuture):
            self._pending.append((step, saving))

    def log_saves(self, step: int) -> None:
        """Logs at ``step`` the background saves that have ended since the last time, and did not fail."""
        ended = [each for each in self._pending if each[1].done()]
        self._pending = [each for each in self._pending if each not in ended]
        for saved_step, future in ended:
            if not future.cancelled() and future.peek() is None:
                self.log(step, future.result(), saved_step)

    def log(self, step: int, report: SaveReport | LoadReport, saved_step: int | None = None) -> None:
        """Logs at ``step`` what ``report`` says. A logger that fails is a warning, once."""
        logger = getattr(getattr(self._states.get("train_state"), "metrics_processor", None), "logger", None)
        if logger is None:
            return
        kind = "save" if isinstance(report, SaveReport) else "load"
        values = {**vars(report), **{name: getattr(report, name, None) for name in _OF_ALL_RANKS}}
        if not report.ranks:
            values |= dict.fromkeys(_OF_ALL_RANKS)
        numbers = scalars_of({"kind": kind, "is_async": values.get("is_async"), "report": values})
        if saved_step is not None:
            numbers["checkpoint/saved_step"] = saved_step
        try:
            logger.log(numbers, step)
        except Exception:
            if not self._has_failed:
                _logger.warning("torchtitan's metrics logger failed; this is said once", exc_info=True)
            self._has_failed = True
