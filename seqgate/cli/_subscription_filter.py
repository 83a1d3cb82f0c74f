"""`seqgate subscription filter`: manages filters. `analyze`: estimates their effect."""

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Final

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2
from seqgate.cli._arguments import Subscription, Topic, start
from seqgate.cli._command import Run, command, group
from seqgate.cli._declared import argument, choice, flag, option
from seqgate.cli._failure import WrongUsage
from seqgate.cli._output import Columns, Table, fields_of, table, words
from seqgate.cli._wire import record
from seqgate.times import duration

ENTRIES_MAX: Final = 100_000
SECONDS_MAX: Final = 120
"""The most entries that an analysis evaluates, and its longest duration."""

ANALYSIS_GRACE_S: Final = 30.0
"""How much longer than its duration an analysis may take to answer."""

_FILTER: Final = re.compile(
    r"(?P<name>[^=]+?)(:(?P<version>[0-9]{1,19}))?=(?P<expression>.+)", re.S
)

app = group("Show and set the filters of a subscription.")


class OnFailure(StrEnum):
    PARK = "park"
    ACCEPT = "accept"
    REJECT = "reject"


FILTERS_HELP: Final = (
    "The filters, in order: a name, and an expression in CEL. Without a version, a filter keeps "
    "that of the same name and expression, or else gets the next one of its name."
)
START_HELP: Final = (
    "The place from which they apply, as for create; entries before it keep their filters. By "
    "default, the first entry that waits because a filter failed, or else the first unread one."
)


def _parsed(given: Sequence[str]) -> list[filter_pb2.Filter]:
    """Parse filters; their version is 0: not given."""
    filters = []
    for text in given:
        found = _FILTER.fullmatch(text)
        if found is None:
            raise WrongUsage(
                "a filter must be NAME=EXPR or NAME:VERSION=EXPR", details={"given": text}
            )
        name, version, expression = found.group("name", "version", "expression")
        each = filter_pb2.Filter(name=name, version=int(version or 0), expression=expression)
        filters.append(each)
    return filters


Given = Annotated[
    list[filter_pb2.Filter] | None,
    argument("NAME[:VERSION]=EXPR...", FILTERS_HELP, parse=_parsed, raw=list[str]),
]
StartAt = Annotated[
    common_pb2.Start | None, option("PLACE", START_HELP, "--from", parse=partial(start, "--from"))
]
Nothing = Annotated[bool, flag("Remove all filters.", "--none")]


@command(app, "set")
async def set_(
    run: Run,
    topic: Topic,
    name: Subscription,
    filters: Given = None,
    *,
    none: Nothing = False,
    on_failure: OnFailure = choice(
        "What happens to an entry when a filter fails, or the filter service does not "
        "answer in time.",
        default=OnFailure.PARK,
    ),
    start_at: StartAt = None,
) -> None:
    """Set the filters of a subscription. Entries that they reject count as acknowledged.

    The first filter that does not accept an entry decides. If one filter is invalid, none is set.
    Waiting entries at or after the start place are evaluated again.
    """
    request = pb.SetFiltersRequest(
        topic=topic,
        subscription=name,
        start=start_at,
        policy=pb.FailurePolicy.Value(f"FAILURE_POLICY_{on_failure.name}"),
        mode=pb.FILTER_MODE_APPLIED,
    )
    await _set(run, request, filters or [], none=none)


@command(app, "shadow")
async def shadow(
    run: Run,
    topic: Topic,
    name: Subscription,
    filters: Given = None,
    *,
    none: Nothing = False,
    start_at: StartAt = None,
) -> None:
    """Count the verdicts of filters without applying them; `subscription report` shows the counts.

    Shadow filters never affect or delay delivery.
    """
    request = pb.SetFiltersRequest(
        topic=topic, subscription=name, start=start_at, mode=pb.FILTER_MODE_SHADOW
    )
    await _set(run, request, filters or [], none=none)


@command(app, "show")
async def show(run: Run, topic: Topic, name: Subscription) -> None:
    """Show the filters that unacknowledged entries still need, and the latest changes."""
    await _tell(run, pb.GetFiltersRequest(topic=topic, subscription=name))


async def analyze(
    run: Run,
    topic: Topic,
    name: Subscription,
    filters: Given = None,
    *,
    entries: int = option(
        "MAX", "Maximum number of entries to evaluate.", default=10_000, min=1, max=ENTRIES_MAX
    ),
    seconds: int = option("MAX", "Maximum duration.", default=10, min=1, max=SECONDS_MAX),
) -> None:
    """Evaluate a subscription's filters, or those given, on its unacknowledged entries. Read-only.

    If there are more entries than the maximum, blocks of neighbouring entries are evaluated, spread
    over all of them. The totals are then estimates; for entries, with a 95 % confidence interval.
    """
    request = pb.AnalyzeBacklogRequest(
        topic=topic,
        subscription=name,
        filters=filters,
        max_entries=entries,
        max_duration=duration(seconds * 1000),
    )
    found = await run.services.call(request, timeout_s=seconds + ANALYSIS_GRACE_S)
    shown = {"topic": topic, "subscription": name, **record(found)}
    titles: Columns = {
        "Entries not acknowledged": "backlog_entries",
        "Looked at": "scanned_entries",
        "  in blocks": "blocks",
        "  from": "first",
        "  to": "last",
        "That is all": "complete",
    }
    headings = (
        "VERDICT",
        "ENTRIES",
        "MESSAGES",
        "OF ALL, ABOUT",
        "AT LEAST",
        "AT MOST",
        "MESSAGES",
    )
    rows = [
        (
            words(each["verdict"] or f"no verdict: {each['failure']}"),
            each["entries"],
            each["messages"],
            each["estimated_entries"],
            each["estimated_entries_low"],
            each["estimated_entries_high"],
            each["estimated_messages"],
        )
        for each in shown["verdicts"]
    ]
    run.output.result(shown, fields_of(shown, titles), Table(headings, rows))


async def _set(
    run: Run, request: pb.SetFiltersRequest, given: Sequence[filter_pb2.Filter], *, none: bool
) -> None:
    if none == bool(given):
        raise WrongUsage("give filters or --none")
    if any(each.version == 0 for each in given):
        known = pb.GetFiltersRequest(topic=request.topic, subscription=request.subscription)
        given = _versioned(given, (await run.services.call(known)).filters)
    request.filters.extend(given)
    await _tell(run, request)


async def _tell(run: Run, request: pb.SetFiltersRequest | pb.GetFiltersRequest) -> None:
    filters = (await run.services.call(request)).filters
    shown = {"topic": request.topic, "subscription": request.subscription, **record(filters)}
    for change in shown["changes"]:
        for each in change["filters"]:
            del each["expression"]  # changes name filters only
    rows: list[tuple[object, ...]] = []
    for each in shown["applied"]:
        rows += _rows("applied", each, each["on_failure"].lower())
    if shown["shadow"] is not None:
        rows += _rows("shadow", shown["shadow"], None)
    changes: Columns = {
        "CHANGED": "time_ms",
        "MODE": lambda each: each["mode"].lower(),
        "FROM": lambda each: each["start"] or "the beginning",
        "ON FAILURE": lambda each: each["on_failure"].lower(),
        "FILTERS": lambda each: (
            ", ".join(f"{one['name']}:{one['version']}" for one in each["filters"]) or "none"
        ),
        "BY": "caller",
    }
    run.output.result(
        shown,
        Table(("MODE", "FROM", "ON FAILURE", "FILTER", "VERSION", "EXPRESSION"), rows),
        table(changes, shown["changes"]),
    )


def _rows(mode: str, stretch: dict[str, Any], on_failure: str | None) -> list[tuple[object, ...]]:
    begins = stretch["start"] or "the beginning"
    if not stretch["filters"]:
        return [(mode, begins, None, None, None, "nothing is filtered")]
    return [
        (mode, begins, on_failure, each["name"], each["version"], each["expression"])
        for each in stretch["filters"]
    ]


def _versioned(
    given: Sequence[filter_pb2.Filter], known: pb.SubscriptionFilters
) -> list[filter_pb2.Filter]:
    """Give each filter a version: the known one of the same expression, or the next of its name."""
    texts: dict[tuple[str, str], int] = {}
    highest: dict[str, int] = {}
    for stretch in (*known.applied, known.shadow):
        for each in stretch.filters:
            texts[each.name, each.expression] = each.version
            highest[each.name] = max(each.version, highest.get(each.name, 0))
    for change in known.changes:
        for each in change.filters:
            highest[each.name] = max(each.version, highest.get(each.name, 0))
    return [
        each
        if each.version
        else filter_pb2.Filter(
            name=each.name,
            version=texts.get((each.name, each.expression), highest.get(each.name, 0) + 1),
            expression=each.expression,
        )
        for each in given
    ]
