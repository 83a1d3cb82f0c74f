"""Topics over two instances of the ledger and two of the cursor service."""

import asyncio
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgpack
import pytest
from grpc import StatusCode, aio

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.placement.v1 import placement_pb2 as pb
from seqgate.client import Client, connect
from seqgate.spark._columns import Range, asked, connected, read_blocks
from seqgate.types import Position
from services.ledger.adapters.sqlite import LAYOUT
from tests.integration.refusals import refused
from tests.integration.services import Services, running
from tests.support.placing import Instances, instances_of
from tests.support.waiting import eventually

IN_USE, NOT_FOUND = StatusCode.FAILED_PRECONDITION, StatusCode.NOT_FOUND
INVALID, UNAVAILABLE = StatusCode.INVALID_ARGUMENT, StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """Two instances of each."""
    async with running(
        tmp_path_factory.mktemp("placed"), instances=2, SEQGATE_LEDGER_FOLLOW_POLL_S="0.05"
    ) as services:
        yield services


@pytest.fixture(scope="module")
async def ledgers(services: Services) -> AsyncIterator[Instances]:
    async with instances_of(services.stack, "ledger") as instances:
        yield instances


@pytest.fixture(scope="module")
async def cursors(services: Services) -> AsyncIterator[Instances]:
    async with instances_of(services.stack, "cursor") as instances:
        yield instances


@pytest.fixture
async def client(services: Services) -> AsyncIterator[Client]:
    stack = services.stack
    async with connect(stack.target("ledger"), stack.address("dispatcher")) as client:
        yield client


async def publish(client: Client, topic: str, *payloads: str, name: str = "p") -> list[str]:
    """Publish; the messages' ids."""
    async with client.producer(topic, name=name) as producer:
        return [str((await producer.send(each.encode())).message_id) for each in payloads]


async def payloads(client: Client, topic: str) -> list[str]:
    async with client.reader(topic, follow=False) as reader:
        return [message.payload.decode() async for message in reader]


async def make_cursor(cursors: Instances, topic: str, name: str = "c") -> Any:
    request = cursor_pb2.CreateCursorRequest(topic=topic, name=name)
    return (await cursors.anywhere.CreateCursor(request)).cursor


async def get_cursor(cursors: Instances, topic: str, name: str = "c") -> Any:
    request = cursor_pb2.GetCursorRequest(topic=topic, name=name)
    return (await cursors.anywhere.GetCursor(request)).cursor


# ---- where topics are


async def test_new_topics_are_spread_over_the_instances(
    client: Client, ledgers: Instances, topic: str
) -> None:
    names = [f"{topic}-{i}" for i in range(6)]
    for name in names:
        await publish(client, name, "one")
    places = [await ledgers.where(name) for name in names]
    assert abs(places.count("ledger") - places.count("ledger-1")) <= 1
    for name, place in zip(names, places, strict=True):
        assert await ledgers.holding(name) == [place]
        assert await payloads(client, name) == ["one"]


async def test_producers_of_a_new_topic_that_come_at_once_find_one_place(
    client: Client, ledgers: Instances, topic: str
) -> None:
    await asyncio.gather(*(publish(client, topic, "x", name=f"p{i}") for i in range(10)))
    assert len(await ledgers.holding(topic)) == 1
    assert await payloads(client, topic) == ["x"] * 10


async def test_every_instance_lists_all_topics_in_order(
    client: Client, ledgers: Instances, topic: str
) -> None:
    names = [f"{topic}-{i}" for i in range(7)]
    for name in names:
        await publish(client, name, "one")
    for instance in ledgers.names:
        found: list[str] = []
        request = ledger_pb2.ListTopicsRequest(prefix=topic, page_size=3)
        while True:
            page = await ledgers.at(instance).ListTopics(request)
            assert len(page.topics) <= 3
            found += [each.name for each in page.topics]
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        assert found == names


async def test_every_instance_lists_all_cursors_in_order(cursors: Instances, topic: str) -> None:
    wanted = [(f"{topic}-{i}", name) for i in range(4) for name in ("a", "b")]
    for name in wanted:
        await make_cursor(cursors, *name)
    for instance in cursors.names:
        found: list[tuple[str, str]] = []
        request = cursor_pb2.ListCursorsRequest(page_size=3)
        while True:
            page = await cursors.at(instance).ListCursors(request)
            found += [(each.topic, each.name) for each in page.cursors]
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        assert found == sorted(found)
        assert [each for each in found if each in wanted] == wanted


async def test_a_list_with_a_wrong_page_is_refused(ledgers: Instances) -> None:
    for instance in ledgers.names:
        with refused(INVALID, "INVALID_PAGE"):
            await ledgers.at(instance).ListTopics(ledger_pb2.ListTopicsRequest(page_size=-1))


LEDGER_METHODS = sorted(ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"].methods_by_name)
CURSOR_METHODS = sorted(cursor_pb2.DESCRIPTOR.services_by_name["CursorService"].methods_by_name)


async def ask(stub: Any, module: Any, method: str, topic: str) -> None:
    """Make a call that names nothing but its topic, and take what comes."""
    request = getattr(module, f"{method}Request")
    if method == "Publish":
        call = stub.Publish()
        await call.write(request(open=ledger_pb2.Open(topic=topic, producer_name="p")))
        await call.read()
    elif method.startswith("Read") and module is ledger_pb2:
        async for _ in getattr(stub, method)(request(topic=topic)):
            pass
    else:
        await getattr(stub, method)(request(topic=topic))


@pytest.mark.parametrize("method", [each for each in LEDGER_METHODS if each != "ListTopics"])
async def test_every_method_of_the_ledger_names_the_owner(
    client: Client, services: Services, ledgers: Instances, topic: str, method: str
) -> None:
    await publish(client, topic, "one")
    here, other = await ledgers.where(topic), await ledgers.elsewhere(topic)
    with refused(IN_USE, "NOT_OWNER") as details:
        await ask(ledgers.at(other), ledger_pb2, method, topic)
    assert details["owner"] == ledgers.address(here)
    assert await ledgers.holding(topic) == [here]
    assert await payloads(client, topic) == ["one"]


@pytest.mark.parametrize("method", CURSOR_METHODS)
async def test_every_method_of_the_cursor_service_names_the_owner(
    cursors: Instances, topic: str, method: str
) -> None:
    before = await make_cursor(cursors, topic)
    here, other = await cursors.where(topic), await cursors.elsewhere(topic)
    with refused(IN_USE, "NOT_OWNER") as details:
        await ask(cursors.at(other), cursor_pb2, method, topic)
    assert details["owner"] == cursors.address(here)
    assert await get_cursor(cursors, topic) == before


async def test_what_is_in_no_place_is_not_found_anywhere(
    ledgers: Instances, cursors: Instances, topic: str
) -> None:
    for name in ledgers.names:
        with refused(NOT_FOUND, "TOPIC_NOT_FOUND"):
            await ledgers.at(name).GetTopic(ledger_pb2.GetTopicRequest(topic=topic))
    for name in cursors.names:
        with refused(NOT_FOUND, "CURSOR_NOT_FOUND"):
            await cursors.at(name).GetCursor(cursor_pb2.GetCursorRequest(topic=topic, name="c"))
        listed = await cursors.at(name).ListCursors(cursor_pb2.ListCursorsRequest(topic=topic))
        assert not listed.cursors
    with refused(NOT_FOUND, "TOPIC_NOT_PLACED"):
        await ledgers.move(topic, "ledger")


async def test_a_topic_that_is_made_again_comes_where_its_numbers_are(
    client: Client, ledgers: Instances, topic: str
) -> None:
    await publish(client, topic, "one")
    here = await ledgers.where(topic)
    await ledgers.anywhere.DeleteTopic(ledger_pb2.DeleteTopicRequest(topic=topic))
    assert await publish(client, topic, "two") == ["2:0:-1"]
    assert await ledgers.holding(topic) == [here]


async def test_jobs_find_topics_that_are_spread(
    client: Client, services: Services, ledgers: Instances, topic: str
) -> None:
    names = [f"{topic}-{i}" for i in range(4)]
    for name in names:
        await publish(client, name, "one", "two")
    moved_to = await ledgers.elsewhere(names[0])

    def read() -> list[int]:
        with connected(services.stack.address("ledger")) as stub:
            found = []
            for name in names:
                wanted = Range(name, None, Position(9, 9), 2)
                blocks = [each for some in read_blocks(stub, wanted, timeout_s=10) for each in some]
                last = asked(stub.LastMessageId, ledger_pb2.LastMessageIdRequest(topic=name), 10)
                found.append(sum(each.count for each in blocks) + last.last.entry_id)
            return found

    assert await asyncio.to_thread(read) == [3] * 4
    await ledgers.move(names[0], moved_to)
    assert await asyncio.to_thread(read) == [3] * 4


# ---- moves


async def test_a_topic_moves_with_all_that_is_known_of_it(
    client: Client, services: Services, ledgers: Instances, topic: str
) -> None:
    ids = await publish(client, topic, "one", "two", "three")
    await publish(client, topic, "four", name="q")
    before = ledger_pb2.TrimTopicRequest(topic=topic)
    before.before.ledger_id, before.before.entry_id = 1, 3
    await ledgers.anywhere.TrimTopic(before)  # all of p is trimmed
    old = (await ledgers.anywhere.GetTopic(ledger_pb2.GetTopicRequest(topic=topic))).topic
    source, target = await ledgers.where(topic), await ledgers.elsewhere(topic)

    assert await ledgers.move(topic, target)

    assert await ledgers.holding(topic) == [target]
    new = (await ledgers.anywhere.GetTopic(ledger_pb2.GetTopicRequest(topic=topic))).topic
    assert new.ledger_id > old.ledger_id
    for each in (old, new):
        each.ClearField("ledger_id")
        each.ClearField("connected_producers")
        each.ClearField("entries_to_replay")
    assert new == old
    assert await payloads(client, topic) == ["four"]
    trimmed = ledger_pb2.ListTrimmedProducersRequest(topic=topic)
    listed = (await ledgers.at(target).ListTrimmedProducers(trimmed)).producers
    assert [(each.producer_name, each.highest_sequence_id) for each in listed] == [("p", 2)]
    async with client.producer(topic, name="p") as producer:
        assert producer.last_sequence_id == 2
        receipt = await producer.send(b"five")
        assert receipt.sequence_id == 3
        await ledgers.move(topic, source)  # its own name is still its own
        assert (await producer.send(b"six")).sequence_id == 4
        await ledgers.move(topic, target)
    assert await payloads(client, topic) == ["four", "five", "six"]
    assert ids[0] == "1:0:-1"
    with refused(IN_USE, "NOT_OWNER") as details:
        await ledgers.at(source).GetTopic(ledger_pb2.GetTopicRequest(topic=topic))
    assert details["owner"] == ledgers.address(target)


async def test_a_topic_moves_there_and_back_again(
    client: Client, ledgers: Instances, topic: str
) -> None:
    wanted = []
    await publish(client, topic, "start")
    first, second = await ledgers.where(topic), await ledgers.elsewhere(topic)
    async with client.producer(topic, name="q") as producer:
        for i in range(6):
            assert await ledgers.move(topic, second if i % 2 == 0 else first)
            wanted.append(f"{i}")
            await producer.send(wanted[-1].encode())
    assert await payloads(client, topic) == ["start", *wanted]
    assert await ledgers.holding(topic) == [first]


async def test_a_large_topic_moves_in_many_pieces(
    client: Client, ledgers: Instances, topic: str
) -> None:
    body = "x" * 1_500_000
    await publish(client, topic, *(f"{i} {body}" for i in range(5)))
    await ledgers.move(topic, await ledgers.elsewhere(topic))
    assert [each[:2] for each in await payloads(client, topic)] == ["0 ", "1 ", "2 ", "3 ", "4 "]


async def test_a_topic_that_was_deleted_moves_with_its_numbers(
    client: Client, ledgers: Instances, topic: str
) -> None:
    await publish(client, topic, "one")
    await ledgers.anywhere.DeleteTopic(ledger_pb2.DeleteTopicRequest(topic=topic))
    target = await ledgers.elsewhere(topic)
    assert await ledgers.move(topic, target)
    assert await publish(client, topic, "two") == ["2:0:-1"]
    assert await ledgers.holding(topic) == [target]


async def test_a_move_to_where_a_topic_is_changes_nothing(
    client: Client, ledgers: Instances, topic: str
) -> None:
    await publish(client, topic, "one")
    here = await ledgers.where(topic)
    assert not await ledgers.move(topic, here)
    assert await publish(client, topic, "two") == ["1:1:-1"]


async def test_a_move_to_nobody_is_refused(client: Client, ledgers: Instances, topic: str) -> None:
    await publish(client, topic, "one")
    here = await ledgers.where(topic)
    with refused(INVALID, "INVALID_INSTANCE"):
        request = pb.MoveTopicRequest(topic=topic, to="127.0.0.1:1")
        await ledgers.placement_at(here).MoveTopic(request)
    other = await ledgers.elsewhere(topic)
    with refused(IN_USE, "NOT_OWNER"):
        request = pb.MoveTopicRequest(topic=topic, to=ledgers.address(other))
        await ledgers.placement_at(other).MoveTopic(request)


async def test_producers_and_readers_that_are_connected_move_along(
    client: Client, ledgers: Instances, topic: str
) -> None:
    await publish(client, topic, "start")
    target, source = await ledgers.elsewhere(topic), await ledgers.where(topic)
    sent = ["start", *(str(i) for i in range(2_000))]
    seen: list[str] = []

    async def read() -> None:
        async with client.reader(topic) as reader:
            async for message in reader:
                seen.append(message.payload.decode())  # noqa: PERF401 - others look meanwhile

    async def move() -> None:
        for to in (target, source, target):
            await eventually(lambda: len(seen) > 50)
            await ledgers.move(topic, to)

    reading = asyncio.create_task(read())
    async with client.producer(topic, name="q") as producer, asyncio.TaskGroup() as tasks:
        tasks.create_task(move())
        for each in sent[1:]:
            tasks.create_task(producer.send(each.encode()))
            await asyncio.sleep(0)
    await eventually(lambda: len(seen) >= len(sent))
    reading.cancel()
    assert seen == sent
    assert await payloads(client, topic) == sent


async def test_cursors_move_with_all_that_is_known_of_them(cursors: Instances, topic: str) -> None:
    def at(ledger_id: int, entry_id: int) -> entry_pb2.Position:
        return entry_pb2.Position(ledger_id=ledger_id, entry_id=entry_id)

    stub, named = cursors.anywhere, {"topic": topic, "name": "c"}
    await make_cursor(cursors, topic)
    await make_cursor(cursors, topic, "other")
    await make_cursor(cursors, topic, "gone")
    gone = {"topic": topic, "name": "gone"}
    leased = cursor_pb2.AcquireLeaseRequest(**gone, owner="me", duration_ms=60_000)
    for _ in range(7):
        spent = (await stub.AcquireLease(leased)).lease.epoch
        await stub.ReleaseLease(cursor_pb2.ReleaseLeaseRequest(**gone, epoch=spent))
    await stub.DeleteCursor(cursor_pb2.DeleteCursorRequest(**gone))
    lease = cursor_pb2.AcquireLeaseRequest(**named, owner="me", duration_ms=60_000)
    epoch = (await stub.AcquireLease(lease)).lease.epoch
    properties = {"large": "x" * 100_000, "small": "y"}
    marked = cursor_pb2.MarkDeleteRequest(**named, position=at(1, 4), properties=properties)
    await stub.MarkDelete(marked)
    await stub.UpdateCursorProperties(
        cursor_pb2.UpdateCursorPropertiesRequest(**named, put={"own": "z"})
    )
    await stub.Acknowledge(
        cursor_pb2.AcknowledgeRequest(
            **named,
            ranges=[cursor_pb2.PositionRange(first=at(1, 7), last_entry_id=200_000)],
            batches=[
                cursor_pb2.BatchAcknowledgement(position=at(2, 3), batch_size=4, indexes=[1, 2])
            ],
            successions=[cursor_pb2.Succession(last=at(1, 300_000), next=at(2, 0))],
        )
    )
    attempts = cursor_pb2.RecordAttemptsRequest(**named, positions=[at(1, 5)], attempts=[3])
    await stub.RecordAttempts(attempts)

    async def all_of_it() -> list[Any]:
        return [
            await get_cursor(cursors, topic),
            await get_cursor(cursors, topic, "other"),
            await stub.ReadAcknowledged(cursor_pb2.ReadAcknowledgedRequest(**named)),
            await stub.ListAttempts(cursor_pb2.ListAttemptsRequest(**named)),
            await stub.ListCursors(cursor_pb2.ListCursorsRequest(topic=topic)),
        ]

    before = await all_of_it()
    target = await cursors.elsewhere(topic)
    assert await cursors.move(topic, target)
    assert await cursors.holding(topic) == [target]
    assert await all_of_it() == before
    # What was said of the log is known there, too, and the lease fences.
    ends = cursor_pb2.AcknowledgeRequest(
        **named,
        ranges=[
            cursor_pb2.PositionRange(first=at(1, 5), last_entry_id=6),
            cursor_pb2.PositionRange(first=at(1, 200_001), last_entry_id=300_000),
            cursor_pb2.PositionRange(first=at(2, 0), last_entry_id=2),
        ],
        epoch=epoch,
    )
    assert (await stub.Acknowledge(ends)).mark_delete == at(2, 2)
    ends.epoch = spent + 9
    with refused(StatusCode.ABORTED, "FENCED"):
        await stub.Acknowledge(ends)
    # Nor does a cursor that was deleted before have its epochs again.
    await make_cursor(cursors, topic, "gone")
    assert (await stub.AcquireLease(leased)).lease.epoch > spent


async def test_a_subscription_goes_on_while_its_log_and_its_cursor_move(
    client: Client, ledgers: Instances, cursors: Instances, topic: str
) -> None:
    await publish(client, topic, *(f"{i}" for i in range(50)))
    received: list[str] = []
    async with client.consumer(topic, "s") as consumer:

        async def consume(until: int) -> None:
            while len(received) < until:
                message = await consumer.receive()
                received.append(message.payload.decode())
                await consumer.ack(message)

        async with asyncio.timeout(30):
            await consume(10)
            await cursors.move(topic, await cursors.elsewhere(topic))
            await consume(20)
            await ledgers.move(topic, await ledgers.elsewhere(topic))
            await publish(client, topic, *(f"{i}" for i in range(50, 100)))
            await consume(100)
    assert received == [f"{i}" for i in range(100)]


async def test_snapshots_of_deduplication_follow_a_topic(
    client: Client, services: Services, cursors: Instances, topic: str
) -> None:
    await publish(client, topic, "one", "two")
    await services.settled(topic)
    await services.dedup.TakeSnapshot(dedup_pb2.TakeSnapshotRequest(topic=topic))
    before = await get_cursor(cursors, topic, "seqgate.dedup")
    await cursors.move(topic, await cursors.elsewhere(topic))
    assert await get_cursor(cursors, topic, "seqgate.dedup") == before
    await publish(client, topic, "three")
    await services.settled(topic)
    await services.dedup.TakeSnapshot(dedup_pb2.TakeSnapshotRequest(topic=topic))
    after = await get_cursor(cursors, topic, "seqgate.dedup")
    assert after.mark_delete.entry_id == before.mark_delete.entry_id + 1


# ---- what instances ask of one another


def receiving(topic: str, **begin: Any) -> list[pb.ReceiveTopicRequest]:
    """What sends a topic with one row."""
    row = msgpack.packb(["topic", 1, 7, 0, None, None, None, None, 0, 0, 0])
    digest = blake2b(row, digest_size=16).digest()
    first = {"topic": topic, "move": "m", "version": 1, "layout": LAYOUT, **begin}
    return [
        pb.ReceiveTopicRequest(begin=pb.BeginTopic(**first)),
        pb.ReceiveTopicRequest(rows=row),
        pb.ReceiveTopicRequest(end=pb.EndTopic(row_count=1, digest=digest)),
    ]


async def test_a_topic_that_is_sent_is_not_seen_before_its_record_says_so(
    client: Client, ledgers: Instances, topic: str
) -> None:
    await publish(client, topic, "one")
    here, other = await ledgers.where(topic), await ledgers.elsewhere(topic)
    await ledgers.placement_at(other).ReceiveTopic(iter(receiving(topic)))
    assert await ledgers.holding(topic) == [here]
    with refused(IN_USE, "NOT_OWNER"):
        await ledgers.at(other).GetTopic(ledger_pb2.GetTopicRequest(topic=topic))
    assert await ledgers.move(topic, other)  # under a name of its own
    assert await payloads(client, topic) == ["one"]
    assert await ledgers.holding(topic) == [other]


WRONG = {
    "another layout": lambda topic: receiving(topic, layout=LAYOUT + 1),
    "an old record": lambda topic: receiving(topic, version=0),
    "a record that is not made yet": lambda topic: receiving(topic, version=2),
    "no name": lambda topic: receiving(topic, move=""),
    "a long name": lambda topic: receiving(topic, move="m" * 65),
    "no end": lambda topic: receiving(topic, move="x1")[:-1],
    "no rows": lambda topic: [receiving(topic, move="x2")[i] for i in (0, 2)],
    "rows twice": lambda topic: [receiving(topic, move="x3")[i] for i in (0, 1, 1, 2)],
    "no array": lambda topic: [
        receiving(topic, move="x4")[0],
        pb.ReceiveTopicRequest(rows=msgpack.packb({"a": 1})),
    ],
    "what is no row": lambda topic: [
        receiving(topic, move="x5")[0],
        pb.ReceiveTopicRequest(rows=msgpack.packb(["cursor", 1])),
    ],
    "a row without a topic": lambda topic: [
        receiving(topic, move="x6")[0],
        pb.ReceiveTopicRequest(rows=msgpack.packb(["trimmed", "p", 1])),
    ],
    "bytes": lambda topic: [
        receiving(topic, move="x7")[0],
        pb.ReceiveTopicRequest(rows=b"\xc1\xff"),
    ],
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_topic_that_is_not_sent_whole_is_refused(
    client: Client, ledgers: Instances, topic: str, what: str
) -> None:
    await publish(client, topic, "one")
    here, other = await ledgers.where(topic), await ledgers.elsewhere(topic)
    with refused(INVALID, "INVALID_MOVE"):
        await ledgers.placement_at(other).ReceiveTopic(iter(WRONG[what](topic)))
    assert await ledgers.holding(topic) == [here]
    assert await ledgers.move(topic, other)
    assert await payloads(client, topic) == ["one"]


async def test_a_topic_that_is_here_is_not_taken_in(
    client: Client, ledgers: Instances, topic: str
) -> None:
    await publish(client, topic, "one")
    here = await ledgers.where(topic)
    with refused(IN_USE, "ALREADY_HERE"):
        await ledgers.placement_at(here).ReceiveTopic(iter(receiving(topic)))
    assert await payloads(client, topic) == ["one"]


async def test_records_are_kept_by_the_keeper_alone(
    client: Client, ledgers: Instances, topic: str
) -> None:
    await publish(client, topic, "one")
    with refused(IN_USE, "NOT_KEEPER"):
        await ledgers.placement_at("ledger-1").Record(pb.RecordRequest(topic=topic))
    keeper = ledgers.placement_at("ledger")
    record = (await keeper.Record(pb.RecordRequest(topic=topic))).placement
    assert (record.topic, record.version) == (topic, 1)
    with refused(INVALID, "INVALID_INSTANCE"):
        change = pb.Change(version=1, owner="nobody:1")
        await keeper.Record(pb.RecordRequest(topic=topic, change=change))
    with refused(INVALID, "INVALID_MOVE"):
        await keeper.Record(pb.RecordRequest(topic=topic, change=pb.Change(version=-1)))
    late = pb.Change(version=7, owner=record.owner)
    answer = await keeper.Record(pb.RecordRequest(topic=topic, change=late))
    assert (answer.changed, answer.placement) == (False, record)


async def test_a_topic_without_a_name_has_no_place(ledgers: Instances) -> None:
    for name in ledgers.names:
        stub = ledgers.placement_at(name)
        with refused(INVALID, "INVALID_TOPIC_NAME"):
            await stub.Locate(pb.LocateRequest(topic="x"))
        with refused(INVALID, "INVALID_PAGE"):
            await stub.ListPlacements(pb.ListPlacementsRequest(page_size=10_001))


# ---- who is away


async def come_back(ledgers: Instances, name: str) -> None:
    """Start an instance again, and wait until all know it."""
    await ledgers.stack.run(name)

    async def is_known() -> bool:
        try:
            for each in ledgers.names:
                await ledgers.at(each).ListTopics(ledger_pb2.ListTopicsRequest(page_size=1))
                await ledgers.placement_at(each).ListPlacements(pb.ListPlacementsRequest())
        except aio.AioRpcError:
            return False
        return True

    await eventually(is_known, f"{name} is known again")


async def test_while_the_keeper_is_away_what_is_held_goes_on(
    client: Client, services: Services, ledgers: Instances, topic: str
) -> None:
    await publish(client, topic, "one")
    await ledgers.move(topic, "ledger-1")
    stack = services.stack
    await stack.kill("ledger")
    try:
        async with connect(stack.address("ledger-1")) as other:
            await publish(other, topic, "two")
            assert await payloads(other, topic) == ["one", "two"]
        with refused(UNAVAILABLE, "PLACEMENT_UNAVAILABLE"):
            request = ledger_pb2.CreateTopicRequest(topic=f"{topic}-new")
            await ledgers.at("ledger-1").CreateTopic(request)
        with refused(UNAVAILABLE, "PLACEMENT_UNAVAILABLE"):
            await ledgers.at("ledger-1").ListTopics(ledger_pb2.ListTopicsRequest())
    finally:
        await come_back(ledgers, "ledger")
    assert await payloads(client, topic) == ["one", "two"]
    await publish(client, f"{topic}-new", "one")


async def test_a_move_to_an_instance_that_is_away_leaves_the_topic_where_it_was(
    client: Client, services: Services, ledgers: Instances, topic: str
) -> None:
    await publish(client, topic, "one")
    await ledgers.move(topic, "ledger")
    stack = services.stack
    await stack.kill("ledger-1")
    try:
        with refused(UNAVAILABLE, "MOVE_FAILED") as details:
            request = pb.MoveTopicRequest(topic=topic, to=ledgers.address("ledger-1"))
            await ledgers.placement_at("ledger").MoveTopic(request)
        assert details["because"] == "PLACEMENT_UNAVAILABLE"
        async with connect(stack.address("ledger")) as first:
            await publish(first, topic, "two")
    finally:
        await come_back(ledgers, "ledger-1")
    assert await ledgers.move(topic, "ledger-1")
    assert await payloads(client, topic) == ["one", "two"]


async def test_a_client_that_knows_an_old_place_finds_the_new_one(
    services: Services, ledgers: Instances, topic: str
) -> None:
    async with connect(services.stack.address("ledger")) as client:
        await publish(client, topic, "one")
        for _ in range(3):
            await ledgers.move(topic, await ledgers.elsewhere(topic))
            assert await payloads(client, topic) == ["one"]
        await publish(client, topic, "two")
        assert await payloads(client, topic) == ["one", "two"]


async def test_one_instance_with_topics_becomes_two(tmp_path: Path) -> None:
    topics = [f"public/default/grown-{i}" for i in range(5)]
    async with running(tmp_path / "stack") as services:
        async with connect(services.stack.address("ledger")) as client:
            for topic in topics:
                await publish(client, topic, "one")
        request = ledger_pb2.DeleteTopicRequest(topic=topics[4])
        await services.ledger.DeleteTopic(request)
        request = cursor_pb2.CreateCursorRequest(topic=topics[0], name="c")
        await services.cursor.CreateCursor(request)
    async with (
        running(tmp_path / "stack", instances=2) as services,
        instances_of(services.stack, "ledger") as ledgers,
        instances_of(services.stack, "cursor") as cursors,
        connect(services.stack.address("ledger-1")) as client,
    ):
        for topic in topics[:4]:
            assert await ledgers.where(topic) == "ledger"
            await publish(client, topic, "two")
            assert await payloads(client, topic) == ["one", "two"]
        assert await ledgers.where(topics[4]) == "ledger"
        assert await publish(client, topics[4], "again") == ["2:0:-1"]
        assert (await get_cursor(cursors, topics[0])).name == "c"
        await publish(client, "public/default/grown-new", "one")
        assert await ledgers.where("public/default/grown-new") == "ledger-1"
