"""The results of topics, as text and as JSON."""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from seqgate.cli._output import Output
from seqgate.jobs.rebuild.loading import Result
from seqgate.jobs.rebuild.plan import TopicPlan, Untouched

WIDTH: Final = 160

TOPIC_FAILED: Final = "TOPIC_FAILED"
ENTRIES_SKIPPED: Final = "ENTRIES_SKIPPED"
"""The reasons of notes about topics that an operator must look at."""


class Screen:
    """Prints results to standard output, and problems to standard error."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._json = output.json
        self._started = time.monotonic()

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
        for each in results:
            self._result(each)

    def summary(self, results: list[Result], untouched: list[Untouched]) -> None:
        counts: dict[str, int] = {}
        for each in results:
            counts[each.outcome] = counts.get(each.outcome, 0) + 1
        figures = {
            "topics": len(results),
            "producers": sum(each.producers for each in results),
            "entries": sum(each.entries for each in results),
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
            self._alarm(
                TOPIC_FAILED,
                f"{result.topic} FAILED: {result.reason}: {result.message} {where}",
                {"topic": result.topic, "reason": result.reason, **result.details},
            )
        if result.skipped:
            self._alarm(
                ENTRIES_SKIPPED,
                f"{result.topic}: {result.skipped:,} damaged entries were SKIPPED; a message in "
                "them that is sent again may be stored again",
                {"topic": result.topic, "skipped": result.skipped},
            )

    def _out(self, fields: dict[str, Any], line: str) -> None:
        self._output.line(json.dumps(fields) if self._json else line)

    def _alarm(self, reason: str, line: str, details: Mapping[str, int | str]) -> None:
        if self._json:
            self._output.note(reason, line, details)
            return
        # Written to the current stderr, which a live line may have replaced by its own.
        console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH, soft_wrap=True)
        console.print(f"[bold red]ALARM[/] {escape(line)}", highlight=False)
