"""The data source for Spark; the package describes its use."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._subscribing import Place, parse_place
from seqgate.errors import InvalidRequestError
from seqgate.message_id import MessageId
from seqgate.spark._columns import (
    COLUMNS,
    METADATA_COLUMNS,
    Range,
    connected,
    read_blocks,
    record_batch,
    runs_of,
)
from seqgate.spark._messages import (
    GAP,
    GAP_COLUMN,
    MESSAGE_COLUMNS,
    Edges,
    Scan,
    message_batches,
)
from seqgate.spark._partitions import (
    Bounds,
    all_ranges,
    bounds_of,
    check_not_trimmed,
    first_entry,
    for_each,
    is_pattern,
    just_after,
    just_before,
    list_topics,
    ranges_after,
    shared,
    trimmed,
)
from seqgate.spark._traced import in_task
from seqgate.telemetry import names, spans
from seqgate.telemetry.propagation import FIELDS
from seqgate.types import InvalidNameError, TopicName

ENTRIES_PER_PARTITION: Final = 1_000_000
ENTRIES_PER_PARTITION_MAX: Final = 100_000_000
"""The default and the most entries per task."""

BYTES_PER_PARTITION: Final = 16 * 1024 * 1024
BYTES_PER_PARTITION_MAX: Final = 2**40
"""The default and the most bytes of payload and metadata per task that reads messages. The default
is about a second's work."""

TIMEOUT_S: Final = 60.0
TIMEOUT_MAX_S: Final = 86_400.0
"""The default and the longest time that the ledger may be silent or unreachable."""

MESSAGES: Final = "messages"
ENTRIES: Final = "entries"
"""The values of option `rows`: what a row is."""

FAIL: Final = "fail"
SKIP: Final = "skip"
REPORT: Final = "report"
"""The values of option `trimmed`: what to do if requested entries were trimmed."""


class InvalidOptionError(InvalidRequestError):
    """The data source has no such option or column, or does not accept its value."""

    default_reason = "INVALID_OPTION"


@dataclass(frozen=True)
class Options:
    ledger: str
    topics: tuple[str, ...]
    entries_per_partition: int
    bytes_per_partition: int
    start: Place | None
    to: Place | None
    timeout_s: float
    handed: Mapping[str, str]
    rows: str = MESSAGES
    trimmed: str = FAIL

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "Options":
        """Parse the options, whose names are case-insensitive. Raises InvalidOptionError."""
        options = {name.lower(): value for name, value in given.items()}
        if not options.get("ledger"):
            raise InvalidOptionError("option ledger is required: HOST:PORT of the ledger service")
        topics = tuple(each.strip() for each in options.get("topics", "").split(","))
        for topic in topics:
            if not is_pattern(topic):
                try:
                    TopicName.parse(topic)
                except InvalidNameError as error:
                    raise InvalidOptionError(f"option topics, {topic!r}: {error}") from error
        number = partial(_number, options)
        rows = _choice("rows", options.get("rows", MESSAGES), (MESSAGES, ENTRIES))
        trimmed_choices = (FAIL, SKIP, REPORT) if rows == MESSAGES else (FAIL, SKIP)
        return cls(
            ledger=options["ledger"],
            topics=topics,
            entries_per_partition=int(
                number("entriesPerPartition", ENTRIES_PER_PARTITION, ENTRIES_PER_PARTITION_MAX)
            ),
            bytes_per_partition=int(
                number("bytesPerPartition", BYTES_PER_PARTITION, BYTES_PER_PARTITION_MAX)
            ),
            start=_place(options, "from"),
            to=_place(options, "to"),
            timeout_s=number("timeout", TIMEOUT_S, TIMEOUT_MAX_S),
            handed={name: options[name] for name in FIELDS if name in options},
            rows=rows,
            trimmed=_choice("trimmed", options.get("trimmed", FAIL), trimmed_choices),
        )

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The columns of a read without `.schema(...)`."""
        if self.rows == ENTRIES:
            return COLUMNS
        return MESSAGE_COLUMNS | (GAP_COLUMN if self.trimmed == REPORT else {})

    @property
    def edges(self) -> Edges:
        return Edges(*(each if isinstance(each, MessageId) else None for each in self.ends))

    @property
    def ends(self) -> tuple[Place, Place]:
        """Where a read that ends starts and ends."""
        return self.start or "earliest", self.to or "latest"

    def entries_max(self, topic: ledger_pb2.Topic) -> int:
        """The most entries of a topic per task that reads its messages."""
        entries = int(self.bytes_per_partition / bytes_each(topic))
        return max(1, min(entries, self.entries_per_partition))


def bytes_each(topic: ledger_pb2.Topic) -> float:
    """The average size of a topic's entries."""
    return max(1.0, topic.bytes / max(1, topic.entries))


def _choice(name: str, text: str, choices: Sequence[str]) -> str:
    if text.strip().lower() not in choices:
        raise InvalidOptionError(f"option {name} must be {' or '.join(choices)}, not {text!r}")
    return text.strip().lower()


def _number(options: Mapping[str, str], name: str, default: float, highest: float) -> float:
    text = options.get(name.lower(), str(default))
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 1 <= value <= highest:
        raise InvalidOptionError(f"option {name} must be 1 to {highest:.0f}, not {text!r}")
    return value


def _place(options: Mapping[str, str], name: str) -> Place | None:
    text = options.get(name)
    if text is None:
        return None
    found = parse_place(text.strip())
    if found is None:
        raise InvalidOptionError(
            f"option {name} must be earliest, latest, a message id (LEDGER:ENTRY, or as printed by "
            f"seqgate read), or a time (ISO 8601, 1970 or later), not {text!r}"
        )
    return found


class SeqgateDataSource(DataSource):
    """spark.read.format("seqgate")"""

    @classmethod
    def name(cls) -> str:
        return "seqgate"

    def schema(self) -> StructType:
        """The columns of a read without `.schema(...)`. Raises InvalidOptionError."""
        return from_arrow_schema(pa.schema(list(Options.parse(self.options).columns.items())))

    def reader(self, schema: StructType) -> "MessagesReader | EntriesReader":
        """Raises InvalidOptionError if an option or a column is invalid."""
        options = Options.parse(self.options)
        if options.rows == ENTRIES:
            wanted = arrow_schema(schema, COLUMNS | METADATA_COLUMNS)
            return EntriesReader(options, wanted)
        return MessagesReader(options, message_schema(options, schema))


def message_schema(options: Options, schema: StructType) -> pa.Schema:
    """The columns' Arrow types. Raises InvalidOptionError like `arrow_schema`, and if gaps are to
    be reported without the column for them."""
    wanted = arrow_schema(schema, MESSAGE_COLUMNS | GAP_COLUMN)
    if options.trimmed == REPORT and GAP not in wanted.names:
        raise InvalidOptionError(f"option trimmed = {REPORT} needs the column {GAP}")
    return wanted


def arrow_schema(schema: StructType, known: Mapping[str, pa.DataType]) -> pa.Schema:
    """The columns' Arrow types. Raises InvalidOptionError for an unknown column or type."""
    wanted = to_arrow_schema(schema, timezone="UTC")
    for field in wanted:
        if field.name not in known:
            raise InvalidOptionError(f"unknown column {field.name}, expected {', '.join(known)}")
        if field.type != known[field.name]:
            raise InvalidOptionError(
                f"column {field.name} must be {known[field.name]}, not {field.type}"
            )
    return pa.schema([pa.field(field.name, field.type) for field in wanted])


class Share(InputPartition):
    def __init__(self, ranges: tuple[Range, ...]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


# Neither reader pushes filters down: docs/decisions/the-spark-source-pushes-down-no-filters.md.


class MessagesReader(DataSourceReader):
    """Connects only in the planning process, and in each task."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[Share]:
        options = self._options
        with (
            in_task(options.handed),
            spans.joined("plan", options.handed),
            connected(options.ledger) as stub,
        ):
            topics = list_topics(stub, options.topics, options.timeout_s)

            def ranges(topic: ledger_pb2.Topic) -> list[Range]:
                bounds = bounds_of(stub, topic.name, *options.ends, options.timeout_s)
                if bounds is None:
                    return []
                after = None if bounds.start == Bounds().start else just_before(bounds.start)
                entries_max = options.entries_max(topic)
                through = bounds.through
                return ranges_after(stub, topic, after, through, entries_max, options.timeout_s)

            # Without partitions Spark creates one of its own.
            return message_shares(options, topics, ranges) or [Share(())]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return read_messages(self._options, self._options.edges, self._schema, partition)


def message_shares(
    options: Options,
    topics: Sequence[ledger_pb2.Topic],
    ranges: Callable[[ledger_pb2.Topic], list[Range]],
) -> list[Share]:
    """Divide ranges of topics among tasks, by their size."""
    sizes = {topic.name: bytes_each(topic) for topic in topics}
    found = for_each(ranges, topics)
    tasks = shared(
        (each for of_topic in found for each in of_topic),
        options.bytes_per_partition,
        lambda each: each.entries * sizes[each.topic],
    )
    return [Share(each) for each in tasks]


def read_messages(
    options: Options, edges: Edges, schema: pa.Schema, partition: Any
) -> Iterator[pa.RecordBatch]:
    """The messages of a task."""
    scan = Scan(schema, edges, options.timeout_s, options.trimmed == FAIL)
    handed = options.handed
    with in_task(handed), connected(options.ledger) as stub:
        for each in partition.ranges:
            messages = 0
            with spans.joined(f"read {each.topic}", handed, {names.TOPIC: each.topic}) as span:
                for batch in message_batches(stub, each, scan):
                    messages += batch.num_rows
                    yield batch
                span.set_attribute(names.MESSAGING_BATCH_MESSAGE_COUNT, messages)


class EntriesReader(DataSourceReader):
    """Connects only in the planning process, and in each task."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[Share]:
        options = self._options
        entries_max = options.entries_per_partition
        with (
            in_task(options.handed),
            spans.joined("plan", options.handed),
            connected(options.ledger) as stub,
        ):
            topics = list_topics(stub, options.topics, options.timeout_s)
            start, to = options.ends
            first = first_entry(start)
            if options.trimmed == FAIL and isinstance(first, MessageId):
                requested = bounds_of(stub, "", first, "latest", options.timeout_s)
                assert requested is not None
                check_not_trimmed(stub, topics, requested, options.timeout_s)

            def bounds(topic: ledger_pb2.Topic) -> Bounds | None:
                return bounds_of(stub, topic.name, first, to, options.timeout_s)

            ranges = all_ranges(stub, topics, bounds, entries_max, options.timeout_s)
            # Without partitions Spark creates one of its own.
            return [Share(each) for each in shared(ranges, entries_max) or [()]]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        metadata = not METADATA_COLUMNS.keys().isdisjoint(self._schema.names)
        timeout_s, handed = self._options.timeout_s, self._options.handed
        with in_task(handed), connected(self._options.ledger) as stub:
            for each in partition.ranges:
                entries = 0
                with spans.joined(f"read {each.topic}", handed, {names.TOPIC: each.topic}) as span:
                    blocks = read_blocks(stub, each, timeout_s=timeout_s, metadata=metadata)
                    for run in runs_of(each.topic, blocks):
                        entries += run.count
                        yield record_batch(run, self._schema)
                    span.set_attribute(names.ENTRIES, entries)
                # Ids are consecutive: this many existed when it was planned.
                if entries < each.entries and self._options.trimmed == FAIL:
                    raise trimmed(each.topic, just_after(each.after), each.through)


def register(spark: SparkSession) -> None:
    """Add the data source "seqgate" to a session."""
    spark.dataSource.register(SeqgateDataSource)
