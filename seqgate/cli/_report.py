"""`seqgate subscription report` and `explain`: consumers, and why messages are not delivered."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.cli._arguments import (
    Subscription,
    Topic,
    first_entry,
    key_from_base64,
    key_from_text,
    message_id,
)
from seqgate.cli._command import Run
from seqgate.cli._declared import option
from seqgate.cli._failure import WrongUsage
from seqgate.cli._output import Columns, Fields, Table, fields_of, table, time_shown, words
from seqgate.cli._output import shown as text_shown
from seqgate.cli._trace import trace_of
from seqgate.cli._wire import bytes_record, position, record, wire_position
from seqgate.client import MessageId
from seqgate.errors import NotFoundError
from seqgate.types import Position

KEYS_DEFAULT: Final = 20
KEYS_MAX: Final = 1_000
"""The default and the largest number of waiting keys that `report` lists."""

RANGES_SHOWN: Final = 3
"""The most ranges of slots in a table; it counts all of them."""

SAID: Final = ("processed", "accepted", "rejected", "rescheduled", "failed")


def _key_shown(of: dict[str, Any]) -> str:
    return str(of["key"]) if "key" in of else f"base64:{of['key_base64']}"


KEY_FIELDS: Final[Columns] = {
    "Key": _key_shown,
    "Slot": "slot",
    "Owner": "owner",
    "In flight at": "holder",
    "Entries in flight": "in_flight_entries",
    "Entries that wait": "parked_entries",
    "First of them": "oldest",
    "  failed deliveries": "attempts",
    "Looked at again": "next_retry_ms",
}


async def report(
    run: Run,
    topic: Topic,
    name: Subscription,
    *,
    keys: int = option(
        "MAX",
        "Number of waiting keys to list, longest waiting first.",
        default=KEYS_DEFAULT,
        min=1,
        max=KEYS_MAX,
    ),
) -> None:
    """Show a subscription's consumers, its waiting keys, and what each key waits for.

    Delivery counts start when the dispatcher instance takes the subscription.
    """
    found = await run.services.call(pb.ReportRequest(topic=topic, subscription=name, max_keys=keys))
    shown = {"topic": topic, "subscription": name, **record(found)}
    parts: list[Fields | Table] = [_report_fields(shown)]
    now_ms = time.time_ns() // 1_000_000
    if shown["filtering"] is not None:
        shown["filtering"]["filters"] = [_filter_record(each) for each in found.filtering.filters]
        parts += _filtering(shown["filtering"], now_ms)
    consumers = table(
        {
            "CONSUMER": "consumer",
            "SLOTS": lambda each: _ranges_shown(each["ranges"]),
            "PERMITS": "permits",
            "UNACKED": _unacked_shown,
            "DRAINING KEYS": "draining_keys",
            "PARKED": "parked_entries",
            "BREAKER": lambda each: _breaker_shown(each, now_ms),
            "OLDEST DELIVERY": lambda each: _age(each["oldest_delivery_ms"], now_ms),
        },
        shown["consumers"],
    )
    waiting = table(
        {
            "KEY": _key_shown,
            "REASON": lambda each: words(each["reason"]),
            "HOLDER": "holder",
            "OWNER": "owner",
            "FOR": lambda each: _age(each["since_ms"], now_ms),
            "OLDEST": "oldest",
            "ATTEMPTS": "attempts",
            "IN FLIGHT": "in_flight_entries",
            "PARKED": "parked_entries",
        },
        shown["keys"],
    )
    run.output.result(shown, *parts, consumers, waiting)


async def explain(
    run: Run,
    topic: Topic,
    name: Subscription,
    *,
    key: bytes | None = option("KEY", "A key, as text.", parse=key_from_text, is_bytes=True),
    key_base64: bytes | None = option(
        "KEY", "A key, as base64.", parse=partial(key_from_base64, "--key-base64")
    ),
    id_: MessageId | None = option("ID", "A message id.", parse=partial(message_id, "--id")),
) -> None:
    """Explain why a key's messages, or one message, are not delivered: the nearest reason first."""
    given_key = key_base64 if key is None else key
    if [key, key_base64, id_].count(None) != 2:
        raise WrongUsage("give one of --key, --key-base64 and --id")
    request = pb.ExplainRequest(topic=topic, subscription=name)
    batch_index = -1
    if id_ is not None:
        place, batch_index = first_entry(id_)
        request.position.CopyFrom(wire_position(place))
    elif given_key is not None:
        request.key = given_key
    found = await run.services.call(request)
    if any(each.reason == pb.REASON_NO_ENTRY for each in found.reasons):
        place = position(request.position)
        raise NotFoundError(
            f"not in the log: there is no entry {place}",
            reason="MESSAGE_NOT_FOUND",
            details={"topic": topic, "message_id": str(id_)},
        )
    about = _about(request, found)
    key_report = record(found.key_report) if found.HasField("key_report") else None
    shown = {
        "topic": topic,
        "subscription": name,
        "id": record(request)["position"],
        **bytes_record("key", found.key if found.HasField("key") else None),
        "reasons": [
            record(each) | {"filter_version": each.filter_version if each.filter else None}
            for each in found.reasons
        ],
        "key_report": key_report,
        "message_id": None if about is None else str(about),
        "trace_id": about and await trace_of(run, topic, about, batch_index),
    }
    now_ms = time.time_ns() // 1_000_000
    sentences = [_sentence(each, now_ms) for each in shown["reasons"]]
    if shown["trace_id"] is not None:
        sentences.append(f"The trace of {about} is {shown['trace_id']}.")
    run.output.result(
        shown, "\n".join(sentences), fields_of(key_report, KEY_FIELDS) if key_report else []
    )


def waiting_shown(found: pb.ReportResponse) -> str:
    """Why a consumer of the subscription gets no message, in one line."""
    counts = {
        "read, and have not been acknowledged": found.unacked_messages,
        "to be delivered later": found.delayed_entries,
        "failed, and to be delivered again": found.failed_entries,
        "without a verdict of the filters": found.unjudged_entries,
        "held back because a filter failed": found.filter_failed_entries,
        "rescheduled by a filter": found.rescheduled_entries,
    }
    parts = [f"{count:,} {words}" for words, count in counts.items() if count]
    if found.blocked_on_unacked:
        parts.append("its limit of unacknowledged messages is reached")
    if found.filtering.unanswered_because:
        parts.append(found.filtering.unanswered_because)
    if not parts:
        return "none is left in the topic"
    return ", ".join(parts)


def _about(request: pb.ExplainRequest, found: pb.ExplainResponse) -> Position | None:
    """The requested entry; for a key, its first entry that is in flight or waits."""
    if request.HasField("position"):
        return position(request.position)
    return position(found.key_report.oldest) if found.key_report.HasField("oldest") else None


def _filter_record(found: pb.FilterReport) -> dict[str, Any]:
    failures = {each.reason: record(each.count) for each in found.failures}
    version = found.version if found.name else None
    return record(found) | {"version": version, "failures": failures}


def _report_fields(shown: dict[str, Any]) -> Fields:
    return [
        ("Topic", shown["topic"]),
        ("Subscription", shown["subscription"]),
        ("Type", words(shown["options"]["type"])),
        ("Epoch", shown["epoch"]),
        ("Read up to", shown["read_position"]),
        ("Mark-delete position", shown["mark_delete"]),
        ("Unacknowledged messages", _unacked_shown(shown)),
        ("Keys with work", shown["active_keys"]),
        *[(f"  withheld, {words(each['reason'])}", each["keys"]) for each in shown["withheld"]],
        ("Entries that wait", shown["parked_entries"]),
        ("  to be delivered later", shown["delayed_entries"]),
        ("  failed before", shown["failed_entries"]),
        ("  for a verdict", shown["unjudged_entries"]),
        ("  because a filter failed", shown["filter_failed_entries"]),
        ("  rescheduled by a filter", shown["rescheduled_entries"]),
        ("Keys and slots to be read again", shown["lagging"]),
        *[(words(name).capitalize(), count) for name, count in shown["totals"].items()],
    ]


def _filtering(filtering: dict[str, Any], now_ms: int) -> tuple[Fields, Table]:
    answers = filtering["answers"]
    fields: list[tuple[str, object]] = [
        ("Answers of the filter service", answers),
        (
            "  took, on average",
            f"{filtering['answers_duration_ms'] / answers:.1f} ms" if answers else None,
        ),
        ("  at most", f"{filtering['max_answer_duration_ms']:.1f} ms" if answers else None),
        ("Questions without an answer", filtering["unanswered"]),
    ]
    if filtering["unanswered_since_ms"] is not None:
        fields.append(("  no answer for", _age(filtering["unanswered_since_ms"], now_ms)))
        fields.append(("  because", filtering["unanswered_because"]))
    filters = table(
        {
            "MODE": lambda each: each["mode"].lower(),
            "FILTER": lambda each: each["filter"] or "all",
            "VERSION": "version",
            **{said.upper(): partial(_said, said) for said in SAID},
            "FAILURES": lambda each: ", ".join(
                f"{words(reason)}: {_count_shown(count)}"
                for reason, count in each["failures"].items()
            ),
        },
        filtering["filters"],
    )
    return fields, filters


def _said(said: str, of: dict[str, Any]) -> str:
    return _count_shown(of[said])


def _count_shown(count: dict[str, int]) -> str:
    """The entries, and in brackets the messages if there are more of them."""
    entries, messages = count["entries"], count["messages"]
    return str(entries) if entries == messages else f"{entries} ({messages})"


def _sentence(reason: dict[str, Any], now_ms: int) -> str:
    more = [] if reason["position"] is None else [reason["position"]]
    if reason["since_ms"] is not None:
        more.append(f"for {_age(reason['since_ms'], now_ms)}")
    if reason["until_ms"] is not None:
        more.append(f"until {time_shown(reason['until_ms'])}")
    text = text_shown(reason["text"])
    text = text[:1].upper() + text[1:]
    return f"{text} ({', '.join(more)})." if more else f"{text}."


def _age(since_ms: int | None, now_ms: int) -> str | None:
    if since_ms is None:
        return None
    seconds = max(0.0, (now_ms - since_ms) / 1000)
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.0f} h"


def _unacked_shown(of: dict[str, Any]) -> str:
    messages = of["unacked_messages"]
    return f"{messages} (limit reached)" if of["blocked_on_unacked"] else str(messages)


def _breaker_shown(of: dict[str, Any], now_ms: int) -> str | None:
    opened_ms = of["breaker_opened_ms"]
    return None if opened_ms is None else f"open for {_age(opened_ms, now_ms)}"


def _ranges_shown(ranges: Sequence[dict[str, int]]) -> str:
    slots = sum(each["last"] - each["first"] + 1 for each in ranges)
    if not slots or len(ranges) > RANGES_SHOWN:
        return f"{slots} in {len(ranges)} ranges" if slots else ""
    return ", ".join(f"{each['first']} to {each['last']}" for each in ranges)
