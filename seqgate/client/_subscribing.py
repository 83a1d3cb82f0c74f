"""What a consumer asks of its subscription: in the application's words, and on the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Final, Literal, NamedTuple

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.errors import InvalidRequestError, SeqgateError
from seqgate.message_id import LATEST_ID, ChunkMessageId, MessageId
from seqgate.types import TopicName

DELAY_MAX_S: Final = 86_400.0
"""The longest delay, and the longest time-out, in seconds: a day."""

Place = MessageId | datetime | Literal["earliest", "latest"]
"""A place in a topic: before the first message that it still has, after the last one, at a message,
or at the first message that was stored at this time or later. A time without a zone is local."""

KeyRange = tuple[int, int]
"""A range of hash slots, both ends included: 0 to 65,535."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class SubscriptionType(Enum):
    """Who gets a subscription's messages."""

    KEY_SHARED = pb.SUBSCRIPTION_TYPE_KEY_SHARED
    """A key's messages go to one consumer at a time, in order."""
    SHARED = pb.SUBSCRIPTION_TYPE_SHARED
    """Each message goes to whoever has room; there is no order."""
    EXCLUSIVE = pb.SUBSCRIPTION_TYPE_EXCLUSIVE
    """There is one consumer, and the whole topic comes in order."""


class Placement(Enum):
    """How hash slots are assigned to the consumers of a KEY_SHARED subscription."""

    CONSISTENT_HASHING = pb.PLACEMENT_CONSISTENT_HASHING
    """By a ring with 100 points for each consumer, times its weight."""
    AUTO_SPLIT = pb.PLACEMENT_AUTO_SPLIT
    """The widest range is split for each consumer that joins."""
    STICKY = pb.PLACEMENT_STICKY
    """Each consumer says which ranges it takes."""


class AfterDeadLetter(Enum):
    """What becomes of a key when one of its messages went to the dead letter topic."""

    CONTINUE = pb.AFTER_DEAD_LETTER_CONTINUE
    """The next message comes, and its `gap` tells which one is missing."""
    HOLD = pb.AFTER_DEAD_LETTER_HOLD
    """Nothing of the key comes until somebody releases it."""
    TAIL = pb.AFTER_DEAD_LETTER_TAIL
    """What follows in the key goes to the dead letter topic, too, in order, until somebody releases
    it."""


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """How a subscription behaves. All consumers that are connected at a time give the same.

    Attributes:
        placement: how slots are assigned; of KEY_SHARED.
        allow_out_of_order_delivery: keys are placed, but their order is not kept when consumers
            come and go, or messages are delivered again.
        max_in_flight_per_key: how many entries of a key may be unacknowledged, 0 to 10,000; 0: any
            number.
        max_unacked_per_consumer, max_unacked: how many messages may be unacknowledged, of a
            consumer and of all, 0 to 1,000,000; 0: any number; None: 50,000 and 200,000.
        max_redeliveries: how often a message is delivered again before it goes to the dead letter
            topic, 0 to 1,000; None: 16, which takes eleven minutes. A consumer that dies counts.
        dead_letter_topic: tenant/namespace/name; empty: the topic's own name with
            -<subscription>-DLQ.
        after_dead_letter: what becomes of the key then.
        delay_holds_key: whether a message that is to be delivered later holds what follows in its
            key.
        drain_deadline_s: how long a key that moved to another consumer waits for the
            acknowledgements of the one before, in seconds, up to 86,400; 0: 300. A consumer that
            takes longer loses the key then, and what it acknowledges is refused.
        classic_join: whether a consumer that joins gets nothing newer until all that was read
            before is acknowledged (Pulsar's rule before 4.0).
    """

    placement: Placement = Placement.CONSISTENT_HASHING
    allow_out_of_order_delivery: bool = False
    max_in_flight_per_key: int = 0
    max_unacked_per_consumer: int | None = None
    max_unacked: int | None = None
    max_redeliveries: int | None = None
    dead_letter_topic: str = ""
    after_dead_letter: AfterDeadLetter = AfterDeadLetter.CONTINUE
    delay_holds_key: bool = False
    drain_deadline_s: float = 0.0
    classic_join: bool = False


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a message that failed waits before it is delivered again: `min_s`, growing by
    `multiplier` with each attempt before, up to `max_s`.

    Attributes:
        min_s, max_s: seconds, 0 to 86,400.
        multiplier: 1 or more.

    Raises:
        ValueError: one is out of its bounds, or min_s is above max_s.
    """

    min_s: float = 1.0
    max_s: float = 60.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_s <= self.max_s <= DELAY_MAX_S:
            raise ValueError("0 <= min_s <= max_s <= 86,400")
        if not self.multiplier >= 1:
            raise ValueError("a multiplier is at least 1")

    def delay_s(self, attempts: int) -> float:
        """How long a message waits that failed now, and `attempts` times before."""
        if self.min_s == 0:
            return 0.0
        try:
            return min(self.min_s * self.multiplier**attempts, self.max_s)
        except OverflowError:
            return self.max_s


class Incomplete(Enum):
    """What becomes of the chunks of a large message that cannot be put together here: there was no
    room or no time for them, it is larger than this consumer takes, or it began before the
    subscription did."""

    REFUSE = "refuse"
    """What there was no room or no time for goes back, has not failed, and comes again, whole, when
    it is the turn of the last chunk. What is too large is refused: delivered again later, and
    dead-lettered when that was often enough; where order is kept, its key waits meanwhile."""
    ACKNOWLEDGE = "acknowledge"
    """They are acknowledged: the subscription goes on without the message."""


class Subscribing(NamedTuple):
    """How a consumer subscribes: see Client.consumer."""

    topic: TopicName
    subscription: str
    type: SubscriptionType
    options: SubscriptionOptions
    name: str | None
    start: Place | None
    properties: Mapping[str, str]
    ranges: Sequence[KeyRange]
    weight: int
    ack_timeout_ms: int

    @property
    def is_ordered(self) -> bool:
        """Whether a key's messages come in order."""
        out_of_order = self.options.allow_out_of_order_delivery
        return self.type is not SubscriptionType.SHARED and not out_of_order

    @property
    def is_one_key(self) -> bool:
        """Whether the whole topic comes in order."""
        return self.is_ordered and self.type is SubscriptionType.EXCLUSIVE

    def request(self) -> pb.ConsumeRequest:
        """The first request of a stream.

        Raises:
            InvalidRequestError: a value does not fit its field. (The service checks the bounds.)
        """
        try:
            return pb.ConsumeRequest(
                subscribe=pb.Subscribe(
                    topic=str(self.topic),
                    subscription=self.subscription,
                    consumer_name=self.name or "",
                    options=options_to_wire(self.type, self.options),
                    create_at=None if self.start is None else start_to_wire(self.start),
                    properties=self.properties,
                    ranges=ranges_to_wire(self.ranges),
                    weight=self.weight,
                    ack_timeout_ms=self.ack_timeout_ms,
                )
            )
        except (ValueError, TypeError) as error:
            if isinstance(error, SeqgateError):
                raise
            raise InvalidRequestError(
                f"a consumer cannot subscribe so: {error}", reason="INVALID_CONSUMER"
            ) from error


def options_to_wire(kind: SubscriptionType, options: SubscriptionOptions) -> pb.SubscriptionOptions:
    """The options as the service takes them.

    Raises:
        InvalidRequestError: a number cannot be one. (The service checks the bounds.)
    """
    try:
        return pb.SubscriptionOptions(
            type=kind.value,
            placement=options.placement.value,
            allow_out_of_order_delivery=options.allow_out_of_order_delivery,
            max_in_flight_per_key=options.max_in_flight_per_key,
            max_unacked_per_consumer=options.max_unacked_per_consumer,
            max_unacked=options.max_unacked,
            max_redeliveries=options.max_redeliveries,
            dead_letter_topic=options.dead_letter_topic,
            after_dead_letter=options.after_dead_letter.value,
            delay_holds_key=options.delay_holds_key,
            drain_deadline_ms=round(options.drain_deadline_s * 1000),
            classic_join=options.classic_join,
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(
            f"an option cannot be one: {error}", reason="INVALID_OPTIONS"
        ) from error


def ranges_to_wire(ranges: Sequence[KeyRange]) -> list[pb.KeyRange]:
    """Ranges as the service takes them.

    Raises:
        InvalidRequestError: a number cannot be one.
    """
    try:
        return [pb.KeyRange(first=first, last=last) for first, last in ranges]
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(
            "a range is its first and its last slot, 0 to 65,535", reason="INVALID_KEY_RANGE"
        ) from error


def start_to_wire(place: Place) -> pb.Start:
    """A place as the service takes it. An id is its entry: of a batch, all of it; of a large
    message, the first chunk.

    Raises:
        InvalidRequestError: it is no place, or a time before 1970.
    """
    if isinstance(place, datetime):
        milliseconds = (place.astimezone(UTC) - _EPOCH) // timedelta(milliseconds=1)
        if milliseconds < 0:
            raise InvalidRequestError("a time is 1970 or later", reason="INVALID_START")
        return pb.Start(time=milliseconds)
    if isinstance(place, ChunkMessageId):
        place = place.first_chunk
    if not isinstance(place, MessageId):
        places = {"earliest": pb.Start(earliest=pb.Earliest()), "latest": _latest()}
        if place not in places:
            raise InvalidRequestError(
                'a place is "earliest", "latest", a message id or a time', reason="INVALID_START"
            )
        return places[place]
    if place.ledger_id < 0:
        return pb.Start(earliest=pb.Earliest())
    if place.position == LATEST_ID.position:
        return _latest()
    at = entry_pb2.Position(ledger_id=place.ledger_id, entry_id=max(place.entry_id, 0))
    return pb.Start(at=at)


def _latest() -> pb.Start:
    return pb.Start(latest=pb.Latest())


def delay_to_wire(delay_s: float) -> int:
    """A delay in milliseconds.

    Raises:
        InvalidRequestError: it is not 0 to 86,400 s.
    """
    if not 0 <= delay_s <= DELAY_MAX_S:
        raise InvalidRequestError("a delay is 0 to 86,400 s", reason="INVALID_SETTLEMENT")
    return round(delay_s * 1000)
