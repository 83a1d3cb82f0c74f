"""Messages of a topic: pages of its log, and searches through it.

A search reads entries in the order of the log and stops at the first of its limits. It then names
the last entry that it read, from which the reader may continue.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from seqgate.api.common.v1 import common_pb2
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._calls import Calls
from seqgate.client._channel import translated
from seqgate.client._subscribing import start_to_wire
from seqgate.errors import InvalidRequestError
from seqgate.keys import sticky_key
from seqgate.payloads import PayloadDamaged, open_batch
from seqgate.types import Position

ROWS_MAX: Final = 50
"""The most entries on a page."""

SCAN_ENTRIES_MAX: Final = 5_000
"""The most entries that one search reads."""

SCAN_BYTES_MAX: Final = 32 * 1024 * 1024
"""The most bytes of payloads that one search reads, to find keys within batches."""

SCAN_S: Final = 5.0
"""The most time that one search reads, in seconds."""

WHOLE_BYTES_MAX: Final = 8 * 1024 * 1024
"""The largest message that is put together from its chunks, in bytes as stored."""

EXPRESSION_ENTRIES_MAX: Final = 500
"""The most entries that one search judges by an expression: each costs a call."""

AT_A_TIME: Final = 16
"""The most such calls at once."""

EXPRESSION_CHARACTERS_MAX: Final = 4_000
"""The longest expression."""


class Search(NamedTuple):
    """What to look for in a topic.

    Attributes:
        start: the first entry to read; a time: the first appended then or later; None: the start of
            the log.
        key: None: any.
        producer: empty: any.
        sequence_id: None: any.
        expression: in CEL, as filters have it; empty: none.
    """

    topic: str
    start: Position | datetime | None = None
    key: bytes | None = None
    producer: str = ""
    sequence_id: int | None = None
    expression: str = ""

    @property
    def is_narrow(self) -> bool:
        """Whether entries may be left out."""
        return (
            bool(self.key is not None or self.producer or self.expression)
            or self.sequence_id is not None
        )


@dataclass(slots=True)
class Found:
    """What a search found.

    Attributes:
        read: how many entries it read.
        last: the last one of them; None: none.
        stopped_by: the limit that stopped it; empty: the end of the log.
    """

    entries: list[ledger_pb2.StoredEntry] = field(default_factory=list)
    read: int = 0
    last: Position | None = None
    stopped_by: str = ""


async def search(calls: Calls, wanted: Search) -> Found:
    """Read from the start until the end of the log or a limit.

    Raises:
        InvalidRequestError: the expression is invalid.
        SeqgateError: a service refuses, or does not answer.
    """
    if wanted.expression:
        await _check(calls, wanted.expression)
    found = Found()
    started_s = time.monotonic()
    payload_bytes = 0
    entries = _read(calls, wanted, metadata_only=wanted.key is None)
    try:
        async for page in entries:
            verdicts = await _judged(calls, wanted, page)
            for entry, is_wanted in zip(page, verdicts, strict=False):
                found.read += 1
                found.last = position_of(entry.position)
                payload_bytes += len(entry.payload)
                if is_wanted and _matches(entry, wanted):
                    found.entries.append(entry)
                if len(found.entries) == ROWS_MAX:
                    found.stopped_by = f"{ROWS_MAX} entries a page"
                elif found.read == SCAN_ENTRIES_MAX:
                    found.stopped_by = f"{SCAN_ENTRIES_MAX:,} entries read"
                elif wanted.expression and found.read == EXPRESSION_ENTRIES_MAX:
                    found.stopped_by = f"{EXPRESSION_ENTRIES_MAX} entries judged"
                elif payload_bytes > SCAN_BYTES_MAX:
                    found.stopped_by = f"{SCAN_BYTES_MAX // 2**20} MiB read"
                elif time.monotonic() - started_s > SCAN_S:
                    found.stopped_by = f"{SCAN_S:.0f} seconds"
                if found.stopped_by:
                    return found
    finally:
        await entries.aclose()
    return found


async def _read(
    calls: Calls, wanted: Search, *, metadata_only: bool
) -> AsyncGenerator[Sequence[ledger_pb2.StoredEntry], None]:
    request = ledger_pb2.ReadRequest(
        topic=wanted.topic,
        start=start_message(wanted.start),
        max_entries=SCAN_ENTRIES_MAX if wanted.is_narrow else ROWS_MAX + 1,
        metadata_only=metadata_only,
    )
    async for page in _responses(calls, request):
        yield page


async def _responses(
    calls: Calls, request: ledger_pb2.ReadRequest
) -> AsyncGenerator[Sequence[ledger_pb2.StoredEntry], None]:
    call = calls.stub("ledger").Read(request, timeout=SCAN_S * 2)
    try:
        while True:
            response = await translated(anext(aiter(call), None))
            if response is None or response.HasField("draining"):
                return
            if response.HasField("entries"):
                yield response.entries.entries
    finally:
        call.cancel()


def start_message(at: Position | datetime | None) -> common_pb2.Start:
    match at:
        case None:
            return start_to_wire("earliest")
        case Position():
            return common_pb2.Start(at=to_wire(at))
        case datetime():
            return start_to_wire(at)


async def _check(calls: Calls, expression: str) -> None:
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"the expression is too long (limit {EXPRESSION_CHARACTERS_MAX:,} characters)"
        )
    answer = await calls.call(filter_pb2.CompileRequest(expression=expression))
    for fault in answer.faults.faults:
        raise InvalidRequestError(f"column {fault.column}: {fault.message}")


async def _judged(
    calls: Calls, wanted: Search, page: Sequence[ledger_pb2.StoredEntry]
) -> list[bool]:
    """For each entry, whether the expression accepts it; only the first ones, up to the limit."""
    if not wanted.expression:
        return [True] * len(page)
    slots = asyncio.Semaphore(AT_A_TIME)

    async def accepts(entry: ledger_pb2.StoredEntry) -> bool:
        request = filter_pb2.ExplainRequest(
            expression=wanted.expression, metadata=entry.metadata, topic=wanted.topic
        )
        async with slots:
            answer = await calls.call(request)
        return bool(answer.outcome.verdict == filter_pb2.FILTER_VERDICT_ACCEPT)

    return list(await asyncio.gather(*(accepts(each) for each in page[:EXPRESSION_ENTRIES_MAX])))


def _matches(entry: ledger_pb2.StoredEntry, wanted: Search) -> bool:
    metadata = entry.metadata
    if wanted.producer and metadata.producer_name != wanted.producer:
        return False
    if wanted.sequence_id is not None:
        highest = metadata.highest_sequence_id or metadata.sequence_id
        if not metadata.sequence_id <= wanted.sequence_id <= highest:
            return False
    return wanted.key is None or wanted.key in keys_of(entry)


def keys_of(entry: ledger_pb2.StoredEntry) -> set[bytes]:
    """The keys of an entry's messages. A batch has them in its payload."""
    found = {sticky_key(entry.metadata)}
    if entry.metadata.HasField("num_messages_in_batch") and entry.payload:
        try:
            for message in open_batch(entry.metadata, entry.payload):
                if message.metadata.HasField("partition_key"):
                    found.add(message.metadata.partition_key.encode())
        except PayloadDamaged:
            pass
    return found


async def entry_at(calls: Calls, topic: str, at: Position) -> ledger_pb2.StoredEntry | None:
    """The entry at a position; None: the log has none."""
    request = ledger_pb2.ReadEntriesRequest(topic=topic, positions=[to_wire(at)])
    found = [each for answer in await calls.responses(request) for each in answer.entries.entries]
    return found[0] if found else None


async def whole_payload(
    calls: Calls, topic: str, chunk: ledger_pb2.StoredEntry
) -> tuple[bytes, str]:
    """The chunks of a chunk's message end to end, and why they are not all there; empty: they are.
    Reads at most WHOLE_BYTES_MAX, which lie within SCAN_ENTRIES_MAX entries.

    Raises:
        SeqgateError: a service refuses, or does not answer.
    """
    metadata = chunk.metadata
    if metadata.total_chunk_msg_size > WHOLE_BYTES_MAX:
        limit = f"{WHOLE_BYTES_MAX // 2**20} MiB"
        return b"", f"the message has {metadata.total_chunk_msg_size:,} bytes (limit {limit})"
    found = await calls.call(
        ledger_pb2.FindMessageRequest(
            topic=topic,
            producer_name=metadata.producer_name,
            sequence_id=metadata.sequence_id,
        )
    )
    if not found.fate.HasField("first_chunk_position"):
        return b"", "the message is unfinished, was aborted, or lost chunks to a trim"
    request = ledger_pb2.ReadRequest(
        topic=topic,
        start=common_pb2.Start(at=found.fate.first_chunk_position),
        through=found.fate.position,
        max_entries=SCAN_ENTRIES_MAX,
        metadata_only=True,
    )
    places: dict[int, common_pb2.Position] = {}
    async for page in _responses(calls, request):
        for each in page:
            if each.metadata.uuid == metadata.uuid:
                places[each.metadata.chunk_id] = each.position
    if places.keys() != set(range(metadata.num_chunks_from_msg)):
        return b"", "its chunks are of another attempt, or too far apart"
    wanted = ledger_pb2.ReadEntriesRequest(
        topic=topic, positions=[places[number] for number in sorted(places)]
    )
    chunks = [each for answer in await calls.responses(wanted) for each in answer.entries.entries]
    payloads = {each.metadata.chunk_id: each.payload for each in chunks}
    if payloads.keys() != places.keys():
        return b"", "chunks of it were trimmed meanwhile"
    return b"".join(payloads[number] for number in sorted(payloads)), ""


async def steps_back(calls: Calls, topic: str, to: Position, entries: int) -> Position:
    """The position that many entries before another one; the first of the log, if it has fewer."""
    ranges: list[ledger_pb2.LedgerRange] = [
        each
        async for each in calls.pages(ledger_pb2.ListLedgersRequest(topic=topic, page_size=1_000))
        if (each.ledger_id, each.first_entry_id) <= to
    ]
    left = entries
    place = to
    for each in reversed(ranges):
        last = to.entry_id if each.ledger_id == to.ledger_id else each.last_entry_id + 1
        first = max(each.first_entry_id, last - left)
        left -= last - first
        place = Position(each.ledger_id, first)
        if left <= 0:
            break
    return place


def position_of(wire: common_pb2.Position) -> Position:
    return Position(wire.ledger_id, wire.entry_id)


def to_wire(place: Position) -> common_pb2.Position:
    return common_pb2.Position(ledger_id=place.ledger_id, entry_id=place.entry_id)
