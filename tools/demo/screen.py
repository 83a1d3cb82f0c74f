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
    "airline_crashes": "of these, of airlines",
    "station_crashes": "of these, of weather stations",
    "stored": "flights stored",
    "stored_twice": "stored twice",
    "lost": "lost",
    "out_of_order": "out of order",
    "altered": "altered",
    "unknown": "never sent, but stored",
    "receipts": "receipts held against the log",
    "receipts_wrong": "of these, wrong",
    "marks_wrong": "wrong marks in deduplication state",
    "large_messages_sent": "large messages sent (the weather)",
    "large_messages_read": "large messages read",
    "large_messages_chunks": "chunks in the log",
    "large_message_crashes": "crashes in the middle of large messages",
    "large_message_attempts_aborted": "attempts that they ended",
    "orphan_chunks_delivered": "chunks of these, delivered",
    "large_messages_wrong": "large messages or attempts that are wrong",
    "rebuild.entries": "entries after snapshots, read by Spark when Redis had forgotten",
    "rebuild.producers": "producers rebuilt",
    "rebuild.differences": "of these, other than the whole log says",
    "rebuild.failed": "topics not rebuilt",
    "audit.entries": "entries audited by Spark",
    "audit.findings": "of these, twice or out of order",
    "deliver.delivered": "flights delivered to crews, by aircraft",
    "deliver.deliveries": "deliveries of these, repeated ones included",
    "deliver.refused": "refused by a crew, and delivered again",
    "deliver.missing": "not delivered",
    "deliver.key_order_violations": "out of order within an aircraft",
    "deliver.exclusivity_violations": "at two crews at once",
    "deliver.dispatcher_crashes": "crashes of the dispatcher on the way",
    "deliver.crew_crashes": "crashes of crews on the way",
    "deliver.keys_blocked_by_the_stuck_one": "aircraft that waited while a crew stuck on a flight",
    "deliver.others_slowdown": "how many times slower the other crews were then",
    "filter.filtered_expected": "flights from one airport, by the data set",
    "filter.filtered_actual": "delivered to a subscription that wants only these",
    "filter.wrong": "of these, too many or missing",
    "filter.entries": "entries that all flights took, batches cut by airport",
    "filter.rejected": "of these, rejected by its filter",
    "filter.payloads_opened": "batches that the services opened",
    "filter.waited": "entries that waited while the filter service was away",
    "filter.early": "delivered meanwhile, without a verdict",
    "publish_s": "seconds to publish, faults included",
    "rebuild.seconds": "seconds to rebuild",
    "audit.seconds": "seconds to audit",
    "proof_s": "seconds to rebuild, to audit and to prove",
    "deliver.seconds": "seconds to deliver",
    "filter.seconds": "seconds to filter",
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
    "orphan_chunks_delivered",
    "large_messages_wrong",
    "rebuild.differences",
    "rebuild.failed",
    "audit.findings",
    "deliver.missing",
    "deliver.key_order_violations",
    "deliver.exclusivity_violations",
    "filter.wrong",
    "filter.early",
    "filter.payloads_opened",
)
"""What is 0 when all is well."""

_TO_HAPPEN: Final = (
    "large_message_crashes",
    "large_message_attempts_aborted",
    "rebuild.producers",
    "audit.entries",
    "deliver.delivered",
    "deliver.refused",
    "filter.filtered_actual",
    "filter.rejected",
    "filter.waited",
)
"""What is not."""


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
        line = f"{time.monotonic() - self._started:6.1f} s  {text}"
        self._console.print(line, highlight=False, soft_wrap=True)


class Step:
    """A bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def at(self, completed: int) -> None:
        """It is so far now."""
        self._progress.update(self._task, completed=completed)


def show_result(nested: Mapping[str, object]) -> None:
    """Print the report as a table."""
    report = _flat(nested)
    table = Table(show_header=False, title="a year of flights, stored exactly once")
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, label in _LABELS.items():
        value = report[name]
        text = f"{value:,}" if isinstance(value, int | float) else str(value)
        table.add_row(label, f"{_colour(name, report)}{text}")
    Console().print(table)


def _flat(report: Mapping[str, object]) -> dict[str, object]:
    """The report, its parts by their path."""
    flat: dict[str, object] = {}
    for name, value in report.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{path}": each for path, each in _flat(value).items()}
        else:
            flat[name] = value
    return flat


def _colour(name: str, report: Mapping[str, object]) -> str:
    """Whether a line of the table is as it should be."""
    if name in _PROMISES:
        good = not report[name]
    elif name in _TO_HAPPEN:
        good = bool(report[name])
    elif name == "large_messages_read":
        good = report[name] == report["large_messages_sent"]
    else:
        return ""
    return "[green]" if good else "[red]"
