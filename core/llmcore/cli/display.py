"""Progress on standard error: a bar per stage on a terminal, a line per stage in a log."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text


class Stages:
    """Progress of named stages on standard error; `unit` "bytes" shows sizes, anything else counts."""

    def __init__(self, unit: str = "bytes", console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        amount = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
        self._bar = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            amount,
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage`; the first call for a stage announces it."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
            if self.console.is_terminal:
                self._bar.start()
            else:
                self.console.print(f"{stage}...")
        self._bar.update(self._tasks[stage], completed=done, total=total)

    def close(self) -> None:
        """Remove the bars."""
        if self.console.is_terminal:  # elsewhere no bar was started, and stopping would print an empty line
            self._bar.stop()


def show_summary(title: str, rows: Sequence[tuple[str, str]], console: Console) -> None:
    """Print (label, text) rows: a panel on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        for label, text in rows:
            console.print(f"{label}: {text}", markup=False, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    console.print(Panel(table, title=title, title_align="left", expand=False))
