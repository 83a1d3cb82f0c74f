"""`seqgate subscription`: who gets a topic's messages, and why somebody does not."""

import base64
import time
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, Final

import typer

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.cli._command import Run, Topic, command, group, option_properties, topic_name
from seqgate.cli._failure import DONE, WrongUsage
from seqgate.cli._names import Name, subscription_name
from seqgate.cli._output import Columns, time_shown
from seqgate.cli._output import shown as text_shown
from seqgate.cli._place import PLACE_HELP, first_entry, message_id, start
from seqgate.cli._service import Dispatcher, pages
from seqgate.cli._subscription_filter import analyze
from seqgate.cli._subscription_filter import app as filter_
from seqgate.cli._trace import trace_of
from seqgate.cli._wire import bytes_record, position, record
from seqgate.types import Position

KEYS_DEFAULT: Final = 20
KEYS_MAX: Final = 1_000
"""How many keys that wait `report` lists, unless asked otherwise, and at most."""

RANGES_SHOWN: Final = 3
"""How many ranges of slots a table names; it counts all of them."""

SAID: Final = ("processed", "accepted", "rejected", "rescheduled", "failed")
"""What filters are counted by."""

LISTED: Final = 1_000
"""How many subscriptions a page has."""

app = group("Manage subscriptions, and explain why messages are not delivered.")
app.add_typer(filter_, name="filter")
command(app, "analyze")(analyze)


@command(app, "list")
def list_(run: Run, topic: Topic) -> Coroutine[Any, Any, int]:
    """List a topic's subscriptions, sorted by name."""
    return _list(run, str(topic_name(topic)))


@command(app, "show")
def show(run: Run, topic: Topic, name: Name) -> Coroutine[Any, Any, int]:
    """Show a subscription: its position, its properties and its owner."""
    request = pb.GetSubscriptionRequest(
        topic=str(topic_name(topic)), subscription=subscription_name(name)
    )
    return _show(run, request)


@command(app, "create")
def create(
    run: Run,
    topic: Topic,
    name: Name,
    *,
    start_at: Annotated[str, typer.Option("--start", metavar="PLACE", help=PLACE_HELP)] = (
        "earliest"
    ),
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", metavar="NAME=VALUE", help="A property; repeatable."),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Create a subscription. An existing one is left unchanged.

    For a message in a batch, delivery starts with the whole batch; for a large message, with its
    first chunk. A time means the first message stored at or after it, by the ledger's clock.
    """
    request = pb.CreateSubscriptionRequest(
        topic=str(topic_name(topic)),
        subscription=subscription_name(name),
        start=start("--start", start_at),
        properties=option_properties("--property", properties),
    )
    return _create(run, request)


@command(app, "delete")
def delete(
    run: Run,
    topic: Topic,
    name: Name,
    *,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Delete it even with connected consumers, and disconnect them."
        ),
    ] = False,
) -> Coroutine[Any, Any, int]:
    """Delete a subscription and its acknowledgements."""
    request = pb.DeleteSubscriptionRequest(
        topic=str(topic_name(topic)), subscription=subscription_name(name), force=force
    )
    return _delete(run, request)


@command(app, "reset")
def reset(
    run: Run,
    topic: Topic,
    name: Name,
    *,
    to: Annotated[str, typer.Option("--to", metavar="PLACE", help=PLACE_HELP, show_default=False)],
) -> Coroutine[Any, Any, int]:
    """Move a subscription forwards or backwards. Acknowledgements beyond the place are discarded.

    Consumers stay connected; their deliveries in flight become stale. For a message in a batch,
    delivery starts with the whole batch; for a large message, with its first chunk.
    """
    request = pb.ResetSubscriptionRequest(
        topic=str(topic_name(topic)),
        subscription=subscription_name(name),
        start=start("--to", to),
    )
    return _tell_after(run, "ResetSubscription", request)


@command(app, "set")
def set_(
    run: Run,
    topic: Topic,
    name: Name,
    *,
    put: Annotated[
        list[str] | None,
        typer.Option("--put", metavar="NAME=VALUE", help="Set a property; repeatable."),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="NAME", help="Remove a property; repeatable."),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Change a subscription's properties. Removing one that is not set is not an error."""
    if not put and not remove:
        raise WrongUsage("give --put or --remove")
    request = pb.UpdateSubscriptionPropertiesRequest(
        topic=str(topic_name(topic)),
        subscription=subscription_name(name),
        put=option_properties("--put", put),
        remove=remove or [],
    )
    return _tell_after(run, "UpdateSubscriptionProperties", request)


@command(app, "report")
def report(
    run: Run,
    topic: Topic,
    name: Name,
    *,
    keys: Annotated[
        int,
        typer.Option(
            "--keys",
            metavar="MAX",
            min=1,
            max=KEYS_MAX,
            help="Number of waiting keys to list, those that wait longest first.",
        ),
    ] = KEYS_DEFAULT,
) -> Coroutine[Any, Any, int]:
    """Show a subscription's consumers, its waiting keys, and what each key waits for.

    Delivery counts start when the dispatcher instance takes the subscription.
    """
    request = pb.ReportRequest(
        topic=str(topic_name(topic)), subscription=subscription_name(name), keys_max=keys
    )
    return _report(run, request)


@command(app, "explain")
def explain(
    run: Run,
    topic: Topic,
    name: Name,
    *,
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="A key, as text.", show_default=False)
    ] = None,
    key_base64: Annotated[
        str | None,
        typer.Option("--key-base64", metavar="KEY", help="A key, as base64.", show_default=False),
    ] = None,
    id_: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="A message id.", show_default=False),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Tell why a key's messages, or one message, are not delivered: the nearest reason first."""
    if [key, key_base64, id_].count(None) != 2:
        raise WrongUsage("give one of --key, --key-base64 and --id")
    request = pb.ExplainRequest(topic=str(topic_name(topic)), subscription=subscription_name(name))
    batch_index = -1
    if id_ is not None:
        place, batch_index = first_entry(message_id("--id", id_))
        request.position.ledger_id, request.position.entry_id = place
    else:
        request.key = _from_base64("--key-base64", key_base64) if key is None else _bytes(key)
    return _explain(run, request, batch_index)


@command(app, "release-key")
def release_key(
    run: Run,
    topic: Topic,
    name: Name,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key.", show_default=False)],
    *,
    is_base64: Annotated[bool, typer.Option("--base64", help="KEY is base64, not text.")] = False,
) -> Coroutine[Any, Any, int]:
    """Resume delivery of a key that is held after a dead letter, or whose messages all go to the
    dead letter topic since."""
    request = pb.ReleaseKeyRequest(
        topic=str(topic_name(topic)),
        subscription=subscription_name(name),
        key=_from_base64("KEY", key) if is_base64 else _bytes(key),
    )
    return _release_key(run, request)


# ---- what is done


async def _list(run: Run, topic: str) -> int:
    columns: Columns = {
        "SUBSCRIPTION": "subscription",
        "MARK-DELETE": "mark_delete",
        "BEYOND": "acknowledged_entries",
        "PROPERTIES": lambda each: len(each["properties"]),
        "OWNER": "owner",
    }
    request = pb.ListSubscriptionsRequest(topic=topic, page_size=LISTED)
    found = pages(Dispatcher(run.settings), "ListSubscriptions", request, "subscriptions")
    await run.output.listing(columns, (record(each) async for each in found))
    return DONE


async def _show(run: Run, request: pb.GetSubscriptionRequest) -> int:
    answer = await Dispatcher(run.settings).call("GetSubscription", request)
    return _tell(run, answer.subscription)


async def _create(run: Run, request: pb.CreateSubscriptionRequest) -> int:
    answer = await Dispatcher(run.settings).call("CreateSubscription", request)
    return _tell(run, answer.subscription, created=answer.created)


async def _tell_after(run: Run, method: str, request: Any) -> int:
    answer = await Dispatcher(run.settings).call(method, request)
    return _tell(run, answer.subscription)


async def _delete(run: Run, request: pb.DeleteSubscriptionRequest) -> int:
    await Dispatcher(run.settings).call("DeleteSubscription", request)
    run.output.result(_names(request) | {"deleted": True})
    return DONE


async def _release_key(run: Run, request: pb.ReleaseKeyRequest) -> int:
    await Dispatcher(run.settings).call("ReleaseKey", request)
    key = bytes_record("key", request.key)
    run.output.result(_names(request) | key | {"released": True})
    return DONE


async def _report(run: Run, request: pb.ReportRequest) -> int:
    found = await Dispatcher(run.settings).call("Report", request)
    shown = _names(request) | record(found)
    if shown["filtering"] is not None:
        shown["filtering"]["filters"] = [_filter_record(each) for each in found.filtering.filters]
    if run.output.json:
        run.output.record(shown)
        return DONE
    now_ms = time.time_ns() // 1_000_000
    run.output.fields(_report_fields(shown))
    if shown["filtering"] is not None:
        run.output.line("")
        _tell_filtering(run, shown["filtering"], now_ms)
    run.output.line("")
    run.output.table(
        ("CONSUMER", "SLOTS", "PERMITS", "UNACKED", "DRAINING KEYS", "PARKED", "OLDEST DELIVERY"),
        [
            (
                each["consumer"],
                _ranges_shown(each["ranges"]),
                each["permits"],
                _blocked_shown(each["unacked_messages"], blocked=each["blocked_on_unacked"]),
                each["draining_keys"],
                each["parked_entries"],
                _age(each["oldest_delivery_ms"], now_ms),
            )
            for each in shown["consumers"]
        ],
    )
    run.output.line("")
    run.output.table(
        ("KEY", "REASON", "HOLDER", "OWNER", "FOR", "OLDEST", "ATTEMPTS", "IN FLIGHT", "PARKED"),
        [
            (
                _key_shown(each),
                _words(each["reason"]),
                each["holder"],
                each["owner"],
                _age(each["since_ms"], now_ms),
                each["oldest"],
                each["attempts"],
                each["in_flight_entries"],
                each["parked_entries"],
            )
            for each in shown["keys"]
        ],
    )
    return DONE


async def _explain(run: Run, request: pb.ExplainRequest, batch_index: int) -> int:
    found = await Dispatcher(run.settings).call("Explain", request)
    about = _about(request, found)
    report_ = record(found.key_report) if found.HasField("key_report") else None
    shown = _names(request) | {
        "id": record(request)["position"],
        **bytes_record("key", found.key if found.HasField("key") else None),
        "reasons": [
            record(each) | {"filter_version": each.filter_version if each.filter else None}
            for each in found.reasons
        ],
        "key_report": report_,
        "message_id": None if about is None else str(about),
        "trace_id": about and await trace_of(run, request.topic, about, batch_index),
    }
    if run.output.json:
        run.output.record(shown)
        return DONE
    now_ms = time.time_ns() // 1_000_000
    for each in shown["reasons"]:
        run.output.line(_sentence(each, now_ms))
    if shown["trace_id"] is not None:
        run.output.line(f"The trace of {about} is {shown['trace_id']}.")
    if report_ is not None:
        run.output.line("")
        run.output.fields(
            [
                ("Key", _key_shown(report_)),
                ("Slot", report_["slot"]),
                ("Owner", report_["owner"]),
                ("In flight at", report_["holder"]),
                ("Entries in flight", report_["in_flight_entries"]),
                ("Entries that wait", report_["parked_entries"]),
                ("First of them", report_["oldest"]),
                ("  failed deliveries", report_["attempts"]),
                ("Looked at again", time_shown(report_["next_retry_ms"])),
            ]
        )
    return DONE


def _about(request: pb.ExplainRequest, found: pb.ExplainResponse) -> Position | None:
    """The entry that was asked about; of a key, the first of it that is in flight or waits."""
    if request.HasField("position"):
        return position(request.position)
    return position(found.key_report.oldest) if found.key_report.HasField("oldest") else None


def _tell(run: Run, subscription: pb.Subscription, *, created: bool | None = None) -> int:
    shown = record(subscription)
    fields: list[tuple[str, object]] = [
        ("Topic", shown["topic"]),
        ("Subscription", shown["subscription"]),
        ("Since", time_shown(shown["created_ms"])),
        ("Mark-delete position", shown["mark_delete"]),
        ("Entries acknowledged beyond", shown["acknowledged_entries"]),
        ("Properties", len(shown["properties"])),
        *[("  property", f"{name} = {value}") for name, value in shown["properties"].items()],
        ("Owner", shown["owner"]),
    ]
    if created is not None:
        shown |= {"created": created}
        fields.append(("Created", "now" if created else "before; it stays as it is"))
    run.output.result(shown, fields)
    return DONE


# ---- records, for programs


def _names(request: Any) -> dict[str, Any]:
    return {"topic": request.topic, "subscription": request.subscription}


def _filter_record(found: pb.FilterReport) -> dict[str, Any]:
    failures = {each.reason: record(each.count) for each in found.failures}
    version = found.version if found.name else None
    return record(found) | {"version": version, "failures": failures}


# ---- tables and sentences, for people


def _report_fields(shown: dict[str, Any]) -> list[tuple[str, object]]:
    totals = shown["totals"]
    return [
        ("Topic", shown["topic"]),
        ("Subscription", shown["subscription"]),
        ("Type", _words(shown["options"]["type"])),
        ("Epoch", shown["epoch"]),
        ("Read up to", shown["read_position"]),
        ("Mark-delete position", shown["mark_delete"]),
        (
            "Unacknowledged messages",
            _blocked_shown(shown["unacked_messages"], blocked=shown["blocked_on_unacked"]),
        ),
        ("Keys with work", shown["active_keys"]),
        *[(f"  withheld, {_words(each['reason'])}", each["keys"]) for each in shown["withheld"]],
        ("Entries that wait", shown["parked_entries"]),
        ("  to be delivered later", shown["delayed_entries"]),
        ("  failed before", shown["failed_entries"]),
        ("  for a verdict", shown["unjudged_entries"]),
        ("  because a filter failed", shown["filter_failed_entries"]),
        ("  put off by a filter", shown["put_off_entries"]),
        ("Keys and slots to be read again", shown["lagging"]),
        *[(_title(name), count) for name, count in totals.items()],
    ]


def _tell_filtering(run: Run, filtering: dict[str, Any], now_ms: int) -> None:
    answers = filtering["answers"]
    fields: list[tuple[str, object]] = [
        ("Answers of the filter service", answers),
        ("  took, on average", f"{filtering['answers_ms'] / answers:.1f} ms" if answers else None),
        ("  at most", f"{filtering['answer_max_ms']:.1f} ms" if answers else None),
        ("Questions without an answer", filtering["unanswered"]),
    ]
    if filtering["unanswered_since_ms"] is not None:
        fields.append(("  no answer for", _age(filtering["unanswered_since_ms"], now_ms)))
        fields.append(("  because", filtering["unanswered_because"]))
    run.output.fields(fields)
    run.output.line("")
    run.output.table(
        ("MODE", "FILTER", "VERSION", *(said.upper() for said in SAID), "FAILURES"),
        [
            (
                each["mode"].lower(),
                each["filter"] or "all",
                each["version"],
                *(_count_shown(each[said]) for said in SAID),
                ", ".join(
                    f"{_words(reason)}: {_count_shown(count)}"
                    for reason, count in each["failures"].items()
                ),
            )
            for each in filtering["filters"]
        ],
    )


def _count_shown(count: dict[str, int]) -> str:
    """Entries, and in brackets messages, where these are more."""
    entries, messages = count["entries"], count["messages"]
    return str(entries) if entries == messages else f"{entries} ({messages})"


def _sentence(reason: dict[str, Any], now_ms: int) -> str:
    """A reason, with where and since when."""
    more = [] if reason["position"] is None else [reason["position"]]
    if reason["since_ms"] is not None:
        more.append(f"for {_age(reason['since_ms'], now_ms)}")
    if reason["until_ms"] is not None:
        more.append(f"until {time_shown(reason['until_ms'])}")
    text = text_shown(reason["text"])
    text = text[:1].upper() + text[1:]
    return f"{text} ({', '.join(more)})." if more else f"{text}."


def _age(since_ms: int | None, now_ms: int) -> str | None:
    """How long ago it was, by this machine's clock."""
    if since_ms is None:
        return None
    seconds = max(0.0, (now_ms - since_ms) / 1000)
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.0f} h"


def _blocked_shown(messages: int, *, blocked: bool) -> str:
    return f"{messages} (as many as may be)" if blocked else str(messages)


def _ranges_shown(ranges: Sequence[dict[str, int]]) -> str:
    slots = sum(each["last"] - each["first"] + 1 for each in ranges)
    if not slots or len(ranges) > RANGES_SHOWN:
        return f"{slots} in {len(ranges)} ranges" if slots else ""
    return ", ".join(f"{each['first']} to {each['last']}" for each in ranges)


def _key_shown(of: dict[str, Any]) -> str:
    return str(of["key"]) if "key" in of else f"base64:{of['key_base64']}"


def _words(name: str) -> str:
    return name.lower().replace("_", " ")


def _title(name: str) -> str:
    return name.capitalize().replace("_", " ")


# ---- translating


def _bytes(key: str) -> bytes:
    """A key as it was given: what is no UTF-8 on a command line stays the bytes it was."""
    return key.encode(errors="surrogateescape")


def _from_base64(option: str, text: str | None) -> bytes:
    try:
        return base64.b64decode(text or "", validate=True)
    except ValueError:
        raise WrongUsage(f"{option} is not base64", details={"given": text or ""}) from None
