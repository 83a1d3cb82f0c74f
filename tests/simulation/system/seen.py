"""All that happened in a history, as somebody saw it who sees everything: what was sent and
answered, what the stores hold, what consumers were given and asked for.

Nothing here judges; checkers.py does. Whatever is noted goes into a digest, so that two runs of one
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
    """What is before was trimmed."""
    deleted_ledger: int = 0
    """Up to this ledger everything was deleted with the topic that had this name before."""
    marks: dict[str, int] = field(default_factory=dict)
    """By producer, the id of the entry that came last: the fold."""
    stored: dict[str, set[int]] = field(default_factory=dict)
    """By producer, the ids that count as stored."""
    chunks: set[tuple[str, str, int]] = field(default_factory=set)
    attempts: dict[tuple[str, str], list[Position]] = field(default_factory=dict)
    """By producer and uuid, where the chunks are."""
    last: dict[str, Appended] = field(default_factory=dict)
    """By producer, its newest entry."""

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
        return not self._is_whole(entry) and self.last[entry.producer].position != last

    def _is_whole(self, entry: "Appended") -> bool:
        assert entry.chunk is not None
        found = self.attempts[entry.producer, entry.chunk.uuid]
        return len(found) == entry.chunk.num_chunks


Place = tuple[Position, int]
"""A message's entry, and its index in the batch, or 0."""


@dataclass(slots=True)
class Move:
    """Somebody asked to move a subscription; None: it is not answered yet."""

    asked_s: float
    answered_s: float | None = None


@dataclass(slots=True)
class Subscription:
    """What is known of a subscription.

    Attributes:
        acknowledged: which entries its cursor counts as acknowledged, as the store has it.
        parts: of batches that are acknowledged in part, the messages.
        asked: what a consumer asked to acknowledge.
        through: how far somebody asked to acknowledge everything.
        done: what was answered to be acknowledged, and by which delivery.
        expressions: the tags that a filter rejected, ever.
        dropped: chunks that a consumer's client let go.
        lettered: what is in the dead letter topic; of a large message, by chunk.
        is_ordered: whether keys come in order.
    """

    topic: str
    name: str
    kind: str = ""
    exists: bool = True
    created_at: Position | None = None
    acknowledged: set[Position] = field(default_factory=set)
    parts: dict[Position, int] = field(default_factory=dict)
    waiting: dict[Position, None] = field(default_factory=dict)
    """Entries that are not acknowledged, in the order of the log."""
    asked: set[Place] = field(default_factory=set)
    through: Place | None = None
    done: dict[Place, tuple[int, int]] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    rejected_tags: set[str] = field(default_factory=set)
    dropped: set[Position] = field(default_factory=set)
    lettered: set[tuple[Position, int]] = field(default_factory=set)
    first_of_key: dict[object, tuple[Place, tuple[int, int]]] = field(default_factory=dict)
    """By key, the last message that was delivered for the first time, and its token."""
    delivered: set[Place] = field(default_factory=set)
    holds: bool = False
    """Whether a key is held after a dead letter."""
    held: dict[object, tuple[Position, float]] = field(default_factory=dict)
    """By key, which letter holds it, and since when."""
    is_ordered: bool = False


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
