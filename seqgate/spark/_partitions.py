"""Divides entries among tasks, without Spark.

Within a ledger entry ids are consecutive, so topics are cut by arithmetic; small topics share a
task.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Final, NamedTuple, TypeVar

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client._subscribing import Place, start_to_wire
from seqgate.errors import MessagesTrimmedError, NotFoundError
from seqgate.message_id import ChunkMessageId, MessageId
from seqgate.spark._columns import Range, asked, trimmed_between
from seqgate.telemetry import spans
from seqgate.types import SEQUENCE_ID_MAX, Position

T = TypeVar("T")

PAGE_SIZE: Final = 10_000
"""The most topics, or ledgers of a topic, that a call returns."""

RANGES_MAX: Final = 1_000
"""The most topics that a task reads: each costs a call."""

CALLS_AT_A_TIME: Final = 8


class Bounds(NamedTuple):
    """The requested entries of a topic, both ends included."""

    start: Position = Position(0, 0)
    through: Position = Position(SEQUENCE_ID_MAX, SEQUENCE_ID_MAX)


class LedgerRange(NamedTuple):
    """Consecutive entries of one ledger, both ends included."""

    ledger_id: int
    first: int
    last: int

    @property
    def entries(self) -> int:
        return self.last + 1 - self.first


def matcher(pattern: str) -> "re.Pattern[str]":
    """The regular expression of a topic pattern: * is any text, ? any character."""
    wild = {"*": ".*", "?": "."}
    return re.compile("".join(wild.get(each) or re.escape(each) for each in pattern))


def is_pattern(text: str) -> bool:
    return "*" in text or "?" in text


def is_selected(name: str, wanted: Iterable[str]) -> bool:
    """Whether names and patterns select a topic."""
    return any(matcher(each).fullmatch(name) for each in wanted)


def list_topics(
    stub: LedgerServiceStub, wanted: Iterable[str], timeout_s: float, *, awaits: bool = False
) -> list[ledger_pb2.Topic]:
    """The topics that these names and patterns select, each once, by name. Raises NotFoundError if
    a named topic does not exist, unless the caller awaits it; a pattern may match none."""
    found: dict[str, ledger_pb2.Topic] = {}
    for text in wanted:
        if is_pattern(text):
            matches = matcher(text).fullmatch
            prefix = re.split(r"[*?]", text, maxsplit=1)[0]
            found.update(
                (topic.name, topic)
                for topic in _all_topics(stub, prefix, timeout_s)
                if matches(topic.name)
            )
        else:
            try:
                request = ledger_pb2.GetTopicRequest(topic=text)
                found[text] = asked(stub.GetTopic, request, timeout_s).topic
            except NotFoundError as error:
                if awaits:
                    continue
                raise NotFoundError(
                    f"topic {text} not found", reason=error.reason, details={"topic": text}
                ) from error
    return [found[name] for name in sorted(found)]


def _all_topics(
    stub: LedgerServiceStub, prefix: str, timeout_s: float
) -> Iterator[ledger_pb2.Topic]:
    token = ""
    while True:
        request = ledger_pb2.ListTopicsRequest(prefix=prefix, page_size=PAGE_SIZE, page_token=token)
        page = asked(stub.ListTopics, request, timeout_s)
        yield from page.topics
        token = page.next_page_token
        if not token:
            return


def ledgers_of(
    stub: LedgerServiceStub, topic: ledger_pb2.Topic, timeout_s: float
) -> list[LedgerRange]:
    """The entries of a topic's log, through `topic.last`."""
    if not topic.HasField("first"):
        return []
    first, last = position_of(topic.first), position_of(topic.last)
    if first.ledger_id == last.ledger_id:
        return [LedgerRange(first.ledger_id, first.entry_id, last.entry_id)]
    found: list[LedgerRange] = []
    token = ""
    while True:
        request = ledger_pb2.ListLedgersRequest(
            topic=topic.name, page_size=PAGE_SIZE, page_token=token
        )
        page = asked(stub.ListLedgers, request, timeout_s)
        found.extend(
            LedgerRange(each.ledger_id, each.first_entry_id, each.last_entry_id)
            for each in page.ledgers
        )
        token = page.next_page_token
        if not token:
            return list(_clipped(found, Bounds(through=last)))


def bounds_of(
    stub: LedgerServiceStub, topic: str, start: Place, to: Place, timeout_s: float
) -> Bounds | None:
    """The entries of a topic from a place to another: through the message with that id, or before
    the first one stored at that time. None: there are none. A large message is at its last chunk.
    """
    if start == "latest" or to == "earliest":
        return None
    bounds = Bounds()
    if isinstance(start, MessageId):
        bounds = bounds._replace(start=start.position)
    elif isinstance(start, datetime):
        first = position_at(stub, topic, start, timeout_s)
        if first is None:
            return None
        bounds = bounds._replace(start=first)
    if isinstance(to, MessageId):
        bounds = bounds._replace(through=to.position)
    elif isinstance(to, datetime):
        end = position_at(stub, topic, to, timeout_s)
        if end is not None:
            bounds = bounds._replace(through=just_before(end))
    return bounds


def first_entry(place: Place) -> Place:
    """A place among entries: of a large message, its first chunk."""
    return place.first_chunk if isinstance(place, ChunkMessageId) else place


def position_at(
    stub: LedgerServiceStub, topic: str, when: datetime, timeout_s: float
) -> Position | None:
    """The first entry stored at a time or later; None: there is none."""
    append_time = start_to_wire(when).time
    request = ledger_pb2.FindPositionRequest(topic=topic, append_time=append_time)
    found = asked(stub.FindPosition, request, timeout_s)
    return position_of(found.position) if found.HasField("position") else None


def check_not_trimmed(
    stub: LedgerServiceStub, topics: Sequence[ledger_pb2.Topic], bounds: Bounds, timeout_s: float
) -> None:
    """Raise MessagesTrimmedError if requested entries were trimmed. A read from the beginning
    starts at the first remaining entry, so it lacks none."""
    if bounds.start == Bounds().start:
        return
    cut = [each for each in topics if _may_be_cut(each, bounds)]

    def check(topic: ledger_pb2.Topic) -> None:
        through = position_of(topic.last)
        if topic.HasField("first"):
            through = just_before(position_of(topic.first))
        through = min(through, bounds.through)
        missed = trimmed_between(stub, topic.name, bounds.start, through, timeout_s)
        if missed is not None:
            raise trimmed(topic.name, *missed)

    for _ in for_each(check, cut):
        pass


def _may_be_cut(topic: ledger_pb2.Topic, bounds: Bounds) -> bool:
    """Whether entries may be trimmed: the log reaches `bounds.start`, and begins after it."""
    if not topic.HasField("last"):
        return False
    wanted = bounds.start <= min(position_of(topic.last), bounds.through)
    return wanted and not (topic.HasField("first") and bounds.start >= position_of(topic.first))


def trimmed(topic: str, first: Position, last: Position) -> MessagesTrimmedError:
    where = {"topic": topic, "first": "{}:{}".format(*first), "last": "{}:{}".format(*last)}
    text = "entries of {topic} were trimmed before they were read, in {first} to {last}"
    return MessagesTrimmedError(
        text.format(**where) + "; read from a later position, or set option trimmed to skip",
        details=where,
    )


def position_of(position: common_pb2.Position) -> Position:
    return Position(position.ledger_id, position.entry_id)


def ranges_of(
    topic: str, ledgers: Iterable[LedgerRange], bounds: Bounds, entries_max: int
) -> Iterator[Range]:
    """The requested entries of a topic, in ranges of at most so many entries, in order."""
    pending: list[LedgerRange] = []
    room = entries_max
    for ledger in _clipped(ledgers, bounds):
        first = ledger.first
        while first <= ledger.last:
            part = LedgerRange(ledger.ledger_id, first, min(ledger.last, first + room - 1))
            pending.append(part)
            room -= part.entries
            first = part.last + 1
            if not room:
                yield _range(topic, pending)
                pending, room = [], entries_max
    if pending:
        yield _range(topic, pending)


def _range(topic: str, parts: Sequence[LedgerRange]) -> Range:
    first, last = parts[0], parts[-1]
    after = just_before(Position(first.ledger_id, first.first))
    entries = sum(each.entries for each in parts)
    return Range(topic, after, Position(last.ledger_id, last.last), entries)


def just_before(position: Position) -> Position:
    """A position between an entry and its predecessor. The predecessor of a ledger's first entry is
    in an earlier ledger, at any entry id."""
    ledger_id, entry_id = position
    if entry_id:
        return Position(ledger_id, entry_id - 1)
    return Position(ledger_id - 1, SEQUENCE_ID_MAX)


def just_after(position: Position | None) -> Position:
    """The position after the result of `just_before`; None: the first position."""
    ledger_id, entry_id = position or Position(0, SEQUENCE_ID_MAX)
    if entry_id == SEQUENCE_ID_MAX:
        return Position(ledger_id + 1, 0)
    return Position(ledger_id, entry_id + 1)


def _clipped(ledgers: Iterable[LedgerRange], bounds: Bounds) -> Iterator[LedgerRange]:
    start, through = bounds
    for ledger_id, first, last in ledgers:
        if not start.ledger_id <= ledger_id <= through.ledger_id:
            continue
        if ledger_id == start.ledger_id:
            first = max(first, start.entry_id)
        if ledger_id == through.ledger_id:
            last = min(last, through.entry_id)
        if first <= last:
            yield LedgerRange(ledger_id, first, last)


def _entries(of: Range) -> float:
    return of.entries


def shared(
    ranges: Iterable[Range], size_max: float, size: Callable[[Range], float] = _entries
) -> list[tuple[Range, ...]]:
    """Group ranges into tasks of at most this size: by default, so many entries."""
    tasks: list[tuple[Range, ...]] = []
    task: list[Range] = []
    total = 0.0
    for each in ranges:
        if task and (total + size(each) > size_max or len(task) == RANGES_MAX):
            tasks.append(tuple(task))
            task, total = [], 0.0
        task.append(each)
        total += size(each)
    if task:
        tasks.append(tuple(task))
    return tasks


def all_ranges(
    stub: LedgerServiceStub,
    topics: Sequence[ledger_pb2.Topic],
    bounds: Callable[[ledger_pb2.Topic], Bounds | None],
    entries_max: int,
    timeout_s: float,
) -> Iterator[Range]:
    """The requested entries of many topics, in ranges of at most so many entries. No bounds: none
    are requested."""

    def of(topic: ledger_pb2.Topic) -> list[Range]:
        requested = bounds(topic)
        if requested is None:
            return []
        ledgers = ledgers_of(stub, topic, timeout_s)
        return list(ranges_of(topic.name, ledgers, requested, entries_max))

    for ranges in for_each(of, topics):
        yield from ranges


def ranges_after(
    stub: LedgerServiceStub,
    topic: ledger_pb2.Topic,
    after: Position | None,
    through: Position,
    entries_max: int,
    timeout_s: float,
) -> list[Range]:
    """The entries of a topic after a position and through another, in ranges of at most so many
    entries. The first range starts there even if entries were trimmed, so that reading it reports
    them. None: from the first remaining entry."""
    if not topic.HasField("last"):
        return []
    start = Bounds().start if after is None else just_after(after)
    ledgers = ledgers_of(stub, topic, timeout_s)
    ranges = list(ranges_of(topic.name, ledgers, Bounds(start, through), entries_max))
    end = min(through, position_of(topic.last))
    if after is None or after >= end:
        return ranges
    if not ranges:
        return [Range(topic.name, after, end, 0)]
    return [ranges[0]._replace(after=after), *ranges[1:]]


def for_each(
    call: Callable[[ledger_pb2.Topic], T], topics: Sequence[ledger_pb2.Topic]
) -> Iterator[T]:
    """Results of calls about topics, a few at a time, in order."""
    with ThreadPoolExecutor(CALLS_AT_A_TIME) as pool:
        yield from pool.map(spans.threaded(call), topics)
