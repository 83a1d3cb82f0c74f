"""The state of a key while it has work: its lane, and the slots, queues and consumers around it.

    Queue ──▶ Slot ──▶ Lane: returned, waiting ──▶ Flight ──▶ Consumer
    one for     a hash     a true key                a delivery that is
    each owner  slot                                 not settled

Slots place, keys order: a slot decides whose queue a key is in, and everything about order belongs
to its lane. A key in flight at a consumer that no longer owns its slot is draining; that follows
from these two facts and is stored nowhere, so it cannot be forgotten.

Lanes and consumers are checked when a timer is due. Timers are never cancelled: a due timer counts
only if its lane or consumer still awaits that time. Obsolete timers are swept once there are more
than twice as many timers as may be needed, plus TIMERS_SPARE.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, NamedTuple

from seqgate.services.dispatcher.core.positions import Parked, Runs
from seqgate.types import Position


class Reason(Enum):
    """Why a key, or the next entry of it, is not delivered."""

    READY = auto()
    """Not withheld: it waits for its turn."""
    DRAINING = auto()
    """Its earlier messages are unacknowledged at a consumer that no longer owns it."""
    IN_FLIGHT_LIMIT = auto()
    """It has reached the limit of messages in flight."""
    RETRY_DELAY = auto()
    """A message was negatively acknowledged, and its retry delay has not passed."""
    RETRY = auto()
    """A message that was negatively acknowledged is in flight again, and comes first."""
    RECORDING = auto()
    """A failed delivery is being recorded."""
    DELAYED = auto()
    """A delayed message holds its key."""
    DEAD_LETTERING = auto()
    """A message is on its way to the dead letter topic."""
    HELD = auto()
    """A message of the key was dead-lettered, and the key is held until it is released."""
    JOINING = auto()
    """Its owner joined, and messages read before are unacknowledged (the classic rule)."""
    SUBSCRIPTION_LIMIT = auto()
    """The subscription has reached the limit of unacknowledged messages."""
    RETURNED_LIMIT = auto()
    """Its owner has reached the limit of entries to redeliver, which come first."""
    FILTERING = auto()
    """A message has no verdict yet: filters were not asked, or did not answer."""
    FILTER_FAILED = auto()
    """The filters failed at a message, which waits until they are changed or retried."""
    RESCHEDULED = auto()
    """The filters rescheduled a message, and it holds its key."""


class Chunk(NamedTuple):
    """A part of a large message; `number` from 0, None: unknown, assumed to be in its place."""

    attempt: str
    is_last: bool
    number: int | None = None


@dataclass(slots=True, eq=False)
class Large:
    """A large message's chunks in flight at a consumer; `has_last`: the last is one of them."""

    lane: "Lane"
    in_flight: int = 0
    has_last: bool = False

    @property
    def is_unfinished(self) -> bool:
        return not self.has_last


BEYOND_ROOM_MAX: Final = 10_000
"""Limit of new entries parked for an owner beyond `parked_max` while it takes more."""


@dataclass(slots=True, eq=False)
class Queue:
    """The slots of one owner, or the slots without an owner.

    Attributes:
        takers: the consumers that get its entries: its owner, or all of a pool.
        slots, lagging: slots with something to deliver, in turn, and slots with a lag.
        parked, returned: the waiting entries in all its slots, and those of them delivered before.
        is_choked: whether only returned entries are delivered, from their limit down to half of it.
    """

    parked_max: int
    takers: "list[Consumer]" = field(default_factory=list)
    slots: "deque[Slot]" = field(default_factory=deque)
    lagging: "set[Slot]" = field(default_factory=set)
    parked: int = 0
    returned: int = 0
    is_choked: bool = False

    @property
    def is_full(self) -> bool:
        return self.parked >= self.parked_max

    @property
    def is_half_empty(self) -> bool:
        """Whether there is room worth a scan."""
        return self.parked <= self.parked_max // 2

    @property
    def takes_more(self) -> bool:
        """Whether a taker has permits, and there is room for new entries. Those of a key may wait
        for something else, such as failing filters; BEYOND_ROOM_MAX bounds them."""
        if self.parked >= self.parked_max + BEYOND_ROOM_MAX:
            return False
        return any(consumer.has_room for consumer in self.takers)


@dataclass(slots=True, eq=False)
class Slot:
    """A hash slot with work.

    Attributes:
        ready, last: the first and the last of the lanes in turn, linked by `next_ready`.
        lag: where its entries that were read and not kept begin; they are scanned given room.
    """

    number: int
    queue: Queue
    lanes: "dict[Lane, None]" = field(default_factory=dict)
    ready: "Lane | None" = None
    last: "Lane | None" = None
    queued: bool = False
    parked: int = 0
    returned: int = 0
    lag: Position | None = None

    def line_up(self, lane: "Lane") -> None:
        """Give a lane a turn after all others."""
        if self.last is None:
            self.ready = lane
        else:
            self.last.next_ready = lane
        self.last = lane
        lane.is_ready = True

    def take_turn(self) -> "Lane | None":
        """Take the lane whose turn it is; None: none is ready."""
        lane = self.ready
        if lane is not None:
            self.ready, lane.next_ready = lane.next_ready, None
            if self.ready is None:
                self.last = None
            lane.is_ready = False
        return lane

    def skip_idle(self) -> "list[Lane]":
        """Remove the turns of lanes without work. Returns the lanes."""
        line = []
        while (lane := self.take_turn()) is not None:
            line.append(lane)
        for lane in line:
            if not lane.is_idle:
                self.line_up(lane)
        return [lane for lane in line if lane.is_idle]

    def is_behind(self, position: Position) -> bool:
        """Whether an entry is at or after the lag."""
        return self.lag is not None and position >= self.lag


@dataclass(slots=True, eq=False)
class Returned:
    """An entry to be redelivered."""

    position: Position
    messages: int
    not_before_ms: int = 0

    def __lt__(self, other: "Returned") -> bool:
        return self.position < other.position


@dataclass(slots=True, eq=False)
class Rare:
    """State that few keys have: delayed messages, and chunks.

    Attributes:
        delays: the times of delayed entries that hold the key.
        later: the times of delayed entries that hold nothing; they do not count as waiting.
        chunks: the chunks among waiting entries and those in flight.
        rests: how many of these wait, by attempt.
        kept_back, kept_since_ms: the kept-back chunks, and since when, by attempt.
    """

    delays: dict[Position, int] = field(default_factory=dict)
    later: dict[Position, int] = field(default_factory=dict)
    chunks: dict[Position, Chunk] = field(default_factory=dict)
    rests: dict[str, int] = field(default_factory=dict)
    kept_back: dict[str, list[Position]] = field(default_factory=dict)
    kept_since_ms: dict[str, int] = field(default_factory=dict)

    def forget(self, position: Position) -> None:
        """Forget an entry that no longer waits."""
        self.chunks.pop(position, None)
        self.delays.pop(position, None)

    def count_rest(self, position: Position, entries: int) -> None:
        """Count an entry that begins (1) or ceases (-1) to wait, if it is a chunk."""
        chunk = self.chunks.get(position)
        if chunk is None:
            return
        rest = self.rests.get(chunk.attempt, 0) + entries
        if rest:
            self.rests[chunk.attempt] = rest
        else:
            del self.rests[chunk.attempt]


@dataclass(slots=True, eq=False)
class Undecided:
    """Entries of a key that wait until filters accept them.

    Attributes:
        states: UNJUDGED, FILTER_FAILED, or, of a rescheduled entry, its time; never empty.
        times: how often an entry was rescheduled in a row.
        failed_ms: since when entries at which filters failed wait.
        aside: where keys are not ordered, undecided entries whose turn had come: they hold nothing.
    """

    states: dict[Position, int] = field(default_factory=dict)
    times: dict[Position, int] = field(default_factory=dict)
    failed_ms: dict[Position, int] = field(default_factory=dict)
    aside: "dict[Position, Parked | Returned]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Lane:
    """A key with work. Rarely used fields are None until they are needed.

    Attributes:
        holder: the consumer that has all its flights; None: it has none.
        returned: a heap, in the order of the log, of entries delivered before.
        waiting: entries not delivered yet; where keys are ordered, all after those delivered.
        unresolved: failed entries not acknowledged since, in order; later ones are withheld.
        recording: how many of its failed deliveries are being recorded.
        last_reason: the latest reason to withhold it since its last delivery, at `since_ms`.
        dead: its entry on the way to the dead letter topic.
        lag: as a slot's, for this key alone.
        is_released: whether it was released while it had a `dead` entry.
    """

    key: bytes
    slot: Slot
    reason: Reason = Reason.READY
    last_reason: Reason = Reason.READY
    since_ms: int = 0
    is_ready: bool = False
    next_ready: "Lane | None" = None
    holder: int | None = None
    draining_since_ms: int | None = None
    flights: "dict[Position, Flight]" = field(default_factory=dict)
    returned: list[Returned] | None = None
    waiting: Runs | None = None
    unresolved: list[Position] | None = None
    recording: int = 0
    dead: Position | None = None
    lag: Position | None = None
    rare: Rare | None = None
    undecided: Undecided | None = None
    is_released: bool = False
    timer_ms: int | None = None

    @property
    def parked(self) -> int:
        waiting = 0 if self.waiting is None else len(self.waiting)
        returned = 0 if self.returned is None else len(self.returned)
        return waiting + returned + (0 if self.undecided is None else len(self.undecided.aside))

    @property
    def next_position(self) -> Position | None:
        """The position of `head()`; None: no entry waits."""
        head = self.head()
        return None if head is None else head.position

    def head(self, *, hurries: bool = False) -> "Parked | Returned | None":
        """The next entry in the order of the log; if it `hurries`, returned entries come first."""
        if not self.returned:
            return None if self.waiting is None else self.waiting.first()
        returned = self.returned[0]
        if self.waiting is None or hurries:
            return returned
        waiting = self.waiting.first()
        return returned if returned.position < waiting.position else waiting

    @property
    def is_idle(self) -> bool:
        """Whether the lane can be forgotten."""
        return not (
            self.flights
            or self.returned
            or self.waiting
            or self.recording
            or (self.undecided and self.undecided.aside)
            or (self.rare and (self.rare.later or self.rare.kept_back))
            or self.dead
            or self.lag
            or self.unresolved
        )

    @property
    def is_free(self) -> bool:
        """Whether nothing but deliveries in flight has to do with a key's next entry."""
        return not (
            self.waiting
            or self.returned
            or self.is_ready
            or self.reason is not Reason.READY
            or self.rare
            or self.undecided
            or self.unresolved
            or self.recording
            or self.dead
            or self.lag
        )

    def is_behind(self, position: Position) -> bool:
        """Whether an entry is at or after the key's lag."""
        return self.lag is not None and position >= self.lag

    def is_kept_back(self, position: Position) -> bool:
        kept_back = {} if self.rare is None else self.rare.kept_back
        return any(position in positions for positions in kept_back.values())

    def awaits(self, when_ms: int) -> bool:
        return self.timer_ms == when_ms

    def is_behind_unresolved(self, position: Position) -> bool:
        """Whether an earlier entry failed and comes first. A kept-back chunk does not: it comes
        with the last of its message."""
        kept = () if self.rare is None else self.rare.kept_back.values()
        for each in self.unresolved or ():
            if each >= position:
                return False
            if not any(each in some for some in kept):
                return True
        return False

    def record_unresolved(self, position: Position) -> None:
        """Withhold later entries of the key until this one is acknowledged."""
        if self.unresolved is None:
            self.unresolved = []
        if position not in self.unresolved:
            insort(self.unresolved, position)

    def is_amid_message(self, consumer: "Consumer") -> bool:
        """Whether a consumer has the first chunks of a large message whose next one waits or may
        lag: no other consumer can use it, and this one acknowledges nothing before it has all."""
        rare = self.rare
        if rare is None or not consumer.unfinished:
            return False
        may_lag = self.lag is not None or self.slot.lag is not None
        return any(
            each.lane is self and each.is_unfinished and (may_lag or attempt in rare.rests)
            for attempt, each in consumer.large.items()
        )


@dataclass(slots=True, eq=False)
class Flight:
    """An unsettled delivery.

    Attributes:
        delivery: its number, unique in the subscription.
        unacked: a bit for each message that is not durably acknowledged.
        pending: a bit for each message whose acknowledgement is not durable yet.
        deadline_ms: when it times out; None: never.
    """

    delivery: int
    consumer: int
    lane: Lane
    position: Position
    messages: int
    unacked: int
    delivered_ms: int
    deadline_ms: int | None = None
    pending: int = 0

    @property
    def is_settling(self) -> bool:
        """Whether all its messages are acknowledged, durably or not yet."""
        return not self.unacked & ~self.pending


class Gathering(NamedTuple):
    """A large message whose chunks are delivered one after the other, ahead of everything else."""

    lane: Lane
    attempt: str


@dataclass(slots=True, eq=False)
class Consumer:
    """A connected consumer.

    Attributes:
        permits: how many messages it may be sent; a batch may make it negative.
        unacked: how many messages it has not durably acknowledged.
        is_blocked: whether its deliveries pause, from the limit of `unacked` down to half of it.
        joined_at: under the classic rule, the position to which it waits for acknowledgements.
        flights: its unsettled deliveries, the next to time out at the front.
        large: the large messages of which it has chunks, by attempt.
        unfinished: how many of these lack the last chunk. While there are any, limits of
            unacknowledged messages do not apply: it could never go below them.
        gathering: the large message sent ahead of everything else, for which it had no room.
    """

    id: int
    name: str
    queue: Queue
    weight: int
    ack_timeout_ms: int
    permits: int = 0
    unacked: int = 0
    is_blocked: bool = False
    joined_at: Position | None = None
    flights: dict[int, Flight] = field(default_factory=dict)
    large: dict[str, Large] = field(default_factory=dict)
    unfinished: int = 0
    gathering: "Gathering | None" = None
    timer_ms: int | None = None

    @property
    def has_room(self) -> bool:
        """Whether it can be sent a delivery now."""
        if self.permits <= 0:
            return False
        return not self.is_blocked or self.unfinished > 0

    def awaits(self, when_ms: int) -> bool:
        return self.timer_ms == when_ms


TIMERS_SPARE: Final = 1_000
"""Number of timers tolerated beyond twice those that may be needed."""

Subject = Lane | Consumer


class _Timer(NamedTuple):
    """`number` orders the timers of one time."""

    when_ms: int
    number: int
    subject: Subject


class Timers:
    """The times at which lanes and consumers are checked: a heap."""

    def __init__(self, needed_max: Callable[[], int]) -> None:
        """`needed_max` returns the number of timers that may be needed now."""
        self._heap: list[_Timer] = []
        self._numbers = count()
        self._needed_max = needed_max

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_ms(self) -> int | None:
        return self._heap[0].when_ms if self._heap else None

    def set(self, subject: Subject, when_ms: int) -> None:
        """Check a lane or consumer at that time, in addition to its other timers."""
        self.trim()
        heappush(self._heap, _Timer(when_ms, next(self._numbers), subject))

    def trim(self) -> None:
        """Remove obsolete timers if there are many; called when fewer may be needed."""
        heap = self._heap
        if len(heap) > TIMERS_SPARE + 2 * self._needed_max():
            heap[:] = [each for each in heap if each.subject.awaits(each.when_ms)]
            heapify(heap)

    def look_at(self, subject: Subject, when_ms: int) -> None:
        """Check a lane or consumer at this time, unless its timer is earlier."""
        if subject.timer_ms is None or when_ms < subject.timer_ms:
            subject.timer_ms = when_ms
            self.set(subject, when_ms)

    def due(self, now_ms: int) -> Iterator[Subject]:
        """The lanes and consumers that are due. The caller may set timers meanwhile."""
        while self._heap and self._heap[0].when_ms <= now_ms:
            when_ms, _, subject = heappop(self._heap)
            if subject.awaits(when_ms):
                yield subject
