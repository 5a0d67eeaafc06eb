# SPDX-License-Identifier: Apache-2.0
"""Structured records for ``logging``."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from bytecheckpoint.journal.failures import CallFailure
from bytecheckpoint.report import LoadReport, SaveReport

__all__ = ["LoggingExporter"]

_LOGGER = "bytecheckpoint.calls"
# Columns of all ranks and timelines are for the journal.
_LEFT_OUT = ("ranks", "timelines", "sizes", "hosts")


class LoggingExporter:
    """Logs each call, with its numbers as an attribute of the log record.

    The attribute ``checkpoint`` is a dict of plain values: the record of the call without what is there once a rank.
    Formatters that write JSON include it. A call is logged as INFO, a failure as ERROR.

    Args:
        logger: Where to log; None takes the logger ``bytecheckpoint.calls``.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logging.getLogger(_LOGGER) if logger is None else logger

    def export(self, report: SaveReport | LoadReport, record: dict[str, Any]) -> None:
        """Logs a call."""
        values = {name: value for name, value in record.items() if name not in _LEFT_OUT}
        self._logger.info("%s", report.summary(), extra={"checkpoint": values})

    def export_failure(self, failure: CallFailure) -> None:
        """Logs a call that failed."""
        self._logger.error(
            "%s(%s) failed after %.2f s: %s: %s",
            *(failure.kind, failure.path, failure.total_s, failure.error_type, failure.message),
            extra={"checkpoint": dataclasses.asdict(failure)},
        )
