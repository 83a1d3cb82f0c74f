"""The streaming source for Spark; the package describes its use.

An offset has, for each topic that a query has met, the last position that is read: {"t/n/name":
"ledger:entry"}. A topic without one is read from its first remaining entry, so a topic that appears
late is read whole. Spark keeps the offsets in its checkpoint.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from math import ceil
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.errors import NotFoundError
from seqgate.message_id import MessageId
from seqgate.spark._columns import Range, Run, connected, read_blocks, runs_of
from seqgate.spark._messages import Edges
from seqgate.spark._options import FAIL, Options, Share
from seqgate.spark._partitions import (
    for_each,
    is_selected,
    just_before,
    list_topics,
    position_at,
    position_of,
    ranges_after,
)
from seqgate.spark._tasks import message_shares, read_messages
from seqgate.types import Position

COUNTED_ENTRIES: Final = 16_384
"""About how many entries are counted at a time to find where a trigger ends."""

Offset = dict[str, Position]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Connects for each call, and in each task."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._target: Offset | None = None
        self._turn = 0  # the topic whose messages are counted first

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        with connected(self._options.ledger) as stub:
            topics = self._topics(stub)

            def before(topic: ledger_pb2.Topic) -> Position | None:
                return self._before(stub, topic)

            found = zip(topics, for_each(before, list(topics.values())), strict=True)
            return _to_json({name: each for name, each in found if each is not None})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        messages = self._options.messages_per_trigger
        return ReadAllAvailable() if messages is None else ReadMaxRows(messages)

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802
        begin = _of_json(start)
        with connected(self._options.ledger) as stub:
            topics = self._topics(stub)
            self._check_present(begin, topics)
            ends = _lasts(topics) if self._target is None else self._target
            grown = {
                name: end
                for name, end in ends.items()
                if name in topics and (name not in begin or begin[name] < end)
            }
            if isinstance(limit, ReadMaxRows):
                grown = self._limited(stub, begin, grown, limit.max_rows)
        return _to_json(begin | grown)

    def reportLatestOffset(self) -> dict[str, str]:  # noqa: N802
        with connected(self._options.ledger) as stub:
            return _to_json(_lasts(self._topics(stub)))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with connected(self._options.ledger) as stub:
            self._target = _lasts(self._topics(stub))

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> list[Share]:
        options, begin, until = self._options, _of_json(start), _of_json(end)
        with connected(options.ledger) as stub:
            topics = self._topics(stub)
            self._check_present(until, topics)
            grown = [
                topic
                for name, topic in topics.items()
                if name in until and (name not in begin or begin[name] < until[name])
            ]

            def ranges(topic: ledger_pb2.Topic) -> list[Range]:
                after, through = begin.get(topic.name), until[topic.name]
                entries_max = options.entries_max(topic)
                return ranges_after(stub, topic, after, through, entries_max, options.timeout_s)

            return message_shares(options, grown, ranges)

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return read_messages(self._options, Edges(), self._schema, partition)

    def _topics(self, stub: LedgerServiceStub) -> dict[str, ledger_pb2.Topic]:
        """The topics that exist. A named one may be created later."""
        options = self._options
        found = list_topics(stub, options.topics, options.timeout_s, awaits=True)
        return {topic.name: topic for topic in found}

    def _before(self, stub: LedgerServiceStub, topic: ledger_pb2.Topic) -> Position | None:
        """The position after which a query starts to read a topic; None: at its first entry."""
        start, last = self._options.start or "latest", _last(topic)
        if start == "earliest":
            return None
        if start == "latest":
            return last
        if isinstance(start, datetime):
            first = position_at(stub, topic.name, start, self._options.timeout_s)
            return last if first is None else just_before(first)
        assert isinstance(start, MessageId)
        return just_before(start.position) if start.ledger_id else None

    def _check_present(self, wanted: Offset, topics: Mapping[str, Any]) -> None:
        """Raise NotFoundError if a topic was deleted: what was unread is lost."""
        if self._options.trimmed != FAIL:
            return
        for name in wanted:
            if name not in topics and is_selected(name, self._options.topics):
                raise NotFoundError(
                    f"topic {name} was deleted, perhaps before all of it was read; set option "
                    "trimmed to skip or report to go on",
                    details={"topic": name},
                )

    def _limited(
        self, stub: LedgerServiceStub, begin: Offset, ends: Offset, messages_max: int
    ) -> Offset:
        """How far a trigger reads each topic: together about so many messages, which topics share.
        Each trigger begins with another topic."""
        found: Offset = {}
        left, first = messages_max, self._turn % max(1, len(ends))
        self._turn += 1
        names = [*ends][first:] + [*ends][:first]
        for index, name in enumerate(names):
            if left <= 0:
                break
            share = ceil(left / (len(names) - index))
            wanted = Range(name, begin.get(name), ends[name], 0)
            found[name], messages = cut(stub, wanted, share, self._options.timeout_s)
            left -= messages
        return found


def cut(
    stub: LedgerServiceStub, wanted: Range, messages_max: int, timeout_s: float
) -> tuple[Position, int]:
    """Where a range ends after so many messages, and their number: with the entry that reaches it,
    as no batch is cut, or at its own end."""
    messages = 0
    blocks = read_blocks(stub, wanted, timeout_s=timeout_s)
    for run in runs_of(wanted.topic, blocks, COUNTED_ENTRIES):
        counts = messages + np.cumsum(_counts(run))
        index = int(np.searchsorted(counts, messages_max))
        if index < run.count:
            return Position(int(run.ledger_id[index]), int(run.entry_id[index])), int(counts[index])
        messages = int(counts[-1])
    return wanted.through, messages


def _counts(run: Run) -> Any:
    """The number of messages that end with each entry."""
    counts = np.maximum(run.num_messages, 1).astype(np.int64)
    counts[run.markers] = 0
    counts[[index for index, chunk in run.chunks if not chunk.is_last]] = 0
    return counts


def _lasts(topics: Mapping[str, ledger_pb2.Topic]) -> Offset:
    found = ((name, _last(topic)) for name, topic in topics.items())
    return {name: last for name, last in found if last is not None}


def _last(topic: ledger_pb2.Topic) -> Position | None:
    return position_of(topic.last) if topic.HasField("last") else None


def _to_json(offset: Offset) -> dict[str, str]:
    """Sorted: Spark compares offsets as texts."""
    return {name: str(offset[name]) for name in sorted(offset)}


def _of_json(offset: Mapping[str, str]) -> Offset:
    return {name: Position(*map(int, place.split(":"))) for name, place in offset.items()}
