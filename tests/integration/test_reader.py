"""The reader: from any position, in order, without gaps and duplicates."""

import asyncio
import os
import sqlite3
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import (
    EARLIEST,
    LATEST,
    Batching,
    Client,
    Message,
    MessageId,
    Missed,
    Reader,
    Receipt,
    connect,
)
from seqgate.dev.stack import Stack
from seqgate.errors import (
    CorruptMessageError,
    DataLossError,
    InvalidRequestError,
    MessagesTrimmedError,
    NotFoundError,
)
from seqgate.types import Position
from tests.integration.services import Services, pids_of, running
from tests.support.publisher import batch, publishing, single
from tests.support.waiting import WITHIN_S, eventually

COLLECTING = Batching(delay_s=60)
STREAMS_MAX = 50


@pytest.fixture(scope="module")
async def frail(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A stack whose ledger is stopped and killed; it runs again when a test ends. It allows few
    readers."""
    async with running(
        tmp_path_factory.mktemp("frail"), SEQGATE_LEDGER_READ_STREAMS_MAX=str(STREAMS_MAX)
    ) as services:
        yield services


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with connect(stack.address("ledger")) as client:
        yield client


@pytest.fixture
async def frail_client(frail: Services) -> AsyncIterator[Client]:
    async with connect(frail.stack.address("ledger")) as client:
        yield client


async def publish(
    client: Client,
    topic: str,
    *flushes: int,
    producer: str = "p",
    batching: Batching | None = COLLECTING,
) -> list[Receipt]:
    """Publish messages, this many per entry, or as `batching` decides."""
    async with client.producer(topic, name=producer, batching=batching) as opened:
        futures = []
        for count in flushes:
            futures += [opened.send_nowait(b"x") for _ in range(count)]
            await opened.flush()
        return [each.result() for each in futures]


async def rest(reader: Reader) -> list[int]:
    """The ids of the remaining messages, up to the end."""
    return [message.sequence_id async for message in reader]


async def some(reader: Reader, count: int) -> list[int]:
    """The ids of the next messages."""
    async with asyncio.timeout(WITHIN_S):
        return [(await anext(reader)).sequence_id for _ in range(count)]


async def trim(services: Services, topic: str, before: MessageId) -> None:
    position = common_pb2.Position(ledger_id=before.ledger_id, entry_id=before.entry_id)
    await services.ledger.TrimTopic(pb.TrimTopicRequest(topic=topic, before=position))


# ---- the start


async def test_a_reader_starts_at_the_beginning_or_at_the_end(client: Client, topic: str) -> None:
    await publish(client, topic, 1, 3, 1)
    assert await rest(client.reader(topic, follow=False)) == [0, 1, 2, 3, 4]
    assert await rest(client.reader(topic, start=EARLIEST, follow=False)) == [0, 1, 2, 3, 4]
    assert await rest(client.reader(topic, start=LATEST, follow=False)) == []


async def test_a_reader_starts_at_any_message_or_after_it(client: Client, topic: str) -> None:
    """Also inside a batch."""
    receipts = await publish(client, topic, 1, 3, 1, 2)
    everything = list(range(7))
    for number, receipt in enumerate(receipts):
        where = receipt.message_id
        at = client.reader(topic, start=where, follow=False)
        assert await rest(at) == everything[number:], where
        after = client.reader(topic, start=where, inclusive=False, follow=False)
        assert await rest(after) == everything[number + 1 :], where


async def test_a_reader_starts_at_a_time(client: Client, topic: str) -> None:
    await publish(client, topic, 1, 3, 1, 2)
    async with client.reader(topic, follow=False) as reader:
        found = [message async for message in reader]
    for each in found:
        since = datetime.fromtimestamp(each.append_time_ms / 1000, UTC)
        expected = [m.sequence_id for m in found if m.append_time_ms >= each.append_time_ms]
        reader = client.reader(topic, start=since, follow=False)
        assert await reader.has_message_available()
        assert await rest(reader) == expected
    now = client.reader(topic, start=datetime.now(UTC) + timedelta(seconds=1), follow=False)
    assert not await now.has_message_available()
    assert await rest(now) == []


BEYOND = {
    "after the end": (MessageId(1, 4), True),
    "after a missing message": (MessageId(1, 3), False),
    "in a missing batch": (MessageId(1, 9, batch_index=1), False),
    "a later ledger": (MessageId(99_999, 99_999), True),
    "an hour to come": (datetime.now(UTC) + timedelta(hours=1), True),
    "the last year": (datetime(9999, 12, 31, tzinfo=UTC), True),
}


@pytest.mark.parametrize(("start", "inclusive"), BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize("is_empty", [False, True], ids=["", "empty"])
async def test_a_place_beyond_the_end_is_refused(
    services: Services,
    client: Client,
    topic: str,
    start: MessageId | datetime,
    inclusive: bool,
    is_empty: bool,
) -> None:
    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    if not is_empty:
        await publish(client, topic, 1, 1, 1)
    for follow in (False, True):
        async with client.reader(topic, follow=follow) as reader:
            await reader.seek(start, inclusive=inclusive)
            with pytest.raises(InvalidRequestError, match="beyond the end") as refused:
                await reader.read()
            assert refused.value.reason == "INVALID_RANGE"
            assert refused.value.details["last"] == ("" if is_empty else "1:2")
            await reader.seek(LATEST)
            assert not await reader.has_message_available()


async def test_a_start_that_is_none_is_refused(client: Client, topic: str) -> None:
    for start in ("first", datetime(1969, 1, 1, tzinfo=UTC)):
        with pytest.raises(InvalidRequestError, match="invalid start"):
            client.reader(topic, start=start)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "inclusive", "expected"),
    [
        (MessageId(1, 1), True, [1, 2, 3, 4]),  # the batch as a whole
        (MessageId(1, 1), False, [4]),
        (MessageId(1, 1, batch_index=2), False, [4]),
        (MessageId(1, 1, batch_index=9), True, [4]),  # the batch has no such index
        (MessageId(1, 0, batch_index=0), True, [1, 2, 3, 4]),  # it is no batch
        (MessageId(0, 0), True, [0, 1, 2, 3, 4]),
        (MessageId(0, 7), False, [0, 1, 2, 3, 4]),
        (MessageId(1, 3), True, []),
        (MessageId(2**63 - 1, 2**63 - 1), False, []),
    ],
)
async def test_a_reader_starts_at_the_next_entry_of_the_log(
    client: Client, topic: str, start: MessageId, inclusive: bool, expected: list[int]
) -> None:
    await publish(client, topic, 1, 3, 1)
    reader = client.reader(topic, start=start, inclusive=inclusive, follow=False)
    found = await rest(reader)
    if start == MessageId(1, 0, batch_index=0):
        found = [each for each in found if each]  # with the plain message, or without
    assert found == expected


async def test_the_end_is_fixed_when_the_reader_connects(client: Client, topic: str) -> None:
    await publish(client, topic, 2)
    async with client.reader(topic, start=LATEST) as reader:
        reading = asyncio.create_task(some(reader, 3))
        await _is_connected(reader)
        await publish(client, topic, 1, 2)
        assert await reading == [2, 3, 4]


async def test_the_end_of_an_empty_topic_is_its_beginning(
    services: Services, client: Client, topic: str
) -> None:
    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    async with client.reader(topic, start=LATEST) as reader:
        reading = asyncio.create_task(some(reader, 2))
        await _is_connected(reader)
        await publish(client, topic, 2)
        assert await reading == [0, 1]
    assert await rest(client.reader(topic, start=LATEST, follow=False)) == []


async def _is_connected(reader: Reader) -> None:
    """A reader connects on its first read; the service has then sent it the bounds of the log."""
    await eventually(
        lambda: reader._after is not None or reader._start == EARLIEST, "the reader is connected"
    )


async def test_a_missing_topic_cannot_be_read(client: Client, topic: str) -> None:
    readers = [client.reader(topic, follow=follow) for follow in (False, True)]
    for reader in readers:
        with pytest.raises(NotFoundError) as refusal:
            await reader.read()
        assert refusal.value.reason == "TOPIC_NOT_FOUND"
        with pytest.raises(NotFoundError):
            await reader.has_message_available()
    await publish(client, topic, 1)
    assert await some(readers[-1], 1) == [0]  # now it is there
    await readers[-1].close()


# ---- the end


async def test_a_reader_without_follow_ends_at_the_end_of_the_topic(
    client: Client, topic: str
) -> None:
    """And continues from there on the next call."""
    await publish(client, topic, 1, 2)
    async with client.reader(topic, follow=False) as reader:
        assert await rest(reader) == [0, 1, 2]
        assert await reader.read() is None
        assert await reader.read() is None
        await publish(client, topic, 1, 2)
        assert await rest(reader) == [3, 4, 5]
        assert await reader.read() is None


async def test_a_following_reader_waits_for_new_messages(client: Client, topic: str) -> None:
    await publish(client, topic, 1)
    async with client.reader(topic) as reader:
        assert await some(reader, 1) == [0]
        for each in range(1, 6):
            waiting = asyncio.create_task(some(reader, 1))
            await asyncio.sleep(0)
            assert not waiting.done()
            await publish(client, topic, 1)
            assert await waiting == [each]


async def test_a_reader_keeps_up_while_several_producers_publish(
    client: Client, topic: str
) -> None:
    await publish(client, topic, 1, producer="p0")

    async def read() -> list[Message]:
        async with client.reader(topic) as reader:
            return [await anext(reader) for _ in range(1 + 3 * 100)]

    async def write(name: str) -> None:
        async with client.producer(topic, name=name) as producer:
            for _ in range(100):
                await producer.send(b"x")

    async with asyncio.timeout(60):
        writing = asyncio.gather(*map(write, ("p0", "p1", "p2")))
        one, other, _ = await asyncio.gather(read(), read(), writing)
    assert [message.id for message in one] == sorted({message.id for message in one})
    assert one == other
    for name, first in (("p0", 101), ("p1", 100), ("p2", 100)):
        assert [each.sequence_id for each in one if each.producer_name == name] == list(
            range(first)
        )


async def test_a_reader_knows_whether_there_is_more(client: Client, topic: str) -> None:
    (*_, last) = await publish(client, topic, 1, 2)
    async with client.reader(topic, follow=False) as reader:
        for _ in range(3):
            assert await reader.has_message_available()
            assert await reader.read() is not None
        assert not await reader.has_message_available()
        await publish(client, topic, 1)
        assert await reader.has_message_available()
    cases: list[tuple[Literal["earliest", "latest"] | MessageId, bool, bool]] = [
        (EARLIEST, True, True),
        (LATEST, True, False),
        (last.message_id, True, True),
        (MessageId(1, 2), True, True),
        (MessageId(1, 2), False, False),
        (MessageId(1, 3), True, False),
    ]
    for start, inclusive, expected in cases:
        reader = client.reader(topic, start=start, inclusive=inclusive)
        assert await reader.has_message_available() is expected


async def test_an_empty_topic_has_nothing_to_read(
    services: Services, client: Client, topic: str
) -> None:
    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    async with client.reader(topic, follow=False) as reader:
        assert not await reader.has_message_available()
        assert await reader.read() is None


async def test_a_closed_reader_has_nothing_more(client: Client, topic: str) -> None:
    await publish(client, topic, 3)
    reader = client.reader(topic)
    assert await some(reader, 1) == [0]
    await reader.close()
    await reader.close()
    async with asyncio.timeout(WITHIN_S):
        while (message := await reader.read()) is not None:
            assert message.sequence_id in (1, 2)  # it was received before


async def test_closing_a_reader_ends_the_wait_for_its_next_message(
    client: Client, topic: str
) -> None:
    """It does not cancel the waiting task."""
    await publish(client, topic, 1)
    reader = client.reader(topic)
    assert await some(reader, 1) == [0]
    waiting = asyncio.create_task(reader.read())
    await asyncio.sleep(0.02)
    await reader.close()
    async with asyncio.timeout(WITHIN_S):
        assert await waiting is None


async def test_a_wait_for_the_next_message_can_be_cancelled_and_loses_nothing(
    client: Client, topic: str
) -> None:
    await publish(client, topic, 1)
    async with client.reader(topic) as reader:
        assert await some(reader, 1) == [0]
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await reader.read()
        await publish(client, topic, 1, 2)
        assert await some(reader, 3) == [1, 2, 3]


# ---- seeking


async def test_a_reader_seeks_anywhere(client: Client, topic: str) -> None:
    receipts = await publish(client, topic, 1, 3, 1)
    where = [each.message_id for each in receipts]
    async with client.reader(topic, follow=False) as reader:
        assert await some(reader, 2) == [0, 1]  # in the middle of a batch
        await reader.seek(where[4])
        assert await rest(reader) == [4]
        await reader.seek(EARLIEST)
        assert await some(reader, 1) == [0]
        await reader.seek(where[2], inclusive=False)
        assert await rest(reader) == [3, 4]
        await reader.seek(LATEST)
        assert await rest(reader) == []
        await publish(client, topic, 1)
        assert await rest(reader) == [5]
        await reader.seek(where[1])
        assert await rest(reader) == [1, 2, 3, 4, 5]


async def test_a_waiting_reader_seeks_anywhere(client: Client, topic: str) -> None:
    """A seek does not cancel the waiting task."""
    await publish(client, topic, 1, 2)
    async with client.reader(topic) as reader:
        assert await some(reader, 3) == [0, 1, 2]
        waiting = asyncio.create_task(some(reader, 1))
        await asyncio.sleep(0.02)
        await reader.seek(EARLIEST)
        async with asyncio.timeout(WITHIN_S):
            assert await waiting == [0]


# ---- trimmed topics


async def test_trimmed_messages_are_not_read(
    services: Services, client: Client, topic: str
) -> None:
    where = [each.message_id for each in await publish(client, topic, 1, 3, 1, 1)]
    await trim(services, topic, where[4])
    assert await rest(client.reader(topic, follow=False)) == [4, 5]
    for gone in where[:4]:
        for inclusive in (True, False):
            missed: list[Missed] = []
            reader = client.reader(
                topic, start=gone, inclusive=inclusive, follow=False, on_missed=missed.append
            )
            assert await rest(reader) == [4, 5]
            first = gone.position if inclusive or gone.batch_index >= 0 else MessageId(1, 1)
            assert [(each.first.position, each.last) for each in missed] == [
                (Position(first.ledger_id, first.entry_id), MessageId(1, 1))
            ]
    for start in (where[4], where[5]):
        reader = client.reader(topic, start=start, inclusive=start == where[5], follow=False)
        assert await rest(reader) == [5]


async def test_unread_messages_that_were_trimmed_are_reported(
    services: Services, client: Client, topic: str
) -> None:
    """The error is raised in order, at every call, until one call continues after it."""
    where = [each.message_id for each in await publish(client, topic, *[1] * 6)]
    await trim(services, topic, where[3])
    async with client.reader(topic, start=where[0], inclusive=False, follow=False) as reader:
        for _ in range(2):
            with pytest.raises(MessagesTrimmedError) as told:
                await reader.read()
            assert told.value.details == {"first": "1:1", "last": "1:2"}
            assert await reader.has_message_available()
        missed = reader.skip()
        assert missed is not None
        assert (missed.first, missed.last) == (where[1], where[2])
        assert await rest(reader) == [3, 4, 5]
        assert reader.skip() is None
        await reader.seek(where[0])
        with pytest.raises(MessagesTrimmedError):
            await reader.read()
        await reader.seek(where[4])
        assert await rest(reader) == [4, 5]


async def test_missing_entries_are_reported_exactly_across_ledgers(
    frail: Services, frail_client: Client, topic: str
) -> None:
    """Nothing lies between the last entry of a ledger and the first one of the next."""
    await publish(frail_client, topic, *[1] * 4)
    await _kill(frail.stack)  # starts another ledger
    await publish(frail_client, topic, 1, 1)

    async def missed_after(entry_id: int, *expected: int) -> list[tuple[MessageId, MessageId]]:
        missed: list[Missed] = []
        async with frail_client.reader(
            topic,
            start=MessageId(1, entry_id),
            inclusive=False,
            follow=False,
            on_missed=missed.append,
        ) as reader:
            assert await rest(reader) == list(expected)
        return [(each.first, each.last) for each in missed]

    assert await missed_after(0, 1, 2, 3, 4, 5) == []
    await trim(frail, topic, MessageId(2, 0))
    assert await missed_after(1, 4, 5) == [(MessageId(1, 2), MessageId(1, 3))]
    assert await missed_after(3, 4, 5) == []
    await trim(frail, topic, MessageId(2, 1))
    assert await missed_after(3, 5) == [(MessageId(1, 4), MessageId(2, 0))]
    await trim(frail, topic, MessageId(9, 9))
    assert await missed_after(3) == [(MessageId(1, 4), MessageId(2, 1))]


async def test_a_topic_trimmed_to_its_end_can_be_read_on(
    services: Services, client: Client, topic: str
) -> None:
    await publish(client, topic, 1, 1)
    async with client.reader(topic) as reader:
        assert await some(reader, 1) == [0]
        missed: list[Missed] = []
        waiting = client.reader(topic, start=MessageId(1, 0), on_missed=missed.append)
        await trim(services, topic, MessageId(1, 2))
        assert await rest(client.reader(topic, follow=False)) == []
        assert not await client.reader(topic, follow=False, start=MessageId(1, 2)).read()
        await publish(client, topic, 1)
        assert (await some(reader, 1))[0] in (1, 2)  # 1, if it was received before
        assert await some(waiting, 1) == [2]
        assert [(each.first, each.last) for each in missed] == [(MessageId(1, 0), MessageId(1, 1))]
        await waiting.close()


# ---- damage


LZ4: dict[str, Any] = {"compression": entry_pb2.COMPRESSION_TYPE_LZ4, "uncompressed_size": 10}
ZLIB: dict[str, Any] = {"compression": entry_pb2.COMPRESSION_TYPE_ZLIB, "uncompressed_size": 10}
ZSTD: dict[str, Any] = {"compression": entry_pb2.COMPRESSION_TYPE_ZSTD, "uncompressed_size": 10}

BROKEN = {
    # Services look into no payload, so they accept what no reader can decode.
    "no LZ4": single(1, 1, b"x", **LZ4),
    "no zlib": single(1, 1, b"x", **ZLIB),
    "no Zstandard": single(1, 1, b"x", **ZSTD),
    "larger than declared": single(1, 1, zlib.compress(b"x" * 11), **ZLIB),
    "smaller than declared": single(1, 1, zlib.compress(b"x" * 9), **ZLIB),
    "larger than any reader's limit": single(1, 1, b"x", **LZ4 | {"uncompressed_size": 2**32 - 1}),
    "no batch": batch(1, [1, 2, 3], b"\xff"),
    "an empty batch": batch(1, [1, 2, 3], b""),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_an_undecodable_message_raises_and_does_not_block_later_ones(
    services: Services, client: Client, topic: str, how: str
) -> None:
    """Earlier messages are returned; the error is raised at every call; a seek past it continues
    the read."""
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.store(single(0, 0))
        assert (await publisher.store(BROKEN[how])).status == pb.RECEIPT_STATUS_STORED
        await publisher.store(single(2, 8))
        await publisher.store(single(3, 9))
    async with client.reader(topic, follow=False) as reader:
        assert await some(reader, 1) == [0]
        damage: CorruptMessageError | None = None
        for _ in range(2):
            with pytest.raises(CorruptMessageError) as caught:
                await reader.read()
            damage = caught.value
            assert damage.details == {"ledger_id": "1", "entry_id": "1"}
        missed = reader.skip()
        assert missed is not None
        assert missed.error is damage
        assert await rest(reader) == [8, 9]
        await reader.seek(MessageId(1, 1), inclusive=False)
        assert await rest(reader) == [8, 9]


async def test_damage_on_the_disk_is_not_read_as_a_message(tmp_path: Path, topic: str) -> None:
    """Nor does it block messages stored before and after it."""
    payload = os.urandom(500)
    async with Stack(tmp_path) as stack, connect(stack.address("ledger")) as client:
        async with client.producer(topic, name="p") as producer:
            for each in (b"before", payload, b"behind"):
                await producer.send(each)
        assert await stack.terminate("ledger") == 0
        file = tmp_path / "ledger" / "ledger.db"
        with closing(sqlite3.connect(file)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        stored = file.read_bytes()
        assert stored.count(payload[100:110]) == 1
        file.write_bytes(stored.replace(payload[100:110], bytes(10)))
        await stack.run("ledger")
        async with client.reader(topic, follow=False) as reader:
            assert (await anext(reader)).payload == b"before"
            for _ in range(2):
                with pytest.raises(DataLossError) as damage:
                    await reader.read()
                assert damage.value.reason == "ENTRY_CORRUPT"
                where = {"ledger_id": "1", "entry_id": "1", "first_entry_id": "1"}
                assert damage.value.details == where
            missed = reader.skip()
            assert missed is not None
            assert (missed.first, missed.last) == (MessageId(1, 1), MessageId(1, 1))
            assert (await anext(reader)).payload == b"behind"
            await reader.seek(MessageId(1, 1), inclusive=False)
            assert (await anext(reader)).payload == b"behind"


# ---- reconnecting


async def _kill(stack: Stack) -> None:
    await stack.kill("ledger")
    await stack.run("ledger")


async def _drain(stack: Stack) -> None:
    assert await stack.terminate("ledger") == 0
    await stack.run("ledger")


@pytest.mark.parametrize("disturb", [_kill, _drain], ids=["killed", "drained"])
async def test_a_reader_loses_and_repeats_nothing_when_the_ledger_starts_again(
    frail: Services,
    frail_client: Client,
    topic: str,
    disturb: Callable[[Stack], Awaitable[None]],
) -> None:
    """While it reads, and while it waits at the end; batches included."""
    client = frail_client
    count = 3_000
    await publish(client, topic, count // 2, batching=None)
    await publish(client, topic, count // 2, batching=Batching(messages_max=7))

    async def read(reader: Reader) -> list[int]:
        found = []
        async for message in reader:
            found.append(message.sequence_id)
            if len(found) % 10 == 0:
                await asyncio.sleep(0)
            if len(found) == count + 20:
                break
        return found

    async with client.reader(topic) as one, client.reader(topic, start=LATEST) as late:
        reading = asyncio.create_task(read(one))
        waiting = asyncio.create_task(some(late, 20))
        await _is_connected(late)
        await disturb(frail.stack)
        await publish(client, topic, 1, 9)
        await disturb(frail.stack)
        await publish(client, topic, 9, 1)
        async with asyncio.timeout(WITHIN_S):
            assert await reading == list(range(count + 20))
            assert await waiting == list(range(count, count + 20))


async def test_a_reader_waits_for_an_unreachable_service(
    frail: Services, frail_client: Client, topic: str
) -> None:
    await publish(frail_client, topic, 2)
    await frail.stack.kill("ledger")
    async with frail_client.reader(topic, follow=False) as reader:
        reading = asyncio.create_task(rest(reader))
        await asyncio.sleep(0.05)
        assert not reading.done()
        await frail.stack.run("ledger")
        async with asyncio.timeout(WITHIN_S):
            assert await reading == [0, 1]


async def test_a_reader_waits_for_a_free_stream(
    frail: Services, frail_client: Client, topic: str
) -> None:
    await publish(frail_client, topic, 2)
    request = pb.ReadRequest(
        topic=topic, start=common_pb2.Start(latest=common_pb2.Latest()), follow=True
    )
    calls = [frail.ledger.Read(request) for _ in range(STREAMS_MAX)]
    assert all([(await call.read()).HasField("started") for call in calls])
    async with frail_client.reader(topic, follow=False) as reader:
        reading = asyncio.create_task(rest(reader))
        await asyncio.sleep(0.05)
        assert not reading.done()
        for call in calls:
            call.cancel()
        async with asyncio.timeout(WITHIN_S):
            assert await reading == [0, 1]


async def test_readers_that_disconnect_midway_do_no_harm(
    frail: Services, frail_client: Client, topic: str
) -> None:
    """The service is about to send when it learns that the reader has disconnected."""
    pid = pids_of(frail.stack)["ledger"]
    async with frail_client.producer(topic) as producer:
        await asyncio.gather(*(producer.send(b"x" * 1_000_000) for _ in range(8)))
    for _ in range(10):
        calls = [
            frail.ledger.Read(
                pb.ReadRequest(topic=topic, start=common_pb2.Start(earliest=common_pb2.Earliest()))
            )
            for _ in range(4)
        ]
        await asyncio.gather(*(call.read() for call in calls))
        for call in calls:
            call.cancel()
    assert len(await rest(frail_client.reader(topic, follow=False))) == 8
    assert pids_of(frail.stack)["ledger"] == pid
    assert await frail.stack.terminate("ledger") == 0
    await frail.stack.run("ledger")


async def test_a_reader_learns_that_its_topic_was_deleted(
    services: Services, client: Client, topic: str
) -> None:
    await publish(client, topic, 1)
    async with client.reader(topic) as reader:
        assert await some(reader, 1) == [0]
        await services.ledger.DeleteTopic(pb.DeleteTopicRequest(topic=topic))
        with pytest.raises(NotFoundError):
            await some(reader, 1)
