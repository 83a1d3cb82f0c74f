"""Rebuilds that are killed, that run concurrently, that lose Redis's state, and that meet damage.

Topics wait for a rebuild here as soon as deduplication lacks more than one entry, so each recovered
state was loaded by a rebuild.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest
import pytest_asyncio
from grpc import StatusCode, aio
from redis.asyncio import Redis

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import connect
from seqgate.errors import SeqgateError
from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.types import DEDUP_CURSOR, Position, TopicName
from tests.faults.world import World
from tests.integration.services import log_lines
from tests.support.application import Application
from tests.support.jobs import JAVA, WORKERS, Rebuild, rebuilding
from tests.support.stubs import cursor_stub, dedup_stub
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(900)  # each test starts Spark more than once

MESSAGES = 60

NEVER = Position(0, 0)


@pytest_asyncio.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One stack whose topics wait for rebuilds; each test uses topics of its own."""
    made = World(tmp_path_factory.mktemp("rebuild"), SEQGATE_LEDGER_INLINE_REPLAY_ENTRIES_MAX="1")
    async with made.stack:
        yield made


async def published(world: World, seed: int, count: int) -> list[Application]:
    """Applications that have each published to a topic of their own."""
    applications = [world.application(seed + number) for number in range(count)]
    await publish(applications)
    for each in applications:
        await each.check_state()
    return applications


async def publish(applications: Sequence[Application], count: int = MESSAGES) -> None:
    await asyncio.gather(*(each.publish(count) for each in applications))


async def forget(world: World, applications: Sequence[Application]) -> None:
    """Redis loses the state of these topics."""
    async with Redis.from_url(world.stack.redis_url) as redis:
        for each in applications:
            await redis.delete(topic_key(TopicName.parse(each.topic)))


async def forget_everything(world: World) -> None:
    async with Redis.from_url(world.stack.redis_url) as redis:
        await redis.flushall()


async def forget_snapshots(world: World, topics: Collection[str]) -> None:
    """The topics' snapshots are lost too: loading a state takes one."""
    async with aio.insecure_channel(world.stack.address("cursor")) as channel:
        cursors: Any = cursor_stub(channel)
        for each in topics:
            request = cursor_pb2.DeleteCursorRequest(topic=each, cursor=DEDUP_CURSOR)
            try:
                await cursors.DeleteCursor(request)
            except aio.AioRpcError as error:  # already lost with the state
                if error.code() is not StatusCode.NOT_FOUND:
                    raise


async def whole(applications: Sequence[Application]) -> None:
    """Check that the state agrees with the log and nothing is stored twice, also after more
    messages."""
    for each in applications:
        await each.check_state()
    await publish(applications)
    for each in applications:
        await each.check_log()
        await each.check_state()


def topics(applications: Sequence[Application]) -> set[str]:
    return {each.topic for each in applications}


def loaded(job: Rebuild) -> set[str]:
    return {topic for topic, outcome in job.outcomes.items() if outcome == "loaded"}


@asynccontextmanager
async def dedup_of(world: World) -> AsyncIterator[Any]:
    async with aio.insecure_channel(world.stack.address("dedup")) as channel:
        yield dedup_stub(channel)


async def confirmed(dedup: Any, application: Application) -> Position:
    request = dedup_pb2.GetTopicStatusRequest(topic=application.topic)
    status = await dedup.GetTopicStatus(request)
    if not status.HasField("confirmed"):
        return NEVER
    return Position(status.confirmed.ledger_id, status.confirmed.entry_id)


async def waits(world: World, application: Application) -> None:
    """Return when the ledger leaves the replay of a topic to a rebuild."""
    request = ledger_pb2.GetTopicRequest(topic=application.topic)
    async with aio.insecure_channel(world.stack.address("ledger")) as channel:
        ledger: Any = LedgerServiceStub(channel)

        async def lacking() -> bool:
            return bool((await ledger.GetTopic(request)).topic.entries_to_replay > 1)

        await eventually(lacking)


@pytest.mark.deep
async def test_state_lost_during_a_rebuild_is_left_to_the_next_one(
    world: World, seed: int, tmp_path: Path
) -> None:
    """State loaded before is lost again, and left to the next rebuild; the rest is loaded.

    Meanwhile a healthy topic continues, and a waiting one resumes by itself once its state is
    loaded.
    """
    applications = await published(world, seed, 5)
    await forget(world, applications)
    async with rebuilding(world.stack, tmp_path) as job:
        await job.topics(1)
        before = set(job.outcomes)
        await forget_everything(world)
        assert await job.ended() == 0
        assert loaded(job) == topics(applications)
    await forget_snapshots(world, before)

    (well,) = await published(world, seed + len(applications), 1)
    lost = [each for each in applications if each.topic in before]
    waiting = asyncio.create_task(publish(lost))
    for each in lost:
        await waits(world, each)
    answered = [len(each.history.acknowledged) for each in lost]
    async with rebuilding(world.stack, tmp_path) as again:
        await again.runs(JAVA)
        assert answered == [len(each.history.acknowledged) for each in lost]
        ended = asyncio.create_task(again.ended())
        rounds = 0
        while not ended.done():
            async with asyncio.timeout(20):  # less than Spark takes, even on a slow machine
                await well.publish(1)
            rounds += 1
            await asyncio.sleep(0.05)  # the job needs the machine too
        assert await ended == 0
        assert before <= loaded(again) <= topics(applications)
    assert rounds > 5
    await waiting
    await whole([well, *applications])


@pytest.mark.deep
async def test_killed_rebuilds_are_completed_by_two_at_once(
    world: World, seed: int, tmp_path: Path
) -> None:
    """Killed at the start, and with some topics loaded. Then two rebuilds do the rest, while
    producers resume as soon as the first has loaded their topic: the second one's state is outdated
    by then, and undoes nothing."""
    random = Random(seed)
    applications = await published(world, seed, 8)
    await forget(world, applications)
    seen: set[str] = set()
    start = random.choice((JAVA, WORKERS))
    for moment, count in ((start, 0), (WORKERS, random.randint(1, 3))):
        async with rebuilding(world.stack, tmp_path) as job:
            await job.runs(moment)
            await job.topics(count)
            await job.kill()
            seen |= loaded(job)
    async with dedup_of(world) as dedup:
        lost = [each for each in applications if await confirmed(dedup, each) == NEVER]
    assert seen
    assert not topics(lost) & seen
    assert len(lost) > 1

    for each in set(applications) - set(lost):
        await each.check_state()
    waiting = asyncio.create_task(publish(lost[-2:]))
    for each in lost[-2:]:
        await waits(world, each)
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    async with (
        rebuilding(world.stack, folders[0]) as one,
        rebuilding(world.stack, folders[1]) as other,
        never_worse(world, applications),
    ):
        assert [*await asyncio.gather(one.ended(), other.ended())] == [0, 0]
        assert loaded(one) | loaded(other) == topics(lost)
        assert {*one.outcomes.values(), *other.outcomes.values()} <= {"loaded", "current"}
        await waiting
    await whole(applications)


@asynccontextmanager
async def never_worse(world: World, applications: Sequence[Application]) -> AsyncIterator[None]:
    """Check that deduplication's marks of the topics never decrease meanwhile."""
    known = dict.fromkeys(topics(applications), NEVER)
    over = asyncio.Event()

    async def watch() -> None:
        async with dedup_of(world) as dedup:
            while not over.is_set():
                for each in applications:
                    now = await confirmed(dedup, each)
                    assert now >= known[each.topic], each.topic
                    known[each.topic] = now
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        try:
            yield
        finally:
            over.set()


# ---- damage


@pytest.mark.deep
async def test_a_damaged_entry_fails_only_its_topic_and_can_be_skipped(
    tmp_path: Path, seed: int
) -> None:
    world = World(tmp_path / "world")
    job_folder = tmp_path / "job"
    job_folder.mkdir()
    async with world.stack:
        damaged, *others = await published(world, seed, 3)
        await publish([damaged])
        await world.stack.terminate("ledger")
        await forget_everything(world)
        with damage(world, damaged) as place:
            await world.stack.run("ledger")
            await refused(world, damaged, place)

            async with rebuilding(world.stack, job_folder) as job:
                assert await job.ended() == 1
                assert loaded(job) == topics(others)
                assert job.outcomes[damaged.topic] == "failed"
                (failed,) = (each for each in job.said if each.get("outcome") == "failed")
                assert failed["reason"] == "ENTRY_CORRUPT"
                assert failed["details"]["ledger_id"] == str(place.ledger_id)
                assert failed["details"]["entry_id"] == str(place.entry_id)
                assert f"{damaged.topic} FAILED: ENTRY_CORRUPT" in job.warned
            await whole(others)
            await refused(world, damaged, place)

            async with rebuilding(world.stack, job_folder, "--skip-corrupt") as job:
                assert await job.ended() == 1
                assert loaded(job) == set(job.outcomes) == {damaged.topic}
                assert job.said[-1]["skipped"] > 0
                assert f"{damaged.topic}: {job.said[-1]['skipped']} damaged" in job.warned
            await accepted(world, damaged)
            await publish([damaged])
            await world.stack.terminate("ledger")
        await world.stack.run("ledger")  # with the damaged block restored
        await whole([damaged])


async def refusal(world: World, application: Application) -> str | None:
    """The reason why publishing to a topic is refused now, if it is."""
    async with connect(world.stack.address("ledger")) as client:
        try:
            async with client.producer(application.topic, name="late", open_timeout_s=1):
                return None
        except SeqgateError as error:
            return error.reason


async def refused(world: World, application: Application, place: Position) -> None:
    """Check that publishing to a topic that cannot be replayed is refused, with the damaged
    position."""

    async def corrupt() -> bool:
        return await refusal(world, application) == "ENTRY_CORRUPT"

    await eventually(corrupt)
    told = {
        (line["topic"], line["ledger_id"], line["entry_id"])
        for line in log_lines(world.stack, "ledger")
        if line["level"] == "critical"
    }
    assert told == {(application.topic, *place)}


async def accepted(world: World, application: Application) -> None:
    """Return when a topic has noticed that its state was loaded."""

    async def open_again() -> bool:
        return await refusal(world, application) is None

    await eventually(open_again)


@contextmanager
def damage(world: World, application: Application) -> Iterator[Position]:
    """Damage the second block of a log while the block runs, and yield its position. The ledger
    must not run."""
    file = str(world.stack.folder / "ledger" / "ledger.db")
    with apsw.Connection(file) as database:
        ((block, ledger_id, entry_id, entries),) = database.execute(
            """SELECT id, ledger_id, last_entry, entries FROM block
                WHERE topic = (SELECT id FROM topic WHERE name = ?)
                ORDER BY ledger_id, last_entry LIMIT 1 OFFSET 1""",
            (application.topic,),
        )
        database.execute("UPDATE block SET entries = ? WHERE id = ?", (bytes(len(entries)), block))
    database.close()
    yield Position(ledger_id, entry_id)
    with apsw.Connection(file) as database:
        database.execute("UPDATE block SET entries = ? WHERE id = ?", (entries, block))
    database.close()
