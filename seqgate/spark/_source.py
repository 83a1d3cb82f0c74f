"""The data source for Spark; the package describes its use."""

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from seqgate.api.ledger.v1 import ledger_pb2
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
from seqgate.spark._messages import GAP, GAP_COLUMN, MESSAGE_COLUMNS
from seqgate.spark._options import ENTRIES, FAIL, REPORT, InvalidOptionError, Options, Share
from seqgate.spark._partitions import (
    Bounds,
    all_ranges,
    bounds_of,
    check_not_trimmed,
    first_entry,
    just_after,
    just_before,
    list_topics,
    ranges_after,
    shared,
    trimmed,
)
from seqgate.spark._sink import SeqgateStreamWriter, SeqgateWriter, parsed
from seqgate.spark._stream import StreamReader
from seqgate.spark._tasks import located, message_shares, read_messages
from seqgate.spark._traced import in_task
from seqgate.telemetry import names, spans


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

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        """Raises InvalidOptionError if an option or a column is invalid, or not one of a stream."""
        options = Options.parse(self.options)
        if options.rows == ENTRIES:
            raise InvalidOptionError("the rows of a stream are messages: omit option rows")
        if options.to is not None:
            raise InvalidOptionError("a stream does not end: omit option to")
        if isinstance(options.start, MessageId) and options.start.batch_index >= 0:
            raise InvalidOptionError(
                "a stream starts at an entry: option from must be LEDGER:ENTRY, a time, earliest "
                "or latest"
            )
        return StreamReader(options, message_schema(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> SeqgateWriter:  # noqa: FBT001
        """Raises InvalidOptionError if an option or a column is invalid."""
        return SeqgateWriter(*parsed(self.options, schema, overwrite=overwrite))

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> SeqgateStreamWriter:
        """Raises InvalidOptionError if an option or a column is invalid."""
        return SeqgateStreamWriter(*parsed(self.options, schema, overwrite=overwrite))


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
                about = {names.TOPIC: each.topic}
                with located(each.topic), spans.joined(f"read {each.topic}", handed, about) as span:
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
