# SPDX-License-Identifier: Apache-2.0
"""Tests the progress bar in a notebook, which a real kernel runs: a widget in the cell of the call, which ends full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat

CALLS = {
    "saving": """
import torch, torch.distributed.checkpoint as dcp
from bytecheckpoint import BcpReader, BcpWriter, Config
state = {{"w": torch.arange(5_000_000)}}
shown = Config(progress=True, write_bytes_per_s=80_000_000)
dcp.save(state, storage_writer=BcpWriter({path!r}, config=shown), no_dist=True);
""",
    "loading": """
dcp.load(state, storage_reader=BcpReader({path!r}, config=shown), no_dist=True)
""",
}


def bars_in(cell: Any, widgets: dict[str, Any]) -> list[Any]:
    """Returns the states of the bars that a cell shows."""
    view = "application/vnd.jupyter.widget-view+json"
    boxes = [widgets[output.data[view]["model_id"]] for output in cell.outputs if view in output.get("data", {})]
    parts = [widgets[child.removeprefix("IPY_MODEL_")] for box in boxes for child in box["state"]["children"]]
    return [part["state"] for part in parts if part["model_name"] == "FloatProgressModel"]


def test_a_bar_is_a_widget_of_the_cell(tmp_path: Path) -> None:
    path = str(tmp_path / "step_1")
    cells = [nbformat.v4.new_code_cell(code.format(path=path)) for code in CALLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={}).execute()
    widgets = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    for cell, title in zip(notebook.cells, CALLS, strict=True):
        (bar,) = bars_in(cell, widgets)
        assert bar["value"] == bar["max"] >= 40_000_000, title
        texts = [output.data["text/plain"] for output in cell.outputs if output.output_type == "display_data"]
        assert [text.split(":")[0] for text in texts] == [f"{title} {path}"]
