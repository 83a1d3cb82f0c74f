"""The data source for Spark; the package describes its use."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from seqgate.errors import InvalidRequestError
from seqgate.spark._columns import (
    COLUMNS,
    METADATA_COLUMNS,
    Range,
    connected,
    read_blocks,
    record_batch,
    runs_of,
)
from seqgate.spark._partitions import (
    Bounds,
    all_ranges,
    check_not_trimmed,
    is_pattern,
    just_after,
    list_topics,
    shared,
    trimmed,
)
from seqgate.spark._traced import in_task
from seqgate.telemetry import names, spans
from seqgate.telemetry.propagation import FIELDS
from seqgate.types import SEQUENCE_ID_MAX, InvalidNameError, Position, TopicName

ENTRIES_PER_PARTITION: Final = 1_000_000
ENTRIES_PER_PARTITION_MAX: Final = 100_000_000
"""The default and the most entries per task."""

TIMEOUT_S: Final = 60.0
TIMEOUT_MAX_S: Final = 86_400.0
"""The default and the longest time that the ledger may be silent or unreachable."""


FAIL: Final = "fail"
SKIP: Final = "skip"
"""The values of option `trimmed`: what to do if requested entries were trimmed."""


class InvalidOptionError(InvalidRequestError):
    """The data source has no such option or column, or does not accept its value."""

    default_reason = "INVALID_OPTION"


@dataclass(frozen=True)
class Options:
    ledger: str
    topics: tuple[str, ...]
    entries_per_partition: int
    bounds: Bounds
    timeout_s: float
    handed: Mapping[str, str]
    skips_trimmed: bool = False

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
        bounds = Bounds()
        if "from" in options:
            bounds = bounds._replace(start=_position("from", options["from"]))
        if "through" in options:
            bounds = bounds._replace(through=_position("through", options["through"]))
        return cls(
            options["ledger"],
            topics,
            int(
                _number(
                    "entriesPerPartition",
                    options.get("entriesperpartition", str(ENTRIES_PER_PARTITION)),
                    ENTRIES_PER_PARTITION_MAX,
                )
            ),
            bounds,
            _number("timeout", options.get("timeout", str(TIMEOUT_S)), TIMEOUT_MAX_S),
            {name: options[name] for name in FIELDS if name in options},
            _choice("trimmed", options.get("trimmed", FAIL), (FAIL, SKIP)) == SKIP,
        )


def _choice(name: str, text: str, choices: Sequence[str]) -> str:
    if text.strip().lower() not in choices:
        raise InvalidOptionError(f"option {name} must be {' or '.join(choices)}, not {text!r}")
    return text.strip().lower()


def _number(name: str, text: str, highest: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 1 <= value <= highest:
        raise InvalidOptionError(f"option {name} must be 1 to {highest:.0f}, not {text!r}")
    return value


def _position(name: str, text: str) -> Position:
    found = re.fullmatch(r"(\d{1,19}):(\d{1,19})", text.strip(), re.ASCII)
    position = Position(*map(int, found.groups())) if found else Position(-1, -1)
    if not all(0 <= each <= SEQUENCE_ID_MAX for each in position):
        raise InvalidOptionError(f"option {name} must be LEDGER:ENTRY, not {text!r}")
    return position


class SeqgateDataSource(DataSource):
    """spark.read.format("seqgate")"""

    @classmethod
    def name(cls) -> str:
        return "seqgate"

    def schema(self) -> StructType:
        """The columns of a read without `.schema(...)`."""
        return from_arrow_schema(pa.schema(list(COLUMNS.items())))

    def reader(self, schema: StructType) -> "SeqgateReader":
        """Raises InvalidOptionError if an option or a column is invalid."""
        return SeqgateReader(Options.parse(self.options), arrow_schema(schema))


def arrow_schema(schema: StructType) -> pa.Schema:
    """The columns' Arrow types. Raises InvalidOptionError for an unknown column or type."""
    known = COLUMNS | METADATA_COLUMNS
    wanted = to_arrow_schema(schema)
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


class SeqgateReader(DataSourceReader):
    """Connects only in the planning process, and in each task.

    It pushes no filters down: Spark 4.3 plans a DataFrame once, so rows that the first query's
    filter excluded would be missing from all others.
    """

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
            if not options.skips_trimmed:
                check_not_trimmed(stub, topics, options.bounds, options.timeout_s)
            ranges = all_ranges(stub, topics, options.bounds, entries_max, options.timeout_s)
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
                if entries < each.entries and not self._options.skips_trimmed:
                    raise trimmed(each.topic, just_after(each.after), each.through)


def register(spark: SparkSession) -> None:
    """Add the data source "seqgate" to a session."""
    spark.dataSource.register(SeqgateDataSource)
