"""`seqgate subscription`: who gets a topic's messages, and why somebody does not."""

import base64
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Annotated, Any, Final

import typer
from google.protobuf.timestamp_pb2 import Timestamp

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.cli._command import Run, command, group, option_properties, topic_name
from seqgate.cli._failure import DONE, WrongUsage
from seqgate.cli._names import subscription_name
from seqgate.cli._output import shown, time_shown
from seqgate.cli._place import PLACE_HELP, start
from seqgate.cli._policy import enum_name
from seqgate.cli._service import Dispatcher
from seqgate.cli._subscription_filter import analyze
from seqgate.cli._subscription_filter import app as filter_
from seqgate.cli._trace import trace_of
from seqgate.client import ChunkMessageId, MessageId
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

app = group("Who gets a topic's messages, and why somebody does not.")
app.add_typer(filter_, name="filter")
command(app, "analyze")(analyze)

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The subscription.", show_default=False)]


@command(app, "list")
def list_(run: Run, topic: Topic) -> Coroutine[Any, Any, int]:
    """List a topic's subscriptions, in the order of their names."""
    return _list(run, str(topic_name(topic)))


@command(app, "show")
def show(run: Run, topic: Topic, name: Name) -> Coroutine[Any, Any, int]:
    """Show a subscription: how far it has come, its properties, and who has it."""
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
        typer.Option(
            "--property", metavar="NAME=VALUE", help="A property; may be given several times."
        ),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Create a subscription, unless it exists: then it stays as it is.

    Of a message in a batch, the whole batch will be next, and a large message is read from its
    first chunk on. A time means the first message that was stored then or later, by the ledger's
    clock.
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
        typer.Option("--force", help="Also when consumers are connected: their streams end."),
    ] = False,
) -> Coroutine[Any, Any, int]:
    """Delete a subscription, and what it has acknowledged."""
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
    """Move a subscription, backwards too. What was acknowledged beyond the place is forgotten.

    Consumers stay connected; what they have in flight counts no more. Of a message in a batch, the
    whole batch will be next, and a large message is read from its first chunk on.
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
        typer.Option(
            "--put", metavar="NAME=VALUE", help="Set a property; may be given several times."
        ),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove", metavar="NAME", help="Remove a property; may be given several times."
        ),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Change a subscription's properties. Removing one that it does not have changes nothing."""
    if not put and not remove:
        raise WrongUsage("there is nothing to set: give --put or --remove")
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
            help="How many keys that wait are listed, those that wait longest first.",
        ),
    ] = KEYS_DEFAULT,
) -> Coroutine[Any, Any, int]:
    """Show what a subscription is doing: its consumers, the keys that wait, and why they do.

    Counts of deliveries are since the instance of the service has the subscription.
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
    message_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="A message's id.", show_default=False),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Tell why a key's messages, or one message, are not delivered: the nearest reason first."""
    if [key, key_base64, message_id].count(None) != 2:
        raise WrongUsage("give one of --key, --key-base64 and --id")
    request = pb.ExplainRequest(topic=str(topic_name(topic)), subscription=subscription_name(name))
    batch_index = -1
    if message_id is not None:
        position, batch_index = _message_place(message_id)
        request.position.ledger_id, request.position.entry_id = position
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
    """Let a key go on that is held since one of its messages went to the dead letter topic, or
    whose messages all go there since."""
    request = pb.ReleaseKeyRequest(
        topic=str(topic_name(topic)),
        subscription=subscription_name(name),
        key=_from_base64("KEY", key) if is_base64 else _bytes(key),
    )
    return _release_key(run, request)


# ---- what is done


async def _list(run: Run, topic: str) -> int:
    rows = []
    async for subscription in _subscriptions(run, topic):
        record = _record(subscription)
        if run.output.json:
            run.output.record(record)
        else:
            rows.append(
                (
                    record["subscription"],
                    record["mark_delete"],
                    record["acknowledged_entries"],
                    len(record["properties"]),
                    record["owner"],
                )
            )
    if not run.output.json:
        headings = ("SUBSCRIPTION", "MARK-DELETE", "BEYOND", "PROPERTIES", "OWNER")
        run.output.table(headings, rows)
    return DONE


async def _subscriptions(run: Run, topic: str) -> AsyncIterator[pb.Subscription]:
    dispatcher = Dispatcher(run.settings)
    request = pb.ListSubscriptionsRequest(topic=topic, page_size=LISTED)
    while True:
        page = await dispatcher.call("ListSubscriptions", request)
        for subscription in page.subscriptions:
            yield subscription
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


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
    if run.output.json:
        run.output.record(_names(request) | {"deleted": True})
    return DONE


async def _release_key(run: Run, request: pb.ReleaseKeyRequest) -> int:
    await Dispatcher(run.settings).call("ReleaseKey", request)
    if run.output.json:
        run.output.record(_names(request) | _key_record(request.key) | {"released": True})
    return DONE


async def _report(run: Run, request: pb.ReportRequest) -> int:
    found = await Dispatcher(run.settings).call("Report", request)
    record = _names(request) | _report_record(found)
    if run.output.json:
        run.output.record(record)
        return DONE
    now_ms = time.time_ns() // 1_000_000
    run.output.fields(_report_fields(record))
    if record["filtering"] is not None:
        run.output.line("")
        _tell_filtering(run, record["filtering"], now_ms)
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
            for each in record["consumers"]
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
            for each in record["keys"]
        ],
    )
    return DONE


async def _explain(run: Run, request: pb.ExplainRequest, batch_index: int) -> int:
    found = await Dispatcher(run.settings).call("Explain", request)
    about = _about(request, found)
    report_ = _key_report_record(found.key_report) if found.HasField("key_report") else None
    record = _names(request) | {
        "id": _shown(request.position) if request.HasField("position") else None,
        **(_key_record(found.key) if found.HasField("key") else {"key": None}),
        "reasons": [_reason_record(each) for each in found.reasons],
        "key_report": report_,
        "message_id": None if about is None else str(about),
        "trace_id": None
        if about is None
        else await trace_of(run, request.topic, about, batch_index),
    }
    if run.output.json:
        run.output.record(record)
        return DONE
    now_ms = time.time_ns() // 1_000_000
    for each in record["reasons"]:
        run.output.line(_sentence(each, now_ms))
    if record["trace_id"] is not None:
        run.output.line(f"The trace of {about} is {record['trace_id']}.")
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
        place = request.position
    elif found.key_report.HasField("oldest"):
        place = found.key_report.oldest
    else:
        return None
    return Position(place.ledger_id, place.entry_id)


def _tell(run: Run, subscription: pb.Subscription, *, created: bool | None = None) -> int:
    record = _record(subscription)
    if created is not None:
        record |= {"created": created}
    if run.output.json:
        run.output.record(record)
        return DONE
    fields: list[tuple[str, object]] = [
        ("Topic", record["topic"]),
        ("Subscription", record["subscription"]),
        ("Since", time_shown(record["created_ms"])),
        ("Mark-delete position", record["mark_delete"]),
        ("Entries acknowledged beyond", record["acknowledged_entries"]),
        ("Properties", len(record["properties"])),
        *[("  property", f"{name} = {value}") for name, value in record["properties"].items()],
        ("Owner", record["owner"]),
    ]
    if created is not None:
        fields.append(("Created", "now" if created else "before; it stays as it is"))
    run.output.fields(fields)
    return DONE


# ---- records, for programs


def _names(request: Any) -> dict[str, Any]:
    return {"topic": request.topic, "subscription": request.subscription}


def _record(subscription: pb.Subscription) -> dict[str, Any]:
    return {
        "topic": subscription.topic,
        "subscription": subscription.name,
        "created_ms": subscription.created.ToMilliseconds(),
        "mark_delete": _position(subscription, "mark_delete"),
        "acknowledged_entries": subscription.acknowledged_entries,
        "properties": dict(sorted(subscription.properties.items())),
        "owner": subscription.owner or None,
    }


def _report_record(found: pb.ReportResponse) -> dict[str, Any]:
    return {
        "epoch": found.epoch,
        "options": _options_record(found.options),
        "assignment_version": found.assignment_version,
        "read_position": _position(found, "read_position"),
        "mark_delete": _position(found, "mark_delete"),
        "unacked_messages": found.unacked_messages,
        "blocked_on_unacked": found.blocked_on_unacked,
        "active_keys": found.active_keys,
        "parked_entries": found.parked_entries,
        "lagging": found.lagging,
        "delayed_entries": found.delayed_entries,
        "failed_entries": found.failed_entries,
        "unjudged_entries": found.unjudged_entries,
        "filter_failed_entries": found.filter_failed_entries,
        "put_off_entries": found.put_off_entries,
        "withheld": [
            {
                "reason": _reason(each.reason),
                "keys": each.keys,
                "oldest_ms": _time(each, "oldest"),
            }
            for each in found.withheld
        ],
        "consumers": [_consumer_record(each) for each in found.consumers],
        "keys": [_key_report_record(each) for each in found.keys],
        "totals": {field.name: getattr(found.totals, field.name) for field in _fields_of_totals()},
        "filtering": _filtering_record(found.filtering) if found.HasField("filtering") else None,
    }


def _filtering_record(found: pb.FilteringReport) -> dict[str, Any]:
    return {
        "answers": found.answers,
        "answers_ms": found.answers_ms,
        "answer_max_ms": found.answer_max_ms,
        "unanswered": found.unanswered,
        "unanswered_since_ms": _time(found, "unanswered_since"),
        "unanswered_because": found.unanswered_because or None,
        "filters": [
            {
                "mode": enum_name(pb.FilterMode, each.mode, "FILTER_MODE_"),
                "filter": each.name or None,
                "version": each.version if each.name else None,
                **{said: _count_record(getattr(each, said)) for said in SAID},
                "failures": {one.reason: _count_record(one.count) for one in each.failures},
            }
            for each in found.filters
        ],
    }


def _count_record(count: pb.FilterCount) -> dict[str, int]:
    return {"entries": count.entries, "messages": count.messages}


def _options_record(options: pb.SubscriptionOptions) -> dict[str, Any]:
    limited = options.HasField("max_redeliveries")
    return {
        "type": enum_name(pb.SubscriptionType, options.type, "SUBSCRIPTION_TYPE_"),
        "placement": enum_name(pb.Placement, options.placement, "PLACEMENT_"),
        "allow_out_of_order_delivery": options.allow_out_of_order_delivery,
        "max_in_flight_per_key": options.max_in_flight_per_key,
        "max_unacked_per_consumer": options.max_unacked_per_consumer,
        "max_unacked": options.max_unacked,
        "max_redeliveries": options.max_redeliveries if limited else None,
        "dead_letter_topic": options.dead_letter_topic or None,
        "after_dead_letter": enum_name(
            pb.AfterDeadLetter, options.after_dead_letter, "AFTER_DEAD_LETTER_"
        ),
        "delay_holds_key": options.delay_holds_key,
        "drain_deadline_ms": options.drain_deadline_ms,
        "classic_join": options.classic_join,
    }


def _consumer_record(consumer: pb.ConsumerReport) -> dict[str, Any]:
    return {
        "consumer": consumer.name,
        "consumer_id": consumer.consumer_id,
        "ranges": [{"first": each.first, "last": each.last} for each in consumer.ranges],
        "permits": consumer.permits,
        "unacked_messages": consumer.unacked_messages,
        "blocked_on_unacked": consumer.blocked_on_unacked,
        "draining_keys": consumer.draining_keys,
        "parked_entries": consumer.parked_entries,
        "oldest_delivery_ms": _time(consumer, "oldest_delivery"),
        "connected_ms": _time(consumer, "connected"),
    }


def _key_report_record(found: pb.KeyReport) -> dict[str, Any]:
    return {
        **_key_record(found.key),
        "slot": found.slot,
        "reason": _reason(found.reason),
        "since_ms": _time(found, "since"),
        "holder": found.holder or None,
        "owner": found.owner or None,
        "oldest": _position(found, "oldest"),
        "attempts": found.attempts,
        "in_flight_entries": found.in_flight_entries,
        "parked_entries": found.parked_entries,
        "next_retry_ms": _time(found, "next_retry"),
    }


def _reason_record(found: pb.Explanation) -> dict[str, Any]:
    return {
        "reason": _reason(found.reason),
        "text": found.text,
        "consumer": found.consumer or None,
        "position": _position(found, "position"),
        "since_ms": _time(found, "since"),
        "until_ms": _time(found, "until"),
        "filter": found.filter or None,
        "filter_version": found.filter_version if found.filter else None,
        "dead_letter_topic": found.dead_letter_topic or None,
    }


def _key_record(key: bytes) -> dict[str, str]:
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key_base64": base64.b64encode(key).decode()}


def _fields_of_totals() -> Sequence[Any]:
    return pb.Totals.DESCRIPTOR.fields


# ---- tables and sentences, for people


def _report_fields(record: dict[str, Any]) -> list[tuple[str, object]]:
    totals = record["totals"]
    return [
        ("Topic", record["topic"]),
        ("Subscription", record["subscription"]),
        ("Type", _words(record["options"]["type"])),
        ("Epoch", record["epoch"]),
        ("Read up to", record["read_position"]),
        ("Mark-delete position", record["mark_delete"]),
        (
            "Unacknowledged messages",
            _blocked_shown(record["unacked_messages"], blocked=record["blocked_on_unacked"]),
        ),
        ("Keys with work", record["active_keys"]),
        *[(f"  withheld, {_words(each['reason'])}", each["keys"]) for each in record["withheld"]],
        ("Entries that wait", record["parked_entries"]),
        ("  to be delivered later", record["delayed_entries"]),
        ("  failed before", record["failed_entries"]),
        ("  for a verdict", record["unjudged_entries"]),
        ("  because a filter failed", record["filter_failed_entries"]),
        ("  put off by a filter", record["put_off_entries"]),
        ("Keys and slots to be read again", record["lagging"]),
        *[(_title(name), count) for name, count in totals.items()],
    ]


def _tell_filtering(run: Run, record: dict[str, Any], now_ms: int) -> None:
    answers = record["answers"]
    fields: list[tuple[str, object]] = [
        ("Answers of the filter service", answers),
        ("  took, on average", f"{record['answers_ms'] / answers:.1f} ms" if answers else None),
        ("  at most", f"{record['answer_max_ms']:.1f} ms" if answers else None),
        ("Questions without an answer", record["unanswered"]),
    ]
    if record["unanswered_since_ms"] is not None:
        fields.append(("  no answer for", _age(record["unanswered_since_ms"], now_ms)))
        fields.append(("  because", record["unanswered_because"]))
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
            for each in record["filters"]
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
    text = shown(reason["text"])
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


def _key_shown(record: dict[str, Any]) -> str:
    return str(record["key"]) if "key" in record else f"base64:{record['key_base64']}"


def _words(name: str) -> str:
    return name.lower().replace("_", " ")


def _title(name: str) -> str:
    return name.capitalize().replace("_", " ")


# ---- translating


def _message_place(text: str) -> tuple[Position, int]:
    """The entry that a message begins in, and its place in its batch."""
    try:
        found = MessageId.parse(text)
    except ValueError:
        found = None
    if found is None or min(found.position) < 0:
        raise WrongUsage(
            "--id is a message's id (LEDGER:ENTRY, or as read shows it)", details={"given": text}
        )
    if isinstance(found, ChunkMessageId):
        return found.first_chunk.position, -1
    return found.position, found.batch_index


def _bytes(key: str) -> bytes:
    """A key as it was given: what is no UTF-8 on a command line stays the bytes it was."""
    return key.encode(errors="surrogateescape")


def _from_base64(option: str, text: str | None) -> bytes:
    try:
        return base64.b64decode(text or "", validate=True)
    except ValueError:
        raise WrongUsage(f"{option} is not base64", details={"given": text or ""}) from None


def _reason(number: int) -> str:
    return enum_name(pb.Reason, number, "REASON_")


def _position(message: Any, field: str) -> str | None:
    return _shown(getattr(message, field)) if message.HasField(field) else None


def _shown(position: entry_pb2.Position) -> str:
    return str(Position(position.ledger_id, position.entry_id))


def _time(message: Any, field: str) -> int | None:
    """In milliseconds since 1970 (UTC); None: absent."""
    if not message.HasField(field):
        return None
    stamp: Timestamp = getattr(message, field)
    return stamp.ToMilliseconds()
