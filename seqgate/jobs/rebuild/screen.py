"""The results of topics, as text and as JSON."""

import json
import sys
import time
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from seqgate.jobs.rebuild.loading import Result
from seqgate.jobs.rebuild.plan import TopicPlan, Untouched

WIDTH: Final = 160


class Screen:
    """Prints results to standard output; progress and problems to standard error."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json
        self._console = Console(
            file=sys.stderr, width=None if sys.stderr.isatty() else WIDTH, soft_wrap=True
        )
        self._started = time.monotonic()
        self._entries = self._topics = self._of_topics = 0
        self._progress = Progress(
            TextColumn("rebuilding"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("topics, {task.fields[entries]:,} entries, {task.fields[rate]:,}/s"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

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

    def begin(self, topics: int) -> None:
        self._of_topics = topics
        self._task = self._progress.add_task("", total=topics, entries=0, rate=0)

    def planned(self, plan: TopicPlan) -> None:
        base = "the beginning" if plan.base is None else f"the snapshot at {plan.base}"
        self._out(
            {
                "kind": "plan",
                "topic": plan.topic,
                "base": None if plan.base is None else str(plan.base),
                "through": str(plan.through),
                "entries": plan.entries,
            },
            f"{plan.topic}: {plan.entries:,} entries after {base}, through {plan.through}",
        )

    def untouched(self, topic: Untouched) -> None:
        self._out({"kind": "untouched", **topic._asdict()}, f"{topic.topic}: {topic.why}")

    def wave(self, results: list[Result]) -> None:
        self._topics += len(results)
        self._entries += sum(each.entries for each in results)
        rate = round(self._entries / max(time.monotonic() - self._started, 0.001))
        self._progress.update(self._task, completed=self._topics, entries=self._entries, rate=rate)
        for each in results:
            self._result(each)
        if not self._console.is_terminal:
            self._say(
                f"{self._topics} of {self._of_topics} topics, {self._entries:,} entries, {rate:,}/s"
            )

    def summary(self, results: list[Result], untouched: list[Untouched]) -> None:
        counts: dict[str, int] = {}
        for each in results:
            counts[each.outcome] = counts.get(each.outcome, 0) + 1
        figures = {
            "topics": len(results),
            "producers": sum(each.producers for each in results),
            "entries": self._entries,
            "skipped": sum(each.skipped for each in results),
            "untouched": len(untouched),
            "seconds": round(time.monotonic() - self._started, 1),
        }
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        self._out(
            {"kind": "summary", **figures, "outcomes": counts},
            f"{figures['topics']} topics ({told or 'nothing to do'}), "
            f"{figures['producers']:,} producers, {figures['entries']:,} entries, "
            f"{figures['seconds']} s",
        )

    def _result(self, result: Result) -> None:
        fields = {
            **result._asdict(),
            "differences": [each._asdict() for each in result.differences],
        }
        line = f"{result.topic}: {result.outcome}, {result.producers:,} producers, "
        line += f"{result.entries:,} entries"
        for count, what in (
            (result.left_out, "producers left out"),
            (result.forgotten, "producers forgotten"),
            (result.differing, "producers differ"),
        ):
            line += f", {count:,} {what}" if count else ""
        self._out({"kind": "topic", **fields}, line)
        if not self._json:
            for each in result.differences:
                self._out(
                    {},
                    f"  {each.producer}: {each.rebuilt or '-'} by the log, "
                    f"{each.live or '-'} in place",
                )
        if result.outcome == "failed":
            where = " ".join(f"{name}={value}" for name, value in result.details.items())
            self._alarm(f"{result.topic} FAILED: {result.reason}: {result.message} {where}")
        if result.skipped:
            self._alarm(
                f"{result.topic}: {result.skipped:,} damaged entries were SKIPPED; a message in "
                "them that is sent again may be stored again"
            )

    def _out(self, fields: dict[str, Any], line: str) -> None:
        text = json.dumps(fields) if self._json else line
        if self._progress.disable:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        else:
            self._progress.console.print(text, markup=False, highlight=False)

    def _alarm(self, line: str) -> None:
        self._console.print(f"[bold red]ALARM[/] {escape(line)}", highlight=False)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)
