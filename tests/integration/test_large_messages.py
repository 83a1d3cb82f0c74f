"""Large messages through the client: cut, stored chunk by chunk, put together again."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from random import Random

import pytest
import pytest_asyncio

from seqgate.api.ledger.v1 import ledger_pb2 as pb
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
    connect,
)
from seqgate.errors import MessageTooLargeError, ProducerQueueFullError
from tests.integration.services import Services
from tests.support.publisher import publishing, single

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


async def read_all(client: Client, topic: str, **reading: object) -> list[Message]:
    async with client.reader(topic, follow=False, **reading) as reader:
        return [message async for message in reader]


@pytest.mark.parametrize(
    ("size_bytes", "chunks"),
    [(0, 0), (1, 0), (KIB, 0), (KIB + 1, 2), (3 * KIB, 3), (3 * KIB + 1, 4)],
)
async def test_a_message_is_cut_where_it_must_be(
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
        assert message.id.first_chunk == receipt.message_id.first_chunk


@pytest.mark.parametrize("compression", list(Compression))
async def test_a_message_is_compressed_before_it_is_cut(
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


async def test_a_message_that_is_sent_again_is_a_duplicate(
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


async def test_batching_and_chunking_are_not_for_one_producer(client: Client, topic: str) -> None:
    with pytest.raises(ValueError, match="not both"):
        client.producer(topic, chunking=Chunking(), batching=Batching())


async def test_limits_are_told_before_anything_is_sent(
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
        large = producer.send(noise(11 * KIB))  # waits until it is alone
        await asyncio.gather(small, large)
        assert producer.pending_messages == 0
    assert [len(each.payload) for each in await read_all(client, topic)] == [5, 11 * KIB]


async def test_reading_starts_at_or_after_a_large_message(client: Client, topic: str) -> None:
    async with client.producer(topic, chunking=SMALL_CHUNKS) as producer:
        sent = [noise(size, size) for size in (3 * KIB, 10, 4 * KIB, 20, 5 * KIB)]
        ids = [(await producer.send(payload)).message_id for payload in sent]
    for index, message_id in enumerate(ids):
        inclusive = await read_all(client, topic, start=message_id)
        assert [each.payload for each in inclusive] == sent[index:]
        exclusive = await read_all(client, topic, start=message_id, inclusive=False)
        assert [each.payload for each in exclusive] == sent[index + 1 :]
        # An id that was kept as bytes, or as Pulsar's clients before PIP-107 kept it.
        for kept in (MessageId.from_bytes(message_id.to_bytes()), MessageId(*message_id.position)):
            again = await read_all(client, topic, start=kept)
            assert [each.payload for each in again] == sent[index:]


async def test_a_message_that_is_too_large_for_a_reader_stops_it(
    client: Client, topic: str
) -> None:
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


async def test_a_message_left_unfinished_is_left_out_and_told(
    services: Services, client: Client, topic: str
) -> None:
    dropped: list[Dropped] = []
    async with publishing(services.ledger, topic, "q") as publisher:
        left = {"uuid": "left", "num_chunks_from_msg": 3, "total_chunk_msg_size": 3}
        assert (await publisher.store(single(1, 5, chunk_id=0, **left))).status == STORED
    async with client.producer(topic, name="q", chunking=SMALL_CHUNKS) as producer:
        await producer.send(noise(3 * KIB), sequence_id=5)
        await producer.send(b"next", sequence_id=6)
    async with client.reader(topic, follow=False, on_dropped=dropped.append) as reader:
        messages = [message async for message in reader]
        assert reader.dropped == {DropReason.ABORTED: 1}
    assert [message.sequence_id for message in messages] == [5, 6]
    assert [(each.producer, each.sequence_id, each.uuid) for each in dropped] == [("q", 5, "left")]
