"""Shows on standard error how far a command has come.

On a terminal it is a live line with a bar; otherwise a JSON line every few seconds and a last one:

    {"progress":{"command":"audit","topics":0,"of_topics":3,"entries":4500,"of_entries":9000,
                 "entries_s":900,"seconds":5.0,"done":false}}

The result goes to standard output; it may be written meanwhile.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from seqgate.cli._output import json_line, say

INTERVAL_S: Final = 5.0
"""The time between two JSON lines, in seconds."""

REDRAWN_S: Final = 0.2
"""The time between two changes of the live line, in seconds."""


class Progress:
    """Counts what a command does, and shows it while the context lasts. Safe for threads.

    with Progress("audit", topics=3, entries=9_000) as progress:
        progress.add(entries=500)
    """

    def __init__(
        self,
        command: str,
        *,
        poll: Callable[["Progress"], None] | None = None,
        interval_s: float = INTERVAL_S,
        is_patient: bool = False,
        **totals: int | None,
    ) -> None:
        """
        Args:
            command: what is done, in one word.
            is_patient: show nothing if it is done within the interval.
            poll: called before each look at the counts, in a thread, to set them.
            interval_s: the time between two JSON lines.
            totals: each count by its name, with its expected end; None: not known. The bar shows
                the last one's share, and its rate is shown, too.
        """
        self._command = command
        self._poll = poll
        self._totals = totals
        self._rated = [*totals][-1]
        self._counts = dict.fromkeys(totals, 0)
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._line = _Line(command, totals) if sys.stderr.isatty() else None
        self._is_patient = is_patient
        self._interval_s = REDRAWN_S if self._line else interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show_often, name="progress", daemon=True)

    def add(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count

    def set(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def __enter__(self) -> Self:
        if self._line is not None and not self._is_patient:
            self._line.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_patient:  # it never was shown
            return
        self._show(is_done=kind is None)
        if self._line is not None:
            self._line.stop()

    def _show_often(self) -> None:
        while not self._ended.wait(self._interval_s):
            if self._is_patient:
                self._is_patient = False
                if self._line is not None:
                    self._line.start()
            self._show(is_done=False)

    def _show(self, *, is_done: bool) -> None:
        if self._poll is not None:
            self._poll(self)
        seconds = time.monotonic() - self._began_s
        with self._lock:
            counts = dict(self._counts)
        rate = round(counts[self._rated] / max(seconds, 0.001))
        if self._line is not None:
            self._line.show(counts, rate)
            return
        about: dict[str, Any] = {"command": self._command}
        for name, count in counts.items():
            about[name] = count
            if self._totals[name] is not None:
                about[f"of_{name}"] = self._totals[name]
        about |= {f"{self._rated}_s": rate, "seconds": round(seconds, 1), "done": is_done}
        say(json_line({"progress": about}))


class _Line:
    """The live line."""

    def __init__(self, command: str, totals: Mapping[str, int | None]) -> None:
        # Slow to import, and useless to scripts.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._totals = totals
        self._progress = Progress(
            TextColumn(command),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            # The result is written above the line if both are on a terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        *_, total = totals.values()
        self._task = self._progress.add_task("", total=total, said="")

    def start(self) -> None:
        self._progress.start()

    def show(self, counts: Mapping[str, int], rate: int) -> None:
        parts = []
        for name, count in counts.items():
            total = self._totals[name]
            parts.append(f"{count:,} {name}" if total is None else f"{count:,} of {total:,} {name}")
        *_, rated = counts.values()
        said = f"{', '.join(parts)}, {rate:,}/s"
        self._progress.update(self._task, completed=rated, said=said, refresh=True)

    def stop(self) -> None:
        self._progress.stop()
