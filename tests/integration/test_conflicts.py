"""A producer that starts its numbers again under an old name learns that its messages are not the
stored ones."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import google_crc32c
import pytest

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import (
    Batching,
    Chunking,
    Client,
    Compression,
    OnConflict,
    Outgoing,
    Receipt,
    SendManyError,
    connect,
)
from seqgate.client._deduplication import PolicyValues
from seqgate.client.blocking import connect as connect_blocking
from seqgate.dev.stack import Stack
from seqgate.errors import ConflictError, SequenceIdTrimmedError
from tests.integration.services import Services
from tests.support.publisher import Publisher, batch, publishing, single

DUPLICATE = pb.RECEIPT_STATUS_DUPLICATE
LARGE = b"x" * 3_000_000

WAYS: list[dict[str, Any]] = [
    {},
    {"batching": Batching(messages_max=50)},
    {"batching": Batching(messages_max=50, by_key=True)},
    {"batching": Batching(messages_max=3), "compression": Compression.ZSTD},
    {"compression": Compression.LZ4},
    {"chunking": Chunking(chunk_bytes=7), "compression": Compression.ZLIB},
]
"""Ways in which a producer may encode messages."""


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with connect(
        stack.address("ledger"), stack.address("dispatcher"), dedup=stack.address("dedup")
    ) as client:
        yield client


def feed(word: str, count: int = 10) -> list[Outgoing]:
    return [
        Outgoing(f"{word} {each}".encode() * 3, key=f"k{each % 3}", sequence_id=each)
        for each in range(count)
    ]


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
async def test_however_they_are_encoded_other_messages_are_told_from_resent_ones(
    client: Client, topic: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    async with client.producer(topic, name="p", **first) as producer:
        stored = await producer.send_many(feed("apple"))
        assert not any(each.differs for each in stored)
    async with client.producer(topic, name="p", **second) as producer:
        same = await producer.send_many(feed("apple"))
        mixed = await producer.send_many([*feed("apple")[:4], *feed("pear")[4:]])
        assert [each.differs for each in same] == [False] * 10
        assert [each.differs for each in mixed] == [False] * 4 + [True] * 6
        assert [each.message_id for each in mixed] == [each.message_id for each in stored]
        assert producer.conflicts == 6


@pytest.mark.parametrize("way", WAYS)
async def test_a_refused_message_fails_alone(
    client: Client, topic: str, way: dict[str, Any]
) -> None:
    async with client.producer(topic, name="p", **way) as producer:
        await producer.send_many(feed("apple", 6))
    async with client.producer(topic, name="p", on_conflict="refuse", **way) as producer:
        with pytest.raises(SendManyError) as failure:
            await producer.send_many([*feed("apple", 3), *feed("pear", 8)[3:]])
        assert producer.conflicts == 3
        assert not (await producer.send(b"new", sequence_id=99)).duplicate, "nothing is on hold"
    outcomes = failure.value.outcomes
    assert all(isinstance(each, Receipt) and not each.differs for each in outcomes[:3])
    for number, each in enumerate(outcomes[3:6], 3):
        assert isinstance(each, ConflictError)
        assert (each.reason, each.sequence_id) == ("CONFLICT", number)
    assert all(isinstance(each, Receipt) and not each.duplicate for each in outcomes[6:])


async def test_policy_refuses_for_producers_that_do_not(
    client: Client, stack: Stack, topic: str
) -> None:
    async with client.producer(topic, name="p") as producer:
        await producer.send(b"apple", sequence_id=3)
        admin = client.admin()
        await admin.set_policy(topic, PolicyValues(refuses_conflicts=True))
        assert (await admin.deduplication(topic)).policy.refuses_conflicts
        with pytest.raises(ConflictError):
            await producer.send(b"pear", sequence_id=3)
        assert (await producer.send(b"apple", sequence_id=3)).differs is False


async def test_a_producer_warns_once(
    client: Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with client.producer(topic, name="p") as producer:
        await producer.send_many(feed("apple"))
    with caplog.at_level(logging.WARNING, "seqgate.client"):
        async with client.producer(topic, name="p", on_conflict=OnConflict.REPORT) as producer:
            await producer.send_many(feed("apple"))
            assert not caplog.records
            await producer.send_many(feed("pear"))
            assert producer.conflicts == 10
    (record,) = caplog.records
    assert "another message is stored under sequence id 0" in record.getMessage()


async def test_each_part_of_a_message_is_compared(client: Client, topic: str) -> None:
    sent: dict[str, Any] = {"key": "k", "properties": {"a": "1"}, "event_time_ms": 5}
    others: list[dict[str, Any]] = [
        {"key": b"k"},
        {"properties": {"a": "2"}},
        {"event_time_ms": 6},
        {"ordering_key": b"k"},
    ]
    async with client.producer(topic, name="p") as producer:
        await producer.send(b"x", sequence_id=1, **sent)
        same = await producer.send(
            b"x", sequence_id=1, **sent | {"properties": {"a": "1", "traceparent": "other"}}
        )
        assert same.differs is False
        for each in others:
            assert (await producer.send(b"x", sequence_id=1, **sent | each)).differs


async def test_a_delay_is_another_time_whenever_it_is_given(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as producer:
        await producer.send(b"x", sequence_id=1, deliver_after_s=5)
        assert (await producer.send(b"x", sequence_id=1, deliver_after_s=900)).differs is False


async def test_a_large_message_is_compared_whole(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p", chunking=Chunking()) as producer:
        await producer.send(LARGE, sequence_id=1)
    async with client.producer(topic, name="p", chunking=Chunking(1_000_000)) as producer:
        assert (await producer.send(LARGE, sequence_id=1)).differs is False
        assert (await producer.send(LARGE[:-1] + b"y", sequence_id=1)).differs
        assert (await producer.send(b"small", sequence_id=1)).differs


def test_the_blocking_client_reports_and_refuses(stack: Stack, topic: str) -> None:
    with connect_blocking(stack.address("ledger")) as client:
        with client.producer(topic, name="p") as producer:
            producer.send(b"apple", sequence_id=1)
            assert producer.send(b"pear", sequence_id=1).differs
            assert producer.conflicts == 1
        with (
            client.producer(topic, name="p", on_conflict="refuse") as producer,
            pytest.raises(ConflictError),
        ):
            producer.send(b"pear", sequence_id=1)


async def test_after_a_trim_nothing_is_claimed(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as producer:
        sent = [await producer.send(b"apple", sequence_id=each) for each in range(5)]
        await client.admin().trim_topic(topic, before=sent[3].message_id)
        assert (await producer.send(b"pear", sequence_id=4)).differs
        with pytest.raises(SequenceIdTrimmedError):
            await producer.send(b"pear", sequence_id=1)
        assert producer.conflicts == 1


# ---- the wire


def crc(payload: bytes) -> int:
    return int(google_crc32c.value(payload))


@pytest.fixture
async def publisher(services: Services, topic: str) -> AsyncIterator[Publisher]:
    async with publishing(services.ledger, topic, "p") as publisher:
        yield publisher


@pytest.mark.parametrize(
    ("first", "second", "differs", "not_compared"),
    [
        (single(1, 7, b"a", payload_crc32c=crc(b"a")), b"a", [], []),
        (single(1, 7, b"a", payload_crc32c=crc(b"a")), b"b", [0], []),
        (single(1, 7, b"a", payload_crc32c=crc(b"a")), b"aa", [0], []),
        (single(1, 7, b"a"), b"b", [], [0]),
        (single(1, 7, b"a"), b"aa", [0], []),
        (batch(1, [6, 7], b"ab", payload_crc32c=crc(b"ab")), b"a", [], [0]),
    ],
)
async def test_without_digests_checksums_and_sizes_are_compared(
    publisher: Publisher,
    first: pb.Publication,
    second: bytes,
    differs: list[int],
    not_compared: list[int],
) -> None:
    assert (await publisher.store(first)).status == pb.RECEIPT_STATUS_STORED
    receipt = await publisher.store(single(2, 7, second, payload_crc32c=crc(second)))
    assert receipt.status == DUPLICATE
    assert (list(receipt.differs), list(receipt.not_compared)) == (differs, not_compared)


async def test_the_rest_of_a_batch_is_stored_and_its_conflicts_are_told(
    publisher: Publisher,
) -> None:
    stored = batch(1, [1, 2], content_digests=b"aaaaaaaabbbbbbbb")
    await publisher.store(stored)
    again = batch(2, [1, 2, 3], content_digests=b"aaaaaaaaxxxxxxxxcccccccc")
    receipt = await publisher.store(again)
    assert receipt.status == pb.RECEIPT_STATUS_PARTIAL
    assert (receipt.first_new_sequence_id, list(receipt.differs)) == (3, [1])
    rest = await publisher.store(batch(3, [3], resume=True, content_digests=b"cccccccc"))
    assert rest.status == pb.RECEIPT_STATUS_STORED


@pytest.mark.parametrize(
    ("entry", "digests"),
    [
        (single(1, 1), b"1234567"),
        (single(1, 1), b"123456789"),
        (batch(1, [1, 2]), b"12345678"),
        (batch(1, [1, 2]), b"1234567812345678x"),
    ],
)
async def test_digests_of_another_size_are_refused(
    publisher: Publisher, entry: pb.Publication, digests: bytes
) -> None:
    entry.entries[0].metadata.content_digests = digests
    receipt = await publisher.store(entry)
    assert receipt.status == pb.RECEIPT_STATUS_REFUSED
    assert "content_digests" in receipt.error.message


async def test_services_own_producers_are_exempt(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "seqgate.test") as publisher:
        await publisher.store(single(1, 7, b"a", content_digests=b"aaaaaaaa"))
        receipt = await publisher.store(single(2, 7, b"b", content_digests=b"bbbbbbbb"))
    assert receipt.status == DUPLICATE
    assert not receipt.differs
    assert not receipt.not_compared


async def test_a_stored_digest_is_what_the_client_sent(
    client: Client, services: Services, topic: str
) -> None:
    async with client.producer(topic, batching=Batching(), name="p") as producer:
        await producer.send_many(feed("apple", 3))
    (stored,) = await services.read(topic)
    assert isinstance(stored.metadata, entry_pb2.EntryMetadata)
    assert len(stored.metadata.content_digests) == 24
