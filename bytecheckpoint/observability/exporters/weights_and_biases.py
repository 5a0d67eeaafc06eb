# SPDX-License-Identifier: Apache-2.0
"""Charts in Weights & Biases."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.observability.exporters.metrics import scalars_of
from bytecheckpoint.report import LoadReport, SaveReport

if TYPE_CHECKING:
    from wandb import Run

__all__ = ["WandbExporter"]


class WandbExporter:
    """Logs numbers such as ``checkpoint/save_duration_s`` to a run, online or offline.

    The charts have the axis ``checkpoint/step``: the step that the path of the checkpoint names. Weights & Biases drops
    what is logged for a step of the run before its last one, and a background save ends steps later. So the exporter
    passes no step.

    Args:
        run: The run, as ``wandb.init`` returns it; None takes the current run.
        commit: Whether each call is a step of the run. False adds its numbers to the next one that you log, so that the
            steps of the run stay yours; of several calls between two of your steps, the last one counts.

    Raises:
        ConfigError: There is no current run.
        ImportError: ``wandb`` is not installed (``pip install 'bytecheckpoint-dcp[wandb]'``).
    """

    def __init__(self, run: Run | None = None, *, commit: bool = False) -> None:
        self._run: Any = import_module("wandb").run if run is None else run
        if self._run is None:
            raise ConfigError("WandbExporter: there is no current run; call wandb.init before, or pass its run")
        self._commit = commit
        self._run.define_metric("checkpoint/step", hidden=True)
        self._run.define_metric("checkpoint/*", step_metric="checkpoint/step")

    def export(self, report: SaveReport | LoadReport, record: dict[str, Any]) -> None:
        """Logs the numbers of a call."""
        step = record.get("step")
        numbers = scalars_of(record) | ({} if step is None else {"checkpoint/step": step})
        self._run.log(numbers, commit=self._commit)
