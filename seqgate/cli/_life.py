"""`seqgate message life`: what became of one message."""

from datetime import datetime
from functools import partial
from typing import Any

from seqgate.cli._arguments import Topic, message_id, place, producer_name
from seqgate.cli._command import Run, command, group
from seqgate.cli._declared import argument, option
from seqgate.cli._failure import WrongUsage
from seqgate.cli._message import record as message_record
from seqgate.cli._output import Fields, Table, shown, time_shown, words
from seqgate.client import (
    Admin,
    DeadLetter,
    MessageEvent,
    MessageId,
    MessageLife,
    Reason,
    SubscriptionLife,
)
from seqgate.errors import NotFoundError
from seqgate.times import milliseconds_of
from seqgate.types import SEQUENCE_ID_MAX

app = group("Follow a message.")


def _time(text: str) -> datetime:
    found = place("--since", text)
    if not isinstance(found, datetime):
        raise WrongUsage("--since must be a time", details={"given": text})
    return found


@command(app, "life")
async def life(
    run: Run,
    topic: Topic,
    producer: str | None = argument(
        "PRODUCER", "The producer's name.", default=None, parse=producer_name
    ),
    sequence_id: int | None = argument(
        "SEQUENCE_ID",
        "The message's sequence id.",
        default=None,
        raw=int,
        min=0,
        max=SEQUENCE_ID_MAX,
    ),
    *,
    id_: MessageId | None = option(
        "ID", "The message's id, instead of its producer.", parse=partial(message_id, "--id")
    ),
    trace: str | None = option(
        "ID", "The id of its producer's trace, 32 hexadecimal digits, instead."
    ),
    since: datetime | None = option(
        "TIME", "Look for the trace from this time on, in 20,000 entries.", parse=_time
    ),
) -> None:
    """Show the life of one message: whether and where it is stored, and what became of it in each
    subscription: verdicts of filters, deliveries, failures, acknowledgements, dead letters and
    redrives, with times and consumers.

    Without --since, a trace is looked for among the latest 20,000 entries. What the dispatcher
    has forgotten is not shown; it says since when it remembers all. Exits with 1 if the message is
    not in the log.
    """
    by_identity = producer is not None and sequence_id is not None
    if [by_identity, id_ is not None, trace is not None].count(True) != 1 or (
        producer is not None and sequence_id is None
    ):
        raise WrongUsage("give PRODUCER and SEQUENCE_ID, or one of --id and --trace")
    with run.waits.on("the message to be found"):
        found = await Admin(run.services).message_life(
            topic,
            producer=producer,
            sequence_id=sequence_id,
            message_id=id_,
            trace_id=trace,
            since=since,
        )
    if found.id is None and found.fate == "STALE":
        raise _not_in_log(found)
    parts: list[Fields | Table | str] = [_fields(found)]
    for each in found.subscriptions:
        parts += _timeline(each)
    run.output.result(_record(found), *parts)


def _not_in_log(found: MessageLife) -> NotFoundError:
    """The error of a message that no entry holds, with the reason if deduplication knows it."""
    verdict = found.verdict
    because = ""
    if verdict is None:
        because = f": {found.unknown['dedup']}" if "dedup" in found.unknown else ""
    elif verdict.verdict == "DUPLICATE":
        because = ": a higher sequence id of its producer was stored first"
    elif verdict.verdict == "IN_FLIGHT":
        because = ": it is being written"
    elif verdict.persisted_sequence_id is not None:
        because = f": its producer's last stored sequence id is {verdict.persisted_sequence_id}"
    elif verdict.pushed_sequence_id is None:
        because = ": this producer is unknown"
    details = {
        "topic": found.topic,
        "producer": found.producer or "",
        "sequence_id": str(found.sequence_id),
        "if_sent_again": "" if verdict is None else verdict.verdict,
        "because": "" if verdict is None else verdict.explanation,
    }
    return NotFoundError(
        f"not in the log{because}",
        reason="MESSAGE_NOT_FOUND",
        details={name: value for name, value in details.items() if value},
    )


def _fields(found: MessageLife) -> Fields:
    fields: list[tuple[str, object]] = [
        ("Topic", found.topic),
        ("Producer", found.producer),
        ("Sequence id", found.sequence_id),
        ("The log", words(found.fate)),
    ]
    if found.id is not None:
        fields.append(("Message", found.id))
    if found.message is not None:
        fields += [
            ("Published", time_shown(found.message.publish_time_ms)),
            ("Stored", time_shown(found.message.append_time_ms)),
            ("Key", found.message.key),
            ("Messages in its entry", found.messages),
            *[("  property", f"{name} = {value}") for name, value in _properties(found)],
            ("Trace", found.trace_id),
        ]
    if found.verdict is not None:
        fields += [
            ("If it is sent again", words(found.verdict.verdict)),
            ("  because", found.verdict.explanation),
        ]
    fields += [(f"Unknown to {name}", because) for name, because in found.unknown.items()]
    return fields


def _properties(found: MessageLife) -> list[tuple[str, str]]:
    return [] if found.message is None else sorted(found.message.properties.items())


def _timeline(found: SubscriptionLife) -> list[Fields | Table | str]:
    title = f"Subscription {shown(found.subscription)}"
    if found.unknown:
        return [f"{title}: not known, {shown(found.unknown)}"]
    rows = [[time_shown(_ms(each.at)), each.sentence] for each in found.events]
    more: list[tuple[str, object]] = [("Now", each.text) for each in found.reasons]
    if found.redrive is not None:
        more.append(("On its way back", f"by redrive {found.redrive}"))
    for letter in found.letters:
        state = "redriven" if letter.redriven else "not redriven"
        more.append(("Dead letter", f"{letter.id.position} in {letter.topic}, {state}"))
    if found.more_letters:
        more.append(("Dead letter", "there may be more: the topic was read up to a limit"))
    since = "nothing" if found.complete_since is None else time_shown(_ms(found.complete_since))
    more.append(("All events since", since))
    if found.audit_topic is not None:
        more.append(("Audit topic", found.audit_topic))
    if found.audit_missing:
        more.append(("  incomplete", found.audit_missing))
    return [title, Table(["TIME", "EVENT"], rows) if rows else "", more]


# ---- as JSON


def _record(found: MessageLife) -> dict[str, Any]:
    verdict = found.verdict
    return {
        "topic": found.topic,
        "producer": found.producer,
        "sequence_id": found.sequence_id,
        "message_id": None if found.id is None else str(found.id),
        "fate": found.fate,
        "verdict": None if verdict is None else verdict.verdict,
        "explanation": None if verdict is None else verdict.explanation,
        "message": None if found.message is None else message_record(found.message),
        "num_messages": found.messages,
        "trace_id": found.trace_id,
        "subscriptions": list(map(_subscription_record, found.subscriptions)),
        "unknown": dict(found.unknown),
    }


def _subscription_record(found: SubscriptionLife) -> dict[str, Any]:
    return {
        "subscription": found.subscription,
        "events": list(map(_event_record, found.events)),
        "complete_since_ms": _ms(found.complete_since),
        "letters": list(map(_letter_record, found.letters)),
        "more_letters": found.more_letters,
        "redrive": found.redrive,
        "reasons": list(map(_reason_record, found.reasons)),
        "audit_topic": found.audit_topic,
        "audit_missing": found.audit_missing or None,
        "unknown": found.unknown or None,
    }


def _event_record(event: MessageEvent) -> dict[str, Any]:
    """Without what an event of its kind does not have."""
    found: dict[str, Any] = {"event": event.kind, "time_ms": _ms(event.at)}
    for name in event._fields[2:]:
        value = getattr(event, name)
        if isinstance(value, datetime):
            found[f"{name}_ms"] = _ms(value)
        elif value:
            found[name] = value
    return found


def _letter_record(letter: DeadLetter) -> dict[str, Any]:
    return {
        "position": str(letter.id.position),
        "dead_letter_topic": letter.topic,
        "time_ms": _ms(letter.at),
        "reason": letter.reason,
        "attempts": letter.attempts,
        "redriven": letter.redriven,
        "redrives": letter.redrives,
    }


def _reason_record(reason: Reason) -> dict[str, Any]:
    return {
        "reason": reason.reason,
        "text": reason.text,
        "since_ms": _ms(reason.since),
        "until_ms": _ms(reason.until),
    }


def _ms(time: datetime | None) -> int | None:
    return None if time is None else milliseconds_of(time)
