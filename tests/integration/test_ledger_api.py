"""Topics, publishing and reading, by the ledger's API alone."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode, aio

from seqgate.api.common.v1.common_pb2 import Position, Start
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.times import TIME_MAX_MS, milliseconds, timestamp
from tests.integration.conftest import ON_SQLITE
from tests.integration.refusals import check, refused, status_of_call
from tests.integration.services import Services, running, second_ledger
from tests.support.publisher import STATUS_LOST, Publisher, batch, entry, publishing, single
from tests.support.raw_consumer import EARLIEST, LATEST
from tests.support.waiting import WITHIN_S, eventually

STORED, DUPLICATE = pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE
STALE, FAILED, SKIPPED = (
    pb.RECEIPT_STATUS_STALE,
    pb.RECEIPT_STATUS_FAILED,
    pb.RECEIPT_STATUS_SKIPPED,
)
PARTIAL, REFUSED = pb.RECEIPT_STATUS_PARTIAL, pb.RECEIPT_STATUS_REFUSED

STREAMS_MAX = 4
WINDOW_MESSAGES = 100


@pytest.fixture(scope="module")
async def strict(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A stack that creates topics only where allowed, and has few streams."""
    async with running(
        tmp_path_factory.mktemp("strict"),
        SEQGATE_LEDGER_AUTO_CREATE='["open/*", "half/a?"]',
        SEQGATE_LEDGER_PUBLISH_STREAMS_MAX=str(STREAMS_MAX),
        SEQGATE_LEDGER_WINDOW_MESSAGES=str(WINDOW_MESSAGES),
        SEQGATE_LEDGER_KEEP_INTERVAL_S="0.05",
        SEQGATE_LEDGER_IDLE_TIMEOUT_S="0.05",
        SEQGATE_LEDGER_FOLLOW_POLL_S="0.02",
    ) as services:
        yield services


def position(ledger_id: int, entry_id: int) -> Position:
    return Position(ledger_id=ledger_id, entry_id=entry_id)


async def create(services: Services, topic: str) -> pb.CreateTopicResponse:
    answer: pb.CreateTopicResponse = await services.ledger.CreateTopic(
        pb.CreateTopicRequest(topic=topic)
    )
    return answer


async def get(services: Services, topic: str) -> pb.Topic:
    answer: pb.GetTopicResponse = await services.ledger.GetTopic(pb.GetTopicRequest(topic=topic))
    return answer.topic


async def last(services: Services, topic: str) -> Position | None:
    answer = await services.ledger.GetLastMessageId(pb.GetLastMessageIdRequest(topic=topic))
    return answer.last if answer.HasField("last") else None


async def find(
    services: Services, topic: str, sequence_id: int, producer: str = "p"
) -> pb.MessageFate:
    answer: pb.FindMessageResponse = await services.ledger.FindMessage(
        pb.FindMessageRequest(topic=topic, producer_name=producer, sequence_id=sequence_id)
    )
    return answer.fate


async def trim(services: Services, topic: str, before: Position) -> pb.TrimTopicResponse:
    answer: pb.TrimTopicResponse = await services.ledger.TrimTopic(
        pb.TrimTopicRequest(topic=topic, before=before)
    )
    return answer


async def delete(services: Services, topic: str, *, force: bool = False) -> None:
    await services.ledger.DeleteTopic(pb.DeleteTopicRequest(topic=topic, force=force))


async def publish(stub: Any, topic: str, *ids: int, producer: str = "p") -> list[int]:
    """Publish single messages together; the statuses of their receipts."""
    async with publishing(stub, topic, producer) as publisher:
        await publisher.send(*(single(request_id, each) for request_id, each in enumerate(ids)))
        return [(await publisher.receipt(request_id)).status for request_id in range(len(ids))]


# ---- topics


async def test_a_topic_is_created_once(services: Services, topic: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    first = await create(services, topic)
    again = await create(services, topic)
    assert (first.created, again.created) == (True, False)
    found = await get(services, topic)
    found.ledger_id = 0  # whoever shows a topic on PostgreSQL has taken it
    assert first.topic == again.topic == found
    made = first.topic
    assert (made.name, made.ledger_id, made.entries, made.messages, made.bytes) == (
        topic,
        0,
        0,
        0,
        0,
    )
    assert not made.HasField("first")
    assert not made.HasField("last")
    assert before_ms <= made.created.ToMilliseconds() <= time.time_ns() // 1_000_000


async def test_one_of_many_concurrent_creations_succeeds(services: Services, topic: str) -> None:
    answers = await asyncio.gather(*(create(services, topic) for _ in range(20)))
    assert sum(each.created for each in answers) == 1


async def test_a_topic_counts_its_entries(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.send(
            single(1, 1, b"12345"), batch(2, [2, 3, 7], b"batch"), single(3, 8, b"")
        )
        for request_id in (1, 2, 3):
            assert (await publisher.receipt(request_id)).status == STORED
        async with publishing(services.ledger, topic, "q"):
            assert (await get(services, topic)).connected_producers == 2
        described = await get(services, topic)
    entries = await services.read(topic)
    assert (described.entries, described.messages, described.ledger_id) == (3, 5, 1)
    assert described.bytes == sum(len(each.payload) + each.metadata.ByteSize() for each in entries)
    assert (described.first, described.last) == (position(1, 0), position(1, 2))
    assert described.connected_producers == 1
    assert (await get(services, topic)).connected_producers == 0


async def test_topics_are_listed_by_name(services: Services, topic: str) -> None:
    _, _, name = topic.split("/")
    names = [
        f"listed/{part}/{name}{end}" for part in ("a", "b") for end in ("", "-1", ".2", "A", "_")
    ]
    for each in reversed(names):
        await create(services, each)
    expected = sorted(names)
    assert [each.name for each in await services.topics(prefix="listed/")] == expected
    assert [each.name for each in await services.topics(prefix="listed/b/")] == expected[5:]
    assert await services.topics(prefix="listed/c") == []
    everything = [each.name for each in await services.topics()]
    assert everything == sorted(everything)
    for page_size in (1, 3, 5, 10, 11):
        found: list[str] = []
        token = ""
        for _ in range(12):
            page = await services.ledger.ListTopics(
                pb.ListTopicsRequest(prefix="listed/", page_size=page_size, page_token=token)
            )
            assert len(page.topics) <= page_size
            found.extend(each.name for each in page.topics)
            token = page.next_page_token
            if not token:
                break
        assert not token
        assert found == expected


async def test_a_page_continues_after_a_deleted_topic(services: Services, topic: str) -> None:
    for each in range(3):
        await create(services, f"{topic}-{each}")
    page = await services.ledger.ListTopics(pb.ListTopicsRequest(prefix=topic, page_size=2))
    await delete(services, f"{topic}-1")
    rest = await services.ledger.ListTopics(
        pb.ListTopicsRequest(prefix=topic, page_token=page.next_page_token)
    )
    assert [each.name for each in rest.topics] == [f"{topic}-2"]


async def test_topics_are_created_only_where_allowed(strict: Services) -> None:
    for name in ("open/a/t", "open/b/t", "half/ab/t"):
        assert await publish(strict.ledger, name, 1) == [STORED]
    for name in ("shut/a/t", "half/b/t", "half/abc/t", "openly/a/t"):
        before = await strict.topics()
        with refused(StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"):
            await publish(strict.ledger, name, 1)
        assert await strict.topics() == before
        await create(strict, name)
        assert await publish(strict.ledger, name, 1) == [STORED]


async def test_the_last_message_id_is_the_end_of_the_log(services: Services, topic: str) -> None:
    await create(services, topic)
    assert await last(services, topic) is None
    await publish(services.ledger, topic, 5, 6)
    assert await last(services, topic) == position(1, 1)
    await publish(services.ledger, topic, 6, 5)  # nothing is stored
    assert await last(services, topic) == position(1, 1)
    await trim(services, topic, position(9, 0))
    assert await last(services, topic) == position(1, 1), "though it is trimmed"


# ---- finding and trimming


async def test_a_message_is_found_at_its_position(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.store(single(1, 1))
        await publisher.store(batch(2, [2, 4, 9]))
        await publisher.store(batch(3, [10]))
        await publisher.store(
            pb.Publication(
                request_id=4, entries=[entry(11, producer_name="p"), entry(12, producer_name="p")]
            )
        )
        await publisher.store(single(5, 11, marker_type=1))
    stored = pb.FATE_STORED
    for sequence_id, where in (
        (1, pb.MessageFate(fate=stored, position=position(1, 0))),
        (2, pb.MessageFate(fate=stored, position=position(1, 1), batch_index=0)),
        (4, pb.MessageFate(fate=stored, position=position(1, 1), batch_index=1)),
        (9, pb.MessageFate(fate=stored, position=position(1, 1), batch_index=2)),
        (10, pb.MessageFate(fate=stored, position=position(1, 2), batch_index=0)),
        (11, pb.MessageFate(fate=stored, position=position(1, 3))),
        (12, pb.MessageFate(fate=stored, position=position(1, 4))),
    ):
        assert await find(services, topic, sequence_id) == where
    for sequence_id in (0, 3, 8, 13, 2**63 - 1):
        assert await find(services, topic, sequence_id) == pb.MessageFate(fate=pb.FATE_STALE)
    assert await find(services, topic, 1, "q") == pb.MessageFate(fate=pb.FATE_STALE)


async def test_a_trim_removes_the_entries_before_its_position(
    services: Services, topic: str
) -> None:
    assert await publish(services.ledger, topic, *range(10)) == [STORED] * 10
    for before, removed, first in (
        (position(0, 9), 0, position(1, 0)),
        (position(1, 0), 0, position(1, 0)),
        (position(1, 4), 4, position(1, 4)),  # in the middle of a group
        (position(1, 4), 0, position(1, 4)),
        (position(1, 2), 0, position(1, 4)),
        (position(1, 9), 5, position(1, 9)),
    ):
        answer = await trim(services, topic, before)
        assert (answer.removed_entries, answer.first) == (removed, first)
        described = await get(services, topic)
        assert described.first == first
        assert described.entries == described.messages == 10 - first.entry_id
    assert await services.ids(topic) == [9]
    assert (await get(services, topic)).bytes == sum(
        len(each.payload) + each.metadata.ByteSize() for each in await services.read(topic)
    )


async def test_a_trim_of_all_entries_keeps_the_end_of_the_log(
    services: Services, topic: str
) -> None:
    await publish(services.ledger, topic, 0, 1, 2)
    answer = await trim(services, topic, position(1, 3))
    assert answer.removed_entries == 3
    assert not answer.HasField("first")
    described = await get(services, topic)
    assert (described.entries, described.messages, described.bytes) == (0, 0, 0)
    assert not described.HasField("first")
    assert await services.ids(topic) == []
    async with publishing(services.ledger, topic, "p") as publisher:
        assert publisher.opened.last_sequence_id == 2
        assert (await publisher.store(single(1, 3))).position == position(1, 3)
    assert (await get(services, topic)).first == position(1, 3)


async def test_the_fate_of_a_trimmed_message_is_trimmed(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        for each in (single(1, 1), batch(2, [3, 4]), single(3, 6)):
            assert (await publisher.store(each)).status == STORED
        await trim(services, topic, position(1, 2))
        trimmed, gone = pb.MessageFate(fate=pb.FATE_TRIMMED), pb.FATE_TRIMMED
        for sequence_id in (0, 1, 2, 3, 4):
            assert await find(services, topic, sequence_id) == trimmed
        assert (await find(services, topic, 5)).fate == pb.FATE_STALE
        assert (await find(services, topic, 6)).fate == pb.FATE_STORED
        for publication, fates in (
            (single(4, 1), [gone]),
            (batch(5, [3, 4]), [gone, gone]),
            (batch(6, [4, 5, 6]), [gone, pb.FATE_STALE, pb.FATE_STORED]),
        ):
            receipt = await publisher.store(publication)
            assert receipt.status == STALE
            assert [each.fate for each in receipt.fates] == fates
        assert (await publisher.store(single(7, 6))).status == DUPLICATE
    assert await services.ids(topic) == [6]


# ---- deleting


async def test_a_deleted_topic_is_gone(services: Services, topic: str) -> None:
    await publish(services.ledger, topic, 0, 1)
    await services.settled(topic)
    await delete(services, topic)
    for _ in range(2):
        with refused(StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"):
            await delete(services, topic)
    with refused(StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"):
        await get(services, topic)
    assert topic not in [each.name for each in await services.topics()]
    assert (await services.status(topic)).state == dedup_pb2.TOPIC_STATE_ABSENT


async def test_a_recreated_topic_is_another_topic(services: Services, topic: str) -> None:
    """Its ledger id is higher, and its deduplication state is empty."""
    before = 0
    for each in range(3):
        async with publishing(services.ledger, topic, "p") as publisher:
            opened = publisher.opened
            assert opened.ledger_id > before
            assert not opened.HasField("last_sequence_id")
            receipt = await publisher.store(single(1, 5, b"%d" % each))
            assert receipt.status == STORED
            assert receipt.position == position(opened.ledger_id, 0)
            assert (await publisher.store(single(2, 5))).status == DUPLICATE
        status = await services.settled(topic)
        assert (status.epoch, status.counts.confirmed_entries) == (opened.ledger_id, 1)
        assert [each.payload for each in await services.read(topic)] == [b"%d" % each]
        before = opened.ledger_id
        await delete(services, topic)
    assert (await create(services, topic)).topic.ledger_id == before


async def test_a_topic_is_not_deleted_while_producers_are_connected(
    services: Services, topic: str
) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        assert (await publisher.store(single(1, 1))).status == STORED
        with refused(StatusCode.FAILED_PRECONDITION, "TOPIC_IN_USE") as details:
            await delete(services, topic)
        assert details == {"topic": topic}
        assert (await publisher.store(single(2, 2))).status == STORED

        await delete(services, topic, force=True)
        error = await publisher.ended()
        assert error is not None
        details = check(status_of_call(error), StatusCode.NOT_FOUND, "TOPIC_DELETED")
        assert details == {"topic": topic}
    with refused(StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"):
        await get(services, topic)
    assert await publish(services.ledger, topic, 1) == [STORED]


async def test_a_following_reader_learns_of_a_deleted_topic(strict: Services) -> None:
    topic = "open/follow/t"
    await publish(strict.ledger, topic, 1)
    call = strict.ledger.Read(pb.ReadRequest(topic=topic, start=EARLIEST, follow=True))
    assert (await call.read()).HasField("started")
    assert len((await call.read()).entries.entries) == 1
    await delete(strict, topic)
    with refused(StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"):
        await call.read()


async def test_a_topic_deleted_without_dedup_is_recreated_empty(private: Any, topic: str) -> None:
    """State that dedup could not be asked to forget belongs to an older incarnation."""
    async with private() as services:
        assert await publish(services.ledger, topic, 1, 2) == [STORED, STORED]
        await services.settled(topic)
        await services.stack.kill("dedup")
        await delete(services, topic)
        await services.stack.run("dedup")
        assert (await services.status(topic)).counts.confirmed_entries == 2
        assert await publish(services.ledger, topic, 1, 2, 2) == [STORED, STORED, DUPLICATE]
        assert (await services.settled(topic)).counts.confirmed_entries == 2
        assert await services.ids(topic) == [1, 2]


# ---- reading


@pytest.mark.parametrize("follow", [False, True], ids=["", "follow"])
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(Start(at=position(1, 11)), id="after the end"),
        pytest.param(Start(at=position(2, 0)), id="a later ledger"),
        pytest.param(Start(at=position(2**63 - 1, 2**63 - 1)), id="the last of all places"),
        pytest.param(Start(after=position(1, 10)), id="after a missing entry"),
        pytest.param(Start(after=position(2, 0)), id="after a later ledger"),
        pytest.param(Start(time=timestamp(TIME_MAX_MS)), id="a time to come"),
    ],
)
async def test_a_read_from_beyond_the_end_is_refused(
    services: Services, same_ten: str, start: Start, follow: bool
) -> None:
    with refused(StatusCode.INVALID_ARGUMENT, "INVALID_RANGE") as details:
        async for _ in services.ledger.Read(
            pb.ReadRequest(topic=same_ten, start=start, follow=follow)
        ):
            pass
    assert details["last"] == "1:9"


@pytest.fixture
async def ten(services: Services, topic: str) -> str:
    return await make_ten(services, topic)


@pytest_asyncio.fixture(scope="module")
async def same_ten(services: Services) -> str:
    """One for all tests that only read it."""
    return await make_ten(services, "public/default/ten")


async def make_ten(services: Services, topic: str) -> str:
    """A topic with the ids 100 to 109 at the positions 1:0 to 1:9, the first two trimmed."""
    async with publishing(services.ledger, topic, "p") as publisher:
        for half in (range(100, 105), range(105, 110)):
            await publisher.send(*(single(each, each, b"x" * (each - 99)) for each in half))
            for each in half:
                assert (await publisher.receipt(each)).status == STORED
    await trim(services, topic, position(1, 2))
    return topic


EVERYTHING = list(range(102, 110))


@pytest.mark.parametrize(
    ("request_", "ids"),
    [
        pytest.param({"start": EARLIEST}, EVERYTHING, id="earliest"),
        pytest.param({"start": LATEST}, [], id="latest"),
        pytest.param({"start": Start(time=timestamp(0))}, EVERYTHING, id="a time"),
        pytest.param({"start": Start(at=position(1, 5))}, EVERYTHING[3:], id="at"),
        pytest.param({"start": Start(at=position(1, 2))}, EVERYTHING, id="at the first"),
        pytest.param({"start": Start(at=position(1, 0))}, EVERYTHING, id="at a trimmed entry"),
        pytest.param({"start": Start(at=position(0, 0))}, EVERYTHING, id="at a missing entry"),
        pytest.param({"start": Start(at=position(1, 9))}, [109], id="at the last"),
        pytest.param({"start": Start(at=position(1, 10))}, [], id="at the next"),
        pytest.param({"start": Start(after=position(1, 5))}, EVERYTHING[4:], id="after"),
        pytest.param(
            {"start": Start(after=position(0, 77))},
            EVERYTHING,
            id="after an earlier ledger",
        ),
        pytest.param({"start": Start(after=position(1, 9))}, [], id="after the last"),
        pytest.param({"through": position(1, 4)}, [102, 103, 104], id="through"),
        pytest.param({"through": position(1, 9)}, EVERYTHING, id="through the last"),
        pytest.param({"through": position(7, 0)}, EVERYTHING, id="through a future entry"),
        pytest.param({"through": position(1, 1)}, [], id="through a trimmed entry"),
        pytest.param({"max_entries": 3}, [102, 103, 104], id="a count"),
        pytest.param({"max_entries": 8}, EVERYTHING, id="a count of all"),
        pytest.param({"max_entries": 2**64 - 1}, EVERYTHING, id="the largest count"),
        pytest.param(
            {"start": Start(at=position(1, 4)), "through": position(1, 6)},
            [104, 105, 106],
            id="a range",
        ),
        pytest.param(
            {"start": Start(after=position(1, 4)), "through": position(1, 4)},
            [],
            id="an empty range",
        ),
        pytest.param(
            {"start": Start(at=position(1, 6)), "through": position(1, 3)},
            [],
            id="a range backwards",
        ),
        pytest.param(
            {
                "start": Start(at=position(1, 4)),
                "through": position(1, 8),
                "max_entries": 2,
            },
            [104, 105],
            id="a count of a range",
        ),
    ],
)
@pytest.mark.parametrize("metadata_only", [False, True], ids=["", "metadata only"])
async def test_a_read_ends_at_its_bound(
    services: Services,
    same_ten: str,
    request_: dict[str, Any],
    ids: list[int],
    metadata_only: bool,
) -> None:
    entries = await services.read(same_ten, metadata_only=metadata_only, **request_)
    assert [each.metadata.sequence_id for each in entries] == ids
    assert [each.position for each in entries] == [position(1, each - 100) for each in ids]
    assert [each.payload_bytes for each in entries] == [each - 99 for each in ids]
    payloads = [b"" if metadata_only else b"x" * (each - 99) for each in ids]
    assert [each.payload for each in entries] == payloads
    times = [milliseconds(each.append_time) for each in entries]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("request_", "ids"),
    [
        pytest.param(
            {"start": Start(at=position(1, 8)), "through": position(1, 11)},
            [108, 109, 110, 111],
            id="through",
        ),
        pytest.param({"start": LATEST, "max_entries": 2}, [110, 111], id="a count"),
        pytest.param({"through": position(1, 3)}, [102, 103], id="through the last entry"),
        pytest.param(
            {"start": Start(at=position(1, 9)), "max_entries": 1},
            [109],
            id="a count of all",
        ),
        pytest.param(
            {"start": Start(at=position(1, 5)), "through": position(1, 4)},
            [],
            id="a range backwards",
        ),
        pytest.param({"through": position(1, 0)}, [], id="through a trimmed entry"),
    ],
)
async def test_a_following_read_waits_for_its_bound(
    services: Services, ten: str, request_: dict[str, Any], ids: list[int]
) -> None:
    request = pb.ReadRequest(topic=ten, follow=True, **{"start": EARLIEST, **request_})
    call = services.ledger.Read(request)
    assert (await call.read()).HasField("started")
    reading = asyncio.create_task(_ids_of(call))
    for sequence_id in (110, 111):
        assert await publish(services.ledger, ten, sequence_id) == [STORED]
    async with asyncio.timeout(WITHIN_S):
        assert await reading == ids
    assert await call.code() is StatusCode.OK


async def _ids_of(call: Any) -> list[int]:
    found: list[int] = []
    while (response := await call.read()) is not aio.EOF:
        found.extend(each.metadata.sequence_id for each in response.entries.entries)
    return found


async def test_a_read_starts_with_the_bounds_of_the_log(services: Services, ten: str) -> None:
    call = services.ledger.Read(pb.ReadRequest(topic=ten, start=LATEST))
    assert (await call.read()).started == pb.Started(first=position(1, 2), last=position(1, 9))
    assert await call.read() is aio.EOF


async def test_an_empty_topic_is_read_to_its_end(services: Services, topic: str) -> None:
    await create(services, topic)
    for start in (EARLIEST, LATEST, Start(at=position(0, 0))):
        call = services.ledger.Read(pb.ReadRequest(topic=topic, start=start))
        assert (await call.read()).started == pb.Started()
        assert await call.read() is aio.EOF
    following = services.ledger.Read(
        pb.ReadRequest(
            topic=topic,
            start=EARLIEST,
            follow=True,
            max_entries=2,
        )
    )
    assert (await following.read()).HasField("started")
    assert await publish(services.ledger, topic, 1, 2) == [STORED, STORED]
    assert await _ids_of(following) == [1, 2]


async def test_many_entries_are_read_in_pages_and_in_order(services: Services, topic: str) -> None:
    count = 2_500
    assert await publish(services.ledger, topic, *range(count)) == [STORED] * count
    responses = [
        each async for each in services.ledger.Read(pb.ReadRequest(topic=topic, start=EARLIEST))
    ]
    assert len(responses) > 3
    entries = [each for response in responses for each in response.entries.entries]
    assert [each.metadata.sequence_id for each in entries] == list(range(count))
    assert [each.position.entry_id for each in entries] == list(range(count))


async def test_unknown_metadata_fields_are_kept(services: Services, topic: str) -> None:
    """Fields of newer clients, and fields of Pulsar that Seqgate does not use."""
    unknown = b"\x82\x01\x02ab" + b"\x80\x7d\x05"  # field 16, two bytes; field 2000, a number
    given = single(1, 0, deliver_at_time=5)
    together = [batch(2, [1, 2], partition_key="k"), single(3, 3)]
    for publication in (given, *together):
        for entry_ in publication.entries:
            entry_.metadata.producer_name = "p"
            entry_.metadata.MergeFromString(unknown)
    expected = [each.entries[0].metadata.SerializeToString() for each in (given, *together)]
    assert all(unknown in each for each in expected)
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.store(given)
        await publisher.send(*together)
        assert (await publisher.receipt(3)).status == STORED
    read = await services.read(topic)
    assert [each.metadata.SerializeToString() for each in read] == expected
    request = pb.ReadColumnsRequest(topic=topic, metadata=True)
    columns = [each async for each in services.ledger.ReadColumns(request)]
    blocks = [block for each in columns for block in each.blocks.blocks]
    assert [each for block in blocks for each in block.metadata] == expected


async def test_an_entry_larger_than_a_page_is_read(services: Services, topic: str) -> None:
    sizes = [1, 5 * 1024 * 1024, 1, 600_000, 600_000, 600_000, 0]
    async with publishing(services.ledger, topic, "p") as publisher:
        for each, size in enumerate(sizes):
            receipt = await publisher.store(single(each, each, bytes([each]) * size))
            assert receipt.status == STORED
    entries = await services.read(topic)
    assert [each.payload for each in entries] == [
        bytes([each]) * size for each, size in enumerate(sizes)
    ]


# ---- producers


async def test_a_name_in_use_is_refused_and_may_be_taken_over(
    services: Services, topic: str
) -> None:
    async with publishing(services.ledger, topic, "p") as old:
        assert (await old.store(single(1, 1))).status == STORED
        with refused(StatusCode.FAILED_PRECONDITION, "PRODUCER_BUSY"):
            await publish(services.ledger, topic, 2)
        with refused(StatusCode.FAILED_PRECONDITION, "PRODUCER_BUSY"):
            async with publishing(services.ledger, topic, "p", instance=b"other"):
                pass
        assert (await old.store(single(2, 2))).status == STORED
        async with publishing(services.ledger, topic, "p", takeover=True) as new:
            assert new.opened.last_sequence_id == 2
            error = await old.ended()
            assert error is not None
            check(status_of_call(error), StatusCode.ABORTED, "PRODUCER_TAKEN_OVER")
            assert old.taken_over.is_set()
            assert (await new.store(single(1, 3))).status == STORED
    assert await services.ids(topic) == [1, 2, 3]


async def test_the_same_instance_replaces_its_own_stream(services: Services, topic: str) -> None:
    """A producer that reconnects need not wait until the service has noticed that its old stream is
    dead."""
    async with publishing(services.ledger, topic, "p", instance=b"one") as old:
        assert (await old.store(single(1, 1))).status == STORED
        async with publishing(services.ledger, topic, "p", instance=b"one") as new:
            assert new.opened.last_sequence_id == 1
            error = await old.ended()
            assert error is not None
            check(status_of_call(error), StatusCode.ABORTED, "PRODUCER_TAKEN_OVER")


async def test_a_producer_without_a_name_gets_a_new_one(services: Services, topic: str) -> None:
    async with (
        publishing(services.ledger, topic) as first,
        publishing(services.ledger, topic) as second,
    ):
        names = {first.producer, second.producer}
        assert len(names) == 2
        assert all(names)
        for publisher in (first, second):
            assert not publisher.opened.HasField("last_sequence_id")
            assert (await publisher.store(single(1, 0))).status == STORED
    await services.settled(topic)
    assert (await services.producers(topic)).keys() == names


async def test_an_initial_id_counts_for_an_unknown_producer(services: Services, topic: str) -> None:
    """Absent differs from 0."""
    async with publishing(services.ledger, topic, "p") as publisher:
        assert not publisher.opened.HasField("last_sequence_id")
    async with publishing(services.ledger, topic, "p", initial_sequence_id=0) as publisher:
        assert publisher.opened.HasField("last_sequence_id")
        assert publisher.opened.last_sequence_id == 0
    async with publishing(services.ledger, topic, "p", initial_sequence_id=41) as publisher:
        assert publisher.opened.last_sequence_id == 41
        assert (await publisher.store(single(1, 7))).status == STORED
    async with publishing(services.ledger, topic, "p", initial_sequence_id=41) as publisher:
        assert publisher.opened.last_sequence_id == 7


async def test_open_streams_are_bounded(strict: Services) -> None:
    topic = "open/streams/t"
    async with AsyncExitStack() as others:
        streams = [
            await others.enter_async_context(publishing(strict.ledger, topic, f"p{each}"))
            for each in range(STREAMS_MAX)
        ]
        with refused(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS") as details:
            await publish(strict.ledger, topic, 1)
        assert details == {"publish_streams_max": str(STREAMS_MAX)}
        assert (await streams[0].store(single(1, 1))).status == STORED
        await streams[0].finish()
        assert await publish(strict.ledger, topic, 1) == [STORED]
        await streams[1].cut()

        async def has_room() -> bool:
            return (await get(strict, topic)).connected_producers < STREAMS_MAX - 1

        await eventually(has_room, "the stream is gone")
        assert await publish(strict.ledger, topic, 2) == [STORED]
        for _ in range(STREAMS_MAX):  # a refused stream occupies no place
            with refused(StatusCode.FAILED_PRECONDITION, "PRODUCER_BUSY"):
                await publish(strict.ledger, topic, 1, producer="p2")
        assert await publish(strict.ledger, topic, 3) == [STORED]


@ON_SQLITE
async def test_read_streams_are_bounded_and_a_slow_reader_is_ended(
    services: Services, topic: str
) -> None:
    everything = pb.ReadRequest(topic=topic, start=EARLIEST)
    async with second_ledger(
        services,
        SEQGATE_LEDGER_READ_STREAMS_MAX="2",
        SEQGATE_LEDGER_READ_BYTES_MAX="65536",
        SEQGATE_LEDGER_SLOW_READER_S="1",
    ) as other:
        async with publishing(services.ledger, topic, "p") as publisher:
            for each in range(30):  # more than gRPC buffers for a reader that does not read
                assert (await publisher.store(single(each, each, b"x" * 500_000))).status == STORED
        slow = other.Read(everything)
        assert (await slow.read()).HasField("started")
        async with asyncio.timeout(WITHIN_S):
            assert await _ids_of(other.Read(everything)) == [*range(30)], "after a while"
        quick = other.Read(everything)
        with refused(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS") as details:
            await _ids_of(other.Read(everything))
        assert details == {"read_streams_max": "2"}
        with refused(StatusCode.UNAVAILABLE, "SLOW_READER"):
            await _ids_of(slow)
        assert await _ids_of(quick) == [*range(30)]
        assert await _ids_of(other.Read(everything)) == [*range(30)], "there is room again"


async def test_a_producer_that_reads_no_receipts_is_ended(
    strict: Services,
) -> None:
    topic = "open/unread/t"
    little = [("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)]
    async with aio.insecure_channel(strict.stack.address("ledger"), options=little) as channel:
        call: Any = LedgerServiceStub(channel).Publish()
        await call.write(pb.PublishRequest(open=pb.Open(topic=topic, producer_name="p")))
        assert (await call.read()).HasField("opened")
        for start in range(0, 30_000, 1_000):
            wrong = [pb.Publication(request_id=each) for each in range(start, start + 1_000)]
            request = pb.PublishRequest(publications=pb.Publications(publications=wrong))
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(request)

        async def is_cut() -> bool:
            return (await get(strict, topic)).connected_producers == 0

        await eventually(is_cut, "the producer is connected no more")
        count = 0
        with refused(StatusCode.RESOURCE_EXHAUSTED, "RECEIPTS_UNREAD") as details:
            async with asyncio.timeout(60):
                while (response := await call.read()) is not aio.EOF:
                    count += len(response.receipts.receipts)
        assert details == {"receipts_max": str(WINDOW_MESSAGES + 10_000)}
        assert count < 30_000 - 10_000
        assert await publish(strict.ledger, topic, 1) == [STORED]


async def test_connected_producers_are_kept_alive_and_idle_topics_released(
    strict: Services,
) -> None:
    topic = "open/keep/t"
    async with publishing(strict.ledger, topic, "p") as publisher:
        assert (await publisher.store(single(1, 1))).status == STORED
        first = publisher.opened.ledger_id
        await strict.settled(topic)
        before = (await strict.producers(topic))["p"].last_active

        async def kept() -> bool:
            now = (await strict.producers(topic))["p"].last_active
            return now.ToMilliseconds() > before.ToMilliseconds()

        await eventually(kept, "the producer is kept")
        assert (await get(strict, topic)).ledger_id == first

    async def let_go() -> bool:
        async with publishing(strict.ledger, topic, "p") as publisher:
            assert publisher.opened.last_sequence_id == 1
            return publisher.opened.ledger_id > first

    await eventually(_every(0.05 * 4, let_go), "the topic is let go")
    assert await publish(strict.ledger, topic, 1, 2) == [DUPLICATE, STORED]


def _every(seconds: float, state: Callable[[], Awaitable[bool]]) -> Callable[[], Awaitable[bool]]:
    """Read the state this seldom, since reading it keeps the topic open."""
    looked_at = 0.0

    async def rarely() -> bool:
        nonlocal looked_at
        if time.monotonic() - looked_at < seconds:
            return False
        seen = await state()
        looked_at = time.monotonic()
        return seen

    return rarely


# ---- a full store

PAYLOAD = b"x" * 16_000


async def fill(publisher: Publisher, start: int) -> tuple[list[int], int]:
    """Publish until the store is full; the stored ids, and the first refused one."""
    stored: list[int] = []
    for sequence_id in itertools.count(start):
        receipt = await publisher.store(single(sequence_id, sequence_id, PAYLOAD))
        if receipt.status == FAILED:
            check(receipt.error, StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL")
            return stored, sequence_id
        assert receipt.status == STORED
        stored.append(sequence_id)
        assert len(stored) < 1_000
    raise AssertionError


async def test_a_full_store_loses_nothing_and_resumes_with_space(private: Any, topic: str) -> None:
    """Space comes from another topic's deletion, and then from a raised limit."""
    limit = 1_000_000
    async with private(SEQGATE_LEDGER_STORE_BYTES_MAX=str(limit)) as services:
        async with publishing(services.ledger, f"{topic}-other", "p") as other:
            for each in range(20):
                assert (await other.store(single(each, each, PAYLOAD))).status == STORED
        async with publishing(services.ledger, topic, "p") as publisher:
            stored, failed = await fill(publisher, 0)
            assert stored
            skipped = await publisher.store(single(failed + 1, failed + 1, PAYLOAD))
            assert skipped.status == SKIPPED
            assert await services.ids(topic) == stored
            receipt = await publisher.store(single(failed, failed, PAYLOAD, resume=True))
            assert receipt.status == FAILED
            assert (await publisher.store(single(0, 0, PAYLOAD, resume=True))).status == DUPLICATE

            await delete(services, f"{topic}-other")
            assert (
                await publisher.store(single(failed, failed, PAYLOAD, resume=True))
            ).status == STORED
            more, failed = await fill(publisher, failed + 1)
            stored += [stored[-1] + 1, *more]
        assert await services.ids(topic) == stored == list(range(failed))

    async with private(SEQGATE_LEDGER_STORE_BYTES_MAX=str(2 * limit)) as services:
        async with publishing(services.ledger, topic, "p") as publisher:
            assert publisher.opened.last_sequence_id == failed - 1
            more, failed = await fill(publisher, failed)
            assert more
        assert await services.ids(topic) == list(range(failed))


# ---- two processes, one store


@ON_SQLITE
async def test_another_process_takes_over_a_topic_and_fences_the_first(
    services: Services, topic: str
) -> None:
    async with (
        second_ledger(services) as other,
        publishing(services.ledger, topic, "p") as old,
        publishing(services.ledger, topic, "q") as idle,
    ):
        assert (await old.store(single(1, 1))).position == position(1, 0)
        await services.settled(topic)
        async with publishing(other, topic, "p") as new:
            assert new.opened.ledger_id == 2
            assert new.opened.last_sequence_id == 1
            assert (await new.store(single(1, 1))).status == DUPLICATE
            assert (await new.store(single(2, 2))).position == position(2, 0)

            await old.send(single(2, 3))
            for publisher in (old, idle):
                error = await publisher.ended()
                assert error is not None
                check(status_of_call(error), StatusCode.ABORTED, "FENCED")
            assert (await new.store(single(3, 3))).position == position(2, 1)

            # The first one may take the topic back.
            await services.settled(topic)
            async with publishing(services.ledger, topic, "p") as again:
                assert again.opened.ledger_id == 3
                assert again.opened.last_sequence_id == 3
                assert (await again.store(single(1, 4))).position == position(3, 0)
                await new.send(single(4, 5))
                error = await new.ended()
                assert error is not None
                check(status_of_call(error), StatusCode.ABORTED, "FENCED")
    entries = await services.read(topic)
    assert [each.metadata.sequence_id for each in entries] == [1, 2, 3, 4]
    assert [each.position.ledger_id for each in entries] == [1, 2, 2, 3]
    for start, ids in (
        ({"start": Start(at=position(1, 1))}, [2, 3, 4]),
        ({"start": Start(after=position(1, 0))}, [2, 3, 4]),
        ({"start": Start(at=position(2, 0))}, [2, 3, 4]),
        ({"start": Start(at=position(2, 2))}, [4]),
        ({"start": Start(at=position(3, 0))}, [4]),
    ):
        found = await services.read(topic, **start)
        assert [each.metadata.sequence_id for each in found] == ids


@ON_SQLITE
async def test_a_reader_follows_entries_appended_by_another_process(
    services: Services, topic: str
) -> None:
    async with second_ledger(services, SEQGATE_LEDGER_FOLLOW_POLL_S="0.02") as other:
        assert await publish(services.ledger, topic, 1) == [STORED]
        call = other.Read(
            pb.ReadRequest(
                topic=topic,
                start=EARLIEST,
                follow=True,
                max_entries=3,
            )
        )
        reading = asyncio.create_task(_ids_of(call))
        assert await publish(services.ledger, topic, 2, 3) == [STORED, STORED]
        async with asyncio.timeout(WITHIN_S):
            assert await reading == [1, 2, 3]


@ON_SQLITE
async def test_an_id_is_stored_once_across_processes(services: Services, topic: str) -> None:
    """A topic whose owner keeps changing: producers reconnect, and repeat unanswered messages."""
    count = 60

    async def run(stubs: list[Any], producer: str) -> None:
        unanswered = list(range(count))
        for stub in itertools.cycle(stubs):
            try:
                async with publishing(stub, topic, producer) as publisher:
                    for sequence_id in list(unanswered):
                        receipt = await publisher.store(single(sequence_id, sequence_id))
                        assert receipt.status in (STORED, DUPLICATE), receipt
                        unanswered.remove(sequence_id)
                        if sequence_id % 20 == 19:
                            break  # and continue through the other process
            except aio.AioRpcError as error:
                ended = error.code() in (StatusCode.ABORTED, StatusCode.UNAVAILABLE)
                if not ended and error.details() != STATUS_LOST:
                    raise
            if not unanswered:
                return

    async with second_ledger(services) as other, asyncio.timeout(60):
        await asyncio.gather(run([services.ledger, other], "p"), run([other, services.ledger], "q"))
    for producer in ("p", "q"):
        assert await services.ids(topic, producer) == list(range(count))
    entries = await services.read(topic, metadata_only=True)
    positions = [(each.position.ledger_id, each.position.entry_id) for each in entries]
    assert positions == sorted(set(positions))


# ---- holds, and what is already stored


async def test_a_refused_publication_with_resume_ends_a_hold(
    services: Services, topic: str
) -> None:
    """Its producer has all receipts, and continues."""
    wrong = pb.Publication(request_id=6, resume=True)
    async with publishing(services.ledger, topic, "p") as publisher:
        assert (await publisher.store(batch(1, [1, 2]))).status == STORED
        for alone in (True, False):
            assert (await publisher.store(batch(2, [2, 9]))).status == PARTIAL
            assert (await publisher.store(single(3, 3))).status == SKIPPED
            last = single(7, 3 if alone else 4)
            if alone:
                await publisher.send(wrong)
                await publisher.send(last)
            else:
                await publisher.send(wrong, last)
            assert (await publisher.receipt(6)).status == REFUSED
            assert (await publisher.receipt(7)).status == STORED
    assert await services.ids(topic) == [1, 3, 4]


async def test_a_publication_for_another_epoch_does_not_end_a_hold(
    services: Services, topic: str
) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        assert (await publisher.store(batch(1, [1, 2]))).status == STORED
        assert (await publisher.store(batch(2, [2, 9]))).status == PARTIAL
        await publisher.send(single(3, 3, resume=True), ledger_id=99)
        assert (await publisher.receipt(3)).status == REFUSED
        assert (await publisher.store(single(4, 4))).status == SKIPPED


async def test_a_stored_prefix_of_a_batch_has_its_position(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        stored = await publisher.store(batch(1, [1, 2, 3]))
        for request_id, ids in enumerate(([1, 2, 3], [1, 2]), start=2):
            again = await publisher.store(batch(request_id, ids))
            assert (again.status, again.position) == (DUPLICATE, stored.position)
            assert not again.fates
        rest = await publisher.store(batch(4, [2, 3]))
        assert rest.status == DUPLICATE
        assert not rest.HasField("position")
        places = [(each.position, each.batch_index) for each in rest.fates]
        assert places == [(stored.position, 1), (stored.position, 2)]
