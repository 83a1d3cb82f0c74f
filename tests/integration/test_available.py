"""has_message_available says what read then does: at every place of logs of every shape, however
the reader got there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import pytest_asyncio

import seqgate.client.blocking
from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import (
    EARLIEST,
    LATEST,
    Batching,
    Chunking,
    Client,
    Message,
    MessageId,
    Reader,
    Start,
    connect,
)
from seqgate.errors import DataLossError, NotFoundError
from seqgate.message_id import EARLIEST_ID, LATEST_ID
from tests.integration.services import Services
from tests.support.publisher import publishing, single
from tests.support.waiting import WITHIN_S

Log = Callable[["Writer"], Awaitable[None]]


class Writer:
    """Writes one topic."""

    def __init__(self, services: Services, client: Client, topic: str) -> None:
        self._services, self._client, self.topic = services, client, topic
        self.trims: list[tuple[int, int]] = []
        """The first entries to be kept, by trims to come."""

    async def batches(self, *sizes: int) -> None:
        """Entries of this many messages each."""
        batching = Batching(delay_s=60)
        async with self._client.producer(self.topic, name="b", batching=batching) as producer:
            for size in sizes:
                sending = [producer.send_nowait(b"x") for _ in range(size)]
                await producer.flush()
                await asyncio.gather(*sending)

    async def large(self) -> None:
        """A message of three chunks."""
        chunking = Chunking(chunk_bytes=1)
        async with self._client.producer(self.topic, name="l", chunking=chunking) as producer:
            await producer.send(b"xyz")

    async def unfinished(self, *, then: bool = False) -> None:
        """Two chunks of three, and `then` another message of their producer."""
        async with publishing(self._services.ledger, self.topic, "u") as publisher:
            for chunk_id in range(2):
                chunk = single(
                    chunk_id + 1,
                    0,
                    b"x",
                    uuid="u",
                    chunk_id=chunk_id,
                    num_chunks_from_msg=3,
                    total_chunk_msg_size=3,
                )
                await publisher.store(chunk)
            if then:
                await publisher.store(single(3, 1, b"x"))

    async def trim(self, ledger_id: int, entry_id: int) -> None:
        before = common_pb2.Position(ledger_id=ledger_id, entry_id=entry_id)
        request = pb.TrimTopicRequest(topic=self.topic, before=before)
        assert (await self._services.ledger.TrimTopic(request)).removed_entries


async def nothing(log: Writer) -> None:
    pass


async def a_batch_ends_it(log: Writer) -> None:
    await log.batches(1, 3)


async def a_message_after_a_batch(log: Writer) -> None:
    await log.batches(3, 1)


async def a_large_message_ends_it(log: Writer) -> None:
    await log.batches(2)
    await log.large()


async def a_batch_after_a_large_message(log: Writer) -> None:
    await log.large()
    await log.batches(2)


async def an_unfinished_message_ends_it(log: Writer) -> None:
    await log.batches(2)
    await log.unfinished()


async def an_unfinished_message_alone(log: Writer) -> None:
    await log.unfinished()


async def an_aborted_message(log: Writer) -> None:
    await log.unfinished(then=True)
    await log.unfinished()


async def a_trimmed_beginning(log: Writer) -> None:
    await log.batches(2, 1, 2)
    log.trims.append((1, 1))


async def a_beginning_trimmed_inside_a_large_message(log: Writer) -> None:
    await log.large()
    log.trims.append((1, 1))


async def everything_trimmed(log: Writer) -> None:
    await log.batches(2, 1)
    log.trims.append((1, 2))


LOGS: list[Log] = [
    nothing,
    a_batch_ends_it,
    a_message_after_a_batch,
    a_large_message_ends_it,
    a_batch_after_a_large_message,
    an_unfinished_message_ends_it,
    an_unfinished_message_alone,
    an_aborted_message,
    a_trimmed_beginning,
    a_beginning_trimmed_inside_a_large_message,
    everything_trimmed,
]


@pytest_asyncio.fixture(scope="session")
async def client(services: Services) -> AsyncIterator[Client]:
    async with connect(services.stack.address("ledger")) as client:
        yield client


@pytest_asyncio.fixture(params=LOGS, ids=lambda each: each.__name__)
async def log(
    request: pytest.FixtureRequest, services: Services, client: Client, topic: str
) -> tuple[str, list[Start]]:
    """A topic, and all its places."""
    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    writer = Writer(services, client, topic)
    await request.param(writer)
    async with client.reader(topic, follow=False) as reader:
        messages = [each async for each in reader]
    entries = await services.read(topic, metadata_only=True)
    for where in writer.trims:  # its places include those that are trimmed
        await writer.trim(*where)
    positions = [MessageId(each.position.ledger_id, each.position.entry_id) for each in entries]
    return topic, list(places(messages, positions))


def places(messages: list[Message], entries: list[MessageId]) -> Iterator[Start]:
    yield from (EARLIEST, LATEST, EARLIEST_ID, LATEST_ID)
    yield from entries
    for each in messages:
        yield each.id
        if each.id.batch_index >= 0:
            yield replace(each.id, batch_size=0)  # as stored by another client
    for append_ms in sorted({each.append_time_ms for each in messages}):
        yield datetime.fromtimestamp(append_ms / 1000, UTC)
        yield datetime.fromtimestamp((append_ms + 1) / 1000, UTC)


async def read_as_told(reader: Reader) -> list[MessageId]:
    """Read while the reader says that there is more. It does not wait, and misses nothing."""
    found: list[MessageId] = []
    async with asyncio.timeout(WITHIN_S):
        while await reader.has_message_available():
            try:
                message = await reader.read()
            except DataLossError:
                assert await reader.has_message_available()
                assert reader.skip() is not None
            else:
                assert message is not None, "a message was promised"
                found.append(message.id)
    return found


@pytest.mark.parametrize("inclusive", [True, False], ids=["at", "after"])
async def test_a_reader_has_a_message_wherever_it_starts_exactly_if_it_reads_one(
    client: Client, log: tuple[str, list[Start]], inclusive: bool
) -> None:
    topic, places = log
    for place in places:
        async with client.reader(topic, start=place, inclusive=inclusive, follow=False) as reader:
            found = await read_as_told(reader)
            assert await reader.read() is None, place
        async with client.reader(topic, start=place, inclusive=inclusive, follow=False) as reader:
            assert await _rest(reader) == found, place


@pytest.mark.parametrize("inclusive", [True, False], ids=["at", "after"])
async def test_a_reader_that_follows_and_moves_never_waits_for_what_it_was_promised(
    client: Client, log: tuple[str, list[Start]], inclusive: bool
) -> None:
    topic, places = log
    async with client.reader(topic) as moving:
        for place in places:
            await moving.seek(place, inclusive=inclusive)
            found = await read_as_told(moving)
            async with client.reader(
                topic, start=place, inclusive=inclusive, follow=False
            ) as reader:
                assert await _rest(reader) == found, place


async def _rest(reader: Reader) -> list[MessageId]:
    found: list[MessageId] = []
    while True:
        try:
            found += [each.id async for each in reader]
        except DataLossError:
            assert reader.skip() is not None
        else:
            return found


@pytest.mark.parametrize("asks_first", [True, False])
@pytest.mark.parametrize("is_empty", [True, False])
async def test_a_reader_at_the_end_has_what_is_published_after_its_first_call(
    services: Services, client: Client, topic: str, is_empty: bool, asks_first: bool
) -> None:
    writer = Writer(services, client, topic)
    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    if not is_empty:
        await writer.batches(2)
    async with client.reader(topic, start=LATEST, follow=asks_first) as reader:
        if asks_first:
            assert not await reader.has_message_available()
        else:
            assert await reader.read() is None
        await writer.batches(2)
        assert len(await read_as_told(reader)) == 2


async def test_asking_does_not_disturb_a_reader_that_waits_for_the_next_message(
    services: Services, client: Client, topic: str
) -> None:
    writer = Writer(services, client, topic)
    await writer.batches(1)
    await writer.unfinished()  # a message that asking looks for
    async with client.reader(topic, start=MessageId(1, 0), inclusive=False) as reader:
        waiting = asyncio.create_task(reader.read())
        for _ in range(20):
            assert not await reader.has_message_available()
        await writer.batches(1)
        async with asyncio.timeout(WITHIN_S):
            message = await waiting
        assert message is not None
        assert message.producer_name == "b"


async def test_a_closed_reader_has_nothing_available(client: Client, topic: str) -> None:
    async with client.producer(topic) as producer:
        await producer.send(b"x")
    reader = client.reader(topic)
    await reader.close()
    assert not await reader.has_message_available()


async def test_asking_for_a_message_of_a_missing_topic_raises(client: Client, topic: str) -> None:
    for start in (EARLIEST, LATEST, MessageId(1, 0)):
        with pytest.raises(NotFoundError):
            await client.reader(topic, start=start).has_message_available()


def test_threads_read_while_a_message_is_available(services: Services, topic: str) -> None:
    with seqgate.client.blocking.connect(services.stack.address("ledger")) as client:
        with client.producer(topic, batching=Batching(delay_s=60)) as producer:
            sending = [producer.send_nowait(b"x") for _ in range(3)]
            producer.flush()
            ids = [each.result(WITHIN_S).message_id for each in sending]
        for index, each in enumerate(ids):
            with client.reader(topic, start=each, inclusive=False) as reader:
                found = []
                while reader.has_message_available():
                    message = reader.read()
                    assert message is not None
                    found.append(message.id)
                assert len(found) == len(ids) - index - 1
