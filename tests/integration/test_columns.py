"""Logs read as columns, and the calls that precede this in a job."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.times import milliseconds
from seqgate.types import Chunk, Position
from tests.integration.refusals import refused
from tests.integration.services import Services, running, stopping
from tests.support.columns import Row, rows_on_the_wire
from tests.support.publisher import batch, publishing, single
from tests.support.waiting import eventually

RESPONSE_BYTES_MAX = 1_100_000
"""The limit of a response whose entries are all smaller: 1 MiB, and the framing."""


@pytest.fixture(scope="module")
async def restless(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A stack that releases idle topics at once, so that each producer starts another ledger."""
    async with running(
        tmp_path_factory.mktemp("restless"),
        SEQGATE_LEDGER_KEEP_INTERVAL_S="0.02",
        SEQGATE_LEDGER_IDLE_TIMEOUT_S="0.02",
    ) as services:
        yield services


def position(ledger_id: int, entry_id: int) -> common_pb2.Position:
    return common_pb2.Position(ledger_id=ledger_id, entry_id=entry_id)


async def responses(
    services: Services, topic: str, **request: Any
) -> tuple[pb.Started, list[pb.ReadColumnsResponse]]:
    """All responses of ReadColumns: the first has the end of the log, the others entries."""
    call = services.ledger.ReadColumns(pb.ReadColumnsRequest(topic=topic, **request))
    started, *others = [each async for each in call]
    assert started.WhichOneof("response") == "started"
    assert all(each.blocks.blocks for each in others), "nothing but blocks, and none is empty"
    return started.started, others


async def columns(services: Services, topic: str, **request: Any) -> list[Row]:
    """The entries of a topic, from its columns."""
    _, others = await responses(services, topic, **request)
    blocks = [block for each in others for block in each.blocks.blocks]
    return [row for block in blocks for row in rows_on_the_wire(block)]


def row(stored: pb.StoredEntry) -> Row:
    """The columns' expected values for an entry that was read."""
    metadata = stored.metadata
    has = metadata.HasField
    return Row(
        Position(stored.position.ledger_id, stored.position.entry_id),
        milliseconds(stored.append_time),
        metadata.producer_name,
        metadata.sequence_id,
        metadata.highest_sequence_id if has("highest_sequence_id") else metadata.sequence_id,
        metadata.num_messages_in_batch if has("num_messages_in_batch") else None,
        stored.payload_bytes,
        has("marker_type"),
        Chunk(
            metadata.uuid,
            metadata.chunk_id,
            metadata.num_chunks_from_msg,
            metadata.total_chunk_msg_size,
        )
        if has("uuid")
        else None,
        stored.aborts,
        b"",
    )


async def expected(services: Services, topic: str) -> list[Row]:
    """The expected rows of a topic, from a read."""
    return [row(each) for each in await services.read(topic, metadata_only=True)]


async def publish(services: Services, topic: str, *ids: int, producer: str = "p") -> int:
    """Store single messages together; returns their ledger."""
    async with publishing(services.ledger, topic, producer) as publisher:
        await publisher.send(*(single(request_id, each) for request_id, each in enumerate(ids)))
        receipts = [await publisher.receipt(request_id) for request_id in range(len(ids))]
        assert {each.status for each in receipts} == {pb.RECEIPT_STATUS_STORED}
        return receipts[-1].position.ledger_id


async def publish_everything(services: Services, topic: str) -> None:
    """Publish entries of every kind, from two producers."""
    chunks: list[dict[str, Any]] = [
        {"uuid": uuid, "chunk_id": 0, "num_chunks_from_msg": 2, "total_chunk_msg_size": 2}
        for uuid in ("one", "ü")
    ]
    first, second = chunks
    async with (
        publishing(services.ledger, topic, "p") as p,
        publishing(services.ledger, topic, "生產者") as q,
    ):
        await p.send(single(1, 0, b""), batch(2, [1, 2, 3]), batch(3, [5, 7]), single(4, 8))
        await q.send(single(1, 2**63 - 2, properties={"key": "value"}))
        await p.send(single(5, 9, marker_type=1), single(6, 9, **first), single(7, 9, **second))
        await p.send(single(8, 9, **second | {"chunk_id": 1}), single(9, 10))
        for publisher, count in ((p, 9), (q, 1)):
            for request_id in range(1, count + 1):
                receipt = await publisher.receipt(request_id)
                assert receipt.status == pb.RECEIPT_STATUS_STORED


# ---- columns


async def test_columns_hold_the_published_entries(services: Services, topic: str) -> None:
    await publish_everything(services, topic)
    stored = await services.read(topic)
    started, _ = await responses(services, topic)
    assert (started.first, started.last) == (stored[0].position, stored[-1].position)
    found = await columns(services, topic)
    assert found == await expected(services, topic)
    assert len(found) == 10
    assert {each.chunk.uuid for each in found if each.chunk} == {"one", "ü"}
    assert [each.aborts for each in found if each.aborts] == ["one"]
    assert [each.marker for each in found].count(True) == 1


async def test_metadata_columns_are_unchanged(services: Services, topic: str) -> None:
    await publish_everything(services, topic)
    found = await columns(services, topic, metadata=True)
    assert [each._replace(metadata=b"") for each in found] == await expected(services, topic)
    assert [entry_pb2.EntryMetadata.FromString(each.metadata) for each in found] == [
        each.metadata for each in await services.read(topic)
    ]


async def test_columns_are_bounded_by_after_and_through(services: Services, topic: str) -> None:
    await publish(services, topic, *range(9))
    everything = await expected(services, topic)
    for after, through in itertools.product(range(-1, 10), range(10)):
        more = {} if after < 0 else {"after": position(1, after)}
        found = await columns(services, topic, through=position(1, through), **more)
        assert found == everything[after + 1 : through + 1]
    assert await columns(services, topic, after=position(0, 2**63 - 1)) == everything
    assert await columns(services, topic, through=position(2**63 - 1, 0)) == everything
    assert await columns(services, topic, after=position(2, 0)) == []


async def test_a_topic_without_entries_has_no_columns(services: Services, topic: str) -> None:
    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    started, others = await responses(services, topic)
    assert not started.HasField("first")
    assert not started.HasField("last")
    assert others == []


async def test_responses_stay_within_their_limit(services: Services, topic: str) -> None:
    """Even if a stored group exceeds the limit: here, 6 MB of metadata."""
    properties = {"key": "x" * 100_000}
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.send(*(single(each, each, properties=properties) for each in range(60)))
        assert (await publisher.receipt(59)).status == pb.RECEIPT_STATUS_STORED
    _, with_metadata = await responses(services, topic, metadata=True)
    assert len(with_metadata) >= 6
    assert max(each.ByteSize() for each in with_metadata) <= RESPONSE_BYTES_MAX
    found = await columns(services, topic, metadata=True)
    assert [each.lowest for each in found] == list(range(60))
    assert {len(each.metadata) > 100_000 for each in found} == {True}
    _, without = await responses(services, topic)
    assert len(without) == 1


async def test_columns_end_at_the_end_of_the_log_at_the_call(
    services: Services, topic: str
) -> None:
    """A read during appends returns a prefix of the log."""
    published = 0

    async def publish_on() -> None:
        nonlocal published
        async with publishing(services.ledger, topic, "p") as publisher:
            for each in range(1_000):
                await publisher.send(single(each, each))
            for each in range(1_000):
                assert (await publisher.receipt(each)).status == pb.RECEIPT_STATUS_STORED
                published = each + 1

    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    publishing_on = asyncio.create_task(publish_on())
    seen = [0]
    while not publishing_on.done():
        before = published
        started, others = await responses(services, topic)
        blocks = [block for each in others for block in each.blocks.blocks]
        found = [row.lowest for block in blocks for row in rows_on_the_wire(block)]
        assert found == list(range(len(found)))
        assert len(found) == (started.last.entry_id + 1 if started.HasField("last") else 0)
        assert before <= len(found)
        assert seen[-1] <= len(found)
        seen.append(len(found))
    await publishing_on
    assert len(await columns(services, topic)) == 1_000


async def test_a_job_is_told_to_reconnect_when_the_service_drains(
    stoppable: Services, topic: str
) -> None:
    """It continues after the last entry that it received."""
    # 30 MB: more than the buffers between service and client hold.
    properties = {"key": "x" * 120_000}
    async with publishing(stoppable.ledger, topic, "p") as publisher:
        for first in range(0, 250, 50):
            some = range(first, first + 50)
            await publisher.send(*(single(each, each, properties=properties) for each in some))
            for each in some:
                assert (await publisher.receipt(each)).status == pb.RECEIPT_STATUS_STORED
    call = stoppable.ledger.ReadColumns(pb.ReadColumnsRequest(topic=topic, metadata=True))
    assert (await call.read()).HasField("started")
    response = await call.read()
    ending = await stopping(stoppable, "ledger")
    found: list[Row] = []
    while response.HasField("blocks"):
        found += [row for block in response.blocks.blocks for row in rows_on_the_wire(block)]
        response = await call.read()
    assert response.HasField("draining")
    assert await call.read() is aio.EOF
    assert 0 < len(found) < 250
    assert await ending == 0
    await stoppable.stack.run("ledger")
    rest = await columns(stoppable, topic, metadata=True, after=position(*found[-1].position))
    assert [each.lowest for each in found + rest] == list(range(250))


# ---- the calls of a job before it reads


async def ledgers(services: Services, topic: str, **request: Any) -> pb.ListLedgersResponse:
    answer: pb.ListLedgersResponse = await services.ledger.ListLedgers(
        pb.ListLedgersRequest(topic=topic, **request)
    )
    return answer


async def trim(services: Services, topic: str, before: common_pb2.Position) -> None:
    await services.settled(topic)
    await services.ledger.TrimTopic(pb.TrimTopicRequest(topic=topic, before=before))


async def test_ledgers_are_listed_across_pages(restless: Services, topic: str) -> None:
    written: list[tuple[int, int, int]] = []
    ids = itertools.count()

    async def in_another_ledger() -> bool:
        ledger_id = await publish(restless, topic, next(ids), next(ids))
        if written and written[-1][0] == ledger_id:
            written[-1] = (ledger_id, 0, written[-1][2] + 2)
            return False
        written.append((ledger_id, 0, 1))
        return True

    for _ in range(4):
        await eventually(in_another_ledger, "the topic was let go")
    found = await ledgers(restless, topic)
    assert not found.next_page_token
    assert [(x.ledger_id, x.first_entry_id, x.last_entry_id) for x in found.ledgers] == written
    for page_size in range(1, 6):
        listed: list[pb.LedgerRange] = []
        token = ""
        for _ in range(6):
            page = await ledgers(restless, topic, page_size=page_size, page_token=token)
            assert len(page.ledgers) <= page_size
            listed += page.ledgers
            token = page.next_page_token
            if not token:
                break
        assert not token
        assert listed == list(found.ledgers)
    ranges = [
        await columns(
            restless,
            topic,
            after=position(each.ledger_id - 1, 2**63 - 1),
            through=position(each.ledger_id, each.last_entry_id),
        )
        for each in found.ledgers
    ]
    assert [row for each in ranges for row in each] == await expected(restless, topic)

    await trim(restless, topic, position(written[1][0], 1))
    (first, *_) = (await ledgers(restless, topic)).ledgers
    assert (first.ledger_id, first.first_entry_id) == (written[1][0], 1)
    assert await columns(restless, topic) == await expected(restless, topic)


async def test_producers_with_trimmed_entries_are_listed_across_pages(
    services: Services, topic: str
) -> None:
    async def listed(**request: Any) -> pb.ListTrimmedProducersResponse:
        answer: pb.ListTrimmedProducersResponse = await services.ledger.ListTrimmedProducers(
            pb.ListTrimmedProducersRequest(topic=topic, **request)
        )
        return answer

    names = ["a", "b/ %", "ü", "生產者"]
    for place, name in enumerate(names):
        await publish(services, topic, 1, 10 + place, producer=name)
    await publish(services, topic, 5, producer="kept")
    assert not (await listed()).producers
    await trim(services, topic, position(1, 2 * len(names)))
    marks = [(name, 10 + place) for place, name in enumerate(names)]
    for page_size in (0, 1, 2, 3, 4, 5, 10_000):
        found: list[tuple[str, int]] = []
        token = ""
        for _ in range(6):
            page = await listed(page_size=page_size, page_token=token)
            found += [(each.producer_name, each.highest_sequence_id) for each in page.producers]
            token = page.next_page_token
            if not token:
                break
        assert not token
        assert found == marks


async def test_a_recreated_topic_has_another_incarnation(services: Services, topic: str) -> None:
    async def incarnation() -> int:
        await publish(services, topic, 0)
        answer = await services.ledger.GetTopic(pb.GetTopicRequest(topic=topic))
        return int(answer.topic.incarnation)

    first = await incarnation()
    await services.ledger.DeleteTopic(pb.DeleteTopicRequest(topic=topic))
    with refused(StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"):
        await columns(services, topic)
    assert 0 < first < await incarnation()
