"""The options of the data source; the package describes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._subscribing import Place, parse_place
from seqgate.errors import InvalidRequestError
from seqgate.message_id import MessageId
from seqgate.spark._columns import COLUMNS, Range
from seqgate.spark._messages import GAP_COLUMN, MESSAGE_COLUMNS, Edges
from seqgate.spark._partitions import is_pattern
from seqgate.telemetry.propagation import FIELDS
from seqgate.types import InvalidNameError, TopicName

ENTRIES_PER_PARTITION: Final = 1_000_000
ENTRIES_PER_PARTITION_MAX: Final = 100_000_000
"""The default and the most entries per task."""

BYTES_PER_PARTITION: Final = 16 * 1024 * 1024
BYTES_PER_PARTITION_MAX: Final = 2**40
"""The default and the most bytes of payload and metadata per task that reads messages. The default
takes a core about two seconds if messages have 100 bytes (12 µs each: docs/benchmarks), and less if
they are larger."""

MESSAGES_PER_TRIGGER_MAX: Final = 2**53
"""The highest limit on the messages of a trigger."""

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
    messages_per_trigger: int | None = None
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
        number = partial(parse_number, options)
        rows = parse_choice("rows", options.get("rows", MESSAGES), (MESSAGES, ENTRIES))
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
            messages_per_trigger=(
                int(number("maxMessagesPerTrigger", 1, MESSAGES_PER_TRIGGER_MAX))
                if "maxmessagespertrigger" in options
                else None
            ),
            start=_place(options, "from"),
            to=_place(options, "to"),
            timeout_s=number("timeout", TIMEOUT_S, TIMEOUT_MAX_S),
            handed={name: options[name] for name in FIELDS if name in options},
            rows=rows,
            trimmed=parse_choice("trimmed", options.get("trimmed", FAIL), trimmed_choices),
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


def parse_choice(name: str, text: str, choices: Sequence[str]) -> str:
    if text.strip().lower() not in choices:
        raise InvalidOptionError(f"option {name} must be {' or '.join(choices)}, not {text!r}")
    return text.strip().lower()


def parse_number(options: Mapping[str, str], name: str, default: float, highest: float) -> float:
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


class Share(InputPartition):
    def __init__(self, ranges: tuple[Range, ...]) -> None:
        super().__init__(ranges)
        self.ranges = ranges
