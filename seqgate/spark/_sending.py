"""Sends what is staged. The log decides where to go on: its index has a producer's last stored id,
also when deduplication has forgotten the producer, or the entry was trimmed.

One producer sends all rows of a job in the manifest's order, so those that are stored are always
the first ones of an epoch.
"""

import asyncio
import os
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, cast

from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client import Batching, Chunking, Outgoing, connect
from seqgate.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    ProducerQueueFullError,
)
from seqgate.spark._columns import asked, connected
from seqgate.spark._rows import message_of, rows_of
from seqgate.spark._staging import JobFolder, Manifest
from seqgate.tls import of_environment

NOTHING: Final = -1
"""The last stored id of a producer that has stored nothing."""

EPOCH_ROWS_MAX: Final = 1 << 32
EPOCH_MAX: Final = (1 << 31) - 1
"""The most rows of an epoch, and the highest epoch: a sequence id is an epoch and a row's number
in it, and below 2^63."""

PENDING_BYTES_MAX: Final = 16 * 1024 * 1024
"""The most bytes that await a receipt."""

BATCHED_BYTES_MAX: Final = 64 * 1024
"""The largest row of an epoch that is sent in batches. If one is larger, each is an entry of its
own, or is cut into chunks."""


class NotDeduplicatedError(InvalidRequestError):
    """The topic does not deduplicate, so that rows could be stored twice."""

    default_reason = "NOT_DEDUPLICATED"


class Progress(NamedTuple):
    """What the log knows of a producer.

    Attributes:
        last: the highest id of a whole message; NOTHING: none.
        deduplicates: whether the topic does. Unknown, and True, if nothing is stored.
        limits: those of the ledger.
    """

    last: int
    deduplicates: bool
    limits: ledger_pb2.Opened


def first_id(epoch: int) -> int:
    """The sequence id of an epoch's first row."""
    return epoch * EPOCH_ROWS_MAX


def progress(ledger: str, topic: str, producer: str, timeout_s: float) -> Progress:
    """Open a producer's name, taking it over, and close it. Raises SeqgateError."""
    request = ledger_pb2.Open(topic=topic, producer_name=producer, takeover=True)

    def opened(request: ledger_pb2.PublishRequest, timeout: float) -> ledger_pb2.Opened:
        stream: Any = stub.Publish(iter([request]), timeout=timeout)
        try:
            return cast("ledger_pb2.Opened", next(stream).opened)
        finally:
            stream.cancel()

    with connected(ledger) as stub:
        found = asked(opened, ledger_pb2.PublishRequest(open=request), timeout_s)
    has_stored = found.HasField("last_stored")
    return Progress(
        last=found.last_stored.sequence_id if has_stored else NOTHING,
        deduplicates=not has_stored or found.HasField("last_sequence_id"),
        limits=found,
    )


def check_size(manifest: Manifest, limits: ledger_pb2.Opened) -> None:
    """Raises MessageTooLargeError if a row may exceed what the ledger takes."""
    largest = manifest.message_bytes_max
    most = min(limits.max_large_message_bytes, limits.max_chunks * max(1, limits.max_message_bytes))
    if largest > most:
        raise MessageTooLargeError(
            f"a row of {largest:,} bytes is too large (limit {most:,} with key and properties)",
            details={"max_large_message_bytes": str(most)},
        )


def send(
    folder: JobFolder, manifest: Manifest, ledger: str, producer: str, timeout_s: float
) -> None:
    """Send the rows that the log lacks, and return when all are stored.

    Raises:
        NotDeduplicatedError: at most the first row was sent.
        StagedRowsLostError, FencedError, or another SeqgateError: some rows were sent. Call it
            again.
    """
    if not manifest.rows:
        return
    first = first_id(manifest.epoch)
    last = first + manifest.rows - 1

    def stored() -> int:
        found = progress(ledger, manifest.topic, producer, timeout_s)
        if not found.deduplicates:
            raise NotDeduplicatedError(
                f"{manifest.topic} does not deduplicate, so rows could be stored twice: enable "
                "deduplication by its policy",
                details={"topic": manifest.topic},
            )
        return found.last

    def publish(after: int, through: int) -> None:
        asyncio.run(_publish(folder, manifest, ledger, producer, timeout_s, (after, through)))

    after = stored()
    if after == NOTHING:
        publish(first - 1, first)  # alone: only then does the log tell whether it deduplicates
        after = stored()
    publish(max(first - 1, after), last)
    assert stored() >= last


async def _publish(
    folder: JobFolder,
    manifest: Manifest,
    ledger: str,
    producer_name: str,
    timeout_s: float,
    ids: tuple[int, int],
) -> None:
    after, through = ids
    if after >= through:
        return
    tls, token_file = of_environment(os.environ)
    small = manifest.message_bytes_max <= BATCHED_BYTES_MAX
    async with (
        connect(ledger, tls=tls, token=token_file) as client,
        client.producer(
            manifest.topic,
            name=producer_name,
            takeover=True,
            batching=Batching(by_key=manifest.keyed) if small else None,
            chunking=None if small else Chunking(),
            max_pending_bytes=PENDING_BYTES_MAX,
            send_timeout_s=timeout_s,
            open_timeout_s=timeout_s,
        ) as producer,
    ):
        pending: deque[asyncio.Future[Any]] = deque()
        for message in _messages(folder, manifest, after, through):
            receipt = None
            while receipt is None:
                try:
                    receipt = producer.send_nowait(
                        message.payload,
                        key=message.key,
                        properties=message.properties,
                        sequence_id=message.sequence_id,
                        ordering_key=message.ordering_key,
                        event_time_ms=message.event_time_ms,
                    )
                except ProducerQueueFullError:
                    await pending.popleft()
            pending.append(receipt)
        for receipt in pending:
            await receipt


def _messages(
    folder: JobFolder, manifest: Manifest, after: int, through: int
) -> Iterator[Outgoing]:
    """The rows of these ids, except the first one, in order. Files are read once they are needed,
    slice by slice."""
    next_id = first_id(manifest.epoch)
    for file in manifest.files:
        if next_id + file.rows - 1 <= after:
            next_id += file.rows
            continue
        for batch in folder.read(file):
            skipped = min(max(0, after + 1 - next_id), batch.num_rows)
            next_id += skipped
            for row in rows_of(batch.slice(skipped)):
                if next_id > through:
                    return
                yield message_of(row, next_id)
                next_id += 1
