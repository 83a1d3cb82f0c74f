"""The client library against real services, as an application uses it."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from redis.asyncio import Redis

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import (
    Batching,
    Chunking,
    Client,
    Compression,
    Message,
    Producer,
    Receipt,
    connect,
)
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from seqgate.errors import (
    FencedError,
    InUseError,
    InvalidRequestError,
    MessageTooLargeError,
    MixedSequenceIdsError,
    NotFoundError,
    ProducerClosedError,
    ProducerQueueFullError,
    SendTimeoutError,
    SeqgateError,
    StaleSequenceIdError,
    UnavailableError,
)
from seqgate.types import SEQUENCE_ID_MAX, InvalidNameError
from tests.integration.services import Services, paused, running
from tests.support.waiting import WITHIN_S, eventually
from tools.stack.forwarder import close_listeners

LATER_S = 60.0
"""A delay that no test waits for."""

COLLECTING = Batching(delay_s=LATER_S)
"""Sends nothing before a flush."""

MESSAGE_BYTES_MAX = 20_000


@pytest.fixture(scope="module")
async def frail(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A stack with low limits whose processes are stopped, killed and paused; all run again when a
    test ends."""
    async with running(
        tmp_path_factory.mktemp("frail"),
        SEQGATE_LEDGER_AUTO_CREATE='["public/*"]',
        SEQGATE_LEDGER_MAX_MESSAGE_BYTES=str(MESSAGE_BYTES_MAX),
        SEQGATE_LEDGER_WINDOW_MESSAGES="300",
        SEQGATE_LEDGER_WINDOW_BYTES="100000",
    ) as services:
        yield services
        assert "WINDOW_EXCEEDED" not in (services.stack.folder / "logs" / "ledger.log").read_text()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with connect(stack.address("ledger")) as client:
        yield client


@pytest.fixture
async def frail_client(frail: Services) -> AsyncIterator[Client]:
    async with connect(frail.stack.address("ledger")) as client:
        yield client


async def read(client: Client, topic: str) -> list[Message]:
    async with client.reader(topic, follow=False) as reader:
        return [message async for message in reader]


async def ids(client: Client, topic: str) -> list[int]:
    """The sequence ids of a topic's messages, in the order of the log."""
    return [message.sequence_id for message in await read(client, topic)]


async def entries(client: Client, topic: str) -> list[list[int]]:
    """The sequence ids of a topic's messages, entry by entry."""
    found = itertools.groupby(await read(client, topic), key=lambda message: message.id.position)
    return [[message.sequence_id for message in group] for _, group in found]


async def outcomes(futures: list["asyncio.Future[Receipt]"]) -> list[Receipt | BaseException]:
    async with asyncio.timeout(WITHIN_S):
        return await asyncio.gather(*futures, return_exceptions=True)


class Gate:
    """A proxy to the ledger that can be shut: connections break, and new ones are refused. Or it
    discards the data sent to the ledger, unnoticed."""

    def __init__(self, port: int, target: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._port, self._target = port, target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallows = False
        self.swallowed_bytes = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self._port)

    async def shut(self) -> None:
        assert self._server is not None
        await close_listeners(self._server)
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()
        await eventually(lambda: not self._writers, "every connection has ended")

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        pair = {writer, back}
        self._writers |= pair
        try:
            await asyncio.gather(self._pump(reader, back), _pump(there, writer))
        finally:
            self._writers -= pair

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _pump(reader, writer, self._swallow)

    def _swallow(self, data: bytes) -> bytes:
        if not self.swallows:
            return data
        self.swallowed_bytes += len(data)
        return b""


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    change: Callable[[bytes], bytes] = bytes,
) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(change(data))
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()


@asynccontextmanager
async def gate_to(stack: Stack) -> AsyncIterator[Gate]:
    (port,) = free_ports(1)
    gate = Gate(port, stack.ports["ledger"])
    await gate.open()
    try:
        yield gate
    finally:
        await gate.shut()


# ---- names


async def test_a_producer_without_a_name_gets_a_unique_one(client: Client, topic: str) -> None:
    async with client.producer(topic) as first, client.producer(topic) as second:
        assert first.name
        assert second.name
        assert first.name != second.name
        for producer in (first, second):
            assert producer.last_sequence_id is None
            assert (await producer.send(b"x")).sequence_id == 0
    assert {message.producer_name for message in await read(client, topic)} == {
        first.name,
        second.name,
    }


async def test_a_topic_without_a_namespace_is_in_public_default(client: Client, topic: str) -> None:
    local = topic.rpartition("/")[2]
    async with client.producer(local, name="p") as producer:
        assert (producer.topic, producer.name) == (topic, "p")
        await producer.send(b"x")
    async with client.reader(f"persistent://{topic}", follow=False) as reader:
        assert reader.topic == topic
        message = await reader.read()
        assert message is not None
        assert message.topic == topic


async def test_a_name_in_use_is_refused_until_it_is_released(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as old:
        with pytest.raises(InUseError) as refusal:
            await client.producer(topic, name="p").open()
        assert refusal.value.reason == "PRODUCER_BUSY"
        assert refusal.value.details == {"producer_name": "p"}
        async with client.producer(f"{topic}-other", name="p"):
            pass  # names are per topic
        await old.send(b"x")
    async with client.producer(topic, name="p") as new:
        assert new.last_sequence_id == 0


async def test_a_name_is_free_as_soon_as_its_producer_is_closed(client: Client, topic: str) -> None:
    for each in range(20):
        async with client.producer(topic, name="p") as producer:
            assert (await producer.send(b"x")).sequence_id == each


async def test_a_name_is_free_soon_after_its_producer_was_left_with_an_exception(
    client: Client, topic: str
) -> None:
    with pytest.raises(KeyError):
        async with client.producer(topic, name="p"):
            raise KeyError("from the application")

    async def opens() -> bool:
        try:
            async with client.producer(topic, name="p"):
                return True
        except InUseError:
            return False

    await eventually(opens, "the name is free")


async def test_a_taken_over_producer_is_fenced(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as old:
        await old.send(b"old")
        async with client.producer(topic, name="p", takeover=True) as new:
            assert new.last_sequence_id == 0
            await new.send(b"new")

            async def is_told() -> bool:
                try:
                    await old.send(b"too late")
                except FencedError as error:
                    return error.reason == "PRODUCER_TAKEN_OVER"
                return False

            await eventually(is_told, "the old producer is told")
            await new.send(b"newer")
        assert old.pending_messages == 0
    assert [message.payload for message in await read(client, topic)] == [b"old", b"new", b"newer"]


async def test_a_takeover_in_the_middle_loses_nothing_that_was_acknowledged(
    frail: Services, frail_client: Client, topic: str
) -> None:
    client = frail_client
    async with client.producer(topic, name="p") as old:
        with paused(frail.stack, "dedup"):
            futures = [old.send_nowait(b"old") for _ in range(100)]
            new = client.producer(topic, name="p", takeover=True)
            opening = asyncio.create_task(new.open())
            await asyncio.sleep(0.05)  # the takeover may still precede some of the messages
        await opening
        told = await outcomes(futures)
        stored = [each for each in told if isinstance(each, Receipt)]
        assert all(isinstance(each, Receipt | FencedError) for each in told)
        assert new.last_sequence_id == (len(stored) - 1 if stored else None)
        assert (await new.send(b"new")).sequence_id == len(stored)
        await new.close()
    assert await ids(client, topic) == list(range(len(stored) + 1))


# ---- sequence ids


async def test_the_producer_assigns_ids_by_default(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as producer:
        receipts = [await producer.send(b"%d" % each) for each in range(3)]
        assert [each.sequence_id for each in receipts] == [0, 1, 2]
        assert not any(each.duplicate for each in receipts)
        assert producer.last_sequence_id == 2
    assert [(each.sequence_id, each.id, each.payload) for each in await read(client, topic)] == [
        (each.sequence_id, each.message_id, b"%d" % each.sequence_id) for each in receipts
    ]


async def test_a_new_producer_object_continues_after_the_last_id(
    client: Client, topic: str
) -> None:
    async with client.producer(topic, name="p") as producer:
        assert producer.last_sequence_id is None
        for _ in range(10):
            await producer.send(b"x")
    async with client.producer(topic, name="p") as producer:
        assert producer.last_sequence_id == 9
        assert (await producer.send(b"x")).sequence_id == 10


@pytest.mark.parametrize("initial", [0, 41, SEQUENCE_ID_MAX - 1])
async def test_the_first_id_follows_the_initial_one(
    client: Client, topic: str, initial: int
) -> None:
    """As in Pulsar: the initial id counts as the last one published."""
    async with client.producer(topic, name="p", initial_sequence_id=initial) as producer:
        assert producer.last_sequence_id == initial
        assert (await producer.send(b"x")).sequence_id == initial + 1


async def test_an_initial_id_counts_only_for_an_unknown_producer(
    client: Client, topic: str
) -> None:
    async with client.producer(topic, name="p") as producer:
        await producer.send(b"x", sequence_id=7)
    async with client.producer(topic, name="p", initial_sequence_id=41) as producer:
        assert producer.last_sequence_id == 7
        assert (await producer.send(b"x")).sequence_id == 8


async def test_no_id_follows_the_largest_one(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as producer:
        await producer.send(b"x", sequence_id=SEQUENCE_ID_MAX)
    async with client.producer(topic, name="p") as producer:
        assert producer.last_sequence_id == SEQUENCE_ID_MAX
        with pytest.raises(InvalidRequestError):
            await producer.send(b"x")


async def test_a_duplicate_receipt_names_the_stored_message(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as producer:
        first = await producer.send(b"first", sequence_id=3)
        await producer.send(b"x", sequence_id=5)
    async with client.producer(topic, name="p") as producer:
        again = await producer.send(b"again", sequence_id=3)
        assert again == Receipt(first.message_id, 3, duplicate=True, differs=True)
        with pytest.raises(StaleSequenceIdError) as stale:
            await producer.send(b"x", sequence_id=4)
        assert stale.value.details == {"sequence_id": "4"}
        assert not (await producer.send(b"x", sequence_id=6)).duplicate
    assert [message.payload for message in await read(client, topic)] == [b"first", b"x", b"x"]


@pytest.mark.parametrize("first", [7, None])
async def test_explicit_and_automatic_ids_do_not_mix(
    client: Client, topic: str, first: int | None
) -> None:
    """PIP-6."""
    async with client.producer(topic, name="p") as producer:
        receipt = await producer.send(b"x", sequence_id=first)
        with pytest.raises(MixedSequenceIdsError):
            await producer.send(b"x", sequence_id=8 if first is None else None)
        with pytest.raises(MixedSequenceIdsError):
            producer.send_nowait(b"x", sequence_id=8 if first is None else None)
        following = await producer.send(b"x", sequence_id=None if first is None else 8)
        assert following.sequence_id == receipt.sequence_id + 1
    assert len(await read(client, topic)) == 2


async def test_an_invalid_id_is_refused_and_nothing_is_sent(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as producer:
        for wrong in (-1, SEQUENCE_ID_MAX + 1, 2**64):
            with pytest.raises(InvalidRequestError) as refusal:
                await producer.send(b"x", sequence_id=wrong)
            assert refusal.value.reason == "INVALID_SEQUENCE_ID"
        assert producer.pending_messages == 0
        assert (await producer.send(b"x", sequence_id=0)).sequence_id == 0
    assert await ids(client, topic) == [0]


@pytest.mark.parametrize("batching", [None, Batching(messages_max=7, delay_s=0.001)])
async def test_ids_follow_the_order_of_the_log_across_tasks(
    client: Client, topic: str, batching: Batching | None
) -> None:
    """Five tasks share a producer."""

    async def send(producer: Producer, task: int) -> list[Receipt]:
        return [await producer.send(b"%d:%d" % (task, each)) for each in range(200)]

    async with client.producer(topic, name="p", batching=batching) as producer:
        receipts = await asyncio.gather(*(send(producer, task) for task in range(5)))
    messages = await read(client, topic)
    assert [message.sequence_id for message in messages] == list(range(1000))
    where = {message.id: message.payload for message in messages}
    for task, told in enumerate(receipts):
        assert [where[each.message_id] for each in told] == [
            b"%d:%d" % (task, each) for each in range(200)
        ]


async def test_several_producers_share_a_topic(client: Client, topic: str) -> None:
    async def publish(name: str, batching: Batching | None) -> None:
        async with client.producer(topic, name=name, batching=batching) as producer:
            await asyncio.gather(*(producer.send(b"%d" % each) for each in range(300)))

    await asyncio.gather(
        *(publish(f"p{each}", Batching() if each % 2 else None) for each in range(6))
    )
    found: dict[str, list[int]] = {}
    for message in await read(client, topic):
        found.setdefault(message.producer_name, []).append(message.sequence_id)
        assert message.payload == b"%d" % message.sequence_id
    assert found == {f"p{each}": list(range(300)) for each in range(6)}


# ---- batches


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        (Batching(messages_max=3, delay_s=LATER_S), [[0, 1, 2], [3, 4, 5], [6]]),
        (Batching(bytes_max=250, delay_s=LATER_S), [[0, 1], [2, 3], [4, 5], [6]]),
        (Batching(bytes_max=1, delay_s=LATER_S), [[each] for each in range(7)]),
        (COLLECTING, [list(range(7))]),
        (None, [[each] for each in range(7)]),
    ],
)
async def test_a_batch_ends_at_its_count_or_its_size(
    client: Client, topic: str, batching: Batching | None, expected: list[list[int]]
) -> None:
    async with client.producer(topic, name="p", batching=batching) as producer:
        futures = [producer.send_nowait(b"x" * 100) for _ in range(7)]
        await producer.flush()
        receipts = [each.result() for each in futures]
    assert await entries(client, topic) == expected
    assert [message.id for message in await read(client, topic)] == [
        each.message_id for each in receipts
    ]


async def test_a_batch_waits_at_most_its_delay(client: Client, topic: str) -> None:
    batching = Batching(delay_s=0.01)
    async with client.producer(topic, name="p", batching=batching) as producer:
        for _ in range(2):
            futures = [producer.send_nowait(b"x") for _ in range(3)]
            async with asyncio.timeout(WITHIN_S):
                await asyncio.wait(futures)
    assert await entries(client, topic) == [[0, 1, 2], [3, 4, 5]]


async def test_a_batch_of_one_is_a_plain_message(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p", batching=COLLECTING) as producer:
        future = producer.send_nowait(b"x", key="k", properties={"a": "b"})
        await producer.flush()
        assert future.result().message_id.batch_index == -1
    (message,) = await read(client, topic)
    assert message.id == future.result().message_id
    assert (message.payload, message.key, message.properties) == (b"x", "k", {"a": "b"})


async def test_a_suspected_duplicate_is_sent_alone_and_only_new_messages_are_stored(
    frail: Services, frail_client: Client, topic: str
) -> None:
    """Ids 2, 3, 5 then 2, 4, 6: the log has 2, 3, 5, 6, also after a restart of the service."""
    client = frail_client
    async with client.producer(topic, name="p", batching=COLLECTING) as producer:
        told = []
        for flush in ((2, 3, 5), (2, 4, 6)):
            futures = [producer.send_nowait(b"%d" % each, sequence_id=each) for each in flush]
            await producer.flush()
            told += await outcomes(futures)
    assert [getattr(each, "duplicate", type(each)) for each in told] == [
        *(False, False, False),
        *(True, StaleSequenceIdError, False),
    ]
    assert await frail.stack.terminate("ledger") == 0
    await frail.stack.run("ledger")
    async with client.producer(topic, name="p") as producer:
        assert producer.last_sequence_id == 6
        assert (await producer.send(b"again", sequence_id=2)).duplicate
        with pytest.raises(StaleSequenceIdError):
            await producer.send(b"again", sequence_id=4)
    assert [message.payload for message in await read(client, topic)] == [b"2", b"3", b"5", b"6"]


async def test_messages_of_a_key_share_a_batch_and_keep_their_order(
    client: Client, topic: str
) -> None:
    batching = Batching(by_key=True, delay_s=LATER_S)
    async with client.producer(topic, name="p", batching=batching) as producer:
        futures = [producer.send_nowait(b"x", key=key) for key in "ABBAA"]
        await producer.flush()
        receipts = [each.result() for each in futures]
        assert [each.sequence_id for each in receipts] == list(range(5))
    assert await entries(client, topic) == [[1, 2], [0, 3, 4]]
    messages = {message.sequence_id: message for message in await read(client, topic)}
    for receipt in receipts:
        assert messages[receipt.sequence_id].id == receipt.message_id
    assert [messages[each].key for each in range(5)] == list("ABBAA")

    async with client.producer(topic, name="p") as producer:
        for each in range(5):
            again = await producer.send(b"again", sequence_id=each)
            assert again == Receipt(messages[each].id, each, duplicate=True, differs=True)


async def test_an_ordering_key_takes_precedence_as_the_key_of_a_batch(
    client: Client, topic: str
) -> None:
    batching = Batching(by_key=True, delay_s=LATER_S)
    async with client.producer(topic, name="p", batching=batching) as producer:
        for key, ordering_key in (("A", b"1"), ("A", b"2"), ("B", b"1"), ("A", None), (None, None)):
            producer.send_nowait(b"x", key=key, ordering_key=ordering_key)
        await producer.flush()
    assert await entries(client, topic) == [[1], [0, 2], [3], [4]]
    assert [message.ordering_key for message in await read(client, topic)] == [
        *(b"2", b"1", b"1", None, None)
    ]


async def test_a_partly_stored_batch_is_completed(client: Client, topic: str) -> None:
    """A restarted application batches its messages differently."""
    async with client.producer(topic, name="p", batching=COLLECTING) as producer:
        for each in (0, 1, 3):
            producer.send_nowait(b"first", sequence_id=each)
    async with client.producer(topic, name="p", batching=COLLECTING) as producer:
        futures = [producer.send_nowait(b"again", sequence_id=each) for each in range(1, 7)]
        futures += [producer.send_nowait(b"more", sequence_id=7)]
        await producer.flush()
        futures += [producer.send_nowait(b"more", sequence_id=8)]
        told = await _flushed(producer, futures)
    assert [getattr(each, "duplicate", type(each)) for each in told] == [
        *(True, StaleSequenceIdError, True),
        *(False, False, False, False, False),
    ]
    assert [(each.sequence_id, each.payload) for each in await read(client, topic)] == [
        *((each, b"first") for each in (0, 1, 3)),
        *((each, b"again") for each in (4, 5, 6)),
        *((each, b"more") for each in (7, 8)),
    ]


async def _flushed(
    producer: Producer, futures: list["asyncio.Future[Receipt]"]
) -> list[Receipt | BaseException]:
    await producer.flush()
    return await outcomes(futures)


async def test_batches_stay_within_the_services_limit(frail_client: Client, topic: str) -> None:
    """The producer's batch size exceeds the payload limit."""
    batching = Batching(messages_max=10_000, bytes_max=10 * 1024 * 1024, delay_s=LATER_S)
    client = frail_client
    async with client.producer(topic, name="p", batching=batching) as producer:
        futures = [producer.send_nowait(b"x" * (each % 500)) for each in range(1_000)]
        told = await _flushed(producer, futures)
        assert {type(each) for each in told} == {Receipt}
    assert await ids(client, topic) == list(range(1_000))
    assert len(await entries(client, topic)) > 10


# ---- properties of a batch that filters see


async def shown(services: Services, topic: str) -> list[dict[str, str]]:
    """The properties in the metadata of each entry."""
    found = await services.read(topic, metadata_only=True)
    return [dict(each.metadata.properties) for each in found]


@pytest.mark.parametrize(
    ("listed", "expected", "in_metadata"),
    [
        ((), [[0, 1, 2, 3, 4, 5, 6]], [{}]),
        (
            ("region", "zone"),
            [[0, 1], [2], [3], [4], [5, 6]],
            [{"region": "eu"}, {"region": "us"}, {"region": ""}, {}, {"region": "eu", "zone": "1"}],
        ),
        (
            {"region": ["eu"], "zone": ["2"]},
            [[0, 1], [2, 3, 4], [5, 6]],
            [{"region": "eu"}, {}, {"region": "eu"}],
        ),
    ],
    ids=["none", "names", "values"],
)
async def test_batches_are_cut_by_their_filter_properties(
    services: Services,
    client: Client,
    topic: str,
    listed: Any,
    expected: list[list[int]],
    in_metadata: list[dict[str, str]],
) -> None:
    batching = Batching(delay_s=LATER_S, filter_properties=listed)
    properties = [
        {"region": "eu"},
        {"n": "1", "region": "eu"},
        {"region": "us"},
        {"region": ""},
        {"n": "4"},
        {"zone": "1", "region": "eu"},
        {"region": "eu", "n": "6", "zone": "1"},
    ]
    async with client.producer(topic, name="p", batching=batching) as producer:
        futures = [producer.send_nowait(b"x", properties=each) for each in properties]
        await producer.flush()
        receipts = [each.result() for each in futures]
    assert await entries(client, topic) == expected
    assert await shown(services, topic) == in_metadata
    messages = await read(client, topic)
    assert [each.properties for each in messages] == properties
    assert [each.id for each in messages] == [each.message_id for each in receipts]


@pytest.mark.parametrize("by_key", [False, True], ids=["batched", "by key"])
async def test_a_single_message_has_the_filter_properties_of_a_batch(
    services: Services, client: Client, topic: str, by_key: bool
) -> None:
    """Whether it waits long enough to be batched, is sent again, or has a delivery time."""
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    batching = Batching(delay_s=LATER_S, by_key=by_key, filter_properties=["region"])
    fields: list[dict[str, Any]] = [
        {"sequence_id": 1},
        {"sequence_id": 1},
        {"sequence_id": 2, "deliver_at": noon},
    ]
    told: list[Receipt] = []
    async with client.producer(topic, name="p", batching=batching) as producer:
        for each in fields:
            future = producer.send_nowait(
                b"x", key="k", properties={"region": "eu", "n": "1"}, event_time_ms=7, **each
            )
            await producer.flush()
            told.append(future.result())
    assert [each.duplicate for each in told] == [False, True, False]
    assert await shown(services, topic) == [{"region": "eu"}] * 2
    found = [each.metadata for each in await services.read(topic)]
    assert [each.num_messages_in_batch for each in found] == [1, 1]
    assert [each.partition_key for each in found] == ["k", "k"]
    assert not found[0].HasField("deliver_at_time")
    assert found[1].deliver_at_time == int(noon.timestamp() * 1_000)
    messages = await read(client, topic)
    assert [each.id for each in messages] == [told[0].message_id, told[2].message_id]
    assert told[1].message_id == told[0].message_id
    for message in messages:
        assert message.properties == {"region": "eu", "n": "1"}
        assert (message.payload, message.key, message.event_time_ms) == (b"x", "k", 7)


async def test_filter_properties_cut_only_the_batch_of_their_key(
    services: Services, client: Client, topic: str
) -> None:
    """Batches of other keys continue."""
    batching = Batching(delay_s=LATER_S, by_key=True, filter_properties=["region"])
    sent = [("A", "eu"), ("B", "eu"), ("A", "us"), ("B", "eu"), ("A", "us"), ("A", "eu")]
    async with client.producer(topic, name="p", batching=batching) as producer:
        futures = [producer.send_nowait(b"x", key=k, properties={"region": r}) for k, r in sent]
        await producer.flush()
        receipts = [each.result() for each in futures]
    assert await entries(client, topic) == [[0], [1, 3], [2, 4], [5]]
    assert [each["region"] for each in await shown(services, topic)] == ["eu", "eu", "us", "eu"]
    messages = {message.sequence_id: message for message in await read(client, topic)}
    for receipt, (key, region) in zip(receipts, sent, strict=True):
        message = messages[receipt.sequence_id]
        assert (message.id, message.key) == (receipt.message_id, key)
        assert message.properties == {"region": region}


@pytest.mark.parametrize("by_key", [False, True], ids=["batched", "by key"])
async def test_the_rest_of_a_batch_keeps_its_filter_properties(
    services: Services, client: Client, topic: str, by_key: bool
) -> None:
    batching = Batching(delay_s=LATER_S, by_key=by_key, filter_properties=["region"])
    async with client.producer(topic, name="p", batching=batching) as producer:
        for each in (0, 1):
            producer.send_nowait(b"first", sequence_id=each, properties={"region": "eu"})
    async with client.producer(topic, name="p", batching=batching) as producer:
        futures = [
            producer.send_nowait(
                b"again", sequence_id=each, properties={"region": "eu" if each < 4 else "us"}
            )
            for each in range(6)
        ]
        told = await _flushed(producer, futures)
    assert [getattr(each, "duplicate", each) for each in told] == [True] * 2 + [False] * 4
    assert await entries(client, topic) == [[0, 1], [2, 3], [4, 5]]
    assert await shown(services, topic) == [{"region": "eu"}] * 2 + [{"region": "us"}]


@pytest.mark.parametrize("listed", [[], ["n"]], ids=["keys", "properties"])
async def test_entries_beyond_the_limit_of_a_publication_are_published_in_order(
    services: Services, client: Client, topic: str, listed: list[str]
) -> None:
    batching = Batching(messages_max=5_000, delay_s=LATER_S, by_key=True, filter_properties=listed)
    async with client.producer(topic, name="p", batching=batching) as producer:
        futures = [
            producer.send_nowait(b"", key="k" if listed else str(each), properties={"n": str(each)})
            for each in range(1_500)
        ]
        told = await _flushed(producer, futures)
    assert {type(each) for each in told} == {Receipt}
    assert await entries(client, topic) == [[each] for each in range(1_500)]


async def test_a_message_with_too_large_filter_properties_is_refused_alone(
    services: Services, client: Client, topic: str
) -> None:
    room = 32 * 1024 - len("region")
    batching = Batching(delay_s=LATER_S, filter_properties=["region"])
    async with client.producer(topic, name="p", batching=batching) as producer:
        futures = []
        for region in ("eu", "x" * room):
            futures.append(producer.send_nowait(b"x", properties={"region": region}))
            with pytest.raises(InvalidRequestError) as error:
                producer.send_nowait(b"x", properties={"region": "x" * (room + 1)})
            assert error.value.reason == "INVALID_ENTRY"
        told = await _flushed(producer, futures)
    assert [getattr(each, "sequence_id", each) for each in told] == [0, 1]
    assert [len(each["region"]) for each in await shown(services, topic)] == [2, room]


# ---- contents of a message


@pytest.mark.parametrize("batching", [None, COLLECTING], ids=["alone", "batched"])
@pytest.mark.parametrize("compression", Compression)
async def test_a_message_arrives_as_it_was_sent(
    client: Client, topic: str, compression: Compression, batching: Batching | None
) -> None:
    fields: list[dict[str, Any]] = [
        {"payload": b""},
        {"payload": b"\x00\xff" * 5_000},
        {"payload": "gänse".encode(), "key": "schlüssel", "properties": {"a": "1", "ä": ""}},
        {"payload": b"x", "ordering_key": b"\x00\xfe", "event_time_ms": 1_700_000_000_000},
        {"payload": b"x", "key": "", "event_time_ms": 0, "ordering_key": b""},
        {"payload": b"x", "properties": {str(each): str(each) for each in range(128)}},
    ]
    async with client.producer(
        topic, name="p", compression=compression, batching=batching
    ) as producer:
        futures = [producer.send_nowait(**each) for each in fields]
        await producer.flush()
        receipts = [each.result() for each in futures]
    messages = await read(client, topic)
    assert [
        {
            name: value
            for name in ("payload", "key", "properties", "ordering_key", "event_time_ms")
            if (value := getattr(message, name)) not in (None, {})
        }
        for message in messages
    ] == fields
    assert [message.id for message in messages] == [each.message_id for each in receipts]
    for message in messages:
        assert (message.topic, message.producer_name) == (topic, "p")
        assert message.publish_time_ms <= message.append_time_ms + 1


@pytest.mark.parametrize(
    "batching",
    [None, COLLECTING, Batching(by_key=True, delay_s=LATER_S)],
    ids=["alone", "batched", "by key"],
)
async def test_a_key_of_bytes_arrives_as_bytes(
    client: Client, topic: str, batching: Batching | None
) -> None:
    keys = [b"\x00\xff", "AP8=", None, b"AP8=", b"", "", b"\x00\xff", "schlüssel"] * 2
    async with client.producer(topic, name="p", batching=batching) as producer:
        for key in keys:
            producer.send_nowait(b"x", key=key)
        await producer.flush()
    messages = sorted(await read(client, topic), key=lambda message: message.sequence_id)
    assert [
        message.key_bytes if message.has_bytes_key else message.key for message in messages
    ] == keys
    text = {message.key: message.key_bytes for message in messages if not message.has_bytes_key}
    assert text == {None: None, "AP8=": b"AP8=", "": b"", "schlüssel": "schlüssel".encode()}


async def test_similar_keys_of_different_kinds_are_distinct(
    services: Services, client: Client, topic: str
) -> None:
    batching = Batching(by_key=True, delay_s=LATER_S)
    keys: list[dict[str, Any]] = [
        {"key": "k"},
        {"key": b"k"},
        {"ordering_key": b"k"},
        {"key": "aw=="},
        {},
    ]
    async with client.producer(topic, name="p", batching=batching) as producer:
        for fields in keys * 2:
            producer.send_nowait(b"x", **fields)
        await producer.flush()
    assert await entries(client, topic) == [[each, each + 5] for each in range(5)]
    found = [each.metadata for each in await services.read(topic)]
    assert [
        (each.partition_key, each.partition_key_b64_encoded, each.ordering_key) for each in found
    ] == [
        ("k", False, b""), ("aw==", True, b""), ("", False, b"k"), ("aw==", False, b""),
        ("", False, b""),
    ]  # fmt: skip


async def test_a_message_with_a_delivery_time_is_sent_alone_in_order(
    services: Services, client: Client, topic: str
) -> None:
    noon = datetime(2030, 1, 1, 12, tzinfo=timezone(timedelta(hours=-7)))
    async with client.producer(topic, name="p", batching=COLLECTING) as producer:
        futures = [producer.send_nowait(b"0"), producer.send_nowait(b"1")]
        futures += [producer.send_nowait(b"2", deliver_at=noon)]
        await asyncio.gather(*futures)  # it waits for no batch
        futures += [producer.send_nowait(b"3"), producer.send_nowait(b"4")]
        before_ms = time.time_ns() // 1_000_000
        await producer.send(b"5", deliver_after_s=3.0004)
        after_ms = time.time_ns() // 1_000_000
        await producer.send(b"6", deliver_at=datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC))
    assert await entries(client, topic) == [[0, 1], [2], [3, 4], [5], [6]]
    times = [
        each.metadata.deliver_at_time if each.metadata.HasField("deliver_at_time") else None
        for each in await services.read(topic)
    ]
    assert times[:3] == [None, int(noon.timestamp() * 1_000), None]
    assert times[3] is not None
    assert before_ms + 3_001 <= times[3] <= after_ms + 3_001
    assert times[4] == 1  # never early


async def test_each_chunk_of_a_message_has_its_delivery_time(
    services: Services, client: Client, topic: str
) -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    async with client.producer(topic, name="p", chunking=Chunking(chunk_bytes=100)) as producer:
        await producer.send(b"x" * 250, deliver_at=moment, key=b"k")
        await producer.send(b"x", deliver_at=moment)
    found = [each.metadata for each in await services.read(topic)]
    assert [each.deliver_at_time for each in found] == [int(moment.timestamp() * 1_000)] * 4
    assert [each.key_bytes for each in await read(client, topic)] == [b"k", None]


async def test_a_compressed_payload_is_stored_smaller(
    services: Services, client: Client, topic: str
) -> None:
    payload = b"always the same " * 1_000
    for compression in Compression:
        async with client.producer(topic, name=compression.value, compression=compression) as each:
            await each.send(payload)
    sizes = {each.metadata.producer_name: len(each.payload) for each in await services.read(topic)}
    assert sizes.pop("none") == len(payload)
    assert all(size < len(payload) / 10 for size in sizes.values())
    assert {message.payload for message in await read(client, topic)} == {payload}


# ---- reconnecting

MESSAGES = 5_000


async def _kill(stack: Stack) -> None:
    await stack.kill("ledger")
    await stack.run("ledger")


async def _drain(stack: Stack) -> None:
    assert await stack.terminate("ledger") == 0
    await stack.run("ledger")


async def _kill_dedup(stack: Stack) -> None:
    await stack.kill("dedup")
    await stack.run("dedup")


@pytest.mark.parametrize("batching", [None, Batching(messages_max=20)], ids=["alone", "batched"])
@pytest.mark.parametrize(
    "disturb", [_kill, _drain, _kill_dedup], ids=["ledger killed", "ledger drained", "dedup killed"]
)
async def test_each_message_is_stored_once_in_order_despite_crashes(
    frail: Services,
    frail_client: Client,
    topic: str,
    disturb: Callable[[Stack], Any],
    batching: Batching | None,
) -> None:
    """With 5,000 messages in flight."""
    client = frail_client
    async with client.producer(topic, name="p", batching=batching) as producer:
        sent: list[asyncio.Task[Receipt]] = []
        disturbing: asyncio.Task[None] | None = None
        for each in range(MESSAGES):
            sent.append(asyncio.create_task(producer.send(b"%d" % each, key=str(each % 7))))
            if each % 50 == 0:
                await asyncio.sleep(0)
            if each == MESSAGES // 5:
                await eventually(lambda: sent[0].done(), "the first message is stored")
                disturbing = asyncio.create_task(disturb(frail.stack))
        assert disturbing is not None
        await disturbing
        async with asyncio.timeout(60):
            receipts = await asyncio.gather(*sent)
        assert producer.last_sequence_id == MESSAGES - 1
        assert producer.pending_messages == 0
    messages = await read(client, topic)
    assert [message.payload for message in messages] == [b"%d" % each for each in range(MESSAGES)]
    assert [message.sequence_id for message in messages] == list(range(MESSAGES))
    assert [message.id for message in messages] == [each.message_id for each in receipts]


async def test_a_broken_connection_is_reestablished(
    stack: Stack, client: Client, topic: str
) -> None:
    """Unanswered messages are sent again in order, under the same name, even before the service has
    noticed that the old connection is dead."""
    async with gate_to(stack) as gate, connect(gate.address) as far:
        async with far.producer(topic) as producer:
            name = producer.name
            futures: list[asyncio.Future[Receipt]] = []
            for _ in range(3):
                futures += [
                    producer.send_nowait(b"%d" % (len(futures) + each)) for each in range(200)
                ]
                await asyncio.sleep(0)
                await gate.shut()
                await gate.open()
            receipts = await outcomes(futures)
            assert {type(each) for each in receipts} == {Receipt}
            assert producer.name == name
        messages = await read(client, topic)
        assert [message.payload for message in messages] == [b"%d" % each for each in range(600)]
        assert {message.producer_name for message in messages} == {name}


async def test_a_reconnecting_producer_does_not_claim_anothers_messages(
    stack: Stack, client: Client, topic: str
) -> None:
    """Both assign ids automatically: the ids of unanswered messages now belong to the other
    one's."""
    async with gate_to(stack) as gate, connect(gate.address) as far:
        producer = far.producer(topic, name="p")
        await producer.open()
        await producer.send(b"0")
        await gate.shut()
        future = producer.send_nowait(b"lost")
        async with client.producer(topic, name="p", takeover=True) as other:
            for _ in range(3):
                await other.send(b"other's")
        await gate.open()
        (told,) = await outcomes([future])
        assert isinstance(told, FencedError)
        assert told.reason == "PRODUCER_TAKEN_OVER"
        assert told.details == {"last_sequence_id": "3", "sequence_id": "1"}
        with pytest.raises(FencedError):
            await producer.send(b"lost")
        await producer.close()
    assert [message.payload for message in await read(client, topic)] == [b"0"] + [b"other's"] * 3


@pytest.mark.parametrize("forgotten", ["nothing", "ledger", "everything"])
async def test_anothers_message_with_the_same_id_is_not_reported_as_stored(
    frail: Services, topic: str, forgotten: str
) -> None:
    """The other producer used the very id that is in flight, and has left again. The log alone
    tells whose entry it is: the processes and Redis may have lost all state."""
    async with gate_to(frail.stack) as gate, connect(gate.address) as far:
        producer = far.producer(topic, name="p")
        await producer.open()
        await producer.send(b"0")
        gate.swallows = True
        future = producer.send_nowait(b"lost" * 1_000)
        await eventually(lambda: gate.swallowed_bytes > 4_000, "it is on its way, into nowhere")
        await gate.shut()
        gate.swallows = False
        async with connect(frail.stack.address("ledger")) as client:
            async with client.producer(topic, name="p", takeover=True) as other:
                assert (await other.send(b"other's")).sequence_id == 1
            if forgotten != "nothing":
                await frail.stack.kill("ledger")
            if forgotten == "everything":
                async with Redis.from_url(frail.stack.redis_url) as redis:
                    await redis.flushall()
            if forgotten != "nothing":
                await frail.stack.run("ledger")
            await gate.open()
            (told,) = await outcomes([future])
            assert isinstance(told, FencedError)
            assert told.reason == "PRODUCER_TAKEN_OVER"
            assert told.details == {"last_sequence_id": "1", "sequence_id": "1"}
            await producer.close()
            assert [each.payload for each in await read(client, topic)] == [b"0", b"other's"]


async def test_a_producer_resumes_when_nothing_was_published_meanwhile(
    stack: Stack, client: Client, topic: str
) -> None:
    """Messages from before it opened are another instance's, and do not end it, whether it has
    stored messages itself or not; nor does an instance that took the name and stored nothing."""
    async with client.producer(topic, name="p") as before:
        await before.send(b"0")
    async with (
        gate_to(stack) as gate,
        connect(gate.address) as far,
        far.producer(topic, name="p") as producer,
    ):
        for payload in (b"1", b"2", b"3"):
            await gate.shut()
            future = producer.send_nowait(payload)
            async with client.producer(topic, name="p", takeover=True):
                pass
            await gate.open()
            assert [type(each) for each in await outcomes([future])] == [Receipt]
    assert await ids(client, topic) == [0, 1, 2, 3]


async def test_producers_with_application_ids_share_a_name(
    stack: Stack, client: Client, topic: str
) -> None:
    """Ids assigned by the application mean the same for every sender."""
    async with gate_to(stack) as gate, connect(gate.address) as far:
        async with far.producer(topic, name="p") as producer:
            await producer.send(b"0", sequence_id=0)
            await gate.shut()
            futures = [producer.send_nowait(b"%d" % each, sequence_id=each) for each in (1, 2, 3)]
            async with client.producer(topic, name="p", takeover=True) as other:
                for each in (1, 2):
                    await other.send(b"%d" % each, sequence_id=each)
            await gate.open()
            told = await outcomes(futures)
        assert [getattr(each, "duplicate", each) for each in told] == [True, True, False]
    assert [message.payload for message in await read(client, topic)] == [b"0", b"1", b"2", b"3"]


async def test_a_full_store_delays_and_loses_nothing(private: Any, topic: str) -> None:
    """The producer gets a retry delay, and sends again in order once there is space."""
    size = 16_000
    async with (
        private(SEQGATE_LEDGER_STORE_BYTES_MAX="1000000") as services,
        connect(services.stack.address("ledger")) as client,
    ):
        async with client.producer(f"{topic}-other") as other:
            for _ in range(30):
                await other.send(b"x" * size)
        async with client.producer(topic, name="p") as producer:
            futures = [producer.send_nowait(b"x" * size) for _ in range(40)]
            await eventually(
                lambda: any(line["event"] == "append failed" for line in services.log("ledger")),
                "the store is full",
            )
            assert producer.pending_messages
            await services.ledger.DeleteTopic(pb.DeleteTopicRequest(topic=f"{topic}-other"))
            receipts = await outcomes(futures)
            assert {type(each) for each in receipts} == {Receipt}
        assert await ids(client, topic) == list(range(40))


# ---- waiting and time-outs


async def test_a_message_that_timed_out_and_was_overtaken_is_stale(
    frail: Services, frail_client: Client, topic: str
) -> None:
    """5 times out, 6 and 7 are stored, 5 is sent again. And a time-out fails all pending messages,
    since later ones would overtake those sent again."""
    async with frail_client.producer(topic, name="p", send_timeout_s=0.15) as producer:
        await _sent(producer, 3)
        await frail.stack.kill("ledger")
        told = await outcomes([producer.send_nowait(b"x", sequence_id=each) for each in (4, 5)])
        assert [type(each) for each in told] == [SendTimeoutError] * 2
        assert [getattr(each, "sequence_id", None) for each in told] == [4, 5]
        assert [str(each)[-15:] for each in told] == ["(sequence id 4)", "(sequence id 5)"]
        assert (producer.pending_messages, producer.pending_bytes) == (0, 0)
        await frail.stack.run("ledger")
        await eventually(lambda: _stores(producer, 4), "the producer has connected again")
        for each in (6, 7):
            await _sent(producer, each)
        with pytest.raises(StaleSequenceIdError) as stale:
            await _sent(producer, 5)
        assert stale.value.sequence_id == 5
        with pytest.raises(InvalidRequestError) as wrong:
            await producer.send(b"x", sequence_id=-1)
        assert wrong.value.sequence_id == -1
    assert await ids(frail_client, topic) == [3, 4, 6, 7]


async def _stores(producer: Producer, sequence_id: int) -> bool:
    try:
        await producer.send(b"x", sequence_id=sequence_id)
    except SendTimeoutError:
        return False
    return True


async def _sent(producer: Producer, sequence_id: int) -> Receipt:
    """Send the message again after each time-out, until a slow machine has stored it."""
    while True:
        try:
            return await producer.send(b"x", sequence_id=sequence_id)
        except SendTimeoutError:
            continue


async def test_a_message_that_timed_out_may_be_sent_again(
    frail: Services, frail_client: Client, topic: str
) -> None:
    """Whether or not the first copy was stored: here it may be stored later."""
    async with frail_client.producer(topic, name="p", send_timeout_s=0.15) as producer:
        with paused(frail.stack, "dedup"):
            told = await outcomes(
                [producer.send_nowait(b"x", sequence_id=each) for each in range(20)]
            )
            assert {type(each) for each in told} == {SendTimeoutError}
        for each in range(20):
            await _sent(producer, each)
    assert await ids(frail_client, topic) == list(range(20))


async def test_pending_messages_are_bounded(client: Client, topic: str) -> None:
    async with client.producer(
        topic, name="p", batching=COLLECTING, max_pending_messages=2
    ) as producer:
        futures = [producer.send_nowait(b"x"), producer.send_nowait(b"x")]
        assert producer.pending_messages == 2
        with pytest.raises(ProducerQueueFullError):
            producer.send_nowait(b"x")
        waiting = asyncio.create_task(producer.send(b"x"))
        await asyncio.sleep(0)
        assert producer.pending_messages == 2
        await producer.flush()
        assert all(each.done() for each in futures)

        await eventually(lambda: producer.pending_messages == 1, "there is room")
        await producer.flush()
        assert (await waiting).sequence_id == 2
    assert await ids(client, topic) == [0, 1, 2]


async def test_pending_bytes_are_bounded(client: Client, topic: str) -> None:
    """A message above the limit is admitted alone."""
    async with client.producer(
        topic, name="p", batching=COLLECTING, max_pending_bytes=1_000
    ) as producer:
        futures = [producer.send_nowait(b"x" * 400, key="k") for _ in range(2)]
        assert 800 <= producer.pending_bytes <= 1_000
        with pytest.raises(ProducerQueueFullError):
            producer.send_nowait(b"x" * 400)
        waiting = asyncio.create_task(producer.send(b"x" * 5_000))
        await asyncio.sleep(0)
        assert producer.pending_messages == 2
        await producer.flush()
        await eventually(lambda: producer.pending_messages == 1, "it is alone")
        with pytest.raises(ProducerQueueFullError):
            producer.send_nowait(b"")
        await producer.flush()
        assert (await waiting).sequence_id == 2
        assert all(each.done() for each in futures)
        assert producer.pending_bytes == 0


async def test_blocked_sends_proceed_in_order_and_fail_when_the_producer_is_fenced(
    client: Client, topic: str
) -> None:
    async with client.producer(topic, name="p", max_pending_messages=3) as producer:
        receipts = await asyncio.gather(*(producer.send(b"x") for _ in range(50)))
        assert [each.sequence_id for each in receipts] == list(range(50))
    async with client.producer(
        topic, name="p", batching=COLLECTING, max_pending_messages=1
    ) as producer:
        first = producer.send_nowait(b"x")
        waiting = asyncio.create_task(producer.send(b"x"))
        await asyncio.sleep(0)
        async with client.producer(topic, name="p", takeover=True):
            told = await outcomes([first, waiting])
        assert [type(each) for each in told] == [FencedError, FencedError]


async def test_blocked_sends_fail_when_the_producer_closes(client: Client, topic: str) -> None:
    producer = client.producer(topic, name="p", batching=COLLECTING, max_pending_messages=1)
    await producer.open()
    first = producer.send_nowait(b"x")
    waiting = asyncio.create_task(producer.send(b"x"))
    await asyncio.sleep(0)
    await producer.close()
    stored, closed = await outcomes([first, waiting])
    assert isinstance(stored, Receipt)
    assert isinstance(closed, ProducerClosedError)


async def test_a_cancelled_send_still_publishes_its_message(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p", batching=COLLECTING) as producer:
        sending = asyncio.create_task(producer.send(b"kept"))
        future = producer.send_nowait(b"kept too")
        await asyncio.sleep(0)
        sending.cancel()
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert producer.pending_messages == 2
        third = producer.send_nowait(b"after")
        await producer.flush()
        assert third.result().sequence_id == 2
        assert producer.pending_messages == 0
    payloads = [message.payload for message in await read(client, topic)]
    assert sorted(payloads) == [b"after", b"kept", b"kept too"]


async def test_a_flush_waits_for_messages_whose_senders_were_cancelled(
    client: Client, topic: str
) -> None:
    async with client.producer(topic) as producer:
        sending = asyncio.create_task(producer.send(b"0"))
        future = producer.send_nowait(b"1")
        await asyncio.sleep(0)
        sending.cancel()
        future.cancel()
        await producer.flush()
        assert producer.pending_messages == 0


async def test_a_blocked_send_that_is_cancelled_publishes_nothing(
    client: Client, topic: str
) -> None:
    async with client.producer(
        topic, name="p", batching=COLLECTING, max_pending_messages=1
    ) as producer:
        producer.send_nowait(b"0")
        waiting = asyncio.create_task(producer.send(b"never"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await producer.flush()
        producer.send_nowait(b"1")
    assert [message.payload for message in await read(client, topic)] == [b"0", b"1"]


# ---- flushing and closing


async def test_a_flush_waits_for_everything_sent_before_it(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p", batching=COLLECTING) as producer:
        await producer.flush()  # nothing to flush
        futures = [producer.send_nowait(b"x") for _ in range(2_500)]
        futures.append(producer.send_nowait(b"x" * 6_000_000))  # too large
        await producer.flush()
        assert all(each.done() for each in futures)
        assert Counter(type(each.exception()) for each in futures) == {
            type(None): 2_500,
            MessageTooLargeError: 1,
        }
        assert producer.pending_messages == 0


async def test_closing_sends_collected_messages(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p", batching=COLLECTING) as producer:
        futures = [producer.send_nowait(b"x") for _ in range(10)]
    assert [each.result().sequence_id for each in futures] == list(range(10))
    with pytest.raises(ProducerClosedError):
        await producer.send(b"x")
    with pytest.raises(ProducerClosedError):
        producer.send_nowait(b"x")
    await producer.close()  # again
    await producer.flush()
    assert await ids(client, topic) == list(range(10))


async def test_an_exception_in_the_producers_block_fails_pending_sends(
    client: Client, topic: str
) -> None:
    futures = []

    async def leave() -> None:
        async with client.producer(topic, name="p", batching=COLLECTING) as producer:
            futures.append(producer.send_nowait(b"x"))
            raise KeyError("from the application")

    with pytest.raises(KeyError):
        await leave()
    assert isinstance(futures[0].exception(), ProducerClosedError)


async def test_a_producer_that_was_not_opened_sends_nothing(client: Client, topic: str) -> None:
    producer = client.producer(topic, name="p")
    with pytest.raises(ProducerClosedError):
        producer.send_nowait(b"x")
    await producer.close()


async def test_closing_without_a_service_ends_with_the_send_timeout(
    frail: Services, frail_client: Client, topic: str
) -> None:
    producer = frail_client.producer(topic, name="p", send_timeout_s=0.15)
    idle = frail_client.producer(topic, name="idle", send_timeout_s=None)
    await producer.open()
    await idle.open()
    await frail.stack.kill("ledger")
    future = producer.send_nowait(b"x")
    async with asyncio.timeout(WITHIN_S):
        await producer.close()
        await idle.close()  # nothing is pending
    assert isinstance(future.exception(), SendTimeoutError)
    await frail.stack.run("ledger")


async def test_closing_without_a_send_timeout_waits_for_the_service(
    frail: Services, frail_client: Client, topic: str
) -> None:
    producer = frail_client.producer(topic, name="p", send_timeout_s=None)
    await producer.open()
    await frail.stack.kill("ledger")
    future = producer.send_nowait(b"x")
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    with pytest.raises(ProducerClosedError):
        producer.send_nowait(b"more")
    await frail.stack.run("ledger")
    async with asyncio.timeout(WITHIN_S):
        await closing
    assert future.result().sequence_id == 0
    assert await ids(frail_client, topic) == [0]


async def test_a_cancelled_open_leaves_nothing_running(
    frail: Services, frail_client: Client, topic: str
) -> None:
    before = asyncio.all_tasks()
    with paused(frail.stack, "dedup"):
        producer = frail_client.producer(topic, name="p", open_timeout_s=LATER_S)
        opening = asyncio.create_task(producer.open())
        await asyncio.sleep(0.02)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    await eventually(lambda: asyncio.all_tasks() <= before, "no task is left")


async def test_a_cancelled_close_leaves_nothing_running(
    frail: Services, frail_client: Client, topic: str
) -> None:
    """And no caller is left waiting."""
    before = asyncio.all_tasks()
    producer = frail_client.producer(topic, name="p")
    await producer.open()
    with paused(frail.stack, "dedup"):
        future = producer.send_nowait(b"x")
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0.02)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    await eventually(lambda: asyncio.all_tasks() <= before, "no task is left")
    assert isinstance(future.exception(), ProducerClosedError)


# ---- errors


@pytest.mark.parametrize("topic_name", ["", "a/b", "a/b/c/d", "a//c", "a/b/c d", "ü", "x" * 250])
async def test_an_invalid_topic_is_refused_without_a_call(client: Client, topic_name: str) -> None:
    with pytest.raises(InvalidNameError):
        client.producer(topic_name)
    with pytest.raises(InvalidNameError):
        client.reader(topic_name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"name": "x" * 256},
        {"name": "\ud800"},
        {"initial_sequence_id": -1},
        {"initial_sequence_id": SEQUENCE_ID_MAX},
        {"max_pending_messages": 0},
        {"max_pending_bytes": 0},
    ],
    ids=str,
)
async def test_invalid_producer_options_are_refused_without_a_call(
    client: Client, topic: str, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValueError):
        client.producer(topic, **wrong)


@pytest.mark.parametrize("batching", [None, COLLECTING], ids=["alone", "batched"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"payload": "text"},
        {"payload": 7},
        {"properties": {"a": 1}},
        {"properties": {1: "a"}},
        {"properties": {"a": "\ud800"}},
        {"properties": {str(each): "" for each in range(129)}},
        {"event_time_ms": -1},
        {"event_time_ms": 2**64},
        {"key": 7},
        {"key": "\ud800"},
        {"ordering_key": "text"},
        {"deliver_after_s": -0.001},
        {"deliver_after_s": float("nan")},
        {"deliver_after_s": float("inf")},
        {"deliver_at": datetime(2030, 1, 1, tzinfo=UTC).replace(tzinfo=None)},
        {"deliver_at": datetime(1969, 12, 31, 23, tzinfo=UTC)},
        {"deliver_after_s": 0.0, "deliver_at": datetime(2030, 1, 1, tzinfo=UTC)},
    ],
    ids=lambda wrong: str(wrong)[:30],
)
async def test_an_invalid_message_is_refused_alone(
    client: Client, topic: str, wrong: dict[str, Any], batching: Batching | None
) -> None:
    async with client.producer(topic, name="p", batching=batching) as producer:
        futures = [producer.send_nowait(b"before")]
        with pytest.raises((ValueError, TypeError)):
            producer.send_nowait(b"x", **wrong)
        futures.append(producer.send_nowait(b"after"))
        await producer.flush()
        assert producer.pending_messages == 0
        assert [type(each) for each in await outcomes(futures)] == [Receipt, Receipt]
    assert [message.payload for message in await read(client, topic)] == [b"before", b"after"]


@pytest.mark.parametrize("batching", [None, COLLECTING], ids=["alone", "batched"])
async def test_a_message_above_the_limit_is_refused_alone(
    frail_client: Client, topic: str, batching: Batching | None
) -> None:
    client = frail_client
    async with client.producer(topic, name="p", batching=batching) as producer:
        futures = [
            producer.send_nowait(b"before"),
            producer.send_nowait(b"x" * (MESSAGE_BYTES_MAX + 1)),
            producer.send_nowait(b"x" * MESSAGE_BYTES_MAX),
            producer.send_nowait(b"x", key="k" * 200_000),  # the metadata has its own limit
            producer.send_nowait(b"after"),
        ]
        told = await _flushed(producer, futures)
        assert [type(each) for each in told] == [
            Receipt,
            MessageTooLargeError,
            Receipt,
            MessageTooLargeError,
            Receipt,
        ]
        assert isinstance(told[1], SeqgateError)
        largest = str(MESSAGE_BYTES_MAX)
        assert told[1].details == {"max_message_bytes": largest, "sequence_id": "1"}
    assert [len(message.payload) for message in await read(client, topic)] == [
        len(b"before"),
        MESSAGE_BYTES_MAX,
        len(b"after"),
    ]


async def test_topics_are_created_only_where_allowed(
    frail: Services, frail_client: Client, topic: str
) -> None:
    closed = f"closed/default/{topic.rpartition('/')[2]}"
    with pytest.raises(NotFoundError) as refusal:
        await frail_client.producer(closed).open()
    assert refusal.value.reason == "TOPIC_NOT_FOUND"
    await frail.ledger.CreateTopic(pb.CreateTopicRequest(topic=closed))
    async with frail_client.producer(closed) as producer:
        await producer.send(b"x")


async def test_deleting_a_topic_ends_its_producers(
    services: Services, client: Client, topic: str
) -> None:
    producer = client.producer(topic, name="p", batching=COLLECTING)
    await producer.open()
    future = producer.send_nowait(b"x")
    await services.ledger.DeleteTopic(pb.DeleteTopicRequest(topic=topic, force=True))
    (told,) = await outcomes([future])
    assert isinstance(told, NotFoundError)
    assert told.reason == "TOPIC_DELETED"
    with pytest.raises(NotFoundError):
        await producer.send(b"x")
    await producer.close()


async def test_an_unreachable_service_is_unavailable(topic: str) -> None:
    (port,) = free_ports(1)
    async with connect(f"127.0.0.1:{port}") as nowhere:
        producer = nowhere.producer(topic, open_timeout_s=0.1)
        with pytest.raises(UnavailableError):
            await producer.open()
        with pytest.raises(UnavailableError):
            await producer.send(b"x")
        await producer.close()


async def test_opening_a_producer_has_a_timeout(
    frail: Services, frail_client: Client, topic: str
) -> None:
    with paused(frail.stack, "dedup"), pytest.raises(UnavailableError):
        await frail_client.producer(topic, open_timeout_s=0.1).open()
    async with frail_client.producer(topic) as producer:
        await producer.send(b"x")
