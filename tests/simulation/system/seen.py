"""All that happened in a history, as somebody saw it who sees everything: what was sent and
answered, what the stores hold, what consumers were given and asked for.

Nothing here judges; checkers do. Whatever is noted goes into a digest, so that two runs of one
seed can be compared, and its end into a tail that is shown when something is wrong.
"""

import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from seqgate.types import Chunk, Position, TopicName

TAIL_MAX: Final = 400
"""How many of the last events are kept."""

NUMBER: Final = "n"
"""The property that has a message's number."""

_MARK: Final = re.compile(rb"<(\d+)>")


class Violation(Exception):
    """Something that must not be."""


@dataclass(slots=True)
class Sent:
    """A message of the workload, and what its producer was told of it."""

    number: int
    topic: str
    producer: str
    sequence_id: int | None
    key: str | None
    tag: str
    delay_s: float
    size_bytes: int
    is_keyed: bool = True
    """Whether its entry has its key: one of a batch that was not made by key has none."""
    asked_s: float | None = None
    """When its producer was asked to send it for the first time."""
    outcome: str = ""
    """Empty: nothing yet; "stored", "duplicate", or the reason of a failure."""

    @property
    def payload(self) -> bytes:
        """Its bytes: its number where they begin, and what fills them up."""
        mark = b"<%d>" % self.number
        return mark + b"." * (self.size_bytes - len(mark))


def numbers_in(payload: bytes) -> tuple[int, ...]:
    """The numbers of the messages that begin in a payload."""
    return tuple(int(each) for each in _MARK.findall(payload))


class Origin(NamedTuple):
    """Where a dead letter comes from."""

    topic: str
    subscription: str
    position: Position


@dataclass(slots=True)
class Appended:
    """An entry, when it was appended."""

    position: Position
    producer: str
    ids: Sequence[int]
    numbers: tuple[int, ...]
    chunk: Chunk | None
    append_ms: int
    at_s: float
    origin: Origin | None = None
    generation: int = 0
    """Through how many dead letter topics it went."""
    payload_bytes: int = 0

    @property
    def highest(self) -> int:
        """The highest of its ids."""
        return self.ids[-1]


@dataclass(slots=True)
class Log:
    """What a topic's log held, trimmed or not."""

    entries: list[Appended] = field(default_factory=list)
    at: dict[Position, Appended] = field(default_factory=dict)
    kept_from: Position | None = None
    """What is before was trimmed, or may have been, by a trim that was cut off."""
    deleted_ledger: int = 0
    """Up to this ledger everything was deleted with the topic that had this name before."""
    incarnation: int = 0
    """For how many times there is a topic of this name; 0: not known."""
    deletions: int = 0
    """How many were begun, and not noticed yet."""
    marks: dict[str, int] = field(default_factory=dict)
    """By producer, the id of the entry that came last: the fold."""
    stored: dict[str, set[int]] = field(default_factory=dict)
    """By producer, the ids that count as stored."""
    chunks: set[tuple[str, str, int]] = field(default_factory=set)
    attempts: dict[tuple[str, str], list[Position]] = field(default_factory=dict)
    """By producer and uuid, where the chunks are."""
    last: dict[str, Appended] = field(default_factory=dict)
    """By producer, its newest entry."""
    trimmed: int = 0
    """How many entries were trimmed, and `trimmed_marks` the fold of these."""
    trimmed_marks: dict[str, int] = field(default_factory=dict)
    trimmed_chunks: set[str] = field(default_factory=set)
    """Producers of large messages of which something was trimmed."""
    messages_max: int = 1
    """How many messages the largest batch has."""
    entry_bytes_max: int = 0
    """How large the largest entry is, about."""

    def is_trimmed(self, position: Position) -> bool:
        """Whether an entry is gone."""
        if position.ledger_id <= self.deleted_ledger:
            return True
        return self.kept_from is not None and position < self.kept_from

    def is_beheaded(self, position: Position) -> bool:
        """Whether an entry is a chunk of a message that cannot be whole, since the first is
        trimmed."""
        entry = self.at[position]
        if entry.chunk is None:
            return False
        return self.is_trimmed(self.attempts[entry.producer, entry.chunk.uuid][0])

    def is_aborted(self, position: Position) -> bool:
        """Whether an entry is a chunk of an attempt that ended unfinished: something else of its
        producer came after it."""
        entry = self.at[position]
        if entry.chunk is None:
            return False
        last = self.attempts[entry.producer, entry.chunk.uuid][-1]
        return not self.is_whole(entry) and self.last[entry.producer].position != last

    def is_whole(self, entry: "Appended") -> bool:
        """Whether all chunks of a chunk's message are there."""
        assert entry.chunk is not None
        found = self.attempts[entry.producer, entry.chunk.uuid]
        return len(found) == entry.chunk.num_chunks


Place = tuple[Position, int]
"""A message's entry, and its index in the batch, or 0."""


Token = tuple[int, int]
"""What names a delivery: the epoch of the subscription's lease, and a number."""


@dataclass(slots=True)
class Move:
    """Somebody asked to move a subscription.

    Attributes:
        start: what is delivered first then; None: the first entry there is.
        is_import: somebody else made the cursor, and it may be taken back to the end of the log.
        taken_s: when an instance took it then; None: none has.
        answered_s: when it was answered that it is moved; None: it is not yet, or failed. Then it
            may be moved at any time.
    """

    asked_s: float
    start: Position | None
    is_import: bool = False
    taken_s: float | None = None
    answered_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it may still happen."""
        return self.answered_s is None


@dataclass(slots=True)
class FilterSet:
    """Somebody asked to filter a subscription: the tags of what may be rejected then."""

    asked_s: float
    rejected: frozenset[str]
    answered_s: float | None = None


@dataclass(slots=True)
class Subscription:
    """What is known of a subscription, since its cursor was made.

    Attributes:
        acknowledged: which entries its cursor counts as acknowledged, as the store has it.
        parts: of batches that are acknowledged in part, the messages (bits).
        waiting: entries that are not acknowledged, in the order of the log.
        asked: what consumers asked to acknowledge, by which deliveries, unless these were stale.
        through: how far they asked to acknowledge everything, and by which deliveries.
        done: what was answered to be acknowledged, and by which delivery.
        undone_s: when an acknowledgement was taken back the last time, by entry.
        refused: how often consumers refused messages of an entry; `refused_before`: of the cursor
            that had this name before, whose letters may still be on their way.
        filters: what it was filtered by, in the order in which that was asked for.
        dropped: chunks that a consumer's client acknowledged since they make no message.
        kept_back: chunks that it gave back since the rest of their message did not come.
        passed: entries that the dispatcher says it acknowledged though nobody received them.
        lettered: what is in the dead letter topic; of a large message, by chunk.
        remembers_keys: whether its cursor has keys of which a message was dead-lettered.
        first_of_key: by key, the last message that was delivered for the first time, its token.
        start: what its cursor counted as acknowledged when it was made; None: nothing, or it was
            moved back since.
        floor: only deliveries from this one on were made since it was moved the last time.
        holds: whether a key is held after a dead letter.
        delays_hold: whether a message that is to be delivered later holds its key.
        held: by key, which letter holds it, and from which delivery on.
        kind, is_ordered, redeliveries_max: how it behaves; whether keys come in order.
        epoch: of its lease; `is_taken_now`: whether the last change made it.
        spent_epoch: the last one of the cursor that had this name before.
        taken_epochs: those under which instances took it.
        is_made: whether it has a cursor; `deletions`: how many were begun and not noticed yet.
        dead_letter_topic: where its letters go; empty: where they go by default.
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
    first_of_key: dict[object, tuple[Place, Token]] = field(default_factory=dict)
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

    def made_again(self) -> "Subscription":
        """What is known when its cursor is deleted: how consumers want it to behave."""
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
    """See the module. `now_s` tells the virtual time."""

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
        """Note an event."""
        line = f"{self.now_s():10.4f} {what}"
        self.events += 1
        self._digest.update(line.encode())
        self.tail.append(line)

    @property
    def digest(self) -> str:
        """Of all that was noted."""
        return self._digest.hexdigest()

    def violate(self, kind: str, what: str) -> None:
        """Something must not be."""
        text = f"{kind}: {what}"
        self.note(f"VIOLATION {text}")
        self.violations.append(text)
        self.at_violation()

    def log(self, topic: TopicName | str) -> Log:
        """A topic's log."""
        return self.logs.setdefault(str(topic), Log())

    def subscription(self, topic: TopicName | str, name: str) -> Subscription:
        """A subscription."""
        key = (str(topic), name)
        found = self.subscriptions.get(key)
        if found is None:
            found = self.subscriptions[key] = Subscription(*key)
            found.waiting = dict.fromkeys(self.log(topic).at)
        return found

    def is_forsaken(self, topic: str, position: Position) -> bool:
        """Whether an entry is a chunk of a dead letter that stays unfinished: no chunk of the
        original is left that its subscription would send after it, since somebody deleted or moved
        that, or the topic. Consumers have such chunks until their time is up."""
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
