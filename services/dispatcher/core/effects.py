"""The effects of a subscription's machine, its options, and the outcomes that it reports."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from seqgate.services.dispatcher.core.lane import Chunk, Flight
from seqgate.services.dispatcher.core.positions import Run, positions_of
from seqgate.services.dispatcher.core.selectors import SlotRange
from seqgate.types import Position

# The verdicts of filters on an entry. A positive one reschedules it: the number of milliseconds
# after which it is judged again.

ACCEPT: Final = 0
"""Deliver it."""

REJECT: Final = -1
"""Acknowledge it without delivering it."""

UNJUDGED: Final = -2
"""No verdict yet: filters were not asked, or did not answer."""

FILTER_FAILED: Final = -3
"""The filters failed and would fail again: the entry waits until they are changed or retried."""


class SubscriptionType(Enum):
    """How messages are distributed among consumers (Pulsar's subscription types)."""

    KEY_SHARED = auto()
    """All of a key's messages go to one consumer at a time, in order."""
    SHARED = auto()
    """Each message goes to any consumer with permits, in no order."""
    EXCLUSIVE = auto()
    """A single consumer gets all messages, in order."""


class AfterDeadLetter(Enum):
    """The rule for a key after one of its messages was dead-lettered."""

    CONTINUE = auto()
    """The next delivery names the missing message."""
    HOLD = auto()
    """Nothing is delivered until the key is released."""
    TAIL = auto()
    """Later messages are dead-lettered too, in order, until the key is released."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a subscription behaves.

    Attributes:
        in_order: whether a key's messages are always delivered in order; false is Pulsar's
            allowOutOfOrderDelivery. Without effect on SHARED and EXCLUSIVE.
        max_in_flight_per_key: limit of a key's unacknowledged entries; 0: none.
        consumer_unacked_max, unacked_max: limits of unacknowledged messages, of a consumer and of
            the subscription; 0: none.
        key_parked_max, consumer_parked_max: limits of parked entries, of a key and of all keys of a
            consumer; further ones are read again.
        delayed_max, delayed_bytes_max: limits of delayed messages in memory, and of their
            approximate bytes: those due soonest are kept, the others read again.
        returned_max: limit of entries of a consumer's keys that await redelivery, at which their
            first deliveries pause; 0: none.
        classic_join: whether a consumer that joins waits until all entries read before are
            acknowledged (rememberUnackedMessageKeys=false).
        delay_holds_key: whether a delayed message holds later messages of its key.
        drain_deadline_ms: the time after which a moved key is taken from a consumer that has not
            acknowledged its messages; 0: never.
        redeliveries_max: redeliveries of a message before it is dead-lettered; None: no limit.
        after_dead_letter: the rule for its key from then on.
        retry_first_ms, retry_max_ms: the delay of a negatively acknowledged message unless the
            consumer sets one; it doubles with each attempt.
        reschedule_max_ms: the longest delay that filters may set; longer ones are shortened to it.
        reschedules_max: how often in a row filters may reschedule an entry; then it is delivered.
        unfinished_max_ms, filter_failed_max_ms: how long kept-back chunks wait for their last, and
            entries for filters that failed; then they are dead-lettered.
    """

    kind: SubscriptionType = SubscriptionType.KEY_SHARED
    in_order: bool = True
    max_in_flight_per_key: int = 0
    consumer_unacked_max: int = 50_000
    unacked_max: int = 200_000
    key_parked_max: int = 1_000
    consumer_parked_max: int = 20_000
    delayed_max: int = 20_000
    delayed_bytes_max: int = 32 * 1024 * 1024
    returned_max: int = 50_000
    classic_join: bool = False
    delay_holds_key: bool = False
    drain_deadline_ms: int = 0
    redeliveries_max: int | None = None
    after_dead_letter: AfterDeadLetter = AfterDeadLetter.CONTINUE
    retry_first_ms: int = 1_000
    retry_max_ms: int = 60_000
    reschedule_max_ms: int = 3_600_000
    reschedules_max: int = 100
    unfinished_max_ms: int = 86_400_000
    filter_failed_max_ms: int = 86_400_000

    @property
    def orders_keys(self) -> bool:
        if self.kind is SubscriptionType.KEY_SHARED:
            return self.in_order
        return self.kind is SubscriptionType.EXCLUSIVE


class Entry(NamedTuple):
    """An entry, as far as the machine needs it.

    Attributes:
        key: its sticky key; None: it is a marker, not a message.
        deliver_at_ms: the earliest time of delivery; 0: at once.
        aborts: the attempt at a large message that it aborts; empty: none.
    """

    position: Position
    key: bytes | None
    messages: int = 1
    deliver_at_ms: int = 0
    chunk: Chunk | None = None
    verdict: int = ACCEPT
    aborts: str = ""


class Because(Enum):
    """The reason to skip an entry: acknowledge it without a delivery."""

    HEADLESS = "the first chunk of its large message is missing"
    LETTER_REFUSED = "the dead letter topic refuses it"
    GONE = "the log no longer has it"
    CYCLE = "it passed through the maximum number of dead letter topics"


class Why(Enum):
    """Why an entry is dead-lettered."""

    REDELIVERIES = "REDELIVERIES"
    """It failed more often than redeliveries_max allows."""
    TAIL = "TAIL"
    """An earlier message of its key was dead-lettered, under AfterDeadLetter.TAIL."""
    LARGE_MESSAGE = "LARGE_MESSAGE"
    """Another chunk of its large message was dead-lettered, or the message stayed unfinished."""
    GIVEN_UP = "GIVEN_UP"
    """Its filters failed for too long."""


class How(Enum):
    """How a delivery failed."""

    REFUSED = "REFUSED"
    """Its consumer acknowledged it negatively."""
    TIMED_OUT = "TIMED_OUT"
    """Its consumer did not settle it in time."""
    LOST = "LOST"
    """Its consumer's stream ended without Leave."""


class FailedDelivery(NamedTuple):
    """A failed delivery: how, when, the name of its consumer, and why that one refused it."""

    how: How
    at_ms: int
    consumer: str
    reason: str = ""

    def to_json(self) -> list[str | int]:
        how, at_ms, consumer, reason = self
        return [how.value, at_ms, consumer, *([reason] if reason else [])]


class FailedEntry(NamedTuple):
    """The failed deliveries of an entry: how many, and the latest of them, the oldest first."""

    position: Position
    attempts: int
    failures: tuple[FailedDelivery, ...] = ()


class Gap(NamedTuple):
    """A dead-lettered message, missing in its key."""

    position: Position
    attempts: int


class KeyState(NamedTuple):
    """The durable state of a key of which a message was dead-lettered; `has_more`: it is held
    behind several, of which `gap` is the first, until an operator releases it."""

    after: AfterDeadLetter
    gap: Gap
    has_more: bool = False


class LargeLetter(NamedTuple):
    """The large message of a dead-lettered chunk: its attempt, where it begins, and whether the
    chunk is the last."""

    attempt: str
    first: Position
    is_last: bool


class Delivery(NamedTuple):
    """An entry sent to a consumer.

    Attributes:
        delivery: its number: with the subscription's epoch, the token that settles it.
        messages: the number of its messages.
        unacked: a bit for each unacknowledged message.
        attempts: how many earlier deliveries of it failed.
        gap: the message missing before it in its key.
    """

    delivery: int
    position: Position
    messages: int
    unacked: int
    attempts: int
    deadline_ms: int | None
    gap: Gap | None


# Effects. Each completes with the event that it names, or with none.


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send deliveries to a consumer, in this order, after everything sent before. No event."""

    consumer: int
    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Tell a consumer that these deliveries are stale. No event."""

    consumer: int
    deliveries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell a consumer that the keys of these deliveries moved to another consumer, which waits for
    them: it should return those that it has not begun to process. No event."""

    consumer: int
    deliveries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """Tell a consumer which slots it owns. No event."""

    consumer: int
    ranges: tuple[SlotRange, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Read the next entries of the log, waiting until there are any. Event: `read`."""

    after: Position | None


@dataclass(frozen=True, slots=True)
class Scan:
    """Read a page of earlier entries again, without payloads: from `at` on, or, if that is None,
    after `after`. Event: `scanned`."""

    at: Position | None
    after: Position | None
    entries_max: int


@dataclass(frozen=True, slots=True)
class Persist:
    """Make acknowledgements durable, retrying until they are. Event: `persisted`.

    Attributes:
        runs: the entries that are acknowledged as a whole.
        parts: of batches, their number of messages, and the bits of the acknowledged ones.
        successions: pairs of positions in two ledgers between which the log has no entry.
    """

    number: int
    runs: tuple[Run, ...]
    parts: tuple[tuple[Position, int, int], ...]
    successions: tuple[tuple[Position, Position], ...]

    @property
    def entries(self) -> list[Position]:
        return positions_of(self.runs)


@dataclass(frozen=True, slots=True)
class Record:
    """Make failed deliveries durable, retrying until they are. Event: `recorded`."""

    failed: tuple[FailedEntry, ...]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Publish an entry to the dead letter topic, once, retrying until it is there, and make the
    state of its key durable. Event: `dead_lettered`.

    Attributes:
        why: why it is dead-lettered.
        failures: its latest failed deliveries, the oldest first.
        acknowledged: of a batch, the messages acknowledged before (bits).
        state: the state of its key from then on; None: it follows from the others.
        large: of a chunk, its message: all its chunks are dead-lettered. Durable until the last is.
    """

    position: Position
    key: bytes
    attempts: int
    after: AfterDeadLetter
    why: Why = Why.REDELIVERIES
    failures: tuple[FailedDelivery, ...] = field(default=(), compare=False)
    acknowledged: int = 0
    state: KeyState | None = field(default=None, compare=False)
    large: LargeLetter | None = None


@dataclass(frozen=True, slots=True)
class Judge:
    """Request verdicts on waiting entries, retrying until there is an answer. Event: `judged`."""

    positions: tuple[Position, ...]


@dataclass(frozen=True, slots=True)
class ForgetKey:
    """Forget the durable state of a key. No event: if it fails, a later ForgetKey repeats it."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Passed:
    """Log that entries were skipped, and why. No event."""

    positions: tuple[Position, ...]
    because: Because


Effect = (
    Deliver
    | Revoke
    | Drain
    | Assigned
    | Read
    | Scan
    | Persist
    | Record
    | DeadLetter
    | Judge
    | ForgetKey
    | Passed
)


class Outcome(Enum):
    """The outcome of one item of a consumer's request."""

    DONE = auto()
    """It took effect; an acknowledgement does once it is durable."""
    STALE = auto()
    """The delivery is not, or no longer, the consumer's: nothing changed."""
    INVALID = auto()
    """The batch has no such message: nothing changed."""


class Outgoing:
    """The effects of one event. Each consumer gets revocations before new deliveries."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self._revoked: dict[int, list[int]] = {}
        self._deliveries: dict[int, list[Delivery]] = {}

    def add(self, *effects: Effect | None) -> None:
        """Append effects; None is ignored."""
        self._effects += [effect for effect in effects if effect is not None]

    def revoke(self, flight: Flight) -> bool:
        """Tell a consumer that a delivery is stale; one that this event added is not sent at all.
        Returns whether it was sent."""
        deliveries = self._deliveries.get(flight.consumer, [])
        for place, each in enumerate(deliveries):
            if each.delivery == flight.delivery:
                del deliveries[place]
                if not deliveries:
                    del self._deliveries[flight.consumer]
                return False
        self._revoked.setdefault(flight.consumer, []).append(flight.delivery)
        return True

    def deliver(self, consumer: int, delivery: Delivery) -> None:
        deliveries = self._deliveries.get(consumer)
        if deliveries is None:
            self._deliveries[consumer] = [delivery]
        else:
            deliveries.append(delivery)

    def flush(self) -> dict[int, list[Delivery]]:
        """Append the revocations and deliveries collected so far. Returns the deliveries."""
        for consumer, revoked in self._revoked.items():
            self._effects.append(Revoke(consumer, tuple(revoked)))
        sent, self._deliveries, self._revoked = self._deliveries, {}, {}
        for consumer, deliveries in sent.items():
            self._effects.append(Deliver(consumer, tuple(deliveries)))
        return sent

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
