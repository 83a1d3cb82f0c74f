"""The admin client's calls about dead letters: which there are, and what was done to them."""

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client._arguments import binary, properties_of, text, texts
from seqgate.client._calls import PAGE, Calls
from seqgate.client._codec import decode_entry
from seqgate.client._fields import (
    enum_name,
    full_name,
    message_id_of,
    optional,
    optional_id,
    optional_key,
    optional_name,
    stored_position,
    stored_positions,
    time_of,
)
from seqgate.client._message import Message
from seqgate.message_id import MessageId


@dataclass(frozen=True, slots=True)
class FailedDelivery:
    """A delivery that failed.

    Attributes:
        how: REFUSED (negatively acknowledged), TIMED_OUT, or LOST (its consumer crashed).
        at: when it failed.
        consumer: the name of the consumer that had it.
        reason: why the consumer refused it; empty: it did not say.
    """

    how: str
    at: datetime
    consumer: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeadLetterLife:
    """A time between two redrives of a message.

    Attributes:
        letter: the letter that ended it.
        at: when it was dead-lettered.
        reason, attempts, failures: as in DeadLetter.
    """

    letter: MessageId
    at: datetime
    reason: str
    attempts: int
    failures: tuple[FailedDelivery, ...]


class LetterMend(NamedTuple):
    """The mend that made a letter: the letter that was mended, who mended it, and when."""

    original: MessageId
    caller: str
    at: datetime


class Discard(NamedTuple):
    """A discard of dead letters.

    Attributes:
        operation: its number in the subscription.
        letters: how many letters it has.
        repeated: whether an earlier call with its request id made it.
    """

    operation: int
    letters: int
    repeated: bool


class Mend(NamedTuple):
    """A mend of a dead letter.

    Attributes:
        operation: its number in the subscription.
        letter: the mended letter's id in the dead letter topic.
        repeated: whether an earlier call with its request id made it.
    """

    operation: int
    letter: MessageId
    repeated: bool


@dataclass(frozen=True, slots=True)
class LetterOperation:
    """A redrive, a mend or a discard of dead letters.

    Attributes:
        number: counts the subscription's operations.
        action: REDRIVE, MEND or DISCARD.
        request_id: the id of its request.
        caller: who requested it: the principal, or the address without authentication.
        at: when it was made.
        topic: the dead letter topic.
        letters: the letters; the first ones, if they are too many for the record.
        count: how many letters it has.
        reason: of a discard, why.
        successor: of a mend, the mended letter; None: it is no mend.
    """

    number: int
    action: str
    request_id: str
    caller: str
    at: datetime
    topic: str
    letters: tuple[MessageId, ...]
    count: int
    reason: str
    successor: MessageId | None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a subscription dead-lettered: an entry, which may be a batch or a chunk.

    Attributes:
        id: its id in the dead letter topic, which names the letter.
        topic: the dead letter topic.
        origin: the message's id in the subscription's topic.
        key: the message's key.
        producer, sequence_id: the message's; of a batch, the lowest sequence id.
        properties: the message's own.
        messages: how many messages the entry has.
        payload_bytes: the size of its payload, as stored.
        chunk: of a chunk of a large message, its number from 0; None: it is none.
        at: when it reached the dead letter topic.
        reason: REDELIVERIES, TAIL, LARGE_MESSAGE or GIVEN_UP, as DeadLetterReason in
            dispatcher.proto names them; UNSPECIFIED: not known.
        attempts: how many deliveries failed.
        failures: the latest of them, the oldest first.
        holds_key: whether later messages of its key wait until the key is released.
        waiting_entries: how many entries wait behind it in memory; with `lags`, more wait in the
            log.
        redriven: whether its message is on its way back, or was settled.
        redrives: how often its message was redriven before.
        state: what became of it: DEAD (nothing yet), RETURNING, REDRIVEN, DISCARDED, MENDED (its
            successor took its place), or MENDING (its mend was interrupted: mend it again).
        successor: the mended letter that took its place; None: it was not mended.
        mend: of a mended letter, what it was made of, by whom, and when; None: it is none.
        lives: the earlier lives of its message, the oldest first; the latest ones, if they are
            long.
        chunks: of a large message, how many chunks it has, each a letter; 0: it is none. Any of
            them names all; the last one is listed.
    """

    id: MessageId
    topic: str
    origin: MessageId
    key: bytes
    producer: str
    sequence_id: int
    properties: Mapping[str, str]
    messages: int
    payload_bytes: int
    chunk: int | None
    at: datetime
    reason: str
    attempts: int
    failures: tuple[FailedDelivery, ...]
    holds_key: bool
    waiting_entries: int
    lags: bool
    redriven: bool
    redrives: int
    state: str = "DEAD"
    successor: MessageId | None = None
    mend: LetterMend | None = None
    lives: tuple[DeadLetterLife, ...] = ()
    chunks: int = 0


class LetterCalls:
    """The part of Admin for dead letters."""

    _calls: Calls

    async def dead_letters(
        self,
        topic: str,
        subscription: str,
        *,
        key: str | bytes | None = None,
        dead_letter_topic: str = "",
    ) -> AsyncIterator[DeadLetter]:
        """A subscription's dead letters, the oldest first.

        Args:
            key: only the letters of this key.
            dead_letter_topic: the topic to look in; empty: the one that the subscription uses.

        Raises:
            NotFoundError: there is no such subscription.
        """
        request = pb.ListDeadLettersRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            key=optional_key(key),
            dead_letter_topic=optional_name(dead_letter_topic),
            page_size=PAGE,
        )
        while True:
            page = await self._calls.call(request)
            for each in page.letters:
                yield dead_letter_of(each, page.dead_letter_topic)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def dead_letter(
        self,
        topic: str,
        subscription: str,
        letter: MessageId,
        *,
        dead_letter_topic: str = "",
    ) -> tuple[DeadLetter, list[Message]]:
        """A dead letter, by its id in the dead letter topic, and its messages as they are stored
        there: one, or those of a batch. A chunk is part of a message, and has none.

        Raises:
            NotFoundError: there is no such subscription, or no such letter of it.
        """
        request = pb.GetDeadLetterRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            position=stored_position("letter", letter),
            dead_letter_topic=optional_name(dead_letter_topic),
        )
        found = await self._calls.call(request)
        messages = (
            []
            if found.letter.HasField("chunk_id")
            else decode_entry(found.dead_letter_topic, found.entry)
        )
        return dead_letter_of(found.letter, found.dead_letter_topic), messages

    async def discard(
        self,
        topic: str,
        subscription: str,
        letters: Iterable[MessageId],
        *,
        request_id: str,
        reason: str = "",
        dead_letter_topic: str = "",
    ) -> Discard:
        """Give dead letters up, all or none: they stay in the dead letter topic, and are never
        delivered again. A key held behind one of them resumes with the message after it.

        Args:
            letters: their ids in the dead letter topic: 1 to 100, each once.
            request_id: identifies the request, of 1 to 64 bytes: repeat a call with the same one.
            reason: why, for the record: at most 256 bytes.
            dead_letter_topic: the topic of the letters; empty: the one that the subscription uses.

        Raises:
            InvalidRequestError: too many letters, or an invalid request id or reason.
            InUseError: one of them is missing, on its way back, or was redriven, discarded or
                mended before.
            LimitExceededError: too many letters are settled.
        """
        request = pb.DiscardDeadLettersRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            dead_letter_topic=optional_name(dead_letter_topic),
            positions=stored_positions("letters", letters),
            reason=text("reason", reason),
            request_id=text("request_id", request_id),
        )
        made = await self._calls.call(request)
        return Discard(made.operation, made.letters, made.repeated)

    async def mend(
        self,
        topic: str,
        subscription: str,
        letter: MessageId,
        *,
        request_id: str,
        payload: bytes | None = None,
        put: Mapping[str, str] | None = None,
        remove: Iterable[str] = (),
        dead_letter_topic: str = "",
    ) -> Mend:
        """Publish a changed copy of a dead letter beside it, in the dead letter topic. The copy
        takes the letter's place: redrive it like any other. Its key is the letter's.

        Args:
            letter: its id in the dead letter topic.
            request_id: identifies the request, of 1 to 64 bytes: repeat a call with the same one.
            payload: the new payload; None: the letter's.
            put: properties to set.
            remove: properties to remove.
            dead_letter_topic: the topic of the letter; empty: the one that the subscription uses.

        Raises:
            InvalidRequestError: nothing changes, or the message would be too large.
            InUseError: the letter is missing, on its way back, was redriven, discarded or mended
                before, or is a batch or a large message.
            LimitExceededError: too many letters are settled.
        """
        request = pb.MendDeadLetterRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            dead_letter_topic=optional_name(dead_letter_topic),
            position=stored_position("letter", letter),
            payload=None if payload is None else binary("payload", payload),
            put=properties_of("put", put),
            remove=texts("remove", remove),
            request_id=text("request_id", request_id),
        )
        if not request.dead_letter_topic:
            listing = pb.ListDeadLettersRequest(
                topic=request.topic, subscription=request.subscription, page_size=1
            )
            request.dead_letter_topic = (await self._calls.call(listing)).dead_letter_topic
        made = await self._calls.call(request)
        return Mend(made.operation, message_id_of(made.letter), made.repeated)

    async def letter_operations(self, topic: str, subscription: str) -> list[LetterOperation]:
        """The latest redrives, mends and discards of a subscription's dead letters, the latest
        first: 64 at most. Raises NotFoundError."""
        request = pb.ListLetterOperationsRequest(
            topic=full_name(topic), subscription=text("subscription", subscription)
        )
        return [_operation(each) for each in (await self._calls.call(request)).operations]


def _operation(wire: pb.LetterOperation) -> LetterOperation:
    return LetterOperation(
        number=wire.number,
        action=enum_name(pb.LetterAction, wire.action),
        request_id=wire.request_id,
        caller=wire.caller,
        at=time_of(wire.time),
        topic=wire.dead_letter_topic,
        letters=tuple(message_id_of(each) for each in wire.positions),
        count=wire.letters,
        reason=wire.reason,
        successor=optional_id(optional(wire, "successor")),
    )


def failures_of(wire: Iterable[pb.FailedDelivery]) -> tuple[FailedDelivery, ...]:
    return tuple(
        FailedDelivery(
            enum_name(pb.DeliveryFailure, each.failure),
            time_of(each.time),
            each.consumer,
            each.reason,
        )
        for each in wire
    )


def life_of(wire: pb.DeadLetterLife) -> DeadLetterLife:
    return DeadLetterLife(
        letter=message_id_of(wire.letter),
        at=time_of(wire.time),
        reason=enum_name(pb.DeadLetterReason, wire.reason),
        attempts=wire.attempts,
        failures=failures_of(wire.failures),
    )


def mend_of(wire: pb.DeadLetterMend) -> LetterMend:
    return LetterMend(message_id_of(wire.original), wire.caller, time_of(wire.time))


def dead_letter_of(wire: pb.DeadLetter, topic: str) -> DeadLetter:
    return DeadLetter(
        id=message_id_of(wire.position),
        topic=topic,
        origin=message_id_of(wire.origin),
        key=wire.key,
        producer=wire.producer_name,
        sequence_id=wire.sequence_id,
        properties=dict(wire.properties),
        messages=wire.num_messages,
        payload_bytes=wire.payload_bytes,
        chunk=optional(wire, "chunk_id"),
        at=time_of(wire.time),
        reason=enum_name(pb.DeadLetterReason, wire.reason),
        attempts=wire.attempts,
        failures=failures_of(wire.failures),
        holds_key=wire.holds_key,
        waiting_entries=wire.waiting_entries,
        lags=wire.lags,
        redriven=wire.redriven,
        redrives=wire.redrives,
        state=enum_name(pb.DeadLetterState, wire.state),
        successor=optional_id(optional(wire, "successor")),
        mend=mend_of(wire.mend) if wire.HasField("mend") else None,
        lives=tuple(map(life_of, wire.lives)),
        chunks=wire.num_chunks,
    )
