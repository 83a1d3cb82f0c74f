"""The life of one message: where it is stored, and what became of it in each subscription.

producer and sequence id ──FindMessage──┐
trace id ──read, up to a limit──────────┼──▶ entry ──▶ each subscription: history, letters, why
message id ─────────────────────────────┘      │
                                               └──▶ verdict of deduplication
"""

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client._arguments import message_id as message_id_of
from seqgate.client._arguments import moment, text
from seqgate.client._arguments import sequence_id as sequence_id_of
from seqgate.client._calls import Calls
from seqgate.client._channel import translated
from seqgate.client._codec import decode_entry, describe_fields, position_of
from seqgate.client._log import following, position_at, start_of_last, to_wire
from seqgate.client._message import Message
from seqgate.client._status import Asked
from seqgate.client._subscribing import start_to_wire
from seqgate.errors import (
    CorruptMessageError,
    InvalidRequestError,
    NotFoundError,
    SeqgateError,
)
from seqgate.message_id import ChunkMessageId, MessageId
from seqgate.telemetry import trace_id_of
from seqgate.types import Position

if TYPE_CHECKING:
    from seqgate.client._admin import Admin
    from seqgate.client._deduplication import Verdict
    from seqgate.client._letters import DeadLetter
    from seqgate.client._subscriptions import Reason

SEARCHED_ENTRIES_MAX: Final = 20_000
"""The most entries that are read to find a trace."""

SEARCHED_BYTES_MAX: Final = 64 * 1024 * 1024
"""The most bytes of entries that are read to find a trace: batches have it in their payloads."""

SUBSCRIPTIONS_AT_ONCE: Final = 8
"""How many subscriptions are asked at the same time."""

T = TypeVar("T")


class MessageEvent(NamedTuple):
    """One event of a message's life in a subscription.

    Attributes:
        kind: ACCEPTED, REJECTED, RESCHEDULED, FILTER_FAILED, DELIVERED, FAILED, ACKNOWLEDGED,
            PARTLY_ACKNOWLEDGED, DEAD_LETTERED, PASSED, REDRIVEN, DISCARDED, MENDED, RESET or
            TAKEN, as MessageEventKind in dispatcher.proto describes them.
        at: when it happened.
        consumer: the name of the consumer that received, acknowledged or failed it; None: none, or
            not known.
        failure: how its delivery failed, as in FailedDelivery.how.
        attempts: the number of its failed deliveries, of FAILED and DEAD_LETTERED.
        filter, filter_version: the filter that decided; None: the whole chain.
        number: the number of its dead letter, its redrive or the operation on its letter, or, of
            TAKEN, the epoch.
        target: the dead letter topic; of TAKEN, the instance.
        until: the time of its next judgement, of RESCHEDULED.
        indexes: of a batch, the messages acknowledged, of PARTLY_ACKNOWLEDGED.
        text: details, as a sentence; of FAILED, why its consumer refused it, if it said.
        caller: who did it, of DISCARDED and MENDED.
    """

    kind: str
    at: datetime
    consumer: str | None = None
    failure: str | None = None
    attempts: int = 0
    filter: str | None = None
    filter_version: int = 0
    number: int = 0
    target: str | None = None
    until: datetime | None = None
    indexes: tuple[int, ...] = ()
    text: str = ""
    caller: str | None = None

    @property
    def sentence(self) -> str:
        """What happened, as the words of a sentence without its end."""
        by = f" by {self.consumer}" if self.consumer else ""
        deciding = f"filter {self.filter} (version {self.filter_version})"
        deciding = deciding if self.filter else "its filters"
        match self.kind:
            case "ACCEPTED":
                return f"accepted by its filters: {self.text}"
            case "REJECTED":
                return f"rejected by {deciding}"
            case "RESCHEDULED":
                until = "" if self.until is None else f" until {self.until:%Y-%m-%dT%H:%M:%SZ}"
                return f"rescheduled by {deciding}{until}"
            case "FILTER_FAILED":
                return f"not judged by {deciding}: {self.text}"
            case "DELIVERED":
                return f"delivered to {self.consumer}"
            case "FAILED":
                why = f": {self.text}" if self.text else ""
                return f"delivery failed, the {_nth(self.attempts)}: {_failed(self)}{why}"
            case "ACKNOWLEDGED":
                return f"acknowledged{by}"
            case "PARTLY_ACKNOWLEDGED":
                return f"messages {', '.join(map(str, self.indexes))} acknowledged{by}"
            case "DEAD_LETTERED":
                return f"dead letter {self.number} in {self.target}: {self.text}"
            case "PASSED":
                return f"passed without delivery: {self.text}"
            case "REDRIVEN":
                return f"taken back by redrive {self.number}"
            case "DISCARDED":
                return f"its letter was discarded by {self.caller}: {self.text}"
            case "MENDED":
                return f"its letter was mended by {self.caller}, as letter {self.text}"
            case "RESET":
                return "the subscription was moved to before it"
            case "TAKEN":
                return f"the subscription was taken by {self.target}, epoch {self.number}"
        return self.kind


def _failed(event: MessageEvent) -> str:
    match event.failure:
        case "REFUSED":
            return f"refused by {event.consumer}"
        case "TIMED_OUT":
            return f"not settled in time by {event.consumer}"
        case "LOST":
            return f"{event.consumer} was lost"
    return f"at {event.consumer}"


def _nth(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 // 10 != 1 else 0, "th")
    return f"{number}{ending}"


@dataclass(frozen=True, slots=True)
class SubscriptionLife:
    """What became of a message in one subscription.

    Attributes:
        events: the oldest first.
        complete_since: every event since then is in `events`; None: none are recorded.
        letters: its dead letters, the oldest first.
        more_letters: whether there may be more: the dead letter topic was read up to a limit.
        redrive: the redrive by which it is on its way back; None: it is not.
        reasons: why it is not delivered now, or how it ended, the nearest first.
        audit_topic: the topic that keeps its events; None: there is none.
        audit_missing: why events of the audit topic may be missing; empty: they are all there.
        unknown: why all of this is not known; empty: it is.
    """

    subscription: str
    events: tuple[MessageEvent, ...] = ()
    complete_since: datetime | None = None
    letters: "tuple[DeadLetter, ...]" = ()
    more_letters: bool = False
    redrive: int | None = None
    reasons: "tuple[Reason, ...]" = ()
    audit_topic: str | None = None
    audit_missing: str = ""
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class MessageLife:
    """The life of one message.

    Attributes:
        topic: its topic's full name.
        producer, sequence_id: its identity; None: it was looked up by its id, and is not there.
        id: its id in the log; None: no entry holds it.
        fate: STORED, STALE (a higher id was stored first, or it has yet to arrive) or TRIMMED.
        verdict: deduplication's, if it was sent again now; None: not known.
        message: the message; of a large one, without its payload; None: it is not in the log.
        messages: how many messages its entry has.
        trace_id: of the trace that its producer gave it; None: none.
        subscriptions: sorted by name.
        unknown: the services whose part is not known, and why.
    """

    topic: str
    producer: str | None
    sequence_id: int | None
    id: MessageId | None
    fate: str
    verdict: "Verdict | None" = None
    message: Message | None = None
    messages: int = 0
    trace_id: str | None = None
    subscriptions: tuple[SubscriptionLife, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)


class _Found(NamedTuple):
    """A message in the log; `entry` None: it is not there."""

    fate: str
    id: MessageId | None
    entry: pb.StoredEntry | None


async def life(
    admin: "Admin",
    calls: Calls,
    topic: str,
    *,
    message_id: MessageId | None,
    producer: str | None,
    sequence_id: int | None,
    trace_id: str | None,
    since: datetime | None,
) -> MessageLife:
    """See Admin.message_life."""
    by_identity = producer is not None and sequence_id is not None
    if (producer is None) != (sequence_id is None) or (
        (message_id is not None) + by_identity + (trace_id is not None) != 1
    ):
        raise InvalidRequestError("give a message's id, its producer and sequence id, or its trace")
    if since is not None:
        start_to_wire(moment("since", since))
    if trace_id is not None and not _is_trace_id(trace_id := text("trace_id", trace_id)):
        raise InvalidRequestError("trace_id must be 32 hexadecimal digits, not all of them 0")
    if producer is not None and sequence_id is not None:
        producer, sequence_id = text("producer", producer), sequence_id_of(sequence_id)
        found = await _by_identity(calls, topic, producer, sequence_id)
    elif trace_id is not None:
        found = await _by_trace(calls, topic, trace_id.lower(), since)
    else:
        message_id = message_id_of("message_id", message_id, least=0)
        found = await _by_id(calls, topic, message_id)
    message = None if found.entry is None else _message(topic, found)
    if message is not None:
        producer, sequence_id = message.producer_name, message.sequence_id
    unknown: dict[str, str] = {}
    verdict = None
    if producer and sequence_id is not None:
        asked = admin.explain_publication(topic, producer, sequence_id)
        verdict = await _or_unknown(asked, "dedup", unknown)
    subscriptions: Sequence[SubscriptionLife] = ()
    if found.id is not None:
        asked_all = _subscriptions(admin, topic, found.id)
        subscriptions = await _or_unknown(asked_all, "dispatcher", unknown) or ()
    return MessageLife(
        topic=topic,
        producer=producer,
        sequence_id=sequence_id,
        id=found.id,
        fate=found.fate,
        verdict=verdict,
        message=message,
        messages=0 if found.entry is None else found.entry.metadata.num_messages_in_batch or 1,
        trace_id=None if message is None else trace_id_of(message.properties) or None,
        subscriptions=tuple(subscriptions),
        unknown=unknown,
    )


def _is_trace_id(given: str) -> bool:
    return re.fullmatch("[0-9a-fA-F]{32}", given) is not None and given.strip("0") != ""


async def _or_unknown(asked: Awaitable[T], service: str, unknown: dict[str, str]) -> T | None:
    """The answer; None: there is none, and `unknown` has the reason."""
    try:
        return await asked
    except (SeqgateError, ValueError) as error:  # ValueError: its address was not given
        unknown[service] = str(error)
        return None


# ---- subscriptions


async def _subscriptions(
    admin: "Admin", topic: str, message_id: MessageId
) -> list[SubscriptionLife]:
    slots = asyncio.Semaphore(SUBSCRIPTIONS_AT_ONCE)

    async def known(name: str) -> SubscriptionLife:
        async with slots:
            try:
                return await admin.message_history(topic, name, message_id)
            except SeqgateError as error:
                return SubscriptionLife(name, unknown=str(error))

    names = [each.name async for each in admin.subscriptions(topic)]
    return list(await asyncio.gather(*map(known, names)))


# ---- the entry


async def _by_identity(calls: Calls, topic: str, producer: str, sequence_id: int) -> _Found:
    request = pb.FindMessageRequest(topic=topic, producer_name=producer, sequence_id=sequence_id)
    fate = (await calls.call(request)).fate
    name = pb.Fate.Name(fate.fate).removeprefix("FATE_")
    if not fate.HasField("position"):
        return _Found(name, None, None)
    index = fate.batch_index if fate.HasField("batch_index") else -1
    last = MessageId(*position_of(fate.position), batch_index=index)
    entry = await _entry(calls, topic, last.position)
    if fate.HasField("first_chunk_position"):
        first = MessageId(*position_of(fate.first_chunk_position))
        return _Found(name, ChunkMessageId(first, last), entry)
    return _Found(name, last, entry)


async def _by_id(calls: Calls, topic: str, message_id: MessageId) -> _Found:
    entry = await _entry(calls, topic, message_id.position)
    if entry is not None:
        count = entry.metadata.num_messages_in_batch or 1
        if message_id.batch_index >= count:
            raise _not_found(f"its entry has {count:,} messages", topic, message_id=str(message_id))
        return _Found("STORED", message_id, entry)
    last = (await calls.call(pb.GetTopicRequest(topic=topic))).topic
    if not last.HasField("last") or message_id.position > position_of(last.last):
        raise _not_found("the topic has no such message yet", topic, message_id=str(message_id))
    return _Found("TRIMMED", message_id, None)


async def _entry(calls: Calls, topic: str, position: Position) -> pb.StoredEntry | None:
    request = pb.ReadEntriesRequest(topic=topic, positions=[to_wire(position)])
    responses = await calls.responses(request)
    return next((each for read in responses for each in read.entries.entries), None)


async def _by_trace(calls: Calls, topic: str, trace_id: str, since: datetime | None) -> _Found:
    """The first message of a trace, from a time on, or among the latest ones."""
    start = await _start(calls, topic, since)
    read, size_bytes, last = 0, 0, start
    if start is not None:
        request = pb.ReadRequest(topic=topic, max_entries=SEARCHED_ENTRIES_MAX)
        request.start.at.CopyFrom(to_wire(start))
        asked = Asked("ledger", calls.target("ledger"))
        call = calls.stub("ledger").Read(request)
        try:
            while (page := await translated(anext(aiter(call), None), asked)) is not None:
                for entry in page.entries.entries:
                    read, size_bytes = read + 1, size_bytes + len(entry.payload)
                    last = position_of(entry.position)
                    found = _of_trace(topic, entry, trace_id)
                    if found is not None:
                        return _Found("STORED", found, entry)
                if size_bytes > SEARCHED_BYTES_MAX:
                    break
        finally:
            call.cancel()
    because = f"no message of the trace among {read:,} entries, from {start} to {last}"
    raise _not_found(because, topic, trace_id=trace_id)


def _not_found(because: str, topic: str, **named: str) -> NotFoundError:
    return NotFoundError(
        f"not in the log: {because}",
        reason="MESSAGE_NOT_FOUND",
        details={"topic": topic, **named},
    )


async def _start(calls: Calls, topic: str, since: datetime | None) -> Position | None:
    """Where a search begins; None: there is nothing to search."""
    if since is not None:
        return await position_at(calls, topic, since)
    found = (await calls.call(pb.GetTopicRequest(topic=topic))).topic
    if not found.HasField("first"):
        return None
    count = SEARCHED_ENTRIES_MAX
    return await start_of_last(
        count,
        first=position_of(found.first),
        last=position_of(found.last),
        entries=found.entries,
        following=following(calls, topic, count, found.last),
    )


def _of_trace(topic: str, entry: pb.StoredEntry, trace_id: str) -> MessageId | None:
    if not entry.metadata.HasField("num_messages_in_batch"):
        is_it = trace_id_of(entry.metadata.properties) == trace_id
        return MessageId(*position_of(entry.position)) if is_it else None
    with suppress(CorruptMessageError):
        for message in decode_entry(topic, entry):
            if trace_id_of(message.properties) == trace_id:
                return message.id
    return None


def _message(topic: str, found: _Found) -> Message:
    """A stored message; of a large one, and of a damaged one, without its payload."""
    entry: Any = found.entry
    messages: list[Message] = []
    if entry.metadata.num_chunks_from_msg <= 1:
        with suppress(CorruptMessageError):
            messages = decode_entry(topic, entry)
    messages = messages or [Message(*each) for each in describe_fields(topic, entry)]
    index = max(0, found.id.batch_index) if found.id is not None else 0
    return messages[min(index, len(messages) - 1)]
