"""What snapshots cost, and how soon publishing goes on after Redis has lost a topic.

A load is held against Redis alone, a snapshot against moving a cursor with the same properties, and
a publish after a loss against one after none:

    lost, with a snapshot    load the snapshot, replay what the log has after it, publish
    lost, without one        replay the whole log, publish
"""

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

from grpc import aio
from redis.asyncio import Redis

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.cursor.v1.cursor_pb2_grpc import CursorServiceStub
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dedup.v1.dedup_pb2_grpc import DedupServiceStub
from seqgate.api.entry.v1 import entry_pb2
from seqgate.client import Client, connect
from seqgate.client._channel import open_channel
from seqgate.message_id import MessageId
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.dedup.core.topic import Persisted
from seqgate.types import DEDUP_CURSOR, Position, TopicName
from tools.bench import logs
from tools.bench.bench import Bench
from tools.bench.figures import ROUNDS, BenchError, Measurement, Round, latency, rate, rounds_of
from tools.bench.logs import INCARNATION, LEDGER_ID, Logs
from tools.stack.stack import Stack

PRODUCERS: Final = (10, 1_000, 10_000, 100_000)
"""How many producers a topic has whose snapshot is taken."""

LOADED_MAX: Final = 100_000
"""How many states a load has: as many as a topic of the group `rebuild` has, or as it may have."""

TAILS: Final = (0, 1_000, 10_000)  # entries of the log after the snapshot
WHOLE: Final = (10_000, 100_000)  # entries of the log, without a snapshot
PAGE_PRODUCERS: Final = 5_000  # producers in a message of LoadState
REDIS_TIMEOUT_S: Final = 30.0

PATIENT: Final = {
    "SEQGATE_DEDUP_REDIS_TIMEOUT_S": f"{REDIS_TIMEOUT_S:.0f}",
    "SEQGATE_DEDUP_CURSOR_TIMEOUT_S": f"{REDIS_TIMEOUT_S:.0f}",
}
"""The largest states are to be measured, and not refused, also where others use the machine."""

CONFIRMED_WITHIN_S: Final = 30.0  # until what is stored is confirmed
POLICIES: Final = """[cluster]
max_producers = 100000
producer_inactivity_timeout_minutes = 0
snapshot_entries = 0
snapshot_interval_s = 0
"""
"""Snapshots are taken when they are asked for, and after a load."""

NOTHING_LOST: Final = "publish, nothing lost"


def loading(states: int) -> str:
    """The name of the figure for so many states."""
    return f"LoadState, {states:,} states a call"


async def recovery(bench: Bench) -> list[Measurement]:
    """Loads, snapshots, recoveries."""
    lost = [_Lost(snapshot=True, replayed=bench.scaled(each)) for each in TAILS]
    lost += [_Lost(snapshot=False, replayed=bench.scaled(each)) for each in WHOLE]
    async with (
        bench.another(
            logs=[each.logs for each in lost], policies=POLICIES, environment=PATIENT
        ) as own,
        _services(own.stack) as services,
    ):
        found = []
        for states in (logs.PRODUCERS, bench.scaled(LOADED_MAX)):
            found += await _loads(bench, services, states)
        for producers in PRODUCERS:
            found += await _snapshots(bench, services, bench.scaled(producers))
        return [*found, *await _recoveries(bench, services, lost)]


class _Services(NamedTuple):
    """Stubs and clients of the stack."""

    dedup: Any
    cursor: Any
    redis: Redis
    client: Client


@asynccontextmanager
async def _services(stack: Stack) -> AsyncIterator[_Services]:
    async with (
        open_channel(stack.address("dedup")) as dedup,
        open_channel(stack.address("cursor")) as cursor,
        connect_redis(stack.redis_url, timeout_s=REDIS_TIMEOUT_S, connections_max=1) as redis,
        connect(stack.address("ledger")) as client,
    ):
        stubs = (DedupServiceStub(dedup), CursorServiceStub(cursor))
        yield _Services(*stubs, redis, client)


# ---- loads


async def _loads(bench: Bench, services: _Services, states: int) -> list[Measurement]:
    """A load in the place of the one before, by the service and by its adapter alone."""
    marks = [(logs.producer(number), number) for number in range(states)]
    now_ms = time.time_ns() // 1_000_000
    store = RedisStateStore(services.redis)
    alone = TopicName.parse(f"bench/load/{states}-alone")
    persisted = [Persisted(producer, highest, None, now_ms) for producer, highest in marks]

    async def run_script() -> None:
        through = Position(LEDGER_ID, states)
        await store.load(alone, INCARNATION, through, persisted, replacing=True, taken_ms=None)

    pages = list(_pages(f"bench/load/{states}", states, marks))
    script = f"Redis load script, {states:,} states a call"
    rounds = await rounds_of(run_script, bench.seconds)
    limit = rate(script, "states", rounds, each=states)
    rounds = await rounds_of(lambda: _load(services, pages), bench.seconds)
    return [limit, rate(loading(states), "states", rounds, limit, each=states)]


async def _load(services: _Services, pages: Sequence[dedup_pb2.LoadStateRequest]) -> None:
    answer = await services.dedup.LoadState(iter(pages))
    if not answer.loaded or answer.left_out:
        raise BenchError(f"a load was answered with {answer}")


def _pages(
    topic: str, last: int, marks: Iterable[tuple[str, int]]
) -> Iterator[dedup_pb2.LoadStateRequest]:
    """What LoadState takes; the state covers the log up to the entry `last`."""
    through = entry_pb2.Position(ledger_id=LEDGER_ID, entry_id=last)
    header = dedup_pb2.LoadHeader(
        topic=topic, incarnation=INCARNATION, through=through, replace=True
    )
    yield dedup_pb2.LoadStateRequest(header=header)
    now_ms = time.time_ns() // 1_000_000
    states = [
        dedup_pb2.ProducerState(name=producer, highest_sequence_id=highest, last_active=now_ms)
        for producer, highest in marks
    ]
    for first in range(0, len(states), PAGE_PRODUCERS):
        yield dedup_pb2.LoadStateRequest(producers=states[first : first + PAGE_PRODUCERS])


# ---- snapshots


async def _snapshots(bench: Bench, services: _Services, producers: int) -> list[Measurement]:
    """A snapshot after another, of a state that does not change."""
    topic, bare = f"bench/snapshot/{producers}", f"bench/snapshot/{producers}-bare"
    marks = [(logs.producer(number), number) for number in range(producers)]
    await _load(services, list(_pages(topic, producers, marks)))

    async def take() -> None:
        request = dedup_pb2.TakeSnapshotRequest(topic=topic)
        if (await services.dedup.TakeSnapshot(request)).producers != producers:
            raise BenchError(f"the snapshot of {topic} lacks producers")

    taken = await rounds_of(take, bench.seconds)
    snapshot = cursor_pb2.GetCursorRequest(topic=topic, name=DEDUP_CURSOR)
    cursor = (await services.cursor.GetCursor(snapshot)).cursor
    await services.cursor.CreateCursor(
        cursor_pb2.CreateCursorRequest(topic=bare, name=DEDUP_CURSOR)
    )
    move = cursor_pb2.MarkDeleteRequest(
        topic=bare,
        name=DEDUP_CURSOR,
        position=cursor.mark_delete,
        properties=cursor.mark_delete_properties,
    )
    moved = await rounds_of(lambda: services.cursor.MarkDelete(move), bench.seconds)
    noun = f"{producers:,} producers"
    limit = latency(f"MarkDelete with the properties of {noun}", 0.5, moved)
    return [limit, latency(f"TakeSnapshot, {noun}", 0.5, taken, limit)]


# ---- recoveries


class _Lost(NamedTuple):
    """A topic that Redis loses: whether there is a snapshot, and how many entries are replayed."""

    snapshot: bool
    replayed: int

    @property
    def logs(self) -> Logs:
        """Its log, of which the snapshot covers the first part."""
        covered = max(logs.PRODUCERS, self.replayed) if self.snapshot else 0
        kind = "snapshot" if self.snapshot else "whole"
        return Logs(f"bench/{kind}/{self.replayed}-", 1, covered + self.replayed)

    @property
    def topic(self) -> str:
        """Its name."""
        return f"{self.logs.prefix}0"

    @property
    def name(self) -> str:
        """Of the figure."""
        if self.snapshot:
            return f"publish after a loss, a snapshot and {self.replayed:,} entries"
        return f"publish after a loss, no snapshot, {self.replayed:,} entries"


async def _recoveries(
    bench: Bench, services: _Services, lost: Sequence[_Lost]
) -> list[Measurement]:
    async with services.client.producer("bench/recovery/nothing-lost") as producer:
        rounds = await rounds_of(lambda: producer.send(b""), bench.seconds)
    nothing = latency(NOTHING_LOST, 0.5, rounds)
    found = [nothing]
    for each in lost:
        rounds = [Round(1, after_s, [after_s]) async for after_s in _losses(services, each)]
        found.append(latency(each.name, 0.5, rounds, nothing))
    return found


async def _losses(services: _Services, lost: _Lost) -> AsyncIterator[float]:
    """How long the publish takes after each loss, in seconds. What was published after the losses
    before is replayed as well: an entry each."""
    key = topic_key(TopicName.parse(lost.topic))
    async with services.client.producer(lost.topic, name="bench") as producer:
        receipt = await producer.send(b"")
        for _ in range(ROUNDS):
            if lost.snapshot:
                await _snapshot(services, lost, receipt.message_id)
            if not await services.redis.delete(key):
                raise BenchError(f"there is no {key}")
            began = time.perf_counter()
            receipt = await producer.send(b"")
            yield time.perf_counter() - began


async def _snapshot(services: _Services, lost: _Lost, newest: MessageId) -> None:
    """Have a snapshot that leaves so many entries to be replayed."""
    last = newest.entry_id
    if lost.replayed:
        last = lost.logs.entries - lost.replayed - 1
        there = cursor_pb2.DeleteCursorRequest(topic=lost.topic, name=DEDUP_CURSOR)
        with suppress(aio.AioRpcError):  # the first time, it is not
            await services.cursor.DeleteCursor(there)
        await _load(services, list(_pages(lost.topic, last, logs.highest(last + 1))))
    request = dedup_pb2.TakeSnapshotRequest(topic=lost.topic)
    until = time.monotonic() + CONFIRMED_WITHIN_S
    while (await services.dedup.TakeSnapshot(request)).position.entry_id != last:
        if time.monotonic() > until:  # what is stored is confirmed a little later
            raise BenchError(f"there is no snapshot of {lost.topic} at {last}")
