"""What snapshots cost, and how soon publishing goes on after Redis has lost a topic.

A load is held against Redis alone, a snapshot against moving a cursor with the same properties, and
a publish after a loss against one after none:

    lost, with a snapshot    load the snapshot, replay what the log has after it, publish
    lost, without one        replay the whole log, publish
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from grpc import aio
from redis.asyncio import Redis

from seqgate.api.common.v1 import common_pb2
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.cursor.v1.cursor_pb2_grpc import CursorServiceStub
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dedup.v1.dedup_pb2_grpc import DedupServiceStub
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.internal.dedup.v1.writer_pb2_grpc import DedupWriterServiceStub
from seqgate.client import Producer, Receipt, connect
from seqgate.client._channel import open_channel
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.dedup.core.topic import Persisted
from seqgate.times import timestamp
from seqgate.types import DEDUP_CURSOR, Position, TopicName
from tools.bench import logs
from tools.bench.bench import Bench
from tools.bench.figures import MEDIAN, Measurement, latency
from tools.bench.logs import INCARNATION, LEDGER_ID, Logs
from tools.bench.rounds import ROUNDS, BenchError, Meter, Repeated, Took, check, one_round

PRODUCERS: Final = (10, 1_000, 10_000, 100_000)  # of a topic whose snapshot is taken
LOADED_MAX: Final = 100_000  # states of a load: as many as a topic may have
TAILS: Final = (0, 1_000, 10_000)  # entries of the log after the snapshot
WHOLE: Final = (10_000, 100_000)  # entries of the log, without a snapshot
PAGE_PRODUCERS: Final = 5_000  # producers in a message of LoadState
REDIS_TIMEOUT_S: Final = 30.0

PATIENT: Final = {
    "SEQGATE_DEDUP_REDIS_TIMEOUT_S": f"{REDIS_TIMEOUT_S:.0f}",
    "SEQGATE_DEDUP_CURSOR_TIMEOUT_S": f"{REDIS_TIMEOUT_S:.0f}",
}
"""The largest states are to be measured, and not refused, also where others use the machine."""

CONFIRMED_WITHIN_S: Final = 30.0  # until stored entries are confirmed
POLICIES: Final = """[cluster]
max_producers = 100000
producer_inactivity_timeout_minutes = 0
snapshot_entries = 0
snapshot_interval_s = 0
"""
"""Snapshots are taken when they are asked for, and after a LoadState."""


def loading(states: int) -> str:
    return f"LoadState, {states:,} states a call"


async def recovery(bench: Bench) -> list[Measurement]:
    losses: list[Loss] = []
    for tail in map(bench.scaled, TAILS):
        name = f"publish after a loss, a snapshot and {tail:,} entries"
        entries = max(logs.PRODUCERS, tail) + tail
        losses.append(Loss(name, Logs(f"bench/snapshot/{tail}-", 1, entries), tail))
    for whole in map(bench.scaled, WHOLE):
        name = f"publish after a loss, no snapshot, {whole:,} entries"
        losses.append(Loss(name, Logs(f"bench/whole/{whole}-", 1, whole)))
    stored = [each.logs for each in losses]
    async with (
        bench.another(logs=stored, policies=POLICIES, environment=PATIENT) as own,
        open_channel(own.address("dedup")) as dedup,
        open_channel(own.address("cursor")) as cursor,
        connect_redis(own.stack.redis_url, timeout_s=REDIS_TIMEOUT_S, connections_max=1) as redis,
    ):
        work = _Recovering(own, dedup, cursor, redis)
        found = []
        for states in (logs.PRODUCERS, bench.scaled(LOADED_MAX)):
            found += await work.loads(states)
        for producers in PRODUCERS:
            found += await work.snapshots(bench.scaled(producers))
        return [*found, *await work.recoveries(losses)]


class Loss(NamedTuple):
    """A topic that Redis loses. `tail`: how many entries its log has after the snapshot, if any."""

    name: str
    logs: Logs
    tail: int | None = None

    @property
    def topic(self) -> str:
        return f"{self.logs.prefix}0"


class _Recovering:
    """What is measured, on a stack."""

    def __init__(self, bench: Bench, dedup: aio.Channel, cursor: aio.Channel, redis: Redis) -> None:
        self._bench = bench
        self._dedup = DedupServiceStub(dedup)
        self._dedup_writer = DedupWriterServiceStub(dedup)
        self._cursor = CursorServiceStub(cursor)
        self._redis = redis

    async def loads(self, states: int) -> list[Measurement]:
        """A load in the place of the one before, by the service and by its adapter alone."""
        topic, producers = f"bench/load/{states}", _producers(states)
        through = common_pb2.Position(ledger_id=LEDGER_ID, entry_id=states)
        header = writer_pb2.LoadHeader(
            topic=topic, incarnation=INCARNATION, through=through, replace=True
        )
        pages = [writer_pb2.LoadStateRequest(header=header)]
        for first in range(0, states, PAGE_PRODUCERS):
            page = writer_pb2.LoadStateRequest()
            for name, highest, _, active_ms in producers[first : first + PAGE_PRODUCERS]:
                active = timestamp(active_ms)
                page.producers.add(name=name, highest_sequence_id=highest, last_active=active)
            pages.append(page)

        async def load() -> None:
            answer = await self._dedup_writer.LoadState(iter(pages))
            if not answer.loaded or answer.left_out:
                raise BenchError(f"a load was answered with {answer}")

        alone = partial(self._load, f"{topic}-alone", states, producers)
        script, units = f"Redis load script, {states:,} states a call", {"states": states}
        cases = [
            Repeated(script, alone, units=units),
            Repeated(loading(states), load, units=units, limits=[script]),
        ]
        return await self._bench.measure(cases)

    async def snapshots(self, producers: int) -> list[Measurement]:
        """A snapshot after another, of a state that does not change."""
        topic, bare = f"bench/snapshot/{producers}", f"bench/snapshot/{producers}-bare"
        await self._load(topic, producers, _producers(producers))

        async def take() -> None:
            request = dedup_pb2.TakeSnapshotRequest(topic=topic)
            check((await self._dedup.TakeSnapshot(request)).producers, producers)

        await take()
        snapshot = cursor_pb2.GetCursorRequest(topic=topic, cursor=DEDUP_CURSOR)
        cursor = (await self._cursor.GetCursor(snapshot)).cursor
        create = cursor_pb2.CreateCursorRequest(topic=bare, cursor=DEDUP_CURSOR)
        await self._cursor.CreateCursor(create)
        move = cursor_pb2.MarkDeleteRequest(
            topic=bare,
            cursor=DEDUP_CURSOR,
            position=cursor.mark_delete,
            properties=cursor.mark_delete_properties,
        )
        noun, median = f"{producers:,} producers", [MEDIAN]
        moving = f"MarkDelete with the properties of {noun}"
        cases = [
            Repeated(moving, partial(self._cursor.MarkDelete, move), units={}, shares=median),
            Repeated(f"TakeSnapshot, {noun}", take, units={}, shares=median, limits=[moving]),
        ]
        return await self._bench.measure(cases)

    async def recoveries(self, losses: Iterable[Loss]) -> list[Measurement]:
        """A publish after each loss, beside one after none."""
        async with connect(self._bench.address("ledger")) as client:
            async with client.producer("bench/recovery/nothing-lost") as producer:
                send = partial(producer.send, b"")
                case = Repeated("publish, nothing lost", send, units={}, shares=[MEDIAN])
                (nothing,) = found = await self._bench.measure([case])
            for loss in losses:
                async with client.producer(loss.topic, name="bench") as producer:
                    lose = partial(self._lose, loss, producer)
                    rounds = [await one_round(lose, 0, Meter({})) for _ in range(ROUNDS)]
                found.append(latency(loss.name, MEDIAN, rounds, nothing))
        return found

    async def _lose(self, loss: Loss, producer: Producer) -> Took:
        """Lose a topic's state, and publish, which is timed. What was published after the losses
        before is replayed as well: an entry each."""
        receipt = await producer.send(b"")
        if loss.tail is not None:
            await self._snapshot(loss.topic, loss.logs.entries, loss.tail, receipt)
        check(await self._redis.delete(topic_key(TopicName.parse(loss.topic))), 1)
        began = time.perf_counter()
        await producer.send(b"")
        return Took(time.perf_counter() - began)

    async def _snapshot(self, topic: str, entries: int, tail: int, last: Receipt) -> None:
        """Have a snapshot at the log's last entry, or one that leaves entries to be replayed.
        Stored entries are confirmed a little later, which moves a state loaded meanwhile."""
        covered = entries - tail - 1 if tail else last.message_id.entry_id
        request = dedup_pb2.TakeSnapshotRequest(topic=topic)
        until = time.monotonic() + CONFIRMED_WITHIN_S
        while time.monotonic() < until:
            if tail:
                there = cursor_pb2.DeleteCursorRequest(topic=topic, cursor=DEDUP_CURSOR)
                with suppress(aio.AioRpcError):  # the first time, it is not
                    await self._cursor.DeleteCursor(there)
                await self._load(topic, covered, _states(logs.highest(covered + 1)))
            if (await self._dedup.TakeSnapshot(request)).position.entry_id == covered:
                return
        raise BenchError(f"there is no snapshot of {topic} at {covered}")

    async def _load(self, topic: str, last: int, states: list[Persisted]) -> None:
        """Load a state that covers the log up to the entry `last`, without the service."""
        name, through = TopicName.parse(topic), Position(LEDGER_ID, last)
        store = RedisStateStore(self._redis)
        await store.load(name, INCARNATION, through, states, replacing=True, taken_ms=None)


def _producers(count: int) -> list[Persisted]:
    return _states((logs.producer(number), number) for number in range(count))


def _states(marks: Iterable[tuple[str, int]]) -> list[Persisted]:
    now_ms = time.time_ns() // 1_000_000
    return [Persisted(producer, highest, None, now_ms) for producer, highest in marks]
