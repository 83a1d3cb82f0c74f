"""`seqgate subscription filter`: what a subscription filters by. And `analyze`: what that means."""

import re
from collections.abc import Coroutine, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2
from seqgate.cli._command import Run, Topic, command, group, topic_name
from seqgate.cli._failure import DONE, WrongUsage
from seqgate.cli._names import Name, subscription_name
from seqgate.cli._output import time_shown
from seqgate.cli._place import start
from seqgate.cli._service import Dispatcher
from seqgate.cli._wire import record

ENTRIES_MAX: Final = 100_000
SECONDS_MAX: Final = 120
"""How many entries an analysis looks at, and how long it takes, at most."""

ANALYSIS_GRACE_S: Final = 30.0
"""How much longer than asked an analysis may take to answer."""

_FILTER: Final = re.compile(
    r"(?P<name>[^=]+?)(:(?P<version>[0-9]{1,19}))?=(?P<expression>.+)", re.S
)

app = group("Show and set the filters of a subscription.")


class OnFailure(StrEnum):
    """What it means that there is no verdict."""

    PARK = "park"
    ACCEPT = "accept"
    REJECT = "reject"


FILTERS_HELP: Final = (
    "The filters, in their order: an expression in CEL after a name for it. Without a version a "
    "filter has the next one after that of the name, or the same if the expression is the same."
)
START_HELP: Final = (
    "From where on: as for create. What is before keeps its filters. Unless given: from the first "
    "entry that waits because a filter failed, or from what was not read yet."
)

Given = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME[:VERSION]=EXPR...", help=FILTERS_HELP, show_default=False),
]
StartAt = Annotated[
    str | None, typer.Option("--start", metavar="PLACE", help=START_HELP, show_default=False)
]
Nothing = Annotated[bool, typer.Option("--none", help="Remove all filters.")]


@command(app, "set")
def set_(
    run: Run,
    topic: Topic,
    name: Name,
    filters: Given = None,
    *,
    none: Nothing = False,
    on_failure: Annotated[
        OnFailure,
        typer.Option(
            "--on-failure",
            help="What happens to an entry when a filter fails, or the filter service does not "
            "answer in time.",
        ),
    ] = OnFailure.PARK,
    start_at: StartAt = None,
) -> Coroutine[Any, Any, int]:
    """Set the filters of a subscription. Entries that they reject count as acknowledged.

    The first filter that does not accept an entry decides. If one filter is invalid, none is set.
    Waiting entries from the start place on are evaluated again.
    """
    request = _request(topic, name, start_at)
    request.policy = pb.FailurePolicy.Value(f"FAILURE_POLICY_{on_failure.name}")
    request.mode = pb.FILTER_MODE_APPLIED
    return _set(run, request, _given(filters, none=none))


@command(app, "shadow")
def shadow(
    run: Run,
    topic: Topic,
    name: Name,
    filters: Given = None,
    *,
    none: Nothing = False,
    start_at: StartAt = None,
) -> Coroutine[Any, Any, int]:
    """Count the verdicts of filters without applying them; `subscription report` shows the counts.

    Shadow filters never affect or delay delivery.
    """
    request = _request(topic, name, start_at)
    request.mode = pb.FILTER_MODE_SHADOW
    return _set(run, request, _given(filters, none=none))


@command(app, "show")
def show(run: Run, topic: Topic, name: Name) -> Coroutine[Any, Any, int]:
    """Show the filters that unacknowledged entries still need, and the latest changes."""
    request = pb.GetFiltersRequest(
        topic=str(topic_name(topic)), subscription=subscription_name(name)
    )
    return _show(run, request)


def analyze(
    run: Run,
    topic: Topic,
    name: Name,
    filters: Given = None,
    *,
    entries: Annotated[
        int,
        typer.Option(
            "--entries",
            metavar="MAX",
            min=1,
            max=ENTRIES_MAX,
            help="Maximum number of entries to evaluate.",
        ),
    ] = 10_000,
    seconds: Annotated[
        int,
        typer.Option("--seconds", metavar="MAX", min=1, max=SECONDS_MAX, help="Maximum duration."),
    ] = 10,
) -> Coroutine[Any, Any, int]:
    """Tell what a subscription's filters make of what is not acknowledged; or what others would,
    which are given. Nothing changes.

    Where there is more than may be looked at, blocks of neighbours are, that are spread over all of
    it. What they say of the rest is an estimate, and the range in which it is with a probability
    of 95 %.
    """
    request = pb.AnalyzeBacklogRequest(
        topic=str(topic_name(topic)),
        subscription=subscription_name(name),
        filters=[_parsed(each) for each in filters or ()],
        entries_max=entries,
        seconds_max=seconds,
    )
    return _analyze(run, request)


# ---- what is done


async def _set(run: Run, request: pb.SetFiltersRequest, given: Sequence[filter_pb2.Filter]) -> int:
    dispatcher = Dispatcher(run.settings)
    if any(each.version == 0 for each in given):
        names = pb.GetFiltersRequest(topic=request.topic, subscription=request.subscription)
        found = await dispatcher.call("GetFilters", names)
        given = _versioned(given, found.filters)
    request.filters.extend(given)
    answer = await dispatcher.call("SetFilters", request)
    return _tell(run, request, answer.filters)


async def _show(run: Run, request: pb.GetFiltersRequest) -> int:
    answer = await Dispatcher(run.settings).call("GetFilters", request)
    return _tell(run, request, answer.filters)


async def _analyze(run: Run, request: pb.AnalyzeBacklogRequest) -> int:
    dispatcher = Dispatcher(run.settings)
    found = await dispatcher.call(
        "AnalyzeBacklog", request, timeout_s=request.seconds_max + ANALYSIS_GRACE_S
    )
    shown = {"topic": request.topic, "subscription": request.subscription, **record(found)}
    if run.output.json:
        run.output.record(shown)
        return DONE
    run.output.fields(
        [
            ("Entries not acknowledged", shown["backlog_entries"]),
            ("Looked at", shown["scanned_entries"]),
            ("  in blocks", shown["blocks"]),
            ("  from", shown["first"]),
            ("  to", shown["last"]),
            ("That is all", shown["complete"]),
        ]
    )
    run.output.line("")
    run.output.table(
        ("VERDICT", "ENTRIES", "MESSAGES", "OF ALL, ABOUT", "AT LEAST", "AT MOST", "MESSAGES"),
        [
            (
                _words(each["verdict"] or f"no verdict: {each['failure']}"),
                each["entries"],
                each["messages"],
                each["estimated_entries"],
                each["estimated_entries_low"],
                each["estimated_entries_high"],
                each["estimated_messages"],
            )
            for each in shown["verdicts"]
        ],
    )
    return DONE


def _tell(run: Run, request: Any, filters: pb.SubscriptionFilters) -> int:
    shown = {"topic": request.topic, "subscription": request.subscription, **record(filters)}
    for change in shown["changes"]:
        for each in change["filters"]:
            del each["expression"]  # changes name filters only
    if run.output.json:
        run.output.record(shown)
        return DONE
    rows: list[tuple[object, ...]] = []
    for each in shown["applied"]:
        rows += _rows("applied", each, each["on_failure"].lower())
    if shown["shadow"] is not None:
        rows += _rows("shadow", shown["shadow"], None)
    run.output.table(("MODE", "FROM", "ON FAILURE", "FILTER", "VERSION", "EXPRESSION"), rows)
    run.output.line("")
    run.output.table(
        ("CHANGED", "MODE", "FROM", "ON FAILURE", "FILTERS", "BY"),
        [
            (
                time_shown(each["time_ms"]),
                each["mode"].lower(),
                each["start"] or "the beginning",
                each["on_failure"].lower(),
                ", ".join(f"{one['name']}:{one['version']}" for one in each["filters"]) or "none",
                each["caller"],
            )
            for each in shown["changes"]
        ],
    )
    return DONE


# ---- rows


def _rows(mode: str, stretch: dict[str, Any], on_failure: str | None) -> list[tuple[object, ...]]:
    begins = stretch["start"] or "the beginning"
    if not stretch["filters"]:
        return [(mode, begins, None, None, None, "nothing is filtered")]
    return [
        (mode, begins, on_failure, each["name"], each["version"], each["expression"])
        for each in stretch["filters"]
    ]


def _words(name: str) -> str:
    return name.lower().replace("_", " ")


# ---- what is given


def _request(topic: str, name: str, start_at: str | None) -> pb.SetFiltersRequest:
    return pb.SetFiltersRequest(
        topic=str(topic_name(topic)),
        subscription=subscription_name(name),
        start=None if start_at is None else start("--start", start_at),
    )


def _given(filters: Sequence[str] | None, *, none: bool) -> list[filter_pb2.Filter]:
    if none == bool(filters):
        raise WrongUsage("give filters or --none")
    return [_parsed(each) for each in filters or ()]


def _parsed(text: str) -> filter_pb2.Filter:
    found = _FILTER.fullmatch(text)
    if found is None:
        raise WrongUsage("a filter must be NAME=EXPR or NAME:VERSION=EXPR", details={"given": text})
    version = int(found["version"] or 0)
    return filter_pb2.Filter(name=found["name"], version=version, expression=found["expression"])


def _versioned(
    given: Sequence[filter_pb2.Filter], known: pb.SubscriptionFilters
) -> list[filter_pb2.Filter]:
    """With a version each: the known one of the same expression, or the next of the name."""
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
