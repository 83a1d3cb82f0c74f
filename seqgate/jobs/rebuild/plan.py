"""The plan of a rebuild: the topics, the ranges of each, the waves, and the tasks of a wave."""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum, auto
from typing import Final, NamedTuple

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.cursor.v1.cursor_pb2_grpc import CursorServiceStub
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dedup.v1.dedup_pb2_grpc import DedupServiceStub
from seqgate.api.internal.dedup.v1.writer_pb2_grpc import DedupWriterServiceStub
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.errors import NotFoundError, SeqgateError
from seqgate.jobs.division import (
    ENTRIES_PER_TASK_MIN,
    TASKS_PER_CORE,
    entries_per_task,
    joined,
)
from seqgate.jobs.rebuild.source import Part
from seqgate.services.dedup.core.snapshot import Snapshot, UnreadableSnapshot, decode
from seqgate.spark._columns import Range, asked, open_channel
from seqgate.spark._partitions import (
    Bounds,
    ledgers_of,
    list_topics,
    position_of,
    ranges_of,
)
from seqgate.telemetry import spans
from seqgate.types import DEDUP_CURSOR, Position

CALLS_AT_A_TIME: Final = 8

TOPIC_COST_ENTRIES: Final = 5_000
"""The cost of a topic besides its entries, in entries: that of a call."""

TOPICS_PER_WAVE_MAX: Final = 1_000

ENTRIES_PER_WAVE: Final = 10_000_000
"""The entries of a wave on a small cluster; a topic with more has a wave of its own."""

ABSENT: Final = dedup_pb2.TOPIC_STATE_ABSENT
RECOVERING: Final = dedup_pb2.TOPIC_STATE_RECOVERING
DISABLED: Final = dedup_pb2.TOPIC_STATE_DISABLED


class Source(StrEnum):
    SNAPSHOT = auto()
    EARLIEST = auto()


class Services(NamedTuple):
    """The services' addresses, and how many seconds one may be unreachable."""

    ledger: str
    dedup: str
    cursor: str
    timeout_s: float


class Stubs:
    """A stub for each service. Do not share it between processes."""

    def __init__(self, services: Services) -> None:
        self.timeout_s = services.timeout_s
        self._channels = [
            open_channel(target) for target in (services.ledger, services.dedup, services.cursor)
        ]
        ledger, dedup, cursor = self._channels
        self.ledger = LedgerServiceStub(ledger)
        self.dedup = DedupServiceStub(dedup)
        self.dedup_writer = DedupWriterServiceStub(dedup)
        self.cursor = CursorServiceStub(cursor)

    def __enter__(self) -> "Stubs":
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()


class TopicPlan(NamedTuple):
    """The part of a topic's log after a snapshot (None: all of it), through the last entry at that
    time. `start` is the first position read: no entry from there on may be trimmed meanwhile.
    `ranges` are small, and joined once the cluster's size is known."""

    topic: str
    incarnation: int
    base: Position | None
    through: Position
    start: Position
    ranges: tuple[Range, ...]

    @property
    def entries(self) -> int:
        return sum(each.entries for each in self.ranges)


class Untouched(NamedTuple):
    """A requested topic that needs no work, or cannot be planned."""

    topic: str
    why: str
    failed: bool = False


def status_of(stubs: Stubs, topic: str) -> dedup_pb2.GetTopicStatusResponse:
    request = dedup_pb2.GetTopicStatusRequest(topic=topic)
    return asked(stubs.dedup.GetTopicStatus, request, stubs.timeout_s)


def plans(
    stubs: Stubs, wanted: Sequence[str], source: Source, *, comparing: bool
) -> Iterator[TopicPlan | Untouched]:
    """A plan for each topic that these names and patterns select.

    Args:
        wanted: empty: topics that need a rebuild, or when comparing, all that deduplicate.
        comparing: plan through the position that the state covers.

    Raises:
        SeqgateError: the topics cannot be listed.
    """
    topics = list_topics(stubs.ledger, wanted or ["*"], stubs.timeout_s)

    def plan(topic: ledger_pb2.Topic) -> TopicPlan | Untouched | None:
        try:
            return _plan(stubs, topic, source, needed=not wanted, comparing=comparing)
        except SeqgateError as error:
            return Untouched(topic.name, f"{error.reason}: {error}", failed=True)

    with ThreadPoolExecutor(CALLS_AT_A_TIME) as pool:
        yield from (each for each in pool.map(spans.threaded(plan), topics) if each is not None)


def _plan(
    stubs: Stubs, topic: ledger_pb2.Topic, source: Source, *, needed: bool, comparing: bool
) -> TopicPlan | Untouched | None:
    status = status_of(stubs, topic.name)
    last = position_of(topic.last) if topic.HasField("last") else None
    confirmed = position_of(status.confirmed) if status.HasField("confirmed") else None
    if status.state == DISABLED:
        return None if needed else Untouched(topic.name, "deduplication is off")
    if last is None:
        return None if needed else Untouched(topic.name, "the log is empty")
    through = last
    if comparing:
        if confirmed is None or confirmed.ledger_id == 0:  # a replay has only begun
            return Untouched(topic.name, "there is no state to compare with")
        # Include entries appended since the topics were listed.
        request = ledger_pb2.GetTopicRequest(topic=topic.name)
        topic = asked(stubs.ledger.GetTopic, request, stubs.timeout_s).topic
        through = confirmed
    elif needed and (status.state not in (ABSENT, RECOVERING) or confirmed == last):
        return None
    begins = start_of(topic)
    base = snapshot_position(stubs, topic, through) if source is Source.SNAPSHOT else None
    topic.last.ledger_id, topic.last.entry_id = through
    ledgers = list(ledgers_of(stubs.ledger, topic, stubs.timeout_s))
    bounds = Bounds(through=through)
    if base is not None:
        bounds = bounds._replace(start=base._replace(entry_id=base.entry_id + 1))
    ranges = tuple(ranges_of(topic.name, ledgers, bounds, ENTRIES_PER_TASK_MIN))
    left = (
        max(bounds.start, Position(each.ledger_id, each.first))
        for each in ledgers
        if bounds.start <= Position(each.ledger_id, each.last)
    )
    start = next(left, max(begins, bounds.start))
    return TopicPlan(topic.name, topic.incarnation, base, through, start, ranges)


def start_of(topic: ledger_pb2.Topic) -> Position:
    """The beginning of a topic's log: until it changes, nothing is trimmed."""
    if topic.HasField("first"):
        return position_of(topic.first)
    return _after(position_of(topic.last)) if topic.HasField("last") else Position(0, 0)


def _after(position: Position) -> Position:
    return position._replace(entry_id=position.entry_id + 1)


def snapshot_position(stubs: Stubs, topic: ledger_pb2.Topic, through: Position) -> Position | None:
    """The position of the newest snapshot, if the log can be folded on top of it."""
    found = read_snapshot(stubs, topic.name, topic.incarnation)
    if found is None or found[0] > through:
        return None
    base = found[0]
    # If entries after it were trimmed, the ledger's list of trimmed producers knows more.
    first = position_of(topic.first) if topic.HasField("first") else None
    follows = first is None or first <= base._replace(entry_id=base.entry_id + 1)
    return base if follows and (first is not None or base == through) else None


def read_snapshot(stubs: Stubs, topic: str, incarnation: int) -> tuple[Position, Snapshot] | None:
    """This incarnation's snapshot and its position; None if it is missing or unreadable."""
    request = cursor_pb2.GetCursorRequest(topic=topic, cursor=DEDUP_CURSOR)
    try:
        cursor = asked(stubs.cursor.GetCursor, request, stubs.timeout_s).cursor
    except NotFoundError:
        return None
    if not cursor.HasField("mark_delete"):
        return None
    position = position_of(cursor.mark_delete)
    try:
        now_ms = time.time_ns() // 1_000_000
        snapshot = decode(cursor.mark_delete_properties, now_ms=now_ms)
    except UnreadableSnapshot:
        return None
    return (position, snapshot) if snapshot.is_of(incarnation, position) else None


def entries_per_wave(cores: int) -> int:
    """The default size of a wave: enough to occupy the cluster."""
    return max(ENTRIES_PER_WAVE, cores * TASKS_PER_CORE * ENTRIES_PER_TASK_MIN)


def waves(topics: Iterable[TopicPlan], entries_max: int) -> list[list[TopicPlan]]:
    """Gather topics into waves of up to so many entries, a Spark job each; a topic is never
    divided. Small topics come first, so that most topics are back soon."""
    gathered: list[list[TopicPlan]] = []
    entries = 0
    for topic in sorted(topics, key=lambda each: (each.entries, each.topic)):
        entries += topic.entries
        if not gathered or entries > entries_max or len(gathered[-1]) == TOPICS_PER_WAVE_MAX:
            gathered.append([])
            entries = topic.entries
        gathered[-1].append(topic)
    return gathered


class Wave(NamedTuple):
    """The topics of one Spark job, and the parts of its tasks."""

    topics: list[TopicPlan]
    tasks: list[list[Part]]

    @classmethod
    def divided(cls, topics: Iterable[TopicPlan], cores: int) -> "Wave":
        """Divide the logs of topics among tasks: large topics are split, small ones share a task,
        and each core has a few tasks unless the logs are small."""
        topics = list(topics)
        entries_max = entries_per_task(sum(map(_cost, topics)), cores)
        topics = [each._replace(ranges=tuple(joined(each.ranges, entries_max))) for each in topics]
        return cls(topics, list(_tasks(topics, entries_max)))

    @property
    def entries(self) -> int:
        return sum(each.entries for each in self.topics)


def _cost(of: TopicPlan | Range | None) -> int:
    return TOPIC_COST_ENTRIES + (of.entries if of is not None else 0)


def _tasks(topics: Sequence[TopicPlan], entries_max: int) -> Iterator[list[Part]]:
    task: list[Part] = []
    entries = 0
    for topic in topics:
        ranges: Sequence[Range | None] = topic.ranges or [None]
        for number, each in enumerate(ranges):
            if task and entries + _cost(each) > entries_max:
                yield task
                task, entries = [], 0
            task.append(Part(topic.topic, number, each))
            entries += _cost(each)
    if task:
        yield task
