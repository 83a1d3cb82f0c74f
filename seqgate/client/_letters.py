"""The admin client's calls that mend and discard dead letters, and tell what was done to them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client._calls import Calls
from seqgate.client._codec import position_of
from seqgate.client._log import to_wire
from seqgate.message_id import MessageId
from seqgate.times import milliseconds
from seqgate.types import TopicName


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


class LetterCalls:
    """The part of Admin for dead letters."""

    _calls: Calls

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
            topic=_name(topic),
            subscription=subscription,
            dead_letter_topic=dead_letter_topic and _name(dead_letter_topic),
            positions=[to_wire(each.position) for each in letters],
            reason=reason,
            request_id=request_id,
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
        where = dead_letter_topic and _name(dead_letter_topic)
        if not where:
            listing = pb.ListDeadLettersRequest(
                topic=_name(topic), subscription=subscription, page_size=1
            )
            where = (await self._calls.call(listing)).dead_letter_topic
        request = pb.MendDeadLetterRequest(
            topic=_name(topic),
            subscription=subscription,
            dead_letter_topic=where,
            position=to_wire(letter.position),
            payload=payload,
            put=put,
            remove=remove,
            request_id=request_id,
        )
        made = await self._calls.call(request)
        return Mend(made.operation, _id(made.letter), made.repeated)

    async def letter_operations(self, topic: str, subscription: str) -> list[LetterOperation]:
        """The latest redrives, mends and discards of a subscription's dead letters, the latest
        first: 64 at most. Raises NotFoundError."""
        request = pb.ListLetterOperationsRequest(topic=_name(topic), subscription=subscription)
        return [_operation(each) for each in (await self._calls.call(request)).operations]


def _operation(wire: pb.LetterOperation) -> LetterOperation:
    return LetterOperation(
        number=wire.number,
        action=_enum(pb.LetterAction, "LETTER_ACTION_", wire.action),
        request_id=wire.request_id,
        caller=wire.caller,
        at=_time(wire.time),
        topic=wire.dead_letter_topic,
        letters=tuple(_id(each) for each in wire.positions),
        count=wire.letters,
        reason=wire.reason,
        successor=_id(wire.successor) if wire.HasField("successor") else None,
    )


def failures_of(wire: Iterable[pb.FailedDelivery]) -> tuple[FailedDelivery, ...]:
    return tuple(
        FailedDelivery(
            _enum(pb.DeliveryFailure, "DELIVERY_FAILURE_", each.failure),
            _time(each.time),
            each.consumer,
            each.reason,
        )
        for each in wire
    )


def life_of(wire: pb.DeadLetterLife) -> DeadLetterLife:
    return DeadLetterLife(
        letter=_id(wire.letter),
        at=_time(wire.time),
        reason=_enum(pb.DeadLetterReason, "DEAD_LETTER_REASON_", wire.reason),
        attempts=wire.attempts,
        failures=failures_of(wire.failures),
    )


def mend_of(wire: pb.DeadLetterMend) -> LetterMend:
    return LetterMend(_id(wire.original), wire.caller, _time(wire.time))


def _enum(kind: Any, prefix: str, number: int) -> str:
    """An enum's value without the enum's name; the number of one that this version lacks."""
    value = kind.DESCRIPTOR.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(prefix)


def _id(wire: Any) -> MessageId:
    return MessageId(*position_of(wire))


def _time(wire: Any) -> datetime:
    return datetime.fromtimestamp(milliseconds(wire) / 1000, UTC)


def _name(topic: str) -> str:
    return str(TopicName.expand(topic))
