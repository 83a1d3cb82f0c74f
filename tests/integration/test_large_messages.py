"""Large messages through the client: cut into chunks, stored, and assembled."""

import asyncio
import sqlite3
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from pathlib import Path
from random import Random
from typing import Any

import google_crc32c
import pytest
import pytest_asyncio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.client import (
    AssemblyLimits,
    Batching,
    Chunking,
    ChunkMessageId,
    Client,
    Compression,
    Dropped,
    DropReason,
    Message,
    MessageId,
    Producer,
    Reader,
    Receipt,
    connect,
)
from seqgate.dev.stack import Stack
from seqgate.errors import (
    CorruptMessageError,
    DataLossError,
    FencedError,
    MessageTooLargeError,
    ProducerQueueFullError,
    SendTimeoutError,
)
from seqgate.message_id import EARLIEST_ID, LATEST_ID
from tests.integration.services import Services, paused
from tests.support.publisher import Publisher, publishing, single
from tests.support.waiting import WITHIN_S, eventually

KIB = 1024
STORED = pb.RECEIPT_STATUS_STORED
SMALL_CHUNKS = Chunking(chunk_bytes=KIB)


@pytest_asyncio.fixture(scope="session")
async def client(services: Services) -> AsyncIterator[Client]:
    async with connect(services.stack.address("ledger")) as client:
        yield client


def noise(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that do not compress."""
    return Random(seed).randbytes(size_bytes)


async def read_all(client: Client, topic: str, **reading: Any) -> list[Message]:
    async with client.reader(topic, follow=False, **reading) as reader:
        return [message async for message in reader]


async def rest(reader: Reader) -> list[bytes]:
    """The payloads of the remaining messages, up to the end."""
    return [message.payload async for message in reader]


async def some(reader: Reader, count: int) -> list[bytes]:
    """The payloads of the next messages."""
    async with asyncio.timeout(WITHIN_S):
        return [(await anext(reader)).payload for _ in range(count)]


async def rest_past_damage(reader: Reader) -> list[bytes]:
    """The payloads of the remaining messages, seeking past the damage that errors report."""
    found: list[bytes] = []
    for _ in range(10):
        try:
            while (message := await reader.read()) is not None:
                found.append(message.payload)
        except (CorruptMessageError, DataLossError) as damage:
            where = MessageId(*(int(damage.details[each]) for each in ("ledger_id", "entry_id")))
            await reader.seek(where, inclusive=False)
        else:
            return found
    raise AssertionError("the reader does not get past the damage")


def chunks(
    sequence_id: int, body: bytes, size: int = KIB, uuid: str = "u", **metadata: Any
) -> list[pb.Publication]:
    """The publications of a large message's chunks; request ids derive from sequence and chunk
    ids."""
    parts = [body[each : each + size] for each in range(0, len(body), size)]
    shared = {
        "uuid": uuid,
        "num_chunks_from_msg": len(parts),
        "total_chunk_msg_size": len(body),
        "message_crc32c": google_crc32c.value(body),
        **metadata,
    }
    return [
        single(1_000 * sequence_id + index + 1, sequence_id, part, chunk_id=index, **shared)
        for index, part in enumerate(parts)
    ]


async def store(publisher: Publisher, publications: Iterable[pb.Publication]) -> list[MessageId]:
    """Store new publications; returns their positions."""
    found = []
    for each in publications:
        receipt = await publisher.store(each)
        assert receipt.status == STORED, receipt
        found.append(MessageId(receipt.position.ledger_id, receipt.position.entry_id))
    return found


async def trim(services: Services, topic: str, before: MessageId) -> None:
    position = common_pb2.Position(ledger_id=before.ledger_id, entry_id=before.entry_id)
    await services.ledger.TrimTopic(pb.TrimTopicRequest(topic=topic, before=position))


async def holds(reader: Reader, size_bytes: int) -> None:
    """Wait until a reader with a pending read holds this many bytes of incomplete messages."""
    await eventually(lambda: reader._assembler.bytes_held == size_bytes, "the reader holds chunks")


@pytest.mark.parametrize(
    ("size_bytes", "chunks"),
    [(0, 0), (1, 0), (KIB, 0), (KIB + 1, 2), (3 * KIB, 3), (3 * KIB + 1, 4)],
)
async def test_a_message_is_chunked_at_the_limit(
    services: Services, client: Client, topic: str, size_bytes: int, chunks: int
) -> None:
    payload = noise(size_bytes)
    async with client.producer(topic, name="p", chunking=SMALL_CHUNKS) as producer:
        receipt = await producer.send(payload, key="k", properties={"a": "b"}, event_time_ms=7)
    (message,) = await read_all(client, topic)
    assert (message.payload, message.key, message.properties) == (payload, "k", {"a": "b"})
    assert message.event_time_ms == 7
    assert message.id == receipt.message_id
    entries = await services.read(topic)
    assert [entry.metadata.chunk_id for entry in entries] == list(range(chunks or 1))
    assert {entry.metadata.num_chunks_from_msg for entry in entries} == {chunks}
    assert isinstance(receipt.message_id, ChunkMessageId) == bool(chunks)
    if chunks:
        assert {entry.metadata.total_chunk_msg_size for entry in entries} == {size_bytes}
        assert len({entry.metadata.uuid for entry in entries}) == 1
        assert b"".join(entry.payload for entry in entries) == payload
        assert isinstance(message.id, ChunkMessageId)
        assert isinstance(receipt.message_id, ChunkMessageId)
        assert message.id.first_chunk == receipt.message_id.first_chunk


@pytest.mark.parametrize("compression", list(Compression))
async def test_a_message_is_compressed_before_it_is_chunked(
    services: Services, client: Client, topic: str, compression: Compression
) -> None:
    payload = noise(4 * KIB) + bytes(64 * KIB)
    async with client.producer(topic, chunking=SMALL_CHUNKS, compression=compression) as producer:
        await producer.send(payload)
    (message,) = await read_all(client, topic)
    assert message.payload == payload
    entries = len(await services.read(topic, metadata_only=True))
    assert entries == 68 if compression is Compression.NONE else entries < 7


async def test_large_and_small_messages_keep_their_order(client: Client, topic: str) -> None:
    payloads = [noise(size, size) for size in (10, 5 * KIB, 20, 30 * KIB, 2 * KIB, 0)]
    async with client.producer(topic, chunking=SMALL_CHUNKS) as producer:
        sent = [producer.send_nowait(payload) for payload in payloads]
        receipts = await asyncio.gather(*sent)
    messages = await read_all(client, topic)
    assert [message.payload for message in messages] == payloads
    assert [message.id for message in messages] == [each.message_id for each in receipts]


async def test_a_repeated_large_message_is_a_duplicate(
    services: Services, client: Client, topic: str
) -> None:
    payload = noise(5 * KIB)
    receipts = []
    for chunk_bytes in (KIB, KIB, 2 * KIB, 64 * KIB):
        chunking = Chunking(chunk_bytes)
        async with client.producer(topic, name="p", chunking=chunking) as producer:
            receipts.append(await producer.send(payload, sequence_id=3))
    assert [receipt.duplicate for receipt in receipts] == [False, True, True, True]
    assert len({str(receipt.message_id) for receipt in receipts}) == 1
    assert len(await services.read(topic, metadata_only=True)) == 5


async def test_batching_and_chunking_exclude_each_other(client: Client, topic: str) -> None:
    with pytest.raises(ValueError, match="give batching or chunking, not both"):
        client.producer(topic, chunking=Chunking(), batching=Batching())


async def test_messages_beyond_the_limits_are_refused_before_sending(
    services: Services, client: Client, topic: str
) -> None:
    async with client.producer(topic, chunking=Chunking(1)) as producer:
        with pytest.raises(MessageTooLargeError) as refusal:
            await producer.send(bytes(10_001))
        assert refusal.value.details["max_chunks"] == "10000"
        await producer.send(b"x")
    assert len(await services.read(topic)) == 1


async def test_a_large_message_counts_for_its_chunks(client: Client, topic: str) -> None:
    async with client.producer(topic, chunking=SMALL_CHUNKS, max_pending_messages=10) as producer:
        with pytest.raises(ProducerQueueFullError):
            producer.send_nowait(noise(11 * KIB))
        assert producer.pending_messages == 0
        small = producer.send_nowait(b"small")
        large = producer.send(noise(11 * KIB))  # waits until nothing else is pending
        await asyncio.gather(small, large)
        assert producer.pending_messages == 0
    assert [len(each.payload) for each in await read_all(client, topic)] == [5, 11 * KIB]


async def test_a_reader_starts_at_or_after_a_large_message(client: Client, topic: str) -> None:
    async with client.producer(topic, chunking=SMALL_CHUNKS) as producer:
        sent = [noise(size, size) for size in (3 * KIB, 10, 4 * KIB, 20, 5 * KIB)]
        ids = [(await producer.send(payload)).message_id for payload in sent]
    for index, message_id in enumerate(ids):
        inclusive = await read_all(client, topic, start=message_id)
        assert [each.payload for each in inclusive] == sent[index:]
        exclusive = await read_all(client, topic, start=message_id, inclusive=False)
        assert [each.payload for each in exclusive] == sent[index + 1 :]
        # An id from stored bytes, or in the form of Pulsar's clients before PIP-107.
        for kept in (MessageId.from_bytes(message_id.to_bytes()), MessageId(*message_id.position)):
            again = await read_all(client, topic, start=kept)
            assert [each.payload for each in again] == sent[index:]


async def test_a_message_above_the_readers_limit_stops_it(client: Client, topic: str) -> None:
    payload = noise(20 * KIB)
    async with client.producer(topic, name="a", chunking=SMALL_CHUNKS) as producer:
        await producer.send(payload)
    limits = AssemblyLimits(bytes_max=4 * KIB, message_bytes_max=4 * KIB)
    async with client.reader(topic, follow=False, assembly=limits) as reader:
        with pytest.raises(MessageTooLargeError) as refusal:
            await reader.read()
    assert refusal.value.details["total_chunk_msg_size"] == str(20 * KIB)


async def test_chunks_of_different_producers_interleave(
    services: Services, client: Client, topic: str
) -> None:
    async def publish(name: str) -> list[bytes]:
        payloads = [noise(7 * KIB, zlib.crc32(f"{name}{i}".encode())) for i in range(20)]
        async with client.producer(topic, name=name, chunking=SMALL_CHUNKS) as producer:
            for payload in payloads:
                await producer.send(payload)
        return payloads

    names = ["a", "b", "c"]
    sent = dict(zip(names, await asyncio.gather(*map(publish, names)), strict=True))
    one_at_a_time = AssemblyLimits(messages_max=1)
    for assembly in (None, one_at_a_time):
        messages = await read_all(client, topic, assembly=assembly)
        for name in names:
            assert [each.payload for each in messages if each.producer_name == name] == sent[name]
        ids = [message.id for message in messages]
        assert ids == sorted(ids)


async def test_an_unfinished_message_is_skipped_and_reported(
    services: Services, client: Client, topic: str
) -> None:
    dropped: list[Dropped] = []
    async with publishing(services.ledger, topic, "q") as publisher:
        left: dict[str, Any] = {"uuid": "left", "num_chunks_from_msg": 3, "total_chunk_msg_size": 3}
        assert (await publisher.store(single(1, 5, chunk_id=0, **left))).status == STORED
    async with client.producer(topic, name="q", chunking=SMALL_CHUNKS) as producer:
        await producer.send(noise(3 * KIB), sequence_id=5)
        await producer.send(b"next", sequence_id=6)
    async with client.reader(topic, follow=False, on_dropped=dropped.append) as reader:
        messages = [message async for message in reader]
        assert reader.dropped == {DropReason.ABORTED: 1}
    assert [message.sequence_id for message in messages] == [5, 6]
    assert [(each.producer, each.sequence_id, each.uuid) for each in dropped] == [("q", 5, "left")]


async def test_the_last_sequence_id_excludes_an_unfinished_message(
    services: Services, client: Client, topic: str
) -> None:
    left: dict[str, Any] = {"uuid": "left", "num_chunks_from_msg": 3, "total_chunk_msg_size": 3}
    async with publishing(services.ledger, topic, "q") as publisher:
        assert (await publisher.store(single(1, 5, chunk_id=0, **left))).status == STORED
    async with client.producer(topic, name="q") as producer:
        assert producer.last_sequence_id is None
        assert (await producer.send(b"x")).sequence_id == 5
    async with publishing(services.ledger, topic, "q") as publisher:
        assert (await publisher.store(single(1, 9, chunk_id=0, **left))).status == STORED
    async with client.producer(topic, name="q") as producer:
        assert producer.last_sequence_id == 5
        assert (await producer.send(b"x")).sequence_id == 9


async def test_a_compressed_message_keeps_all_its_fields(client: Client, topic: str) -> None:
    properties = {f"name {each}": "value" * 20 for each in range(50)}
    said: dict[str, Any] = {
        "key": "k\u00e9y",
        "ordering_key": b"\0\xff",
        "event_time_ms": 2**64 - 1,
    }
    payload = noise(10 * KIB) + bytes(1_000_000)
    for compression in Compression:
        async with client.producer(
            topic, chunking=SMALL_CHUNKS, compression=compression
        ) as producer:
            receipt = await producer.send(payload, properties=properties, **said)
        (message,) = await read_all(client, topic, start=receipt.message_id)
        assert (message.payload, message.properties) == (payload, properties)
        assert {name: getattr(message, name) for name in said} == said
        assert (message.producer_name, str(message.id)) == (producer.name, str(receipt.message_id))


async def test_concurrently_sent_large_messages_stay_whole(
    services: Services, client: Client, topic: str
) -> None:
    """Messages sent concurrently over one producer do not lie between two chunks."""

    async def send(producer: Producer, number: int) -> dict[int, bytes]:
        sent = {}
        for each in range(15):
            payload = noise(Random(number + 100 * each).choice((1, 900, 3 * KIB, 9 * KIB)), number)
            receipt = await producer.send(payload)
            sent[receipt.sequence_id] = payload
            await asyncio.sleep(0)
        return sent

    async with client.producer(
        topic, name="p", chunking=SMALL_CHUNKS, max_pending_messages=30
    ) as producer:
        sent: dict[int, bytes] = {}
        for some_sent in await asyncio.gather(*(send(producer, each) for each in range(12))):
            sent |= some_sent
    messages = await read_all(client, topic)
    assert [each.sequence_id for each in messages] == list(range(12 * 15))
    assert {each.sequence_id: each.payload for each in messages} == sent
    ids = await services.ids(topic)
    assert ids == sorted(ids)


# ---- starting and seeking


async def half_read(services: Services, client: Client, topic: str) -> list[Message]:
    """A topic with a large message among others; all its messages, in the order of reading."""
    async with (
        publishing(services.ledger, topic, "q") as publisher,
        client.producer(topic, name="p", chunking=SMALL_CHUNKS) as producer,
    ):
        around = chunks(0, noise(4 * KIB, 9))
        await producer.send(noise(3 * KIB, 1))
        await store(publisher, around[:3])
        await producer.send(noise(2 * KIB, 2))
        await producer.send(b"small")
        await store(publisher, around[3:])
        await producer.send(b"end")
    messages = await read_all(client, topic)
    assert [len(each.payload) for each in messages] == [3 * KIB, 2 * KIB, 5, 4 * KIB, 3]
    return messages


@pytest.mark.parametrize("inclusive", [True, False], ids=["at", "after"])
@pytest.mark.parametrize("read_before", [0, 1, 2, 3, 4, 5])
async def test_a_reader_seeks_while_a_message_is_half_read(
    services: Services, client: Client, topic: str, read_before: int, inclusive: bool
) -> None:
    messages = await half_read(services, client, topic)
    payloads = [each.payload for each in messages]
    for index, message in enumerate(messages):
        async with client.reader(topic, follow=False) as reader:
            assert await some(reader, read_before) == payloads[:read_before]
            await reader.seek(message.id, inclusive=inclusive)
            assert await rest(reader) == payloads[index if inclusive else index + 1 :]


async def test_a_reader_starts_at_every_entry(
    services: Services, client: Client, topic: str
) -> None:
    """Also at an entry inside a message, which is then read at its end."""
    messages = await half_read(services, client, topic)
    for entry in await services.read(topic, metadata_only=True):
        start = MessageId(entry.position.ledger_id, entry.position.entry_id)
        for inclusive in (True, False):
            expected = [each for each in messages if each.id > start or each.id == start]
            if not inclusive:
                expected = [each for each in expected if each.id != start]
            found = await read_all(client, topic, start=start, inclusive=inclusive)
            assert [str(each.id) for each in found] == [str(each.id) for each in expected]
            assert [each.payload for each in found] == [each.payload for each in expected]


@pytest.mark.parametrize(
    "start",
    [EARLIEST_ID, MessageId(-1, -1, 0), MessageId(-1, -1, 3), MessageId(0, 0, 3), MessageId(1, -1)],
    ids=str,
)
@pytest.mark.parametrize("inclusive", [True, False], ids=["at", "after"])
async def test_an_id_before_the_first_entry_is_the_beginning(
    services: Services, client: Client, topic: str, start: MessageId, inclusive: bool
) -> None:
    messages = await half_read(services, client, topic)
    found = await read_all(client, topic, start=start, inclusive=inclusive)
    assert found == messages


async def test_a_chunk_id_with_an_early_first_chunk_starts_at_its_last_one(
    services: Services, client: Client, topic: str
) -> None:
    messages = await half_read(services, client, topic)
    for index, message in enumerate(messages):
        for first in (EARLIEST_ID, MessageId(1, -1), MessageId(0, 0)):
            start = ChunkMessageId(first, MessageId(*message.id.position))
            assert await read_all(client, topic, start=start) == messages[index:]


@pytest.mark.parametrize("inclusive", [True, False], ids=["at", "after"])
@pytest.mark.parametrize("partition", [-1, 0, 3])
async def test_an_id_after_the_last_entry_is_the_end(
    services: Services, client: Client, topic: str, partition: int, inclusive: bool
) -> None:
    await half_read(services, client, topic)
    start = MessageId(*LATEST_ID.position, partition)
    assert await read_all(client, topic, start=start, inclusive=inclusive) == []


async def test_an_id_with_a_partition_is_a_valid_start(
    services: Services, client: Client, topic: str
) -> None:
    """As applications migrated from Pulsar have it."""
    messages = await half_read(services, client, topic)
    for index, message in enumerate(messages):
        start = MessageId(*message.id.position, 3)
        if isinstance(message.id, ChunkMessageId):
            start = ChunkMessageId(MessageId(*message.id.first_chunk.position, 3), start)
        assert await read_all(client, topic, start=start) == messages[index:]
        after = await read_all(client, topic, start=start, inclusive=False)
        assert after == messages[index + 1 :]


# ---- reading while a message is being published


async def test_a_large_message_is_read_once_its_last_chunk_is_stored(
    services: Services, client: Client, topic: str
) -> None:
    body = noise(4 * KIB)
    *most, last = chunks(0, body)
    async with (
        publishing(services.ledger, topic, "q") as publisher,
        client.reader(topic) as reader,
    ):
        await store(publisher, [])
        reading = asyncio.create_task(some(reader, 1))
        for count, each in enumerate(most, 1):
            await store(publisher, [each])
            await holds(reader, count * KIB)
            assert not reading.done()
        await store(publisher, [last])
        assert await reading == [body]
        assert reader._assembler.bytes_held == 0


async def test_an_incomplete_message_is_not_available(
    services: Services, client: Client, topic: str
) -> None:
    body = noise(2 * KIB)
    first, last = chunks(0, body)
    async with (
        publishing(services.ledger, topic, "q") as publisher,
        client.reader(topic, follow=False) as reader,
    ):
        await store(publisher, [first])
        assert await reader.read() is None
        assert not await reader.has_message_available()
        await store(publisher, [last])
        assert await reader.has_message_available()
        assert await some(reader, 1) == [body]
        assert not await reader.has_message_available()
        assert await reader.read() is None


@pytest.mark.parametrize("start", [EARLIEST_ID, MessageId(1, 0), MessageId(1, 1)], ids=str)
async def test_incomplete_chunks_are_not_available(
    services: Services, client: Client, topic: str, start: MessageId
) -> None:
    """The reader reads them to know that they complete no message."""
    async with publishing(services.ledger, topic, "q") as publisher:
        await store(publisher, chunks(0, noise(3 * KIB))[:2])
    async with client.reader(topic, start=start, follow=False) as reader:
        assert not await reader.has_message_available()
        assert await reader.read() is None
        assert not await reader.has_message_available()


async def _kill(stack: Stack) -> None:
    await stack.kill("ledger")
    await stack.run("ledger")


async def _drain(stack: Stack) -> None:
    assert await stack.terminate("ledger") == 0
    await stack.run("ledger")


@pytest.mark.parametrize("disturb", [_kill, _drain], ids=["killed", "drained"])
async def test_a_reader_that_reconnects_between_two_chunks_reads_the_message_once(
    stoppable: Services, topic: str, disturb: Callable[[Stack], Awaitable[None]]
) -> None:
    body, ledger = noise(4 * KIB), stoppable.ledger
    publications = chunks(7, body)
    address = stoppable.stack.address("ledger")
    async with connect(address) as client:
        async with publishing(ledger, topic, "q") as publisher:
            await store(publisher, publications[:2])
        async with client.reader(topic) as reader, client.reader(topic) as other:
            reading = [asyncio.create_task(some(each, 2)) for each in (reader, other)]
            for each in (reader, other):
                await holds(each, 2 * KIB)
            await disturb(stoppable.stack)
            async with publishing(ledger, topic, "q") as publisher:
                await store(publisher, publications[2:3])
                await holds(reader, 3 * KIB)
            await disturb(stoppable.stack)
            async with publishing(ledger, topic, "q") as publisher:
                await store(publisher, [*publications[3:], single(1, 8, b"next")])
            assert await asyncio.gather(*reading) == [[body, b"next"]] * 2
            assert reader.dropped == {}
        for start in (EARLIEST_ID, MessageId(3, 0)):  # all of it, or only the part to fetch
            found = await read_all(client, topic, start=start)
            assert [each.payload for each in found] == [body, b"next"]


async def test_cancelling_a_reader_while_it_fetches_loses_nothing(
    client: Client, topic: str
) -> None:
    payload = noise(1_000 * KIB)
    async with client.producer(topic, chunking=SMALL_CHUNKS) as producer:
        where = (await producer.send(payload)).message_id
        await producer.send(b"next")
    async with client.reader(topic, start=MessageId(*where.position), follow=False) as reader:
        cancelled = 0
        first: Message | None = None
        for each in range(200):
            try:
                async with asyncio.timeout(each / 1_000):
                    first = await anext(reader)
                break
            except TimeoutError:
                cancelled += bool(reader._arrived)
        assert first is not None
        assert first.payload == payload
        assert cancelled
        assert await rest(reader) == [b"next"]
        assert reader.dropped == {}


async def test_a_seek_ends_a_pending_fetch(
    client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message being fetched belongs to the reader's previous position."""
    payloads = [noise(300 * KIB, 1), noise(300 * KIB, 2), b"end"]
    async with client.producer(topic, chunking=SMALL_CHUNKS) as producer:
        ids = [(await producer.send(payload)).message_id for payload in payloads]
    async with client.reader(topic, start=MessageId(*ids[0].position), follow=False) as reader:
        fetching = asyncio.Event()
        fetch = reader._read_again

        async def told(*of_what: Any) -> Any:
            fetching.set()
            return await fetch(*of_what)

        monkeypatch.setattr(reader, "_read_again", told)
        reading = asyncio.create_task(rest(reader))
        await fetching.wait()
        await reader.seek(ids[1])
        assert await reading == payloads[1:]
        assert reader.dropped == {}


async def test_a_message_that_times_out_fails_once_and_can_be_sent_again(
    stoppable: Services, topic: str
) -> None:
    """It may have other chunks then."""
    payload = noise(20 * KIB)
    async with connect(stoppable.stack.address("ledger")) as client:
        options: dict[str, Any] = {"name": "p", "chunking": SMALL_CHUNKS, "send_timeout_s": 0.4}
        async with client.producer(topic, **options) as producer:
            await producer.send(b"before", sequence_id=1)
            with paused(stoppable.stack, "dedup"):
                sending = [producer.send_nowait(payload, sequence_id=each) for each in (2, 3)]
                outcomes = await asyncio.gather(*sending, return_exceptions=True)
            assert [type(each) for each in outcomes] == [SendTimeoutError] * 2
            assert producer.pending_messages == 0
        async with client.producer(topic, name="p", chunking=Chunking(3 * KIB)) as producer:
            for each in (2, 3):
                await producer.send(payload, sequence_id=each)
        messages = await read_all(client, topic)
        assert [each.sequence_id for each in messages] == [1, 2, 3]
        assert [each.payload for each in messages[1:]] == [payload] * 2


async def test_closing_a_producer_stores_its_last_message_whole(client: Client, topic: str) -> None:
    payload = noise(500 * KIB)
    async with client.producer(topic, chunking=SMALL_CHUNKS) as producer:
        sent = producer.send_nowait(payload)
    assert not sent.result().duplicate
    assert [each.payload for each in await read_all(client, topic)] == [payload]


async def test_a_fenced_producer_leaves_no_partial_message(client: Client, topic: str) -> None:
    """The producer that takes its name sends the same message again, and it is stored once."""
    payload = noise(500 * KIB)
    old = client.producer(topic, name="p", chunking=SMALL_CHUNKS)
    await old.open()
    sent = old.send_nowait(payload, sequence_id=4)
    chunking = Chunking(5 * KIB)
    async with client.producer(topic, name="p", chunking=chunking, takeover=True) as new:
        receipt = await new.send(payload, sequence_id=4)
    (outcome,) = await asyncio.gather(sent, return_exceptions=True)
    await old.close()
    (message,) = await read_all(client, topic)
    assert (message.payload, str(message.id)) == (payload, str(receipt.message_id))
    if isinstance(outcome, Receipt):
        assert (receipt.duplicate, str(outcome.message_id)) == (True, str(message.id))
    else:
        assert isinstance(outcome, FencedError)


# ---- missing, trimmed and dropped chunks


async def test_a_message_whose_first_chunk_was_trimmed_is_skipped_and_reported(
    services: Services, client: Client, topic: str
) -> None:
    dropped: list[Dropped] = []
    async with publishing(services.ledger, topic, "q") as publisher:
        _, second, third = await store(publisher, chunks(0, noise(3 * KIB)))
        await store(publisher, [single(1, 1, b"next")])
    await trim(services, topic, second)
    async with client.reader(topic, follow=False, on_dropped=dropped.append) as reader:
        assert await rest(reader) == [b"next"]
        assert reader.dropped == {DropReason.HEADLESS: 2}
    assert [each.positions for each in dropped] == [(second.position,), (third.position,)]
    assert {(each.reason, each.sequence_id) for each in dropped} == {(DropReason.HEADLESS, 0)}


async def test_an_unfinished_message_whose_first_chunk_is_trimmed_starts_over(
    services: Services, client: Client, topic: str
) -> None:
    first, *others = chunks(3, body := noise(3 * KIB))
    publisher: Publisher
    async with publishing(services.ledger, topic, "q") as publisher:
        (where,) = await store(publisher, [first])
        await trim(services, topic, MessageId(where.ledger_id, where.entry_id + 1))
        error = await publisher.ended()
        assert error is not None
    async with publishing(services.ledger, topic, "q") as publisher:
        receipt = await publisher.store(others[0])
        assert receipt.status == pb.RECEIPT_STATUS_CHUNK_GAP
        again = chunks(3, body, uuid="again")
        again[0].resume = True
        await store(publisher, again)
    assert [each.payload for each in await read_all(client, topic)] == [body]


KEEPING_LITTLE = {
    DropReason.EVICTED: AssemblyLimits(messages_max=1),
    DropReason.EXPIRED: AssemblyLimits(expiry_ms=1),
}


@pytest.mark.parametrize("reason", KEEPING_LITTLE, ids=lambda reason: reason.name)
async def test_chunks_dropped_by_the_reader_are_fetched_again(
    services: Services, client: Client, topic: str, reason: DropReason
) -> None:
    bodies = [noise(4 * KIB, each) for each in range(3)]
    dropped: list[Dropped] = []
    async with (
        publishing(services.ledger, topic, "q") as one,
        publishing(services.ledger, topic, "r") as other,
    ):
        ours, theirs = chunks(0, bodies[0]), chunks(0, bodies[1])
        await store(one, ours[:2])
        await asyncio.sleep(0.01)  # the service's clock determines a chunk's age
        await store(other, theirs[:2])
        await store(one, ours[2:])
        await asyncio.sleep(0.01)
        await store(other, theirs[2:])
        await store(one, chunks(1, bodies[2]))
    async with client.reader(
        topic, follow=False, assembly=KEEPING_LITTLE[reason], on_dropped=dropped.append
    ) as reader:
        assert await rest(reader) == bodies
        assert reader.dropped[reason] >= 2
        assert sum(reader.dropped.values()) == sum(len(each.positions) for each in dropped)


async def test_chunks_beyond_the_byte_limit_are_fetched_again(
    services: Services, client: Client, topic: str
) -> None:
    bodies = [noise(8 * KIB, each) for each in range(4)]
    async with AsyncExitStack() as stack:
        streams = [publishing(services.ledger, topic, f"q{each}") for each in range(4)]
        publishers = [await stack.enter_async_context(each) for each in streams]
        for publications in zip(*(chunks(0, body) for body in bodies), strict=True):
            for publisher, publication in zip(publishers, publications, strict=True):
                await store(publisher, [publication])
    limits = AssemblyLimits(bytes_max=9 * KIB, message_bytes_max=8 * KIB)
    async with client.reader(topic, follow=False, assembly=limits) as reader:
        assert await rest(reader) == bodies
        assert reader.dropped[DropReason.EVICTED] > 0


# ---- damage


WRONG: dict[str, tuple[int, dict[str, Any]]] = {
    "another checksum": (3 * KIB, {"message_crc32c": 1}),
    "less than declared": (3 * KIB, {"total_chunk_msg_size": 3 * KIB + 1}),
    "more than declared": (3 * KIB, {"total_chunk_msg_size": 3 * KIB - 1}),
    "more than declared before the end": (3 * KIB, {"total_chunk_msg_size": KIB + 2}),
}


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("start", [MessageId(1, 1), MessageId(1, 3)], ids=["all", "its end"])
async def test_corrupt_chunks_raise_and_do_not_block_later_messages(
    services: Services, client: Client, topic: str, how: str, start: MessageId
) -> None:
    """The reader continues after a seek past the range in the error."""
    size_bytes, wrong = WRONG[how]
    async with publishing(services.ledger, topic, "q") as publisher:
        await store(publisher, [single(1, 0, b"before")])
        await store(publisher, chunks(1, noise(size_bytes), **wrong))
        await store(publisher, [single(2, 2, b"behind")])
    async with client.reader(topic, start=start, follow=False) as reader:
        for _ in range(2):
            with pytest.raises(CorruptMessageError):
                await reader.read()
        assert await rest_past_damage(reader) == [b"behind"]


async def test_damage_before_the_start_is_not_reported(
    services: Services, client: Client, topic: str
) -> None:
    """It lies between the chunks of the message at which reading starts."""
    body = noise(3 * KIB)
    first, *others = chunks(0, body)
    async with (
        publishing(services.ledger, topic, "q") as one,
        publishing(services.ledger, topic, "r") as other,
    ):
        (begin,) = await store(one, [first])
        await store(other, chunks(0, noise(3 * KIB, 1), message_crc32c=1))
        *_, end = await store(one, others)
    (message,) = await read_all(client, topic, start=ChunkMessageId(begin, end))
    assert message.payload == body


async def publish_together(client: Client, topic: str, bodies: list[bytes]) -> None:
    """Store all chunks of a message in one group."""
    async with client.producer(topic, name="p", chunking=SMALL_CHUNKS) as producer:
        for index, body in enumerate(bodies):
            await producer.send(b"before %d" % index, sequence_id=2 * index)
            await producer.send(body, sequence_id=2 * index + 1)
        await producer.send(b"behind", sequence_id=99)


async def publish_one_by_one(client: Client, topic: str, bodies: list[bytes]) -> None:
    """Store chunks one by one."""
    stub = pb_grpc.LedgerServiceStub(client._channel)
    async with publishing(stub, topic, "p") as publisher:
        for index, body in enumerate(bodies):
            await store(publisher, [single(10_000 + index, 2 * index, b"before %d" % index)])
            await store(publisher, chunks(2 * index + 1, body, uuid=f"{index}"))
        await store(publisher, [single(99_999, 99, b"behind")])


@pytest.mark.parametrize("publish", [publish_together, publish_one_by_one])
async def test_disk_damage_in_large_messages_does_not_block_later_ones(
    tmp_path: Path, topic: str, publish: Callable[[Client, str, list[bytes]], Awaitable[None]]
) -> None:
    """For damage in any chunk."""
    bodies = [noise(3 * KIB, each) for each in range(3)]
    async with Stack(tmp_path) as stack, connect(stack.address("ledger")) as client:
        await publish(client, topic, bodies)
        assert await stack.terminate("ledger") == 0
        damage(tmp_path, [body[each * KIB + 100 :][:10] for each, body in enumerate(bodies)])
        await stack.run("ledger")
        async with client.reader(topic, follow=False) as reader:
            assert await some(reader, 1) == [b"before 0"]
            assert await rest_past_damage(reader) == [b"before 1", b"before 2", b"behind"]


async def test_a_damaged_entry_in_a_large_message_does_not_block_later_ones(
    tmp_path: Path, topic: str
) -> None:
    """Damage beyond the payload hides even the message's position."""
    async with Stack(tmp_path) as stack, connect(stack.address("ledger")) as client:
        stub = pb_grpc.LedgerServiceStub(client._channel)
        async with publishing(stub, topic, "p") as publisher:
            publications = chunks(1, noise(3 * KIB))
            publications[0].entries[0].metadata.properties["mark"] = "to be damaged"
            await store(publisher, [single(1, 0, b"before")])
            await store(publisher, publications)
            await store(publisher, [single(2, 2, b"behind")])
        assert await stack.terminate("ledger") == 0
        damage(tmp_path, [b"to be damaged"])
        await stack.run("ledger")
        async with client.reader(topic, follow=False) as reader:
            assert await some(reader, 1) == [b"before"]
            assert await rest_past_damage(reader) == [b"behind"]


def damage(folder: Path, places: Sequence[bytes]) -> None:
    """Overwrite these bytes in the ledger's file."""
    file = folder / "ledger" / "ledger.db"
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = file.read_bytes()
    for each in places:
        assert each in content
        content = content.replace(each, bytes(len(each)))
    file.write_bytes(content)


# ---- without deduplication, and with other limits


async def test_without_deduplication_the_completed_attempt_is_read(
    private: Callable[..., AbstractAsyncContextManager[Services]], topic: str
) -> None:
    """And a message under a reused id is a separate message, from every start of a read."""
    body, later = noise(3 * KIB, 1), noise(3 * KIB, 2)
    async with private(policies=f'[topic."{topic}"]\nenabled = false\n') as services:
        async with publishing(services.ledger, topic, "q") as publisher:
            await store(publisher, chunks(0, body)[:2])
            await store(publisher, chunks(0, body))
            await store(publisher, chunks(0, later, uuid="later"))
        async with connect(services.stack.address("ledger")) as client:
            messages = await read_all(client, topic)
            assert [each.payload for each in messages] == [body, later]
            end = MessageId(*messages[1].id.position)
            found = await read_all(client, topic, start=end)
            assert [each.payload for each in found] == [later]


async def test_a_lowered_limit_of_the_service_makes_chunks_smaller(
    private: Callable[..., AbstractAsyncContextManager[Services]], topic: str
) -> None:
    """And its chunks of the previous attempt are never read."""
    payload, limit = noise(1_000 * KIB), "SEQGATE_LEDGER_MAX_MESSAGE_BYTES"
    async with (
        private(**{limit: str(4 * KIB)}, SEQGATE_LEDGER_WINDOW_MESSAGES="1") as services,
        connect(services.stack.address("ledger")) as client,
    ):
        stack = services.stack
        async with client.producer(topic, name="p", chunking=Chunking()) as producer:
            await producer.send(b"before")
            sending = [producer.send_nowait(each) for each in (payload, b"behind")]

            async def begun() -> bool:
                return len(await services.read(topic, metadata_only=True)) > 3

            await eventually(begun, "some chunks are stored")
            await stack.kill("ledger")
            stack.environment |= {limit: str(KIB), "SEQGATE_LEDGER_WINDOW_MESSAGES": "1000"}
            await stack.run("ledger")
            receipts = await asyncio.gather(*sending)
        entries = await services.read(topic)
        assert {each.metadata.num_chunks_from_msg for each in entries} == {0, 250, 1_000}
        dropped: list[Dropped] = []
        messages = await read_all(client, topic, on_dropped=dropped.append)
        assert [each.payload for each in messages] == [b"before", payload, b"behind"]
        assert [str(each.id) for each in messages[1:]] == [
            str(each.message_id) for each in receipts
        ]
        assert {each.reason for each in dropped} == {DropReason.ABORTED}
