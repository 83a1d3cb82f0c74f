"""Snapshots, recovery from them, and loaded states: real services, and a real Redis that loses its
data."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode
from redis.asyncio import Redis

from seqgate.api.common.v1 import common_pb2
from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.client import Client, Producer
from seqgate.services.dedup import writer_servicer as limits
from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.services.dedup.core.snapshot import ABOUT
from seqgate.times import timestamp
from seqgate.types import DEDUP_CURSOR, SEQUENCE_ID_MAX, TopicName
from tests.integration.refusals import refused
from tests.integration.services import Services, log_lines
from tests.support.waiting import eventually

Private = Callable[..., AbstractAsyncContextManager[Services]]

EVERY_TEN = "[cluster]\nsnapshot_entries = 10\nsnapshot_interval_s = 0\n"
BY_TIME = "[cluster]\nsnapshot_entries = 0\nsnapshot_interval_s = 1\n"
NEVER = "[cluster]\nsnapshot_entries = 0\nsnapshot_interval_s = 0\n"


@asynccontextmanager
async def producer(services: Services, topic: str, name: str = "p") -> AsyncIterator[Producer]:
    async with (
        Client(services.stack.address("ledger")) as client,
        client.producer(topic, name=name, batching=None) as made,
    ):
        yield made


async def snapshot(services: Services, topic: str) -> cursor_pb2.Cursor | None:
    cursors = await services.cursor.ListCursors(cursor_pb2.ListCursorsRequest(topic=topic))
    if DEDUP_CURSOR not in [each.name for each in cursors.cursors]:
        return None
    request = cursor_pb2.GetCursorRequest(topic=topic, cursor=DEDUP_CURSOR)
    found: cursor_pb2.Cursor = (await services.cursor.GetCursor(request)).cursor
    return found


async def test_a_snapshot_is_reported_after_redis_lost_its_state(
    private: Private, topic: str
) -> None:
    async with private(policies=EVERY_TEN) as services:
        async with producer(services, topic) as made:
            for _ in range(10):
                await made.send(b"x")
        await snapshot_at(services, topic, 9)
        async with Redis.from_url(services.stack.redis_url) as redis:
            await redis.flushall()
        explain = pb.ExplainRequest(topic=topic, producer_name="p", sequence_id=3)
        status = (await services.dedup.Explain(explain)).status
        assert status.state == pb.TOPIC_STATE_ABSENT
        assert status.snapshot == Position(ledger_id=1, entry_id=9)
        assert not status.snapshot_unknown
        await services.stack.terminate("cursor")
        status = await services.status(topic)
        assert (status.HasField("snapshot"), status.snapshot_unknown) == (False, True)


async def snapshot_at(services: Services, topic: str, entry_id: int) -> cursor_pb2.Cursor:
    """Wait for a snapshot at an entry of the first ledger. Its cursor is created without one."""
    position = Position(ledger_id=1, entry_id=entry_id)

    async def there() -> bool:
        found = await snapshot(services, topic)
        return (
            found is not None
            and found.mark_delete == position
            and ABOUT in found.mark_delete_properties
        )

    await eventually(there, f"a snapshot at {entry_id}")
    found = await snapshot(services, topic)
    assert found is not None
    return found


def marks(cursor: cursor_pb2.Cursor) -> dict[str, str]:
    """The snapshot's properties of producers."""
    return {name: text for name, text in cursor.mark_delete_properties.items() if name != ABOUT}


async def forget(services: Services, topic: str) -> None:
    """Delete a topic's state in Redis."""
    async with Redis.from_url(services.stack.redis_url) as redis:
        assert await redis.delete(topic_key(TopicName.parse(topic)))


def replayed(services: Services, topic: str) -> int:
    """The total number of a topic's replayed entries."""
    return sum(
        line["entries"]
        for line in log_lines(services.stack, "ledger")
        if line["event"] == "replaying" and line["topic"] == topic
    )


async def test_after_ten_entries_the_tenth_carries_all_producers(
    private: Private, topic: str
) -> None:
    async with private(policies=EVERY_TEN) as services:
        async with producer(services, topic) as p, producer(services, topic, "q") as q:
            await q.send(b"", sequence_id=41)
            for _ in range(8):
                await p.send(b"")
            await services.settled(topic)
            assert await snapshot(services, topic) is None
            await p.send(b"")
            assert marks(await snapshot_at(services, topic, 9)) == {"p": "8", "q": "41"}
        status = await services.status(topic)
        assert status.snapshot == Position(ledger_id=1, entry_id=9)
        assert status.snapshot_taken.ToSeconds() > 0
        assert (status.entries_since_snapshot, status.snapshot_error) == (0, "")


async def test_snapshots_are_taken_by_time_when_the_state_changed(
    private: Private, topic: str
) -> None:
    """Deduplication is disabled for the cluster, and enabled for the topic."""
    policies = BY_TIME + f'enabled = false\n[topic."{topic}"]\nenabled = true\n'
    async with private(
        policies=policies, SEQGATE_DEDUP_SNAPSHOT_CHECK_INTERVAL_S="0.05"
    ) as services:
        async with producer(services, topic) as p:
            for _ in range(5):
                await p.send(b"")
            first = await snapshot_at(services, topic, 4)
            await p.send(b"")
            second = await snapshot_at(services, topic, 5)
        assert second.revision > first.revision
        assert (await services.status(topic)).entries_since_snapshot == 0


async def test_a_clean_stop_leaves_nothing_to_replay(private: Private, topic: str) -> None:
    """The services stop, and Redis restarts empty."""
    async with private(policies=NEVER) as services, producer(services, topic) as p:
        for _ in range(7):
            await p.send(b"")
    (services.stack.folder / "redis" / "appendonlydir").rename(
        services.stack.folder / "redis" / "lost"
    )
    async with private(policies=NEVER) as services:
        async with producer(services, topic) as p:
            assert p.last_sequence_id == 6
            receipt = await p.send(b"again", sequence_id=6)
            assert receipt.duplicate
        assert replayed(services, topic) == 0
        assert (await services.producers(topic))["p"].persisted_sequence_id == 6


async def test_lost_state_is_restored_from_the_snapshot_and_the_tail(
    private: Private, topic: str
) -> None:
    """The tail is replayed; the rest is not read again. Each producer's activity is restored."""
    async with private(policies=EVERY_TEN) as services:
        async with producer(services, topic) as p:
            for _ in range(10):
                await p.send(b"")
            await snapshot_at(services, topic, 9)
            for _ in range(3):
                await p.send(b"")
            before = await services.settled(topic)
            active = (await services.producers(topic))["p"].last_active
            await forget(services, topic)
            assert (await p.send(b"")).message_id.entry_id == 13
            assert replayed(services, topic) == 3
            assert not (await services.status(topic)).entries_remaining
        assert before.confirmed.entry_id == 12
        assert (await services.producers(topic))["p"].last_active.seconds >= active.seconds


async def test_a_requested_snapshot_is_taken_at_once(private: Private, topic: str) -> None:
    async with private(policies=NEVER) as services:
        request = pb.TakeSnapshotRequest(topic=topic)
        assert not (await services.dedup.TakeSnapshot(request)).HasField("position")
        async with producer(services, topic) as p:
            await p.send(b"")
            await services.settled(topic)
            taken = await services.dedup.TakeSnapshot(request)
        assert taken.position == Position(ledger_id=1, entry_id=0)
        assert taken.producers == 1
        assert marks(await snapshot_at(services, topic, 0)) == {"p": "0"}


async def test_without_the_cursor_service_publishing_continues_and_the_status_explains(
    private: Private, topic: str
) -> None:
    async with private(policies=EVERY_TEN) as services, producer(services, topic) as p:
        for _ in range(10):
            await p.send(b"")
        await snapshot_at(services, topic, 9)
        await services.stack.kill("cursor")
        for _ in range(15):
            await p.send(b"")

        async def failed() -> bool:
            return bool((await services.status(topic)).snapshot_error)

        await eventually(failed, "the status tells of the failure")
        with refused(StatusCode.UNAVAILABLE, "CURSORS_UNAVAILABLE"):
            await services.dedup.TakeSnapshot(pb.TakeSnapshotRequest(topic=topic))
        await services.stack.run("cursor")
        await p.send(b"")

        async def mended() -> bool:
            status = await services.status(topic)
            return not status.snapshot_error and status.snapshot.entry_id >= 24

        await eventually(mended, "the next occasion is taken")


async def test_deleting_a_topic_deletes_its_snapshot(private: Private, topic: str) -> None:
    async with private(policies=EVERY_TEN) as services:
        async with producer(services, topic) as p:
            for _ in range(10):
                await p.send(b"")
            await snapshot_at(services, topic, 9)
        request = writer_pb2.ForgetTopicRequest(
            topic=topic, incarnation=SEQUENCE_ID_MAX, deleted=True
        )
        await services.dedup.ForgetTopic(request)
        assert await snapshot(services, topic) is None


# ---- loaded states


def state(topic: str, entry_id: int, **producers: int) -> list[writer_pb2.LoadStateRequest]:
    """A state of incarnation 1, up to an entry of ledger 1."""
    header = writer_pb2.LoadHeader(
        topic=topic, incarnation=1, through=Position(ledger_id=1, entry_id=entry_id)
    )
    states = [
        writer_pb2.ProducerState(
            name=name, highest_sequence_id=highest, last_active=timestamp(1_750_000_000_000)
        )
        for name, highest in producers.items()
    ]
    return [
        writer_pb2.LoadStateRequest(header=header),
        writer_pb2.LoadStateRequest(producers=states),
    ]


async def load(
    dedup: Any, requests: Iterable[writer_pb2.LoadStateRequest]
) -> writer_pb2.LoadStateResponse:
    answer: writer_pb2.LoadStateResponse = await dedup.LoadState(iter(list(requests)))
    return answer


async def test_a_state_is_loaded_once_and_kept(services: Services, dedup: Any, topic: str) -> None:
    outcome = await load(dedup, state(topic, 5, p=9, q=7))
    assert (outcome.loaded, outcome.confirmed.entry_id) == (True, 5)
    producers = await services.producers(topic)
    assert {name: each.persisted_sequence_id for name, each in producers.items()} == {
        "p": 9,
        "q": 7,
    }
    assert producers["p"].last_active.ToMilliseconds() == 1_750_000_000_000
    again = await load(dedup, state(topic, 5, p=1))
    assert (again.loaded, again.confirmed.entry_id) == (False, 5)
    assert (await services.producers(topic))["p"].persisted_sequence_id == 9
    await snapshot_at(services, topic, 5)


async def test_a_loaded_state_replaces_a_newer_one_only_on_request(
    services: Services, dedup: Any, topic: str
) -> None:
    await load(dedup, state(topic, 5, p=9))
    older = state(topic, 3, p=2)
    assert not (await load(dedup, older)).loaded
    older[0].header.replace = True
    outcome = await load(dedup, older)
    assert (outcome.loaded, outcome.confirmed.entry_id) == (True, 3)
    assert (await services.producers(topic))["p"].persisted_sequence_id == 2


async def test_an_unfinished_message_resumes_from_the_loaded_state(dedup: Any, topic: str) -> None:
    chunk = common_pb2.Chunk(uuid="u", chunk_id=1, num_chunks=3, total_bytes=9)
    requests = state(topic, 5)
    requests[1].producers.add(name="p", highest_sequence_id=4, unfinished=chunk)
    await load(dedup, requests)
    request = writer_pb2.AdmitRequest(
        topic=topic,
        writer=writer_pb2.Writer(incarnation=1, epoch=2, position=requests[0].header.through),
    )
    claims = request.claims.add(producer_name="p", sequence_ids=[4, 4])
    for place, chunk_id in enumerate((1, 2)):
        claims.chunks[place].CopyFrom(chunk)
        claims.chunks[place].chunk_id = chunk_id
    (judged,) = (await dedup.Admit(request)).verdicts.producers
    assert list(judged.verdicts) == [pb.CLAIM_VERDICT_DUPLICATE, pb.CLAIM_VERDICT_NEW]


async def test_a_state_of_an_older_incarnation_is_fenced(dedup: Any, topic: str) -> None:
    newer = state(topic, 5)
    newer[0].header.incarnation = 2
    await load(dedup, newer)
    with refused(StatusCode.ABORTED, "FENCED"):
        await load(dedup, state(topic, 9))


async def test_a_state_loaded_under_a_writer_makes_it_confirm_the_rest(
    private: Private, topic: str
) -> None:
    """Even if the loaded state is older: no claim is judged by a partial state."""
    async with private(policies=NEVER) as services, producer(services, topic) as p:
        for _ in range(9):
            await p.send(b"")
        await services.settled(topic)
        older = state(topic, 4, p=4)
        older[0].header.replace = True
        assert (await load(services.dedup, older)).loaded
        assert (await p.send(b"")).message_id.entry_id == 9
        assert (await services.producers(topic))["p"].persisted_sequence_id >= 8
        assert replayed(services, topic) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda given: given.clear(), "INVALID_STATE"),
        (lambda given: given.pop(0), "INVALID_STATE"),
        (lambda given: given.insert(0, given[0]), "INVALID_STATE"),
        (lambda given: given.append(given[1]), "INVALID_STATE"),
        (lambda given: given[0].header.ClearField("through"), "INVALID_STATE"),
        (lambda given: setattr(given[0].header, "topic", "nowhere"), "INVALID_TOPIC_NAME"),
        (lambda given: setattr(given[0].header, "incarnation", 2**63), "INVALID_STATE"),
        (lambda given: setattr(given[0].header.through, "entry_id", 2**63), "INVALID_STATE"),
        (lambda given: given[1].producers.add(name=""), "INVALID_PRODUCER_NAME"),
        (
            lambda given: given[1].producers.add(name="x", highest_sequence_id=2**63),
            "INVALID_SEQUENCE_ID",
        ),
        (
            lambda given: given[1].producers.add(name="x", last_active=Timestamp(seconds=2**60)),
            "INVALID_STATE",
        ),
        (
            lambda given: given[1].producers.add(name="x", unfinished=common_pb2.Chunk(uuid="u")),
            "INVALID_STATE",
        ),
        (
            lambda given: given[1].producers.add(
                name="x",
                unfinished=common_pb2.Chunk(uuid="u", chunk_id=2, num_chunks=3, total_bytes=9),
            ),
            "INVALID_STATE",
        ),
    ],
)
async def test_an_invalid_state_is_refused_and_nothing_is_loaded(
    services: Services,
    dedup: Any,
    topic: str,
    change: Callable[[list[writer_pb2.LoadStateRequest]], None],
    reason: str,
) -> None:
    given = state(topic, 5, p=9)
    change(given)
    with refused(StatusCode.INVALID_ARGUMENT, reason):
        await load(dedup, given)
    assert (await services.status(topic)).state == pb.TOPIC_STATE_ABSENT


async def test_the_producers_of_a_state_are_bounded(
    services: Services, dedup: Any, topic: str
) -> None:
    """Producers up to the limit come in many messages; policy keeps the most recently active
    ones."""
    most = limits.LOADED_PRODUCERS_MAX
    (header, _) = state(topic, 5)
    pages = [
        writer_pb2.LoadStateRequest(
            producers=[
                writer_pb2.ProducerState(
                    name=f"p{index}", highest_sequence_id=index, last_active=timestamp(index)
                )
                for index in range(first, first + 20_000)
            ]
        )
        for first in range(0, most, 20_000)
    ]
    outcome = await load(dedup, [header, *pages])
    assert (outcome.loaded, outcome.left_out) == (True, most - 10_000)
    assert (await services.status(topic)).producers == 10_000
    pages.append(writer_pb2.LoadStateRequest(producers=[writer_pb2.ProducerState(name="one more")]))
    with refused(StatusCode.INVALID_ARGUMENT, "INVALID_STATE"):
        await load(dedup, [header, *pages])
