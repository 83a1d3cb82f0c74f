"""The second half of a wave: a topic's parts are combined, and loaded or compared.

Runs in Spark's tasks, one topic at a time; a topic's result is a row.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import nlargest
from typing import Any, Final, NamedTuple

import pyarrow as pa

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.errors import SeqgateError
from seqgate.jobs.rebuild.folding import partials
from seqgate.jobs.rebuild.plan import (
    Services,
    Source,
    Stubs,
    TopicPlan,
    read_snapshot,
    start_of,
    status_of,
)
from seqgate.services.dedup.core.fold import Partial
from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.deduplication import NEVER
from seqgate.spark._columns import Range, asked, read_blocks, runs_of, to_position
from seqgate.spark._partitions import position_of
from seqgate.telemetry import names, spans
from seqgate.times import milliseconds, timestamp
from seqgate.types import Chunk, Position

PAGE_PRODUCERS: Final = 5_000

PRODUCERS_MAX: Final = 100_000
"""The most producers that LoadState takes: more than any policy lets a topic remember."""

LIST_PAGE: Final = 10_000

SHOWN_MAX: Final = 1_000

RESULTS: Final = pa.schema({"topic": pa.string(), "result": pa.string()})


class Job(NamedTuple):
    services: Services
    source: Source
    topics: Mapping[str, TopicPlan]
    comparing: bool
    replace: bool
    handed: Mapping[str, str]


class Difference(NamedTuple):
    """A producer whose mark in the log differs from its mark in the state; each is an id, or a
    chunk of one; empty: none."""

    producer: str
    rebuilt: str
    live: str


class Result(NamedTuple):
    """The result of a topic.

    Attributes:
        outcome: "loaded"; "current": the state already covers as much, or more; "equal" or
            "different" when comparing; "failed", with reason and message.
        left_out: producers that policy has no room for.
        skipped: entries that could not be read.
        forgotten: producers in the log that deduplication need not remember any more.
    """

    topic: str
    outcome: str
    producers: int = 0
    entries: int = 0
    seconds: float = 0.0
    left_out: int = 0
    skipped: int = 0
    forgotten: int = 0
    differing: int = 0
    differences: tuple[Difference, ...] = ()
    reason: str = ""
    message: str = ""
    details: Mapping[str, str] = {}

    @property
    def bad(self) -> bool:
        """Whether an operator must look at it."""
        return self.outcome in ("failed", "different") or self.skipped > 0

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> "Result":
        result = cls(*json.loads(text))
        return result._replace(differences=tuple(Difference(*each) for each in result.differences))


class State(NamedTuple):
    marks: Marks
    active_ms: int


class Refused(SeqgateError):
    """A topic cannot be rebuilt now."""


def reducer(job: Job) -> Callable[[pa.Table], pa.Table]:
    opened: list[Stubs] = []  # opened in the task, for all of its topics

    def reduce(rows: pa.Table) -> pa.Table:
        topic: str = rows.column("topic")[0].as_py()
        started = time.monotonic()
        if not opened:
            opened.append(Stubs(job.services))
        does = "compare" if job.comparing else "load"
        with spans.joined(f"{does} {topic}", job.handed, {names.TOPIC: topic}) as span:
            result = finished(opened[0], job, job.topics[topic], rows)
            span.set_attributes({names.ENTRIES: result.entries, names.PRODUCERS: result.producers})
            if result.outcome == "failed":
                spans.fail(span, result.reason, result.message)
        result = result._replace(seconds=round(time.monotonic() - started, 3))
        return pa.Table.from_pylist([{"topic": topic, "result": result.to_json()}], RESULTS)

    return reduce


def finished(stubs: Stubs, job: Job, plan: TopicPlan, rows: pa.Table) -> Result:
    tallies = rows.filter(rows.column("producer").is_null()).to_pylist()
    skipped = sum(each["skipped"] for each in tallies)
    result = Result(
        plan.topic,
        "failed",
        entries=sum(each["entries"] for each in tallies),
        skipped=skipped,
    )
    for each in tallies:
        if each["failure"] is not None:
            reason, message, details = json.loads(each["failure"])
            return result._replace(reason=reason, message=message, details=details)
    assert len(tallies) == max(1, len(plan.ranges))
    try:
        through, states = _states(stubs, job, plan, rows)
        result = result._replace(producers=len(states))
        if job.comparing:
            return _compared(stubs, plan, states, result)
        return _loaded(stubs, job, plan, through, states, result)
    except SeqgateError as error:
        reason = error.reason or type(error).__name__
        return result._replace(reason=reason, message=str(error), details=error.details)


def _states(
    stubs: Stubs, job: Job, plan: TopicPlan, rows: pa.Table
) -> tuple[Position, dict[str, State]]:
    """The end of the rebuilt state, and the state of each producer."""
    at, states = _base(stubs, plan)
    if at is None or at <= plan.through:
        # The base may be newer than the plan: folding entries that it covers again is harmless.
        at = plan.through
        for producer, part in partials(rows):
            _apply(states, producer, part)
    elif job.comparing:
        raise Refused(
            "a newer snapshot was taken during the comparison: run it again", reason="CHANGED"
        )
    request = ledger_pb2.GetTopicRequest(topic=plan.topic)
    topic = asked(stubs.ledger.GetTopic, request, stubs.timeout_s).topic
    if topic.incarnation != plan.incarnation:
        raise Refused("the topic was recreated during the rebuild: run it again", reason="CHANGED")
    if is_trimmed(plan, topic):
        raise Refused("the topic was trimmed during the rebuild: run it again", reason="CHANGED")
    return at, states


def is_trimmed(plan: TopicPlan, topic: ledger_pb2.Topic) -> bool:
    """Whether planned entries were trimmed meanwhile. Without a producer's last entry, an earlier
    one would be taken for it, and all between could be stored again."""
    return start_of(topic) > plan.start


def _apply(states: dict[str, State], producer: str, part: Partial) -> None:
    before = states.get(producer) or State(Marks(), 0)
    marks = part.applied(before.marks)
    states[producer] = State(marks, max(before.active_ms, part.last_append_ms))


def _base(stubs: Stubs, plan: TopicPlan) -> tuple[Position | None, dict[str, State]]:
    """The state below the parts."""
    if plan.base is not None:
        found = read_snapshot(stubs, plan.topic, plan.incarnation)
        if found is None or found[0] < plan.base:
            raise Refused("the snapshot is gone", reason="CHANGED")
        position, snapshot = found
        states = {
            each.producer: State(_marks(each.highest, each.unfinished), each.active_ms)
            for each in snapshot.producers
        }
        return position, states
    now_ms = time.time_ns() // 1_000_000
    return None, {
        each.producer_name: State(_marks(each.highest_sequence_id, None), now_ms)
        for each in _trimmed(stubs, plan.topic)
    }


def _marks(highest: int, chunk: Chunk | None) -> Marks:
    return Marks(highest, highest, chunk, chunk)


def _trimmed(stubs: Stubs, topic: str) -> Iterator[ledger_pb2.TrimmedProducer]:
    token = ""
    while True:
        request = ledger_pb2.ListTrimmedProducersRequest(
            topic=topic, page_size=LIST_PAGE, page_token=token
        )
        page = asked(stubs.ledger.ListTrimmedProducers, request, stubs.timeout_s)
        yield from page.producers
        token = page.next_page_token
        if not token:
            return


# ---- load


def _loaded(
    stubs: Stubs,
    job: Job,
    plan: TopicPlan,
    through: Position,
    states: Mapping[str, State],
    result: Result,
) -> Result:
    # A producer with only chunks that lack their beginning has no marks.
    kept = [each for each in states.items() if each[1].marks.persisted != NEVER]
    too_many = len(kept) - PRODUCERS_MAX
    if too_many > 0:
        kept = nlargest(PRODUCERS_MAX, kept, key=lambda each: each[1].active_ms)
    header = writer_pb2.LoadHeader(
        topic=plan.topic,
        incarnation=plan.incarnation,
        through=to_position(through),
        replace=job.replace,
    )

    def load(_: None, timeout: float) -> writer_pb2.LoadStateResponse:
        pages = _pages(header, kept)
        return stubs.dedup_writer.LoadState(pages, timeout=timeout)

    answer = asked(load, None, stubs.timeout_s)
    return result._replace(
        outcome="loaded" if answer.loaded else "current",
        left_out=answer.left_out + max(0, too_many),
    )


def _pages(
    header: writer_pb2.LoadHeader, states: list[tuple[str, State]]
) -> Iterator[writer_pb2.LoadStateRequest]:
    yield writer_pb2.LoadStateRequest(header=header)
    for first in range(0, len(states), PAGE_PRODUCERS):
        page = writer_pb2.LoadStateRequest()
        for producer, (marks, active_ms) in states[first : first + PAGE_PRODUCERS]:
            added = page.producers.add(
                name=producer,
                highest_sequence_id=marks.persisted,
                last_active=timestamp(active_ms),
            )
            if marks.persisted_chunk is not None:
                uuid, chunk_id, num_chunks, total_bytes = marks.persisted_chunk
                added.unfinished.uuid = uuid
                added.unfinished.chunk_id = chunk_id
                added.unfinished.num_chunks = num_chunks
                added.unfinished.total_bytes = total_bytes
        yield page


# ---- compare


def _compared(stubs: Stubs, plan: TopicPlan, states: dict[str, State], result: Result) -> Result:
    """Compare the state with the log.

    The state of each producer is read at some moment between two positions, taken before and after.
    Entries appended between them are folded one by one, and each mark on the way is accepted.
    """
    live = _live(stubs, plan.topic)
    status = status_of(stubs, plan.topic)
    confirmed = position_of(status.confirmed)
    if not status.HasField("confirmed") or confirmed < plan.through:
        raise Refused("the state was lost during the comparison: rebuild it", reason="CHANGED")
    possible: dict[str, set[str]] = {}
    if confirmed > plan.through:
        for producer, part in _entries(stubs, plan.topic, plan.through, confirmed):
            before = states.get(producer) or State(Marks(), 0)
            _apply(states, producer, part)
            words = possible.setdefault(producer, {_words(before.marks)})
            words.add(_words(states[producer].marks))

    timeout_ms = milliseconds(status.policy.producer_inactivity_timeout)
    inactive_before_ms = time.time_ns() // 1_000_000 - timeout_ms if timeout_ms else 0
    evicted = status.counts.evicted_producers > 0
    differences = []
    forgotten = 0
    for producer in sorted(states.keys() | live.keys()):
        state = states.get(producer) or State(Marks(), 0)
        rebuilt, now = _words(state.marks), live.get(producer, "")
        if now in possible.get(producer, {rebuilt}):
            continue
        if producer not in live and (evicted or state.active_ms < inactive_before_ms):
            forgotten += 1
        else:
            differences.append(Difference(producer, rebuilt, now))
    return result._replace(
        outcome="different" if differences else "equal",
        producers=len(states.keys() | live.keys()),
        forgotten=forgotten,
        differing=len(differences),
        differences=tuple(differences[:SHOWN_MAX]),
    )


def _live(stubs: Stubs, topic: str) -> dict[str, str]:
    """The mark of each producer that deduplication remembers."""
    live: dict[str, str] = {}
    token = ""
    while True:
        request = dedup_pb2.ListProducersRequest(topic=topic, page_size=LIST_PAGE, page_token=token)
        page = asked(stubs.dedup.ListProducers, request, stubs.timeout_s)
        live.update((each.name, _words(_live_marks(each))) for each in page.producers)
        token = page.next_page_token
        if not token:
            return live


def _live_marks(producer: dedup_pb2.Producer) -> Marks:
    if producer.HasField("unfinished"):
        last = producer.unfinished.last_chunk
        chunk = Chunk(last.uuid, last.chunk_id, last.num_chunks, last.total_bytes)
        return _marks(producer.unfinished.sequence_id, chunk)
    if producer.HasField("persisted_sequence_id"):
        return _marks(producer.persisted_sequence_id, None)
    return Marks()


def _words(marks: Marks) -> str:
    chunk = marks.persisted_chunk
    if marks.persisted == NEVER:
        return ""
    if chunk is None:
        return str(marks.persisted)
    return (
        f"{marks.persisted} through chunk {chunk.chunk_id} of {chunk.num_chunks} "
        f"({chunk.total_bytes} bytes, {chunk.uuid})"
    )


def _entries(
    stubs: Stubs, topic: str, after: Position, through: Position
) -> Iterable[tuple[str, Partial]]:
    blocks = read_blocks(stubs.ledger, Range(topic, after, through, 0), timeout_s=stubs.timeout_s)
    for run in runs_of(topic, blocks):
        known: dict[str, int] = {}
        producers = run.producers(known).tolist()
        names = list(known)
        chunks: dict[int, Any] = dict(run.chunks)
        markers = set(run.markers)
        rows = zip(producers, run.highest.tolist(), run.append_ms.tolist(), strict=True)
        for index, (producer, highest, append_ms) in enumerate(rows):
            if index not in markers:
                yield names[producer], Partial.of(highest, chunks.get(index), append_ms)
