"""Trims limited by cursors, retention, and topics that wait for a rebuild: real services."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc import StatusCode, aio
from redis.asyncio import Redis

from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.dev.stack import Stack
from seqgate.times import timestamp
from seqgate.types import DEDUP_CURSOR
from tests.integration.refusals import check, refused, status_of_call
from tests.integration.services import (
    Services,
    channel_to,
    health,
    log_lines,
    paused,
    running,
    serving,
)
from tests.support.publisher import publishing, single
from tests.support.stubs import cursor_stub, dedup_stub
from tests.support.waiting import eventually

STORED, DUPLICATE = pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE
STALE = pb.RECEIPT_STATUS_STALE
ENTRIES = 10
KEPT_BYTES = 3 * 1024


def at(entry_id: int, ledger_id: int = 1) -> Position:
    return Position(ledger_id=ledger_id, entry_id=entry_id)


async def publish(services: Services, topic: str, *ids: int, size_bytes: int = 1) -> list[int]:
    """Publish messages one after the other, each in a block of its own; their statuses."""
    async with publishing(services.ledger, topic, "p") as publisher:
        return [
            (await publisher.store(single(each + 1, each, b"x" * size_bytes))).status
            for each in ids
        ]


async def trim(services: Services, topic: str, before: Position) -> pb.TrimTopicResponse:
    answer: pb.TrimTopicResponse = await services.ledger.TrimTopic(
        pb.TrimTopicRequest(topic=topic, before=before)
    )
    return answer


async def get(services: Services, topic: str) -> pb.Topic:
    answer: pb.GetTopicResponse = await services.ledger.GetTopic(pb.GetTopicRequest(topic=topic))
    return answer.topic


async def create(
    services: Services, topic: str, name: str, mark_delete: Position | None = None
) -> None:
    await services.cursor.CreateCursor(
        cursor_pb2.CreateCursorRequest(topic=topic, cursor=name, mark_delete=mark_delete)
    )


async def acknowledge(services: Services, topic: str, name: str, position: Position) -> None:
    await services.cursor.MarkDelete(
        cursor_pb2.MarkDeleteRequest(topic=topic, cursor=name, position=position)
    )


async def cursors(services: Services, topic: str) -> list[str]:
    request = cursor_pb2.ListCursorsRequest(topic=topic)
    page = await services.cursor.ListCursors(request, wait_for_ready=True)
    return [each.name for each in page.cursors]


async def snapshot(services: Services, topic: str) -> dedup_pb2.TakeSnapshotResponse:
    answer: dedup_pb2.TakeSnapshotResponse = await services.dedup.TakeSnapshot(
        dedup_pb2.TakeSnapshotRequest(topic=topic)
    )
    return answer


# ---- trims


async def test_a_trim_waits_for_the_slowest_cursor(services: Services, topic: str) -> None:
    await publish(services, topic, *range(ENTRIES))
    await create(services, topic, "never")
    await create(services, topic, "slow", at(3))
    await create(services, topic, "quick", at(8))
    held = await trim(services, topic, at(6))
    assert (held.removed_entries, held.first, [*held.held_back_by]) == (0, at(0), ["never"])
    await acknowledge(services, topic, "never", at(3))
    held = await trim(services, topic, at(6))
    assert (held.removed_entries, held.first) == (4, at(4))
    assert held.held_back_by == ["never", "slow"]
    for name in ("never", "slow"):
        await acknowledge(services, topic, name, at(5))
    free = await trim(services, topic, at(6))
    assert (free.removed_entries, free.first, [*free.held_back_by]) == (2, at(6), [])


async def test_a_cursor_beyond_its_ledger_allows_a_trim_of_all_of_it(
    services: Services, topic: str
) -> None:
    await publish(services, topic, *range(ENTRIES))
    await create(services, topic, "far", at(2**63 - 1, 0))
    assert (await trim(services, topic, at(5))).held_back_by == ["far"]
    await acknowledge(services, topic, "far", at(2**63 - 1))
    answer = await trim(services, topic, at(0, 2))
    assert (answer.removed_entries, [*answer.held_back_by]) == (ENTRIES, [])


async def test_the_deduplication_cursor_does_not_limit_a_trim(
    services: Services, topic: str
) -> None:
    await publish(services, topic, 0, 1)
    await services.settled(topic)
    assert (await snapshot(services, topic)).position == at(1)
    await publish(services, topic, *range(2, ENTRIES))
    await services.settled(topic)
    answer = await trim(services, topic, at(ENTRIES - 1))
    assert (answer.removed_entries, [*answer.held_back_by]) == (ENTRIES - 1, [])
    assert DEDUP_CURSOR in await cursors(services, topic)
    assert await publish(services, topic, ENTRIES - 1, ENTRIES) == [DUPLICATE, STORED]


async def test_a_topic_without_deduplication_is_not_limited_by_its_cursor(private: Any) -> None:
    topic = "public/default/off"
    async with private(policies='[topic."public/default/off"]\nenabled = false\n') as services:
        await publish(services, topic, *range(ENTRIES))
        await create(services, topic, DEDUP_CURSOR)
        answer = await trim(services, topic, at(ENTRIES - 1))
        assert (answer.removed_entries, [*answer.held_back_by]) == (ENTRIES - 1, [])


async def test_nothing_is_trimmed_while_the_cursor_service_is_unavailable(
    stoppable: Services, topic: str
) -> None:
    stack = stoppable.stack
    await publish(stoppable, topic, *range(ENTRIES))
    await stack.kill("cursor")
    with refused(StatusCode.UNAVAILABLE, "CURSORS_UNAVAILABLE"):
        await trim(stoppable, topic, at(5))
    assert (await get(stoppable, topic)).first == at(0)
    assert await health(stack.address("ledger")) == "SERVING"
    assert await publish(stoppable, topic, ENTRIES) == [STORED]

    await stack.run("cursor")
    await eventually(lambda: trims(stoppable, topic, at(5)), "it trims again")
    assert (await get(stoppable, topic)).first == at(5)


async def trims(services: Services, topic: str, before: Position) -> bool:
    try:
        await trim(services, topic, before)
    except aio.AioRpcError as error:
        if error.code() is not StatusCode.UNAVAILABLE:
            raise
        return False
    return True


async def test_a_hanging_cursor_service_is_awaited_until_the_callers_deadline(
    stoppable: Services, topic: str
) -> None:
    await publish(stoppable, topic, *range(ENTRIES))
    request = pb.TrimTopicRequest(topic=topic, before=at(5))
    with paused(stoppable.stack, "cursor"), pytest.raises(aio.AioRpcError) as caught:
        await stoppable.ledger.TrimTopic(request, timeout=0.5)
    assert caught.value.code() in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED)
    await serving(stoppable.stack.address("cursor"))
    assert (await get(stoppable, topic)).first == at(0)


async def test_without_a_cursor_service_nothing_limits_a_trim(private: Any, topic: str) -> None:
    async with private(SEQGATE_LEDGER_CURSOR_TARGET="") as services:
        await publish(services, topic, *range(ENTRIES))
        await create(services, topic, "nobody-asks")
        answer = await trim(services, topic, at(5))
        assert (answer.first, [*answer.held_back_by]) == (at(5), [])


# ---- deleting


async def test_a_deleted_topic_leaves_no_cursors(services: Services, topic: str) -> None:
    await publish(services, topic, 0)
    await services.settled(topic)
    await snapshot(services, topic)
    for name in ("a", "b"):
        await create(services, topic, name)
    await create(services, f"{topic}-other", "stays")
    await services.ledger.DeleteTopic(pb.DeleteTopicRequest(topic=topic))
    assert await cursors(services, topic) == []
    assert await cursors(services, f"{topic}-other") == ["stays"]
    status = await services.status(topic)
    assert status.state == dedup_pb2.TOPIC_STATE_ABSENT
    assert not status.HasField("snapshot")


async def test_a_deleted_topic_leaves_no_policy(services: Services, topic: str) -> None:
    await publish(services, topic, 0)
    values = dedup_pb2.PolicyValues(max_producers=7)
    await services.dedup.SetPolicy(dedup_pb2.SetPolicyRequest(topic=topic, values=values))
    await services.ledger.DeleteTopic(pb.DeleteTopicRequest(topic=topic))
    left = await services.dedup.GetPolicy(dedup_pb2.GetPolicyRequest(topic=topic))
    assert left.values == dedup_pb2.PolicyValues()


async def test_a_topic_is_deleted_while_the_cursor_service_is_unavailable(
    stoppable: Services, topic: str
) -> None:
    await publish(stoppable, topic, 0)
    await create(stoppable, topic, "left")
    await stoppable.stack.kill("cursor")
    await stoppable.ledger.DeleteTopic(pb.DeleteTopicRequest(topic=topic))
    with refused(StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"):
        await get(stoppable, topic)
    lines = log_lines(stoppable.stack, "ledger")
    assert any(each["event"] == "deleting cursors failed" for each in lines)
    # The deletion stays pending, whatever happens to the process.
    await stoppable.stack.kill("ledger")
    await stoppable.stack.run("cursor")
    assert "left" in await cursors(stoppable, topic)
    await stoppable.stack.run("ledger")

    async def gone() -> bool:
        return await cursors(stoppable, topic) == []

    await eventually(gone)


# ---- retention


@pytest.fixture(scope="module")
async def retaining(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A stack that keeps a few entries of each topic."""
    async with running(
        tmp_path_factory.mktemp("retaining"),
        SEQGATE_LEDGER_RETENTION_BYTES=str(KEPT_BYTES),
        SEQGATE_LEDGER_TRIM_INTERVAL_S="0.02",
    ) as services:
        yield services


async def test_retention_keeps_a_topic_within_its_size(retaining: Services, topic: str) -> None:
    await publish(retaining, topic, *range(ENTRIES), size_bytes=1_000)

    async def small_enough() -> bool:
        return (await get(retaining, topic)).bytes <= KEPT_BYTES

    await eventually(small_enough)
    left = await retaining.ids(topic)
    assert len(left) in (2, 3)
    assert left == [*range(ENTRIES)][-len(left) :]
    assert await publish(retaining, topic, ENTRIES - 1, ENTRIES) == [DUPLICATE, STORED]


async def test_unacknowledged_entries_are_kept_beyond_the_size(
    retaining: Services, topic: str
) -> None:
    await create(retaining, topic, "c", at(1))
    await publish(retaining, topic, *range(ENTRIES), size_bytes=1_000)

    async def starts_at(entry_id: int) -> bool:
        return (await get(retaining, topic)).first == at(entry_id)

    await eventually(lambda: starts_at(2))
    other = f"{topic}-other"
    await publish(retaining, other, *range(ENTRIES), size_bytes=1_000)

    async def has_gone_round() -> bool:
        return (await get(retaining, other)).bytes <= KEPT_BYTES

    await eventually(has_gone_round)
    assert await starts_at(2)
    await acknowledge(retaining, topic, "c", at(4))
    await eventually(lambda: starts_at(5))


async def test_with_no_retention_time_acknowledged_entries_are_removed(
    private: Any, topic: str
) -> None:
    async with private(
        SEQGATE_LEDGER_RETENTION_MINUTES="0", SEQGATE_LEDGER_TRIM_INTERVAL_S="0.02"
    ) as services:
        await create(services, topic, "c")
        await publish(services, topic, *range(ENTRIES))
        await acknowledge(services, topic, "c", at(6))

        async def starts_at_7() -> bool:
            return (await get(services, topic)).first == at(7)

        await eventually(starts_at_7)
        await acknowledge(services, topic, "c", at(ENTRIES - 1))

        async def is_empty() -> bool:
            return (await get(services, topic)).entries == 0

        await eventually(is_empty)
        assert await publish(services, topic, ENTRIES - 1, ENTRIES) == [STALE, STORED]


# ---- topics that wait for a rebuild


async def forget(services: Services, topic: str) -> None:
    """Redis loses everything, and the topic's cursors, its snapshot included, are deleted."""
    async with Redis.from_url(services.stack.redis_url) as redis:
        await redis.flushall()
    for name in await cursors(services, topic):
        await services.cursor.DeleteCursor(cursor_pb2.DeleteCursorRequest(topic=topic, cursor=name))


async def load(services: Services, topic: str, through: Position, highest: int) -> bool:
    described = await get(services, topic)
    header = writer_pb2.LoadHeader(
        topic=topic, incarnation=described.incarnation or 1, through=through
    )
    state = writer_pb2.ProducerState(
        name="p", highest_sequence_id=highest, last_active=timestamp(1)
    )

    def requests() -> Iterator[writer_pb2.LoadStateRequest]:
        yield writer_pb2.LoadStateRequest(header=header)
        yield writer_pb2.LoadStateRequest(producers=[state])

    answer = await services.dedup.LoadState(requests())
    return bool(answer.loaded)


async def lacking(services: Services, topic: str) -> int:
    return (await get(services, topic)).entries_to_replay


async def goes_on(services: Services, topic: str, sequence_id: int, status: int) -> bool:
    """Whether a message gets this receipt; a waiting topic gives none."""
    try:
        return await publish(services, topic, sequence_id) == [status]
    except aio.AioRpcError as error:
        if error.code() not in (StatusCode.UNAVAILABLE, StatusCode.DATA_LOSS):
            raise
        return False


async def test_a_waiting_topic_resumes_when_its_state_is_loaded(private: Any, topic: str) -> None:
    async with private(SEQGATE_LEDGER_INLINE_REPLAY_ENTRIES_MAX=str(ENTRIES - 1)) as services:
        await publish(services, topic, *range(ENTRIES))
        await services.settled(topic)
        assert await lacking(services, topic) == 0
        await forget(services, topic)
        for _ in range(2):
            with refused(StatusCode.UNAVAILABLE, "RECOVERING") as details:
                await publish(services, topic, ENTRIES)
            assert details == {"entries_to_replay": str(ENTRIES)}
        assert await lacking(services, topic) == ENTRIES
        status = await services.status(topic)
        assert status.state == dedup_pb2.TOPIC_STATE_RECOVERING

        assert await load(services, topic, at(6), highest=6)
        await eventually(lambda: goes_on(services, topic, ENTRIES - 1, DUPLICATE))
        assert await lacking(services, topic) == 0
        assert await publish(services, topic, 3, ENTRIES) == [DUPLICATE, STORED]


async def test_a_damaged_entry_gives_no_verdict_until_a_state_is_loaded_past_it(
    tmp_path: Path, topic: str
) -> None:
    async with (
        Stack(tmp_path / "stack") as stack,
        channel_to(stack.address("ledger")) as ledger,
        channel_to(stack.address("dedup")) as dedup,
        channel_to(stack.address("cursor")) as cursor,
    ):
        services = Services(
            stack,
            LedgerServiceStub(ledger),
            dedup_stub(dedup),
            cursor_stub(cursor),
            dispatcher=None,
            filter=None,
        )
        await publish(services, topic, *range(ENTRIES))
        await services.settled(topic)
        with apsw.Connection(str(stack.folder / "ledger" / "ledger.db")) as database:
            database.execute("UPDATE block SET entries_crc = 1 - entries_crc WHERE last_entry = 5")
        database.close()
        await forget(services, topic)
        for _ in range(2):
            with pytest.raises(aio.AioRpcError) as caught:
                await publish(services, topic, ENTRIES)
            status = status_of_call(caught.value)
            details = check(status, StatusCode.DATA_LOSS, "ENTRY_CORRUPT")
            assert (details["ledger_id"], details["entry_id"]) == ("1", "5")
            assert any(each.Is(RetryInfo.DESCRIPTOR) for each in status.details)
        assert await lacking(services, topic) == ENTRIES - 5
        critical = [each for each in log_lines(stack, "ledger") if each["level"] == "critical"]
        named = {(each["topic"], each["ledger_id"], each["entry_id"]) for each in critical}
        assert named == {(topic, 1, 5)}

        assert await load(services, topic, at(5), highest=5)
        await eventually(lambda: goes_on(services, topic, ENTRIES - 1, DUPLICATE))
        assert await publish(services, topic, ENTRIES) == [STORED]
