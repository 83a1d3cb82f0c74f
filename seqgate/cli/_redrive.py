"""`seqgate redrive`: shows redrives and replays, and stops them; and how both are started."""

import asyncio
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.cli._arguments import (
    COUNT_MAX,
    PLACE_HELP,
    Subscription,
    Topic,
    key_from_base64,
    key_from_text,
    start,
)
from seqgate.cli._command import Run, command, group
from seqgate.cli._declared import argument, flag, option
from seqgate.cli._failure import WrongUsage
from seqgate.cli._output import Columns, Table, time_shown, words
from seqgate.cli._progress import Progress
from seqgate.cli._wire import bytes_record, enum_name, record

LOOK_S: Final = 0.2
"""The interval of looks at a redrive that is waited for, in seconds."""

ESTIMATE_TIMEOUT_S: Final = 15.0
"""The limit of an estimate, which the service ends after ten seconds."""

RATE_MAX: Final = 10_000

Number = Annotated[
    int,
    argument("NUMBER", "The redrive's number, as `ls` lists it.", raw=int, min=1, max=COUNT_MAX),
]
KeyOption = Annotated[
    str | None, option("KEY", "Only the messages with this key.", "--key", "-k", is_bytes=True)
]
IsBase64 = Annotated[bool, flag("KEY is base64, not text.", "--base64")]
Expression = Annotated[
    str | None,
    option("EXPRESSION", "Only the messages for which this CEL expression is true.", "--where"),
]
Rate = Annotated[
    int,
    option(
        "N",
        "The most messages a second; 0: as fast as consumers settle them.",
        "--rate",
        default=0,
        raw=int,
        min=0,
        max=RATE_MAX,
    ),
]
RequestId = Annotated[
    str | None,
    option("ID", "Makes the command safe to repeat: a redrive is made once for each id.", "--id"),
]
DryRun = Annotated[
    bool,
    flag(
        "Count what would be redriven, and what would be left out and why. Change nothing.",
        "--dry-run",
    ),
]
Wait = Annotated[
    bool,
    flag(
        "Wait until it has ended, and show its progress. Ctrl-C ends the wait only; with "
        "--timeout, it ends with 1 after that.",
        "--wait",
    ),
]

app = group("Show redrives of dead letters and replays of topics, and stop them.")


@command(app, "ls")
async def ls(run: Run, topic: Topic, name: Subscription) -> None:
    """List a subscription's latest redrives and replays, the newest first."""
    columns: Columns = {
        "REDRIVE": "number",
        "OF": _source_shown,
        "STATE": lambda each: words(each["state"]),
        "STARTED": lambda each: time_shown(each["started_ms"]),
        "READ": "scanned_entries",
        "OF ALL": "total_entries",
        "REDRIVEN": lambda each: each["counts"].get("REDRIVEN", 0),
        "ON THEIR WAY": "returning_entries",
        "WAITS FOR": "waits_for",
    }
    answer = await run.services.call(pb.ListRedrivesRequest(topic=topic, subscription=name))
    found = [redrive_record(each) for each in answer.redrives]

    async def listed() -> Any:
        for each in found:
            yield each

    await run.output.listing(columns, listed())


@command(app, "show")
async def show(
    run: Run, topic: Topic, name: Subscription, number: Number, *, wait: Wait = False
) -> None:
    """Show a redrive or replay: what it selects, how far it is, and what it left out and why."""
    request = pb.GetRedriveRequest(topic=topic, subscription=name, number=number)
    found = (await run.services.call(request)).redrive
    await tell(run, topic, name, found, wait=wait)


@command(app, "stop")
async def stop(run: Run, topic: Topic, name: Subscription, number: Number) -> None:
    """Stop a redrive or replay for good. Messages on their way stay on their way."""
    request = pb.StopRedriveRequest(topic=topic, subscription=name, number=number)
    await tell(run, topic, name, (await run.services.call(request)).redrive, wait=False)


async def replay(
    run: Run,
    topic: Topic,
    name: Subscription,
    *,
    start_at: common_pb2.Start = option(
        "PLACE", PLACE_HELP, "--from", default="earliest", parse=partial(start, "--from")
    ),
    end_at: common_pb2.Start = option(
        "PLACE",
        "The place after the last message, as for --from.",
        "--to",
        default="latest",
        parse=partial(start, "--to"),
    ),
    key: KeyOption = None,
    is_base64: IsBase64 = False,
    expression: Expression = None,
    rate: Rate = 0,
    create: bool = flag("Create the subscription at the end of the log, unless it exists."),
    request_id: RequestId = None,
    dry_run: DryRun = False,
    wait: Wait = False,
) -> None:
    """Deliver a stretch of the topic once more: the messages that the subscription acknowledged.

    It is a redrive with a number, which survives this command, and touches no acknowledgement.
    `seqgate redrive` shows and stops it.
    """
    selection = selected(key, expression, is_base64=is_base64)
    selection.stretch.CopyFrom(pb.TopicStretch(start=start_at, end=end_at))
    request = pb.StartRedriveRequest(
        topic=topic, subscription=name, selection=selection, create_subscription=create
    )
    await start_or_estimate(run, request, rate, request_id, dry_run=dry_run, wait=wait)


def selected(key: str | None, expression: str | None, *, is_base64: bool) -> pb.RedriveSelection:
    wanted = None
    if key is not None:
        wanted = key_from_base64("--key", key) if is_base64 else key_from_text(key)
    elif is_base64:
        raise WrongUsage("--base64 requires --key")
    return pb.RedriveSelection(key=wanted, expression=expression or "")


async def start_or_estimate(
    run: Run,
    request: pb.StartRedriveRequest,
    rate: int,
    request_id: str | None,
    *,
    dry_run: bool,
    wait: bool,
) -> None:
    """Start a redrive and show it, or estimate it."""
    if dry_run:
        await _estimate(run, request)
        return
    request.letters_per_second = rate
    request.request_id = request_id or uuid.uuid4().hex
    answer = await run.services.call(request)
    await tell(run, request.topic, request.subscription, answer.redrive, wait=wait)


async def _estimate(run: Run, request: pb.StartRedriveRequest) -> None:
    asked = pb.EstimateRedriveRequest(
        topic=request.topic,
        subscription=request.subscription,
        dead_letter_topic=request.dead_letter_topic,
        selection=request.selection,
        create_subscription=request.create_subscription,
    )
    found = await run.services.call(asked, timeout_s=ESTIMATE_TIMEOUT_S)
    shown = {"topic": request.topic, "subscription": request.subscription, **record(found)}
    fields: list[tuple[str, object]] = [
        ("Entries", shown["total_entries"]),
        ("Looked at", shown["scanned_entries"]),
        ("  in blocks", shown["blocks"]),
        ("That is all", shown["complete"]),
    ]
    headings = ("OUTCOME", "ENTRIES", "MESSAGES", "OF ALL, ABOUT", "AT LEAST", "AT MOST")
    rows = [
        (
            words(each["outcome"]),
            each["entries"],
            each["messages"],
            each["estimated_entries"],
            each["estimated_entries_low"],
            each["estimated_entries_high"],
        )
        for each in shown["outcomes"]
    ]
    run.output.result(shown, fields, Table(headings, rows))


async def tell(run: Run, topic: str, name: str, found: pb.Redrive, *, wait: bool) -> None:
    """Show a redrive, once it has ended if `wait`."""
    if wait:
        found = await _ended(run, topic, name, found)
    shown = {"topic": topic, "subscription": name, **redrive_record(found)}
    fields: list[tuple[str, object]] = [
        ("Redrive", shown["number"]),
        ("Of", _source_shown(shown)),
        *_selection_shown(found.selection),
        ("Rate", f"{found.letters_per_second:,}/s" if found.letters_per_second else "no limit"),
        ("State", words(shown["state"])),
        *([("Why", shown["failure"])] if shown["failure"] else []),
        *([("Waits for", shown["waits_for"])] if shown["waits_for"] else []),
        ("Started", time_shown(shown["started_ms"])),
        ("Ended", time_shown(shown["ended_ms"])),
        ("By", shown["caller"]),
        ("Entries read", f"{found.scanned_entries:,} of {found.total_entries:,}"),
        *[(f"  {words(outcome)}", count) for outcome, count in shown["counts"].items()],
        ("On their way", shown["returning_entries"]),
    ]
    run.output.result(shown, fields)


async def _ended(run: Run, topic: str, name: str, found: pb.Redrive) -> pb.Redrive:
    """A redrive once it has ended and all its messages are settled."""
    request = pb.GetRedriveRequest(topic=topic, subscription=name, number=found.number)

    async def because() -> str:
        if found.waits_for or not found.returning_entries:
            return found.waits_for
        asked = pb.ReportRequest(topic=topic, subscription=name, max_keys=1)
        consumers = len((await run.services.call(asked)).consumers)
        who = f"{consumers:,} consumers are connected" if consumers else "no consumer is connected"
        return f"{found.returning_entries:,} entries are on their way to consumers, and {who}"

    progress = Progress("redrive", redriven=None, entries=found.total_entries)
    async with run.waiting(f"redrive {found.number} to end", because):
        with progress:
            while True:
                progress.set(redriven=_redriven(found), entries=found.scanned_entries)
                is_running = found.state == pb.REDRIVE_STATE_RUNNING
                if not (is_running or found.returning_entries):
                    return found
                await asyncio.sleep(LOOK_S)
                found = (await run.services.call(request)).redrive


def _redriven(found: pb.Redrive) -> int:
    counts = {each.outcome: each.entries for each in found.counts}
    return counts.get(pb.REDRIVE_OUTCOME_REDRIVEN, 0)


def redrive_record(found: pb.Redrive) -> dict[str, Any]:
    """A redrive, with its counts by outcome."""
    shown = record(found)
    shown["counts"] = {
        enum_name(pb.RedriveOutcome, each.outcome): each.entries for each in found.counts
    }
    if found.HasField("selection"):
        key = found.selection.key if found.selection.HasField("key") else None
        shown["selection"] = {
            **bytes_record("key", key),
            "expression": found.selection.expression or None,
            "after": _end_shown(found.selection.stretch.start),
            "through": _end_shown(found.selection.stretch.end),
        }
    return shown


def _end_shown(place: common_pb2.Start) -> str | None:
    return f"{place.after.ledger_id}:{place.after.entry_id}" if place.HasField("after") else None


def _source_shown(found: Mapping[str, Any]) -> object:
    if found["selection"] is None:
        return "named letters"
    return found["dead_letter_topic"] or "the topic"


def _selection_shown(selection: pb.RedriveSelection) -> list[tuple[str, object]]:
    shown: list[tuple[str, object]] = []
    if selection.HasField("stretch"):
        shown.append(("  after", _end_shown(selection.stretch.start) or "the beginning"))
        shown.append(("  through", _end_shown(selection.stretch.end) or "nothing"))
    if selection.HasField("key"):
        shown.append(("  key", next(iter(bytes_record("key", selection.key).values()))))
    if selection.expression:
        shown.append(("  where", selection.expression))
    return shown
