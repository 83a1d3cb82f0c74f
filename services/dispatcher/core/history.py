"""What became of a subscription's messages: its latest events, within a budget in bytes.

    deliveries, failures, acknowledgements, ... ──▶ record ──▶ newest ... oldest ──▶ forgotten
                                                                  ▲
                                                    look-up ──────┘ newest first

An event happens to many entries at once: a response to a consumer, or one write of
acknowledgements. So a record is one value for all of them, and costs a message a few bytes:

    time | what | ledger | lowest entry | highest entry | details | entries

`entries` is empty if the event happened to all from the lowest to the highest; else it lists them,
and for acknowledgements their runs. All subscriptions of an instance share the budget, and the
oldest record of all is forgotten first.

A record of an acknowledgement names no consumer: only the one that has the delivery can
acknowledge it, so it is the consumer of the latest delivery before.
docs/decisions/histories-are-records-of-runs.md explains the choices.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from struct import Struct
from typing import Any, Final, NamedTuple

from seqgate.services.dispatcher.core.positions import Run
from seqgate.types import Position, TopicName

_HEAD: Final = Struct("<QBQQQH")
"""Time in ms, what, ledger id, lowest and highest entry id, and the length of the details."""

_EVERYWHERE: Final = 2**64 - 1

OVERHEAD_BYTES: Final = 56
"""What a record takes in memory beside its bytes: their object, and two places in queues."""

DETAILS_BYTES_MAX: Final = 4_000
"""The longest details of a record, in bytes."""

_SEPARATOR: Final = "\0"


class What(IntEnum):
    """What happened; dispatcher.proto describes each, under the same numbers."""

    ACCEPTED = 1
    REJECTED = 2
    RESCHEDULED = 3
    FILTER_FAILED = 4
    DELIVERED = 5
    FAILED = 6
    ACKNOWLEDGED = 7
    PARTLY_ACKNOWLEDGED = 8
    DEAD_LETTERED = 9
    PASSED = 10
    REDRIVEN = 11
    RESET = 12
    TAKEN = 13
    DISCARDED = 14
    MENDED = 15


DETAILS: Final[Mapping[What, tuple[str, ...]]] = {
    What.ACCEPTED: ("text",),
    What.REJECTED: ("filter", "filter_version"),
    What.RESCHEDULED: ("filter", "filter_version", "delay_ms"),
    What.FILTER_FAILED: ("filter", "filter_version", "text"),
    What.DELIVERED: ("consumer",),
    What.FAILED: ("failure", "attempts", "consumer", "text"),
    What.ACKNOWLEDGED: (),
    What.PARTLY_ACKNOWLEDGED: ("messages",),
    What.DEAD_LETTERED: ("number", "attempts", "target", "text"),
    What.PASSED: ("text",),
    What.REDRIVEN: ("number",),
    What.RESET: (),
    What.TAKEN: ("number", "target"),
    What.DISCARDED: ("number", "caller", "text"),
    What.MENDED: ("number", "caller", "text"),
}
"""The names of an event's details, in their order in a record. The last may be left out of it, and
alone may contain any character."""


class Event(NamedTuple):
    """An event of one entry's life; `details` are in the order of DETAILS."""

    what: What
    at_ms: int
    details: tuple[str, ...] = ()

    @property
    def named(self) -> dict[str, str]:
        """The details by name."""
        return dict(zip(DETAILS[self.what], self.details, strict=False))


def encoded(
    what: What,
    at_ms: int,
    ledger_id: int,
    lowest: int,
    highest: int,
    details: Sequence[str] = (),
    entries: Iterable[int] = (),
) -> bytes:
    text = _SEPARATOR.join(details).encode()[:DETAILS_BYTES_MAX]
    head = _HEAD.pack(at_ms, what, ledger_id, lowest, highest, len(text))
    return head + text + array("Q", entries).tobytes()


def records_of(
    what: What, at_ms: int, positions: Sequence[Position], details: Sequence[str] = ()
) -> list[bytes]:
    """The records of an event of different entries: one for each ledger, so usually one."""
    left: Sequence[Position] = positions
    found = []
    while left:
        ledger_id = left[0][0]
        ids = [entry_id for each, entry_id in left if each == ledger_id]
        lowest, highest = min(ids), max(ids)
        is_run = highest - lowest + 1 == len(ids)
        entries = () if is_run else ids
        found.append(encoded(what, at_ms, ledger_id, lowest, highest, details, entries))
        left = () if len(ids) == len(left) else [each for each in left if each[0] != ledger_id]
    return found


def records_of_runs(at_ms: int, runs: Sequence[Run]) -> list[bytes]:
    """The records of acknowledgements, which are runs in the order of the log."""
    found = []
    start = 0
    for end in range(1, len(runs) + 1):
        ledger_id = runs[start].first.ledger_id
        if end < len(runs) and runs[end].first.ledger_id == ledger_id:
            continue
        some, start = runs[start:end], end
        lowest, highest = some[0].first.entry_id, some[-1].last_entry_id
        entries = () if len(some) == 1 else (i for (_, a), b in some for i in (a, b))
        found.append(encoded(What.ACKNOWLEDGED, at_ms, ledger_id, lowest, highest, (), entries))
    return found


class Decoded(NamedTuple):
    """A record in parts. `entries` are ids, and runs of them: the first and the last id."""

    event: Event
    ledger_id: int
    entries: list[int | list[int]]


def decoded(record: bytes) -> Decoded:
    _, what, ledger_id, lowest, highest, length = _HEAD.unpack_from(record)
    ids = _entries(record, length)
    entries: list[Any] = ids.tolist()
    if not entries:
        entries = [lowest if lowest == highest else [lowest, highest]]
    elif what == What.ACKNOWLEDGED:
        entries = list(map(list, zip(entries[::2], entries[1::2], strict=True)))
    return Decoded(_event(record), ledger_id, entries)


def _event(record: bytes) -> Event:
    at_ms, what, *_, length = _HEAD.unpack_from(record)
    text = record[_HEAD.size : _HEAD.size + length].decode(errors="replace")
    more = len(DETAILS[What(what)]) - 1
    return Event(What(what), at_ms, tuple(text.split(_SEPARATOR, more)) if text else ())


def _entries(record: bytes, length: int) -> "array[int]":
    found = array("Q")
    found.frombytes(record[_HEAD.size + length :])
    return found


def find(records: Iterable[bytes], position: Position) -> list[Event]:
    """The events of an entry, in the order of the records."""
    ledger_id, entry_id = position
    found = []
    for record in records:
        _, what, of_ledger, lowest, highest, length = _HEAD.unpack_from(record)
        if what == What.RESET:
            if (of_ledger, lowest) < position:
                found.append(_event(record))
        elif what == What.TAKEN or (
            of_ledger == ledger_id
            and lowest <= entry_id <= highest
            and _has(record, what, entry_id, length)
        ):
            found.append(_event(record))
    return found


def _has(record: bytes, what: int, entry_id: int, length: int) -> bool:
    """Whether an entry between a record's lowest and highest is in it."""
    ids = _entries(record, length)
    if not ids:
        return True
    if what != What.ACKNOWLEDGED:
        return entry_id in ids
    return any(first <= entry_id <= last for first, last in zip(ids[::2], ids[1::2], strict=True))


def time_of(record: bytes) -> int:
    at_ms: int = _HEAD.unpack_from(record)[0]
    return at_ms


def bounds(record: bytes) -> tuple[Position, Position]:
    """The first and the last entry that a record may be about."""
    _, what, ledger_id, lowest, highest, _ = _HEAD.unpack_from(record)
    if what in (What.RESET, What.TAKEN):
        return Position(0, 0), Position(_EVERYWHERE, _EVERYWHERE)
    return Position(ledger_id, lowest), Position(ledger_id, highest)


class History:
    """The events of one subscription.

    Attributes:
        since_ms: all events since then are known; None: the instance never had the subscription.
        audit: takes each record, too, for the audit topic; None: there is none.
    """

    __slots__ = ("_all", "_records", "audit", "since_ms")

    def __init__(self, everything: "Histories") -> None:
        self.since_ms: int | None = None
        self.audit: Callable[[bytes], None] | None = None
        self._all = everything
        self._records: deque[bytes] = deque()

    def begin(self, at_ms: int, epoch: int, owner: str) -> None:
        """The instance took the subscription. What happened while it did not have it is unknown."""
        self.since_ms = at_ms
        self._put(encoded(What.TAKEN, at_ms, 0, 0, 0, (str(epoch), owner)))

    def record(self, what: What, at_ms: int, positions: Sequence[Position], *details: str) -> None:
        """Record an event of these entries, which are different ones."""
        for each in records_of(what, at_ms, positions, details):
            self._put(each)

    def record_acknowledged(self, at_ms: int, runs: Sequence[Run]) -> None:
        for each in records_of_runs(at_ms, runs):
            self._put(each)

    def record_reset(self, at_ms: int, mark_delete: Position | None) -> None:
        ledger_id, entry_id = mark_delete or (0, 0)
        self._put(encoded(What.RESET, at_ms, ledger_id, entry_id, entry_id))

    @property
    def records(self) -> list[bytes]:
        """All records, the oldest first."""
        return list(self._records)

    def _put(self, record: bytes) -> None:
        self._records.append(record)
        if self.audit is not None:
            self.audit(record)
        self._all.added(self, record)

    def forget_oldest(self) -> int:
        """Forget the oldest record. Returns its size in bytes."""
        record = self._records.popleft()
        self.since_ms = max(self.since_ms or 0, time_of(record))
        return len(record) + OVERHEAD_BYTES

    def __len__(self) -> int:
        return len(self._records)


class Histories:
    """The histories of all subscriptions of an instance.

    Attributes:
        bytes_max: the budget; 0: nothing is kept.
        size_bytes: what all records take.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.size_bytes = 0
        self._order: deque[History] = deque()  # of each record, the oldest first
        self._of: dict[tuple[TopicName, str], History] = {}

    def of(self, topic: TopicName, name: str) -> History:
        """The history of a subscription, which may go back to before it was released."""
        if len(self._of) > len(self._order):
            self._of = {key: each for key, each in self._of.items() if len(each)}
        found = self._of.get((topic, name))
        if found is None:
            found = self._of[topic, name] = History(self)
        return found

    def end(self, topic: TopicName, name: str) -> None:
        """Forget the history of a subscription that is deleted."""
        self._of.pop((topic, name), None)

    def added(self, history: History, record: bytes) -> None:
        """Count a record, and forget the oldest ones beyond the budget."""
        self._order.append(history)
        self.size_bytes += len(record) + OVERHEAD_BYTES
        while self.size_bytes > self.bytes_max:
            self.size_bytes -= self._order.popleft().forget_oldest()
