"""A consumer's subscription settings, and their form on the wire."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, cast

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client._arguments import (
    UINT32_MAX,
    each_of,
    flag,
    invalid,
    member,
    message_id,
    real,
    settle,
    text,
    whole,
)
from seqgate.errors import InvalidRequestError
from seqgate.message_id import LATEST_ID, ChunkMessageId, MessageId
from seqgate.times import duration, milliseconds_of, timestamp
from seqgate.types import NACK_REASON_BYTES_MAX, TopicName

DELAY_MAX_S: Final = 86_400.0
"""The longest delay and the longest time-out: a day."""

MULTIPLIER_MAX: Final = 1_000_000.0
"""The largest growth of a delay from one attempt to the next: more than any delay may have."""

Place = MessageId | datetime | Literal["earliest", "latest"]
"""A place in a topic: before its first message, after its last one, at a message, or at the first
message stored at this time or later. A time without a zone is local."""

KeyRange = tuple[int, int]
"""A range of hash slots, both ends included: 0 to 65,535."""

_OPTIONS: Final = "INVALID_OPTIONS"


class SubscriptionType(Enum):
    """How a subscription distributes its messages over consumers."""

    KEY_SHARED = pb.SUBSCRIPTION_TYPE_KEY_SHARED
    """Each key has one consumer at a time, which gets its messages in order."""
    SHARED = pb.SUBSCRIPTION_TYPE_SHARED
    """Each message goes to any consumer with permits, in no particular order."""
    EXCLUSIVE = pb.SUBSCRIPTION_TYPE_EXCLUSIVE
    """The only consumer gets the whole topic in order."""


class Placement(Enum):
    """How the consumers of a KEY_SHARED subscription get their hash slots."""

    CONSISTENT_HASHING = pb.PLACEMENT_CONSISTENT_HASHING
    """From a hash ring with 100 points for each consumer, times its weight."""
    AUTO_SPLIT = pb.PLACEMENT_AUTO_SPLIT
    """Each consumer that joins gets half of the widest range."""
    STICKY = pb.PLACEMENT_STICKY
    """Each consumer declares its ranges."""


class AfterDeadLetter(Enum):
    """What happens to a key after one of its messages was moved to the dead letter topic."""

    CONTINUE = pb.AFTER_DEAD_LETTER_CONTINUE
    """Deliver the next message, whose `gap` names the missing one."""
    HOLD = pb.AFTER_DEAD_LETTER_HOLD
    """Deliver nothing of the key until an operator releases it."""
    TAIL = pb.AFTER_DEAD_LETTER_TAIL
    """Move the key's later messages to the dead letter topic too, until it is released."""


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """How a subscription behaves. All connected consumers must give the same options.

    Attributes:
        placement: how slots are assigned; KEY_SHARED only.
        allow_out_of_order_delivery: assign keys to consumers, but do not keep their order when
            consumers join or leave, or messages are redelivered.
        max_in_flight_per_key: the most unacknowledged entries of a key, 0 to 10,000; 0: no limit.
        max_unacked_per_consumer, max_unacked: the most unacknowledged messages, of a consumer and
            of the subscription, 0 to 1,000,000; 0: no limit; None: 50,000 and 200,000.
        max_redeliveries: how often a message is redelivered before it is moved to the dead letter
            topic, 0 to 1,000; None: 16, which takes eleven minutes. A consumer's crash counts.
        dead_letter_topic: tenant/namespace/name; empty: the topic's own name with
            -<subscription>-DLQ.
        after_dead_letter: what happens to the key of a dead letter.
        delay_holds_key: whether a delayed message blocks later messages of its key.
        drain_deadline_s: how long a key that moved to another consumer waits for the previous
            owner's acknowledgements, in seconds, up to 86,400; 0: 300. Later ones are refused.
        classic_join: whether a consumer that joins gets new messages only when all messages read
            before are acknowledged (Pulsar's rule before 4.0).
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
    """The delay before a failed message is redelivered: `min_s`, times `multiplier` for each
    earlier attempt, up to `max_s`.

    Attributes:
        min_s, max_s: seconds, 0 to 86,400.
        multiplier: 1 to 1,000,000.

    Raises:
        InvalidRequestError: one is no number, or out of its bounds, or min_s is above max_s.
    """

    min_s: float = 1.0
    max_s: float = 60.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        settle(
            self,
            min_s=real("min_s", self.min_s, 0, DELAY_MAX_S),
            max_s=real("max_s", self.max_s, 0, DELAY_MAX_S),
            multiplier=real("multiplier", self.multiplier, 1, MULTIPLIER_MAX, ""),
        )
        if self.min_s > self.max_s:
            invalid("min_s must be at most max_s")

    def delay_s(self, attempts: int) -> float:
        """The delay after a failure that follows `attempts` others."""
        if self.min_s == 0:
            return 0.0
        try:
            return min(self.min_s * self.multiplier**attempts, self.max_s)
        except OverflowError:
            return self.max_s


class Incomplete(Enum):
    """What to do with chunks of a large message that this consumer cannot assemble: it has no room
    for them, they expired, the message exceeds its limits, or it began before the subscription."""

    REFUSE = "refuse"
    """Chunks that were evicted or expired are given back: they have not failed, and are redelivered
    with the whole message when its last chunk is due. A message that exceeds the limits is refused:
    it is redelivered, and finally moved to the dead letter topic; in an ordered subscription, its
    key waits meanwhile."""
    ACKNOWLEDGE = "acknowledge"
    """Acknowledge the chunks: the message is lost to the subscription."""


class Subscribing(NamedTuple):
    """The arguments of Client.consumer."""

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
        """The first request of a stream. Raises InvalidRequestError if a value is of another type,
        or does not fit its field. (The service checks the bounds.)"""
        weight = whole("weight", self.weight, 0, UINT32_MAX, reason="INVALID_CONSUMER")
        return pb.ConsumeRequest(
            subscribe=pb.Subscribe(
                topic=str(self.topic),
                subscription=self.subscription,
                consumer_name=self.name or "",
                options=options_to_wire(self.type, self.options),
                create_at=None if self.start is None else start_to_wire(self.start),
                properties=self.properties,
                ranges=ranges_to_wire(self.ranges),
                weight=weight,
                ack_timeout=duration(self.ack_timeout_ms) if self.ack_timeout_ms else None,
                delivery_runs=True,
            )
        )


def options_to_wire(kind: SubscriptionType, options: SubscriptionOptions) -> pb.SubscriptionOptions:
    """Encode the options. Raises the same as Subscribing.request."""

    def count(name: str) -> Any:
        value = getattr(options, name)
        return None if value is None else whole(name, value, 0, UINT32_MAX, reason=_OPTIONS)

    deadline_s = real("drain_deadline_s", options.drain_deadline_s, 0, DELAY_MAX_S, reason=_OPTIONS)
    return pb.SubscriptionOptions(
        type=member("type", kind, SubscriptionType, reason=_OPTIONS).value,
        placement=member("placement", options.placement, Placement, reason=_OPTIONS).value,
        allow_out_of_order_delivery=flag(
            "allow_out_of_order_delivery", options.allow_out_of_order_delivery, reason=_OPTIONS
        ),
        max_in_flight_per_key=count("max_in_flight_per_key"),
        max_unacked_per_consumer=count("max_unacked_per_consumer"),
        max_unacked=count("max_unacked"),
        max_redeliveries=count("max_redeliveries"),
        dead_letter_topic=text("dead_letter_topic", options.dead_letter_topic, reason=_OPTIONS),
        after_dead_letter=member(
            "after_dead_letter", options.after_dead_letter, AfterDeadLetter, reason=_OPTIONS
        ).value,
        delay_holds_key=flag("delay_holds_key", options.delay_holds_key, reason=_OPTIONS),
        drain_deadline=duration(round(deadline_s * 1000)) if deadline_s else None,
        classic_join=flag("classic_join", options.classic_join, reason=_OPTIONS),
    )


def ranges_to_wire(ranges: Sequence[KeyRange]) -> list[pb.KeyRange]:
    """Encode ranges. Raises the same as Subscribing.request."""
    return each_of("ranges", ranges, _range_to_wire, reason="INVALID_KEY_RANGE")


def _range_to_wire(name: str, ends: object) -> pb.KeyRange:
    try:
        first, last = (whole(name, slot, 0, UINT32_MAX) for slot in cast("Iterable[object]", ends))
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(
            f"invalid range: {name} must be the first and the last slot, 0 to 65,535",
            reason="INVALID_KEY_RANGE",
        ) from error
    return pb.KeyRange(first=first, last=last)


def start_to_wire(place: Place) -> common_pb2.Start:
    """Encode a place. An id stands for its entry: a whole batch, or the first chunk of a large
    message. Raises InvalidRequestError if it is not a Place, or is a time before 1970."""
    if isinstance(place, datetime):
        return common_pb2.Start(time=timestamp(_time_to_wire(place)))
    if isinstance(place, str):
        if place == "latest":
            return _latest()
        if place == "earliest":
            return common_pb2.Start(earliest=common_pb2.Earliest())
    if not isinstance(place, MessageId):
        raise InvalidRequestError(
            'invalid start: give "earliest", "latest", a message id or a time',
            reason="INVALID_START",
        )
    place = message_id("start", place, reason="INVALID_START")
    if isinstance(place, ChunkMessageId):
        place = place.first_chunk
    if place.ledger_id < 0:
        return common_pb2.Start(earliest=common_pb2.Earliest())
    if place.position == LATEST_ID.position:
        return _latest()
    at = common_pb2.Position(ledger_id=place.ledger_id, entry_id=max(place.entry_id, 0))
    return common_pb2.Start(at=at)


def _time_to_wire(time: datetime) -> int:
    try:  # a time without a zone is local
        time_ms = milliseconds_of(time if time.tzinfo else time.astimezone())
    except Exception:  # it has no local form, or the zone's own
        time_ms = -1
    if not time_ms >= 0:
        raise InvalidRequestError(
            "invalid start: a time must be from 1970 to 9999", reason="INVALID_START"
        )
    return time_ms


def parse_place(given: str) -> Place | None:
    """Parse "earliest", "latest", a message's id, or a time in ISO 8601, 1970 or later, which
    without an offset is UTC. None: it is none of them."""
    match given:
        case "earliest" | "latest":
            return given
    return parse_id(given) or _parse_time(given)


def parse_id(given: str) -> MessageId | None:
    """Parse the id of a message in a log. None: it is none."""
    try:
        found = MessageId.parse(given)
    except ValueError:
        return None
    return found if min(found.position) >= 0 else None


def _parse_time(given: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(given)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        start_to_wire(moment)
    except (ValueError, OverflowError, InvalidRequestError):  # not a time, or before 1970
        return None
    return moment


def _latest() -> common_pb2.Start:
    return common_pb2.Start(latest=common_pb2.Latest())


def delay_to_wire(delay_s: float) -> int:
    """A delay in milliseconds. Raises InvalidRequestError unless it is 0 to 86,400 s."""
    return round(real("delay_s", delay_s, 0, DELAY_MAX_S, reason="INVALID_SETTLEMENT") * 1000)


def reason_to_wire(reason: str | BaseException) -> str:
    """Why a message is refused. An exception is its type and message, cut to fit. Raises
    InvalidRequestError if a text is too long, or has no form in UTF-8."""
    if isinstance(reason, BaseException):
        return _described(reason)
    why = text("reason", reason, reason="INVALID_SETTLEMENT")
    if len(why.encode()) > NACK_REASON_BYTES_MAX:
        limit = f"reason must have at most {NACK_REASON_BYTES_MAX} bytes in UTF-8"
        raise InvalidRequestError(limit, reason="INVALID_SETTLEMENT")
    return why


def _described(failure: BaseException) -> str:
    name = type(failure).__name__
    try:
        said = str(failure)
    except Exception:  # the message is refused all the same
        said = ""
    why = (f"{name}: {said}" if said else name).encode(errors="replace")
    if len(why) <= NACK_REASON_BYTES_MAX:
        return why.decode()
    end = "…"
    return why[: NACK_REASON_BYTES_MAX - len(end.encode())].decode(errors="ignore") + end
