"""The two passes over the logs, with Spark."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.jobs.audit.proof import Finding, Integers, Kind, Line, Row, findings
from seqgate.jobs.division import entries_per_task
from seqgate.spark import register
from seqgate.spark._columns import Range, open_channel, read_blocks, runs_of
from seqgate.spark._partitions import just_before
from seqgate.spark._traced import in_task
from seqgate.telemetry import names, spans
from seqgate.types import Position

SCHEMA: Final = """topic string, producer string, ledger_id bigint, entry_id bigint,
    sequence_id bigint, highest_sequence_id bigint, num_messages int, marker boolean,
    chunk_uuid string, chunk_id int, num_chunks int"""
"""The columns to read: the identity of each entry, without its metadata."""

FINDINGS_MAX: Final = 10_000
"""The most findings to list for one producer; further ones are counted."""

TOTALS: Final = pa.schema(
    {
        "topic": pa.string(),
        "producers": pa.int64(),
        "entries": pa.int64(),
        "messages": pa.int64(),
        "suspects": pa.list_(pa.string()),
    }
)
"""Per topic: its counts, and the producers to check in detail."""

FOUND: Final = pa.schema(
    {
        "topic": pa.string(),
        "producer": pa.string(),
        "kind": pa.string(),
        "sequence_id": pa.int64(),
        "ids": pa.int64(),
        "ledger_id": pa.int64(),
        "entry_id": pa.int64(),
        "earlier_ledger_id": pa.int64(),
        "earlier_entry_id": pa.int64(),
        "uuid": pa.string(),
        "chunk_id": pa.int32(),
    }
)
"""A finding; `earlier` is the entry that it collides with."""


GROUP: Final = "spark.jobGroup.id"


class Logs(NamedTuple):
    """The logs to audit, the ledger's address, how many seconds it may be unreachable, and about
    how many entries the logs have."""

    ledger: str
    topics: str
    timeout_s: int
    entries: int


class Audited(NamedTuple):
    """The result: rows of TOTALS and FOUND, and the number of findings not listed."""

    totals: list[dict[str, Any]]
    found: list[dict[str, Any]]
    untold: int


def audit(spark: SparkSession, logs: Logs, group: str = "") -> Audited:
    """Read the logs, and suspicious producers a second time. `group` is the job group of the first
    pass, for entries_read; empty: none."""
    register(spark)
    with spans.part("spark scan") as span, _grouped(spark, group):
        rows = (
            _entries(spark, logs)
            .repartition("topic", "producer")
            .sortWithinPartitions("topic", "producer", "ledger_id", "entry_id")
            .mapInArrow(scanned, from_arrow_schema(TOTALS))
            .collect()
        )
        span.set_attribute(names.ENTRIES, sum(row.entries for row in rows))
        span.set_attribute(names.PRODUCERS, sum(row.producers for row in rows))
        span.set_attribute(names.TOPICS, len({row.topic for row in rows}))
    totals: dict[str, dict[str, Any]] = {}
    for row in rows:
        of = totals.setdefault(
            row.topic,
            {"topic": row.topic, "producers": 0, "entries": 0, "messages": 0, "suspects": []},
        )
        for name in ("producers", "entries", "messages", "suspects"):
            of[name] += row[name]
    suspects = [(topic, producer) for topic, of in totals.items() for producer in of["suspects"]]
    found: list[dict[str, Any]] = []
    untold = 0
    if suspects:
        wanted = spark.createDataFrame(suspects, "topic string, producer string")
        of_suspects = {topic for topic, _ in suspects}
        entries = sum(totals[each]["entries"] for each in of_suspects)
        close = logs._replace(topics=",".join(sorted(of_suspects)), entries=entries)
        with spans.part("spark look", {names.PRODUCERS: len(suspects)}):
            looked = (
                _entries(spark, close)
                .join(f.broadcast(wanted), ["topic", "producer"])
                .groupBy("topic", "producer")
                .applyInArrow(looker(logs, spans.handed_on()), from_arrow_schema(FOUND))
                .collect()
            )
        for row in looked:
            if row.kind is None:
                untold += row.ids
            else:
                found.append(row.asDict())
    found.sort(key=lambda row: (row["topic"], row["producer"], row["ledger_id"], row["entry_id"]))
    return Audited([totals[topic] for topic in sorted(totals)], found, untold)


@contextmanager
def _grouped(spark: SparkSession, group: str) -> Iterator[None]:
    context: Any = spark.sparkContext
    context.setLocalProperty(GROUP, group or None)
    try:
        yield
    finally:
        context.setLocalProperty(GROUP, None)


def entries_read(spark: SparkSession, group: str) -> int:
    """The entries that the ended tasks of the first pass of this job group have read: those that
    they gave to the shuffle. Only Spark's own store counts them."""
    context: Any = spark.sparkContext
    tracker = context.statusTracker()
    jobs = [tracker.getJobInfo(each) for each in tracker.getJobIdsForGroup(group)]
    stages = [stage for job in jobs if job is not None for stage in job.stageIds]
    if not stages:
        return 0
    try:
        store = context._jsc.sc().statusStore()  # noqa: SLF001 - it has no public name in Python
        stage = store.lastStageAttempt(min(stages))
        return int(stage.shuffleWriteRecords())
    except Py4JError:  # the store learns of a stage after the tracker does
        return 0


def _entries(spark: SparkSession, logs: Logs) -> DataFrame:
    cores = spark.sparkContext.defaultParallelism
    return (
        spark.read.format("seqgate")
        .option("ledger", logs.ledger)
        .option("topics", logs.topics)
        .option("rows", "entries")
        .option("timeout", str(logs.timeout_s))
        .option("entriesPerPartition", str(entries_per_task(logs.entries, cores)))
        .options(**spans.handed_on())
        .schema(SCHEMA)
        .load()
        .where("not marker")
    )


# ---- the first pass


def scanned(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """TOTALS of entries that are sorted by topic, producer and log position."""
    totals: dict[str, dict[str, Any]] = {}
    current: tuple[str, str] | None = None
    line, suspect = Line(), False
    for batch in batches:
        if not batch.num_rows:
            continue
        columns = _Columns(batch)
        for group in columns.groups:
            if (group.topic, group.producer) != current:
                current = (group.topic, group.producer)
                line, suspect = Line(), False
                if group.topic not in totals:  # the previous topic is complete
                    yield from _told(totals)
                    totals = {group.topic: dict.fromkeys(TOTALS.names, 0)}
                    totals[group.topic] |= {"topic": group.topic, "suspects": []}
                totals[group.topic]["producers"] += 1
            of = totals[group.topic]
            of["entries"] += group.last + 1 - group.first
            of["messages"] += group.messages
            if suspect:
                continue
            if group.grows and line.grows_with(int(columns.lowest[group.first])):
                line.passed(columns.row(group.last))
                continue
            rows = map(columns.row, range(group.first, group.last + 1))
            if any(line.take(row) is not None for row in rows):
                suspect = True
                of["suspects"].append(group.producer)
    yield from _told(totals)


def _told(totals: dict[str, dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    if totals:
        yield pa.RecordBatch.from_pylist(list(totals.values()), TOTALS)


class _Group(NamedTuple):
    """Consecutive entries of one producer; whether their ids only grow and none is a chunk."""

    topic: str
    producer: str
    first: int
    last: int
    grows: bool
    messages: int


class _Columns:
    def __init__(self, batch: pa.RecordBatch | pa.Table) -> None:
        self.lowest = _numbers(batch, "sequence_id")
        self.highest = _numbers(batch, "highest_sequence_id")
        self._ledger_id = _numbers(batch, "ledger_id")
        self._entry_id = _numbers(batch, "entry_id")
        self._messages = _numbers(batch, "num_messages", missing=0)
        self._num_chunks = _numbers(batch, "num_chunks", missing=0)
        self._chunk_id = _numbers(batch, "chunk_id", missing=0)
        self._uuid = batch.column("chunk_uuid")
        self._topic = batch.column("topic")
        self._producer = batch.column("producer")
        self._count = batch.num_rows

    @property
    def groups(self) -> Iterator[_Group]:
        topics, producers = _codes(self._topic), _codes(self._producer)
        new = (topics[1:] != topics[:-1]) | (producers[1:] != producers[:-1])
        firsts = np.concatenate(([0], np.flatnonzero(new) + 1))
        lasts = np.concatenate((firsts[1:], [self._count])) - 1
        odd = self._num_chunks > 0
        odd[1:] |= ~new & (self.lowest[1:] <= self.highest[:-1])
        odds = np.add.reduceat(odd.astype(np.int64), firsts)
        made = np.where(self._messages > 0, self._messages, 1)
        made[(self._num_chunks > 0) & (self._chunk_id + 1 < self._num_chunks)] = 0
        messages = np.add.reduceat(made, firsts)
        for first, last, count, of in zip(
            firsts.tolist(), lasts.tolist(), odds.tolist(), messages.tolist(), strict=True
        ):
            topic, producer = self._topic[first].as_py(), self._producer[first].as_py()
            yield _Group(topic, producer, first, last, not count, of)

    def row(self, index: int) -> Row:
        messages, num_chunks = int(self._messages[index]), int(self._num_chunks[index])
        return Row(
            Position(int(self._ledger_id[index]), int(self._entry_id[index])),
            int(self.lowest[index]),
            int(self.highest[index]),
            messages or None,
            self._uuid[index].as_py() if num_chunks else None,
            int(self._chunk_id[index]),
            num_chunks,
        )


def _numbers(batch: pa.RecordBatch | pa.Table, name: str, missing: int | None = None) -> Integers:
    column = batch.column(name)
    if missing is not None:
        column = column.fill_null(missing)
    numbers: Integers = column.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _codes(column: pa.Array) -> Integers:
    numbers: Integers = column.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    return numbers


# ---- the second pass


def looker(logs: Logs, handed: Mapping[str, str]) -> Callable[[pa.Table], pa.Table]:
    """A producer's violations, as FOUND; a last row, without a kind, counts those not listed."""

    opened: list[LedgerServiceStub] = []  # opened in the task, for all of its producers

    def look(entries: pa.Table) -> pa.Table:
        entries = entries.sort_by([("ledger_id", "ascending"), ("entry_id", "ascending")])
        entries = entries.combine_chunks()
        topic, producer = entries.column("topic")[0].as_py(), entries.column("producer")[0].as_py()
        columns = _Columns(entries)
        rows = [columns.row(index) for index in range(entries.num_rows)]
        if not opened:
            opened.append(LedgerServiceStub(open_channel(logs.ledger)))
        stub = opened[0]
        about = {names.TOPIC: topic, names.PRODUCER_NAME: producer, names.ENTRIES: len(rows)}
        with in_task(handed), spans.joined(f"look {topic}", handed, about):
            wrong = findings(rows, lambda row: ids_of(stub, logs, topic, row.position))
        told = [
            {"topic": topic, "producer": producer, **_fields(each)} for each in wrong[:FINDINGS_MAX]
        ]
        if len(wrong) > FINDINGS_MAX:
            untold = len(wrong) - FINDINGS_MAX
            told.append(
                {**dict.fromkeys(FOUND.names), "topic": topic, "producer": producer, "ids": untold}
            )
        return pa.Table.from_pylist(told, FOUND)

    return look


def _fields(finding: Finding) -> dict[str, Any]:
    return {
        "kind": Kind(finding.kind).value,
        "sequence_id": finding.sequence_id,
        "ids": finding.ids,
        "ledger_id": finding.entry.ledger_id,
        "entry_id": finding.entry.entry_id,
        "earlier_ledger_id": finding.earlier.ledger_id,
        "earlier_entry_id": finding.earlier.entry_id,
        "uuid": finding.uuid or None,
        "chunk_id": finding.chunk_id,
    }


def ids_of(stub: LedgerServiceStub, logs: Logs, topic: str, position: Position) -> Sequence[int]:
    entry = Range(topic, just_before(position), position, 1)
    blocks = read_blocks(stub, entry, timeout_s=logs.timeout_s, metadata=True)
    (metadata,) = (each for run in runs_of(topic, blocks) for each in run.metadata)
    return list(accumulate(metadata.sequence_id_steps, initial=metadata.sequence_id))
