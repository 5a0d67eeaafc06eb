# SPDX-License-Identifier: Apache-2.0
"""Charts in TensorBoard."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytecheckpoint.observability.exporters.metrics import scalars_of
from bytecheckpoint.report import LoadReport, SaveReport

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardExporter"]


class TensorBoardExporter:
    """Adds scalars such as ``checkpoint/save_duration_s`` at the step that the path of the checkpoint names.

    For a path that names no step, it is the number of the save or load in this process, from 0.

    Args:
        writer: The ``SummaryWriter`` to add to. For a folder, one is made that writes there.

    Raises:
        ImportError: TensorBoard is not installed (``pip install 'bytecheckpoint-dcp[tensorboard]'``).
    """

    def __init__(self, writer: SummaryWriter | str | os.PathLike[str]) -> None:
        self._owns_writer = isinstance(writer, (str, os.PathLike))
        if isinstance(writer, (str, os.PathLike)):
            writer = import_module("torch.utils.tensorboard").SummaryWriter(os.fspath(writer))
        self._writer: Any = writer
        self._num_calls = {"save": 0, "load": 0}

    def export(self, report: SaveReport | LoadReport, record: dict[str, Any]) -> None:
        """Adds the scalars of a call."""
        step = record.get("step")
        if step is None:
            step = self._num_calls[record["kind"]]
        self._num_calls[record["kind"]] += 1
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, step, walltime=report.began_at + report.total_s)
        self._writer.flush()

    def close(self) -> None:
        """Closes the writer, if the exporter has made it."""
        if self._owns_writer:
            self._writer.close()
