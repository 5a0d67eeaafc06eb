# SPDX-License-Identifier: Apache-2.0
"""The demo's output: a progress bar and lines on a terminal, only lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


class Display:
    """Shows the progress bar of the current phase below the lines printed so far. A context manager."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, title: str, num_ticks: int | None = None) -> None:
        """Replaces the bar. Without ``num_ticks`` it only shows that work is in progress."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(title, total=num_ticks)
        if not self.console.is_terminal:
            self.line(f"... {title}")

    def tick(self) -> None:
        if self._task is not None:
            self._progress.advance(self._task)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        """Prints a table. All columns except the first hold numbers."""
        table = Table()
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
