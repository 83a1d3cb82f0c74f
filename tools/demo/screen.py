"""What a person sees: how far it is, what just went wrong, and the result."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

_LABELS: Final = {
    "flights": "flights in the data set",
    "producers": "producers (carriers)",
    "sent": "messages sent",
    "resent": "of these, sent again",
    "duplicates": "answered as duplicates",
    "rewinds": "stretches sent again in other batches",
    "batches_cut": "batches cut where they overlapped (since Redis last forgot)",
    "faults": "faults",
    "airline_crashes": "of these, of producers",
    "stored": "flights stored",
    "stored_twice": "stored twice",
    "lost": "lost",
    "out_of_order": "out of order",
    "altered": "altered",
    "unknown": "never sent, but stored",
    "receipts": "receipts held against the log",
    "receipts_wrong": "of these, wrong",
    "marks_wrong": "wrong marks in deduplication state",
    "publish_s": "seconds to publish, faults included",
    "proof_s": "seconds to prove",
    "messages_per_s": "messages sent a second",
}

_PROMISES: Final = (
    "stored_twice",
    "lost",
    "out_of_order",
    "altered",
    "unknown",
    "receipts_wrong",
    "marks_wrong",
)


class Screen:
    """Shows progress while it lasts; lines that stay are printed above."""

    def __init__(self) -> None:
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            expand=True,
        )
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def step(self, text: str, total: int) -> "Step":
        """A part of the way."""
        return Step(self._progress, self._progress.add_task(text, total=total))

    def tell(self, text: str) -> None:
        """A line that stays."""
        self._console.print(f"{time.monotonic() - self._started:6.1f} s  {text}", highlight=False)


class Step:
    """A bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def at(self, completed: int) -> None:
        """It is so far now."""
        self._progress.update(self._task, completed=completed)


def show_result(report: Mapping[str, object]) -> None:
    """Print the report as a table."""
    table = Table(show_header=False, title="a year of flights, stored exactly once")
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, label in _LABELS.items():
        value = report[name]
        text = f"{value:,}" if isinstance(value, int | float) else str(value)
        if name in _PROMISES:
            text = f"[red]{text}" if value else f"[green]{text}"
        table.add_row(label, text)
    Console().print(table)
