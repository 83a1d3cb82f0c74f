"""Tasks that read messages, of batch and streaming reads alike."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.errors import DataLossError, MessagesTrimmedError, MessageTooLargeError
from seqgate.spark._columns import Range, connected
from seqgate.spark._messages import Edges, Scan, message_batches
from seqgate.spark._options import FAIL, REPORT, Options, Share, bytes_each
from seqgate.spark._partitions import for_each, shared
from seqgate.spark._traced import in_task
from seqgate.telemetry import names, spans


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
    fails, reports = options.trimmed == FAIL, options.trimmed == REPORT
    scan = Scan(schema, edges, options.timeout_s, fails, reports)
    handed = options.handed
    with in_task(handed), connected(options.ledger) as stub:
        for each in partition.ranges:
            messages = 0
            about = {names.TOPIC: each.topic}
            with located(each.topic), spans.joined(f"read {each.topic}", handed, about) as span:
                for batch in message_batches(stub, each, scan):
                    messages += batch.num_rows
                    yield batch
                span.set_attribute(names.MESSAGING_BATCH_MESSAGE_COUNT, messages)


@contextmanager
def located(topic: str) -> Iterator[None]:
    """Have errors about damaged and too large messages name their topic and position: of an error
    in a task, Spark shows only the text."""
    try:
        yield
    except MessagesTrimmedError:  # which names them
        raise
    except (DataLossError, MessageTooLargeError) as error:
        raise type(error)(
            f"{topic}, {_place(error.details)}: {error}",
            reason=error.reason,
            details={**error.details, "topic": topic},
        ) from error


def _place(details: Mapping[str, str]) -> str:
    """The entry, or the range of entries, that an error names."""
    ledger_id, last = details.get("ledger_id", "?"), details.get("entry_id", "?")
    first = details.get("first_entry_id", last)
    place = f"{ledger_id}:{last}"
    return place if first == last else f"{ledger_id}:{first} to {place}"
