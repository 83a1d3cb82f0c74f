"""Processes die, lose state and are partitioned between two chunks of a large message: it is stored
once, byte for byte.

    python -m tests.faults.test_large_messages LEDGER TOPIC CHUNK_BYTES

is an application that publishes one large message, and one after it, on request.
"""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process, create_subprocess_exec
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from random import Random
from signal import SIGKILL
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio
from redis.asyncio import Redis

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import Chunking, Dropped, DropReason, Receipt, connect
from seqgate.dev.child import bound_to_us
from tests.faults.test_lost_replies import LINKS, Wires, wired
from tests.faults.world import World
from tests.integration.services import channel_to
from tests.support.checkers import Acknowledgement, Content, History, Identity, Stored
from tests.support.crash_points import Order
from tests.support.depth import some_of
from tests.support.publisher import Publisher, publishing, single
from tests.support.waiting import WITHIN_S
from tests.support.workload import judge, read_log

FEW_AT_A_TIME: dict[str, Any] = {"SEQGATE_LEDGER_GROUP_ENTRIES_MAX": "3"}
"""Small, so that a large message is stored in many steps."""

FIRST_ID = 2**60
CHUNK_BYTES = 512
CHUNKS = 90
STORED, DUPLICATE = pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE
EVERYTHING = ("redis", "dedup", "ledger")

_topics = count()


@pytest_asyncio.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    made = World(tmp_path_factory.mktemp("world"), **FEW_AT_A_TIME)
    async with made.stack:
        yield made


@pytest_asyncio.fixture(scope="module")
async def wires(tmp_path_factory: pytest.TempPathFactory, seed: int) -> AsyncIterator[Wires]:
    async with wired(tmp_path_factory.mktemp("wires"), seed) as made:
        stack = made.world.stack
        stack.environment |= FEW_AT_A_TIME
        await stack.terminate("ledger")
        await stack.run("ledger")
        yield made


def payload_of(number: int) -> bytes:
    """The payload of a message, derived from its number; every other one is large."""
    chunks = (7, 0, 20, 0, 3)[number % 5]
    return Random(number).randbytes(CHUNK_BYTES * chunks + 1)


class Large:
    """Publishes large and small messages to a topic of its own, and keeps their receipts."""

    def __init__(self, world: World, *, ledger: str | None = None) -> None:
        self.topic = f"public/large/{next(_topics)}"
        self.history = History()
        self._world = world
        self._ledger = ledger or world.stack.address("ledger")
        self._next = 0

    async def publish(self, messages: int = 10) -> None:
        """Publish the last three messages again, then new ones; returns when all are answered."""
        numbers = range(max(0, self._next - 3), self._next + messages)
        self._next = numbers.stop
        async with (
            connect(self._ledger) as client,
            client.producer(
                self.topic,
                name="p",
                takeover=True,
                chunking=Chunking(CHUNK_BYTES),
                send_timeout_s=None,
                open_timeout_s=60,
            ) as producer,
        ):
            sends = []
            for number in numbers:
                identity = self.send(FIRST_ID + number, payload_of(number))
                done = producer.send_nowait(payload_of(number), sequence_id=identity.sequence_id)
                sends.append((identity, done))
            for identity, done in sends:
                self.note(identity, await done)

    def send(self, sequence_id: int, payload: bytes) -> Identity:
        identity = Identity("p", sequence_id)
        self.history.send(identity, Content(payload))
        return identity

    def note(self, identity: Identity, receipt: Receipt) -> None:
        self.history.acknowledged.append(
            Acknowledgement(identity, receipt.message_id, receipt.duplicate)
        )

    async def check(self, *aborted: str) -> None:
        """Check that every message is stored once, unchanged, at its receipt's position and with
        its first chunk; that no chunk is stored twice; that the chunks without a message belong to
        aborted attempts; and that deduplication state agrees with the log."""
        address = self._world.stack.address
        log = await judge(address("ledger"), address("dedup"), self.topic, self.history)
        assert [each.identity for each in log] == sorted(self.history.sent)
        places = {each.identity: str(each.id) for each in log}
        for told in self.history.acknowledged:
            assert str(told.id) == places[told.identity]
        chunks = Counter(map(_chunk, await self.entries()))
        assert max(chunks.values()) == 1
        assert {each.reason for each in await self.dropped()} == (
            {DropReason.ABORTED} if aborted else set()
        )

    async def entries(self) -> list[pb.StoredEntry]:
        request = pb.ReadRequest(
            topic=self.topic,
            start=common_pb2.Start(earliest=common_pb2.Earliest()),
            metadata_only=True,
        )
        async with self.stub() as stub:
            return [each async for some in stub.Read(request) for each in some.entries.entries]

    async def log(self) -> list[Stored]:
        return await read_log(self._world.stack.address("ledger"), self.topic)

    async def dropped(self) -> list[Dropped]:
        """Chunks that belong to no message, as a reader counts them."""
        found: list[Dropped] = []
        async with connect(self._world.stack.address("ledger")) as client:
            reader = client.reader(self.topic, follow=False, on_dropped=found.append)
            async for _ in reader:
                pass
        return found

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[Any]:
        async with channel_to(self._world.stack.address("ledger")) as channel:
            yield LedgerServiceStub(channel)


def _chunk(stored: pb.StoredEntry) -> tuple[str, int, str, int]:
    metadata = stored.metadata
    return metadata.producer_name, metadata.sequence_id, metadata.uuid, metadata.chunk_id


# ---- during a client's publishing


async def publish_through(
    world: World, application: Large, service: str, order: Order, *dying: str
) -> None:
    """Publish until the order has been carried out, and on when everything runs again."""
    await application.publish(3)
    world.order(service, order)
    dead: asyncio.Future[Any] = asyncio.gather(*(world.stack.ended(name) for name in dying))
    publishing_on: asyncio.Future[Any] = asyncio.create_task(application.publish())
    while not dead.done():
        await asyncio.wait([dead, publishing_on], return_when=asyncio.FIRST_COMPLETED)
        if publishing_on.done():
            await publishing_on
            publishing_on = asyncio.create_task(application.publish())
    assert set(await dead) == {-SIGKILL}
    for name in sorted(dying, key=EVERYTHING.index):
        await world.stack.run(name)
    await publishing_on
    await application.publish()
    await application.check()


def at(point: str, *pids: int) -> Order:
    """An order for when a large message is half stored, after the repeats of `publish`."""
    return Order(point, 2 if point.startswith("append") else 13, pids)


LEDGER_POINTS = ["admit.before", "admit.after", "append.before", "append.after", "receipts.after"]


@pytest.mark.parametrize("point", some_of(LEDGER_POINTS, every=8))
async def test_large_messages_are_stored_once_if_the_ledger_dies_between_chunks_at(
    world: World, point: str
) -> None:
    await publish_through(world, Large(world), "ledger", at(point), "ledger")


@pytest.mark.parametrize("point", ["admit.before", "admit.after"])
async def test_large_messages_are_stored_once_if_dedup_dies_between_chunks_at(
    world: World, point: str
) -> None:
    await publish_through(world, Large(world), "dedup", at(point), "dedup")


async def test_large_messages_are_stored_once_if_redis_dies_between_chunks(world: World) -> None:
    order = at("admit.after", world.pid("redis"))
    await publish_through(world, Large(world), "dedup", order, "redis")


async def test_large_messages_are_stored_once_if_everything_dies_between_chunks(
    world: World,
) -> None:
    order = at("append.after", *map(world.pid, EVERYTHING))
    await publish_through(world, Large(world), "ledger", order, *EVERYTHING)


async def test_large_messages_are_stored_once_if_the_ledger_dies_again_during_recovery(
    world: World,
) -> None:
    application, stack = Large(world), world.stack
    await application.publish(3)
    world.order("ledger", Order("append.after", 2))
    publishing_on = asyncio.create_task(application.publish())
    assert await stack.ended("ledger") == -SIGKILL
    world.order("ledger", Order("rollback.after"))
    await stack.spawn("ledger")
    assert await stack.ended("ledger") == -SIGKILL
    await stack.run("ledger")
    await publishing_on
    await application.check()


@pytest.mark.parametrize("link", LINKS)
async def test_large_messages_are_stored_once_if_replies_are_lost_between_chunks(
    wires: Wires, link: str
) -> None:
    wire = wires.wires[link]
    application = Large(wires.world, ledger=wires.wires["producer to ledger"].address)
    await application.publish(3)
    lost = wire.lost
    publishing_on = asyncio.create_task(application.publish())
    for _ in range(4):
        wire.cut_next = 1
        while wire.cut_next and not publishing_on.done():
            await asyncio.sleep(0.005)
    await publishing_on
    wire.cut_next = 0
    assert wire.lost > lost
    await application.publish()
    await application.check()


# ---- exactly between two chunks


async def flush(world: World) -> None:
    async with Redis.from_url(world.stack.redis_url) as redis:
        await redis.flushall()


def killed(*names: str) -> Callable[[World], Awaitable[None]]:
    async def kill(world: World) -> None:
        for name in names:
            await world.stack.kill(name)
        await asyncio.gather(*map(world.stack.run, names))

    return kill


async def start_with_nothing(world: World) -> None:
    await flush(world)
    await killed("redis", "dedup", "ledger")(world)


BETWEEN = {
    "redis is flushed": flush,
    "redis dies": killed("redis"),
    "dedup dies": killed("dedup"),
    "the ledger dies": killed("ledger"),
    "all die": killed(*EVERYTHING),
    "all die and redis is flushed": start_with_nothing,
}


def chunk_publications(sequence_id: int, body: bytes) -> list[pb.Publication]:
    parts = [body[each : each + CHUNK_BYTES] for each in range(0, len(body), CHUNK_BYTES)]
    shared: dict[str, Any] = {
        "uuid": "one attempt",
        "num_chunks_from_msg": len(parts),
        "total_chunk_msg_size": len(body),
    }
    return [
        single(index + 1, sequence_id, part, chunk_id=index, **shared)
        for index, part in enumerate(parts)
    ]


async def store(publisher: Publisher, publication: pb.Publication) -> pb.Receipt:
    """Publish one chunk, again after a temporary failure; its receipt."""
    for attempt in range(100):
        publication.resume = attempt > 0
        receipt = await publisher.store(publication)
        if receipt.status != pb.RECEIPT_STATUS_FAILED:
            return receipt
    raise AssertionError("it fails again and again")


@asynccontextmanager
async def opened(application: Large) -> AsyncIterator[Publisher]:
    """A stream, opened once the service accepts one; it may break when it ends."""
    async with application.stub() as stub, AsyncExitStack() as stack:
        async with asyncio.timeout(WITHIN_S):
            publisher: Publisher | None = None
            while publisher is None:
                stream = publishing(stub, application.topic, "p", takeover=True)
                try:
                    publisher = await stack.enter_async_context(stream)
                except aio.AioRpcError:
                    await asyncio.sleep(0.02)
        yield publisher
        await publisher.cut()  # the service may have died


async def publish_by_hand(
    world: World, application: Large, between: Callable[[World], Awaitable[None]]
) -> None:
    """Publish a message of three chunks, each on its own stream, with an incident after the first.
    A chunk sent again is answered with its first position."""
    body = Random(application.topic).randbytes(3 * CHUNK_BYTES)
    identity = application.send(7, body)
    publications = chunk_publications(7, body)
    receipts: list[pb.Receipt] = []
    for index, publication in enumerate(publications):
        async with opened(application) as publisher:
            if receipts:
                again = await store(publisher, publications[index - 1])
                assert (again.status, again.position) == (DUPLICATE, receipts[-1].position)
            receipts.append(await store(publisher, publication))
        if index == 0:
            await between(world)
    assert {each.status for each in receipts} == {STORED}
    assert [each.identity for each in await application.log()] == [identity]
    assert len(await application.entries()) == len(publications)
    await application.publish(3)
    await application.check()


@pytest.mark.parametrize("what", BETWEEN)
async def test_an_attempt_resumes_when(world: World, what: str) -> None:
    await publish_by_hand(world, Large(world), BETWEEN[what])


@pytest.mark.parametrize("service", ["ledger", "dedup"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_large_messages_are_stored_once_if_a_service_dies_during_a_confirmation(
    world: World, service: str, when: str
) -> None:
    async def has_died(world: World) -> None:
        assert await world.stack.ended(service) == -SIGKILL
        await world.stack.run(service)

    world.order(service, Order(f"confirm.{when}"))
    await publish_by_hand(world, Large(world), has_died)


@pytest.mark.parametrize("what", ["redis is flushed", "dedup dies"])
async def test_an_open_stream_continues_when(world: World, what: str) -> None:
    application = Large(world)
    body = Random(what).randbytes(2 * CHUNK_BYTES)
    application.send(7, body)
    async with opened(application) as publisher:
        for publication in chunk_publications(7, body):
            assert (await store(publisher, publication)).status == STORED
            await BETWEEN[what](world)
    await application.publish(3)
    await application.check()


# ---- with a killed application


@asynccontextmanager
async def running(world: World, topic: str, chunk_bytes: int) -> AsyncIterator[Process]:
    """The application in this module, waiting for a line."""
    what = (world.stack.address("ledger"), topic, str(chunk_bytes))
    process = await create_subprocess_exec(
        *bound_to_us([sys.executable, "-m", "tests.faults.test_large_messages", *what]),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def begin(process: Process) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"open\n"
    process.stdin.write(b"\n")
    await process.stdin.drain()


@pytest.mark.parametrize(
    ("chunk_bytes", "with_the_ledger"),
    some_of(
        [
            pytest.param(10 * CHUNK_BYTES, True, id="larger"),
            pytest.param(CHUNK_BYTES // 2, False, id="smaller"),
            pytest.param(2 * CHUNKS * CHUNK_BYTES, False, id="all in one"),
        ],
        every=3,
    ),
)
async def test_a_message_is_stored_once_if_its_application_returns_with_other_chunks(
    world: World, chunk_bytes: int, with_the_ledger: bool
) -> None:
    """The message may fit into one entry then."""
    application, stored = Large(world), 0
    while not 0 < stored < CHUNKS:  # the ledger may have received everything before the kill
        application = Large(world)
        async with running(world, application.topic, CHUNK_BYTES) as process:
            dying = [process.pid, world.pid("ledger")] if with_the_ledger else [process.pid]
            world.order("ledger", Order("append.after", 2, dying))
            await begin(process)
            assert await process.wait() == -SIGKILL
        if with_the_ledger:
            assert await world.stack.ended("ledger") == -SIGKILL
            await world.stack.run("ledger")
        stored = len(await application.entries())
    async with running(world, application.topic, chunk_bytes) as process:
        await begin(process)
        assert await process.wait() == 0
    for sequence_id, payload in messages():
        application.send(sequence_id, payload)
    await application.check("aborted")


def messages() -> list[tuple[int, bytes]]:
    return [(5, Random(5).randbytes(CHUNKS * CHUNK_BYTES)), (6, b"behind")]


async def main(ledger: str, topic: str, chunk_bytes: str) -> None:
    async with (
        connect(ledger) as client,
        client.producer(
            topic, name="p", takeover=True, chunking=Chunking(int(chunk_bytes))
        ) as producer,
    ):
        print("open", flush=True)  # noqa: T201
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        sends = [producer.send_nowait(payload, sequence_id=each) for each, payload in messages()]
        await asyncio.gather(*sends)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
