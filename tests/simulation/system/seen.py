"""The record of a history, with full knowledge: messages and receipts, contents of stores,
deliveries and acknowledgements.

Nothing here judges; checkers do. Every noted event goes into a digest, so that two runs of one seed
can be compared, and the last ones are kept to be shown with a violation.
"""

import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from seqgate.services.dispatcher.letters.returns import Return
from seqgate.types import Chunk, Position, TopicName

TAIL_MAX: Final = 400
"""The number of last events kept."""

NUMBER: Final = "n"
"""The property with a message's number."""

_MARK: Final = re.compile(rb"<(\d+)>")


class Violation(Exception):
    """An invariant is broken."""


@dataclass(slots=True)
class Sent:
    """A message of the workload, and what its producer learned about it."""

    number: int
    topic: str
    producer: str
    sequence_id: int | None
    key: str | None
    tag: str
    delay_s: float
    size_bytes: int
    is_keyed: bool = True
    """Its entry carries its key: false in a batch that is not by key."""
    asked_s: float | None = None
    """When its producer first tried to send it."""
    outcome: str = ""
    """Empty while unknown; then "stored", "duplicate", or the reason of a failure."""

    @property
    def payload(self) -> bytes:
        """Its bytes: a mark with its number, then padding."""
        mark = b"<%d>" % self.number
        return mark + b"." * (self.size_bytes - len(mark))


def numbers_in(payload: bytes) -> tuple[int, ...]:
    """The numbers of the messages that start in a payload."""
    return tuple(int(each) for each in _MARK.findall(payload))


class Origin(NamedTuple):
    """The source of a dead letter."""

    topic: str
    subscription: str
    position: Position


@dataclass(slots=True)
class Appended:
    """An entry at the time of its append."""

    position: Position
    producer: str
    ids: Sequence[int]
    numbers: tuple[int, ...]
    chunk: Chunk | None
    append_ms: int
    at_s: float
    origin: Origin | None = None
    generation: int = 0
    """The number of dead letter topics that it has passed through."""
    payload_bytes: int = 0
    mends: Position | None = None
    """Of a mended letter, its original."""
    attempts: int = 0
    """Of a letter that failed too often, how often it did."""

    @property
    def highest(self) -> int:
        """Its highest sequence id."""
        return self.ids[-1]


@dataclass(slots=True)
class Log:
    """Every entry that a topic's log ever held."""

    entries: list[Appended] = field(default_factory=list)
    at: dict[Position, Appended] = field(default_factory=dict)
    kept_from: Position | None = None
    """Entries before it were trimmed, or may have been, by an interrupted trim."""
    deleted_ledger: int = 0
    """Entries up to this ledger were deleted with an earlier topic of this name."""
    incarnation: int = 0
    """The topic's incarnation; 0 if unknown."""
    deletions: int = 0
    """Deletions started whose completion was not observed yet."""
    marks: dict[str, int] = field(default_factory=dict)
    """By producer, its mark: the fold over the log."""
    stored: dict[str, set[int]] = field(default_factory=dict)
    """By producer, the ids that count as stored."""
    chunks: set[tuple[str, str, int]] = field(default_factory=set)
    attempts: dict[tuple[str, str], list[Position]] = field(default_factory=dict)
    """By producer and uuid, the positions of the chunks."""
    last: dict[str, Appended] = field(default_factory=dict)
    """By producer, its last entry."""
    trimmed: int = 0
    """The number of trimmed entries; `trimmed_marks` is the fold over them."""
    trimmed_marks: dict[str, int] = field(default_factory=dict)
    trimmed_chunks: set[str] = field(default_factory=set)
    """Producers of large messages that were trimmed, wholly or in part."""
    messages_max: int = 1
    """The largest number of messages in a batch."""
    entry_bytes_max: int = 0
    """The approximate size of the largest entry."""

    def is_trimmed(self, position: Position) -> bool:
        """True if an entry is gone."""
        if position.ledger_id <= self.deleted_ledger:
            return True
        return self.kept_from is not None and position < self.kept_from

    def is_beheaded(self, position: Position) -> bool:
        """True for a chunk of a message whose first chunk is trimmed, so it can never be whole."""
        entry = self.at[position]
        if entry.chunk is None:
            return False
        return self.is_trimmed(self.attempts[entry.producer, entry.chunk.uuid][0])

    def is_aborted(self, position: Position) -> bool:
        """True for a chunk of an unfinished attempt that a later entry of its producer ended."""
        entry = self.at[position]
        if entry.chunk is None:
            return False
        last = self.attempts[entry.producer, entry.chunk.uuid][-1]
        return not self.is_whole(entry) and self.last[entry.producer].position != last

    def is_whole(self, entry: "Appended") -> bool:
        """True if all chunks of a chunk's message are stored."""
        assert entry.chunk is not None
        found = self.attempts[entry.producer, entry.chunk.uuid]
        return len(found) == entry.chunk.num_chunks


Place = tuple[Position, int]
"""A message's entry, and its index in a batch; 0 for a single message."""


Token = tuple[int, int]
"""Identifies a delivery: the lease epoch of the subscription, and a number."""


@dataclass(slots=True)
class Move:
    """A request to move a subscription.

    Attributes:
        start: the first entry to deliver afterwards; None for the first in the log.
        is_import: the cursor was made by an import, and may be moved back to the end of the log.
        taken_s: when an instance took the imported cursor; None before that.
        answered_s: when the request succeeded; None while it is pending or after it failed: the
            move may then still happen.
    """

    asked_s: float
    start: Position | None
    is_import: bool = False
    taken_s: float | None = None
    answered_s: float | None = None

    @property
    def is_open(self) -> bool:
        """True if it may still happen."""
        return self.answered_s is None


@dataclass(slots=True)
class FilterSet:
    """A request to filter a subscription, with the tags that the filters may reject."""

    asked_s: float
    rejected: frozenset[str]
    from_start: bool = False
    answered_s: float | None = None


@dataclass(slots=True)
class Subscription:
    """The record of a subscription since its cursor was made.

    Attributes:
        acknowledged: entries that the stored cursor counts as acknowledged.
        parts: of partly acknowledged batches, the acknowledged messages, as bits.
        waiting: unacknowledged entries, in log order.
        asked: messages that consumers asked to acknowledge, with the deliveries used, except stale
            ones.
        through: cumulative acknowledgements requested, with the deliveries used.
        done: messages confirmed as acknowledged, each with the delivery used.
        undone_s: by entry, when its acknowledgement was last revoked.
        refused: how often consumers refused messages of an entry; `refused_before`: the same for a
            deleted cursor of this name, whose letters may still be in transit.
        filters: requested filters, oldest first.
        dropped: chunks that a consumer's client acknowledged because they form no message.
        kept_back: chunks that it gave back because the rest of their message did not arrive.
        passed: entries that the dispatcher reports as acknowledged without delivery.
        lettered: entries in the dead letter topic; of large messages, with the chunk.
        remembers_keys: its cursor records keys with a dead-lettered message.
        first_of_key: by key, the last message delivered for the first time, its token, and when.
        start: the mark-delete position of the new cursor; None if nothing was acknowledged, or
            it was moved back since.
        floor: the first delivery after the last move; older ones are ignored.
        holds: keys are held after a dead letter.
        delays_hold: a delayed message holds its key.
        held: by key, the letter that holds it, and the first delivery that must respect this.
        kind, is_ordered, redeliveries_max: its behaviour; is_ordered: keys are delivered in order.
        epoch: of its lease; `is_taken_now`: the last change raised it.
        spent_epoch: the last epoch of a deleted cursor of this name.
        taken_epochs: epochs under which instances took it.
        is_made: it has a cursor; `deletions`: deletions started and not observed yet.
        dead_letter_topic: the topic of its letters; empty for the default.
        returns: messages on their way back.
        redrives: it has had redrives; `is_redriving`: one of many runs.
        redriven: letters that came back, by their topic and position, and replayed messages, by the
            number of the replay and their position.
        made: by redrive, how many of its messages came back.
        lettered_before: messages dead-lettered before they came back.
        mended: letters that have a mended copy, by their topic and position.
        through_before: of each message on its way, the cumulative acknowledgements before it.
    """

    topic: str
    name: str
    kind: str = ""
    is_ordered: bool = False
    redeliveries_max: int | None = None
    letters_tail: bool = False
    holds: bool = False
    delays_hold: bool = False
    acknowledged: set[Position] = field(default_factory=set)
    parts: dict[Position, int] = field(default_factory=dict)
    waiting: dict[Position, None] = field(default_factory=dict)
    asked: dict[Place, set[Token]] = field(default_factory=dict)
    through: dict[Place, set[Token]] = field(default_factory=dict)
    done: dict[Place, Token] = field(default_factory=dict)
    undone_s: dict[Position, float] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    refused: Counter[Position] = field(default_factory=Counter)
    refused_before: Counter[Position] = field(default_factory=Counter)
    filters: list[FilterSet] = field(default_factory=list)
    dropped: set[Position] = field(default_factory=set)
    kept_back: set[Position] = field(default_factory=set)
    passed: dict[Position, str] = field(default_factory=dict)
    lettered: set[tuple[Position, int]] = field(default_factory=set)
    remembers_keys: bool = False
    first_of_key: dict[object, tuple[Place, Token, float]] = field(default_factory=dict)
    delivered: set[Place] = field(default_factory=set)
    floor: Token = (0, 0)
    start: Position | None = None
    held: dict[object, tuple[Position, Token]] = field(default_factory=dict)
    epoch: int = 0
    is_taken_now: bool = False
    spent_epoch: int = 0
    taken_epochs: set[int] = field(default_factory=set)
    is_made: bool = False
    deletions: int = 0
    dead_letter_topic: str = ""
    returns: dict[Position, Return] = field(default_factory=dict)
    redrives: bool = False
    is_redriving: bool = False
    redriven: set[tuple[str, Position]] = field(default_factory=set)
    made: Counter[int] = field(default_factory=Counter)
    lettered_before: set[Position] = field(default_factory=set)
    mended: set[tuple[str, Position]] = field(default_factory=set)
    through_before: dict[Position, dict[Place, set[Token]]] = field(default_factory=dict)

    def made_again(self) -> "Subscription":
        """The state after a deletion of the cursor, which keeps the options of its consumers."""
        return Subscription(
            self.topic,
            self.name,
            self.kind,
            self.is_ordered,
            self.redeliveries_max,
            self.letters_tail,
            self.holds,
            self.delays_hold,
            floor=(max(self.epoch, self.spent_epoch) + 1, 0),
            spent_epoch=max(self.epoch, self.spent_epoch),
            taken_epochs=self.taken_epochs,
            deletions=self.deletions - 1,
            refused_before=self.refused,
            dead_letter_topic=self.dead_letter_topic,
        )


class Seen:
    """The record of a history.

    Args:
        now_s: returns the virtual time.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.sent: dict[int, Sent] = {}
        self.logs: dict[str, Log] = {}
        self.subscriptions: dict[tuple[str, str], Subscription] = {}
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.at_violation: Callable[[], None] = lambda: None
        self.tail: deque[str] = deque(maxlen=TAIL_MAX)
        self.events = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def note(self, what: str) -> None:
        """Record an event."""
        line = f"{self.now_s():10.4f} {what}"
        self.events += 1
        self._digest.update(line.encode())
        self.tail.append(line)

    @property
    def digest(self) -> str:
        """A hash of all events."""
        return self._digest.hexdigest()

    def violate(self, kind: str, what: str) -> None:
        """Record a violation."""
        text = f"{kind}: {what}"
        self.note(f"VIOLATION {text}")
        self.violations.append(text)
        self.at_violation()

    def log(self, topic: TopicName | str) -> Log:
        """A topic's log, made on first use."""
        return self.logs.setdefault(str(topic), Log())

    def subscription(self, topic: TopicName | str, name: str) -> Subscription:
        """A subscription, made on first use."""
        key = (str(topic), name)
        found = self.subscriptions.get(key)
        if found is None:
            found = self.subscriptions[key] = Subscription(*key)
            found.waiting = dict.fromkeys(self.log(topic).at)
        return found

    def is_forsaken(self, topic: str, position: Position) -> bool:
        """True for a chunk of a dead letter that will never be complete: the next chunk of the
        original no longer waits in its subscription, which was moved or deleted, or was trimmed
        or deleted with its topic. Consumers keep such chunks until they expire."""
        log = self.log(topic)
        entry = log.at[position]
        if entry.origin is None or entry.chunk is None or log.is_whole(entry):
            return False
        origin = entry.origin
        before = self.log(origin.topic)
        original = before.at.get(origin.position)
        if original is None or original.chunk is None:
            return before.is_trimmed(origin.position)
        sent = len(log.attempts[entry.producer, entry.chunk.uuid])
        rest = before.attempts[original.producer, original.chunk.uuid][sent:]
        if not rest:
            return self.is_forsaken(origin.topic, origin.position)
        waiting = self.subscription(origin.topic, origin.subscription).waiting
        return rest[0] not in waiting or before.is_trimmed(rest[0])
