"""The first half of a wave: tasks read and fold ranges, then each topic's parts are joined."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute
from pyspark import Accumulator
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.errors import SeqgateError
from seqgate.jobs.rebuild.folding import PARTIALS, ProducerFold, tally
from seqgate.spark._columns import Range, connected, read_blocks, runs_of
from seqgate.spark._traced import in_task
from seqgate.telemetry import names, spans
from seqgate.types import Position


class Part(NamedTuple):
    """A range of a topic's log, and its number among the topic's ranges; None: an empty one."""

    topic: str
    number: int
    range: Range | None


class Reading(NamedTuple):
    ledger: str
    timeout_s: float
    skip_corrupt: bool
    tasks: list[list[Part]]
    handed: Mapping[str, str] = {}


def frame(
    spark: SparkSession, reading: Reading, count: "Accumulator[int] | None" = None
) -> DataFrame:
    """The partials of a wave, one row per (topic, part, producer). The entries of each part are
    added to `count` when its task ends. (A DataSource does the same, but starts a Python process to
    plan each wave.)"""

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with in_task(reading.handed), connected(reading.ledger) as stub:
            for batch in numbers:
                for number in batch.column("id").to_pylist():
                    for part in reading.tasks[number]:
                        yield from folded(stub, part, reading)
                        if count is not None and part.range is not None:
                            count.add(part.range.entries)

    tasks = len(reading.tasks)
    return spark.range(0, tasks, 1, tasks).mapInArrow(read, from_arrow_schema(PARTIALS))


def reduced(
    rows: DataFrame,
    make: Callable[[pa.Table], pa.Table],
    schema: pa.Schema,
    tasks: int,
    handed: Mapping[str, str] | None = None,
) -> DataFrame:
    """The results of `make` on the rows of each topic. (groupBy and applyInArrow do the same, but
    take a third more processor time.)"""

    def reduce(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with in_task(handed or {}):
            for topic_rows in by_topic(batches):
                yield from make(topic_rows).to_batches()

    sorted_rows = rows.repartition(tasks, "topic").sortWithinPartitions("topic")
    return sorted_rows.mapInArrow(reduce, from_arrow_schema(schema))


def by_topic(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows of each topic; the batches are sorted by topic."""
    gathered: list[pa.RecordBatch] = []
    current: str | None = None
    for batch in batches:
        start = 0
        topics = pa.compute.run_end_encode(batch.column("topic"))
        ends = topics.run_ends.to_pylist()
        for topic, end in zip(topics.values.to_pylist(), ends, strict=True):
            if gathered and topic != current:
                yield pa.Table.from_batches(gathered)
                gathered = []
            current = topic
            gathered.append(batch.slice(start, end - start))
            start = end
    if gathered:
        yield pa.Table.from_batches(gathered)


def folded(stub: LedgerServiceStub, part: Part, reading: Reading) -> Iterator[pa.RecordBatch]:
    """The rows of one part. A failed part becomes a row with the error, so the wave continues."""
    fold = ProducerFold()
    skipped, failure = 0, None
    try:
        if part.range is not None:
            about = {names.TOPIC: part.topic}
            with spans.joined(f"read {part.topic}", reading.handed, about) as span:
                skipped = _fold(fold, stub, part.range, reading)
                span.set_attribute(names.ENTRIES, fold.count)
        yield fold.rows(part.topic, part.number)
    except SeqgateError as error:
        details = {"topic": part.topic, **error.details}
        failure = json.dumps([error.reason or type(error).__name__, str(error), details])
    yield tally(part.topic, part.number, fold.count, skipped=skipped, failure=failure)


def _fold(fold: ProducerFold, stub: LedgerServiceStub, wanted: Range, reading: Reading) -> int:
    """Fold a range. Returns the number of entries skipped because they are damaged. Raises
    SeqgateError for any other failure."""
    skipped = 0
    while True:
        try:
            blocks = read_blocks(stub, wanted, timeout_s=reading.timeout_s)
            for run in runs_of(wanted.topic, blocks):
                fold.add(run)
        except SeqgateError as error:
            damage = _damage(error, wanted) if reading.skip_corrupt else None
            if damage is None:
                raise
            resume, lost = damage
            skipped += lost
            if resume >= wanted.through:
                return skipped
            wanted = wanted._replace(after=resume)
        else:
            return skipped


def _damage(error: SeqgateError, wanted: Range) -> tuple[Position, int] | None:
    """The entry after which to continue, and the number lost; None: the error has another cause."""
    if error.reason != "ENTRY_CORRUPT" or "entry_id" not in error.details:
        return None
    ledger_id, last = int(error.details["ledger_id"]), int(error.details["entry_id"])
    first = int(error.details.get("first_entry_id", last))
    resume = Position(ledger_id, last)
    if wanted.after is not None and resume <= wanted.after:
        return None
    if wanted.after is not None and wanted.after.ledger_id == ledger_id:
        first = max(first, wanted.after.entry_id + 1)
    if wanted.through.ledger_id == ledger_id:
        last = min(last, wanted.through.entry_id)
    return resume, last + 1 - first
