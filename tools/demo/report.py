"""The promises, the report that says which were kept, and the screen."""

import time
from collections.abc import Callable, Mapping
from typing import Final, Self

from rich import progress
from rich.console import Console
from rich.table import Table

LABELS: Final = {
    "store": "store of logs and cursors",
    "flights": "flights in the data set",
    "producers": "producers (carriers)",
    "sent": "messages sent",
    "resent": "of these, sent again",
    "duplicates": "answered as duplicates",
    "rewinds": "stretches sent again in other batches",
    "batches_cut": "batches cut where they overlapped (since Redis last forgot)",
    "faults": "faults",
    "failovers": "of these, fail-overs of PostgreSQL",
    "airline_crashes": "of these, of airlines",
    "station_crashes": "of these, of weather stations",
    "stored": "flights stored",
    "stored_twice": "0 stored twice",
    "lost": "0 lost",
    "out_of_order": "0 out of order",
    "altered": "0 altered",
    "unknown": "0 never sent, but stored",
    "receipts": "receipts held against the log",
    "receipts_wrong": "0 of these, wrong",
    "marks_wrong": "0 wrong marks in deduplication state",
    "large_messages_sent": "large messages sent (the weather)",
    "large_messages_read": "+ large messages read",
    "large_messages_chunks": "chunks in the log",
    "large_message_crashes": "+ crashes in the middle of large messages",
    "large_message_attempts_aborted": "+ attempts that they ended",
    "orphan_chunks_delivered": "0 chunks of these, delivered",
    "large_messages_wrong": "0 large messages or attempts that are wrong",
    "rebuild.entries": "entries after snapshots, read by Spark when Redis had forgotten",
    "rebuild.producers": "+ producers rebuilt",
    "rebuild.differences": "0 of these, other than the whole log says",
    "rebuild.failed": "0 topics not rebuilt",
    "audit.entries": "+ entries audited by Spark",
    "audit.findings": "0 of these, twice or out of order",
    "conflicts.sent": "flights of a feed that starts again at id 0 under its old name",
    "conflicts.reported": "+ of these, reported: another flight is stored under their id",
    "conflicts.refused": "+ the same once more, refused",
    "conflicts.silent": "0 of these, lost without a word",
    "conflicts.false": "0 flights reported that are stored",
    "deliver.delivered": "+ flights delivered to crews, by aircraft",
    "deliver.deliveries": "deliveries of these, repeated ones included",
    "deliver.refused": "+ refused by a crew, and delivered again",
    "deliver.missing": "0 not delivered",
    "deliver.key_order_violations": "0 out of order within an aircraft",
    "deliver.exclusivity_violations": "0 at two crews at once",
    "deliver.dispatcher_crashes": "crashes of the dispatcher on the way",
    "deliver.crew_crashes": "crashes of crews on the way",
    "deliver.keys_blocked_by_the_stuck_one": "1 aircraft that waited while a crew was stuck",
    "deliver.others_slowdown": "how many times slower the other crews were then",
    "filter.filtered_expected": "flights from one airport, by the data set",
    "filter.filtered_actual": "+ delivered to a subscription that wants only these",
    "filter.wrong": "0 of these, too many or missing",
    "filter.entries": "entries that all flights took, batches cut by airport",
    "filter.rejected": "+ of these, rejected by its filter",
    "filter.payloads_opened": "0 batches that the services opened",
    "filter.waited": "+ entries that waited while the filter service was away",
    "filter.early": "0 delivered meanwhile, without a verdict",
    "mend.cancelled": "cancelled flights, by the data set",
    "mend.dead_letters": "+ of these, refused for good: dead letters that hold their aircraft",
    "mend.explained": "+ of these, with the crew's reason",
    "mend.redriven": "+ mended, and redriven",
    "mend.missing": "0 flights not delivered in the end",
    "mend.doubled": "0 mended flights delivered twice",
    "mend.key_order_violations": "0 out of order within an aircraft",
    "publish_s": "seconds to publish, faults included",
    "rebuild.seconds": "seconds to rebuild",
    "audit.seconds": "seconds to audit",
    "proof_s": "seconds to rebuild, to audit and to prove",
    "deliver.seconds": "seconds to deliver",
    "filter.seconds": "seconds to filter",
    "mend.seconds": "seconds to mend and redrive",
    "messages_per_s": "messages sent a second",
}
"""Lines of the table, by a figure's path. A promise about a figure begins its line; see
PROMISES."""

PROMISES: Final = {
    "0 ": lambda value: value == 0,
    "1 ": lambda value: value <= 1,
    "+ ": lambda value: value > 0,
}


def broken(report: Mapping[str, object]) -> list[str]:
    """The figures that break a promise."""
    return [
        path
        for path, value in flat(report).items()
        if (promise := PROMISES.get(LABELS.get(path, "")[:2])) and not promise(value)
    ]


def show_result(report: Mapping[str, object]) -> None:
    figures, wrong = flat(report), broken(report)
    table = Table("", "", show_header=False, title="a year of flights, stored exactly once")
    table.columns[1].justify = "right"
    for path, label in LABELS.items():
        value = figures[path]
        text = f"{value:,}" if isinstance(value, int | float) else str(value)
        if label[:2] in PROMISES:
            label, text = label[2:], ("[red]" if path in wrong else "[green]") + text
        table.add_row(label, text)
    Console().print(table)


def flat(report: Mapping[str, object]) -> dict[str, object]:
    """The report, its parts by their path."""
    found: dict[str, object] = {}
    for name, value in report.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{path}": each for path, each in flat(value).items()}
        else:
            found[name] = value
    return found


Step = Callable[[int], None]  # shows how much of a part of the way is done


class Screen:
    """Shows progress while it lasts; lines that stay are printed above."""

    def __init__(self) -> None:
        self._console = Console()
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            console=self._console,
            expand=True,
        )
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, text: str, total: int) -> Step:
        task = self._progress.add_task(text, total=total)
        return lambda completed: self._progress.update(task, completed=completed)

    def tell(self, text: str) -> None:
        line = f"{time.monotonic() - self._started:6.1f} s  {text}"
        self._console.print(line, highlight=False, soft_wrap=True)
