"""More work than a dependency serves makes everything slower, and nothing fail.

For each pair of services, many calls at once to a dependency that serves one after the other; at
full depth at a tenth of the speed that would serve all of them within the time limit of one.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2_grpc
from seqgate.api.ledger.v1 import ledger_pb2_grpc
from seqgate.api.ledger.v1.ledger_pb2 import GetTopicRequest
from seqgate.client import connect
from seqgate.errors import SeqgateError
from seqgate.services.console.calls import calls_of
from seqgate.services.console.config import ConsoleConfig
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.memory import MemoryStateStore
from seqgate.services.dedup.adapters.policy_file import PolicyFile
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.dedup.policies import DurablePolicies
from seqgate.services.dedup.service import Deduplication
from seqgate.services.dedup.snapshots import Snapshots
from seqgate.services.dedup.writer_servicer import DedupWriterServicer
from seqgate.services.deduplication import Claim, Judged, ProducerClaims, Writer
from seqgate.services.dispatcher.adapters.cursors import SubscriptionCursors
from seqgate.services.dispatcher.adapters.filters import GrpcFilters
from seqgate.services.dispatcher.adapters.ledger import GrpcLog
from seqgate.services.dispatcher.core.effects import Persist
from seqgate.services.dispatcher.ports import Rules
from seqgate.services.errors import DomainError, ServiceBusy
from seqgate.services.ledger.adapters.dedup import GrpcDeduplicator
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.ports import DedupUnavailable
from seqgate.services.ledger.service import Ledger
from seqgate.services.ledger.servicer import EntryLimits, LedgerServicer
from seqgate.services.runtime import deadline
from seqgate.services.runtime.backoff import Backoff
from seqgate.services.runtime.channels import (
    CALLS_AT_ONCE,
    UNARY_TIMEOUT_S,
    following_channel,
    peer_channel,
)
from seqgate.services.runtime.cursors import GrpcCursors, MemoryCursors, NoCursors
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.limiter import Limiter
from seqgate.services.runtime.postgres import Server, open_postgres
from seqgate.services.runtime.sqlite import connections
from seqgate.types import TopicName
from tests.support.depth import deep, times
from tests.support.postgres_server import PostgresServer, empty_database
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually
from tools.stack.forwarder import CHUNK_BYTES, Forwarder

COUNT = times(quick=150, full=1_000)
"""The number of topics, subscriptions or producers."""

MANY = 10 * CALLS_AT_ONCE

LIMIT_S = deep(quick=30.0, full=2.0)
"""The time limit of a call."""

CALL_S = deep(quick=0.005, full=0.02)
"""How long the dependency takes for each call."""

PATIENCE_S = 120.0


def topic(number: int) -> TopicName:
    return TopicName.parse(f"public/default/t{number}")


class Slow:
    """Serves one call after the other."""

    def __init__(self, call_s: float = CALL_S) -> None:
        self.call_s = call_s
        self.served: Counter[str] = Counter()
        self.most = 0
        """The most calls that were here at a time."""
        self._here = 0
        self._one = asyncio.Lock()

    async def turn(self, what: str = "") -> None:
        self._here += 1
        self.most = max(self.most, self._here)
        try:
            async with self._one:
                self.served[what] += 1
                await asyncio.sleep(self.call_s)
        finally:
            self._here -= 1

    def was_asked_once(self, times: int = COUNT) -> bool:
        """Whether nearly all calls were answered the first time."""
        return times <= self.served.total() <= 1.1 * times and self.most <= CALLS_AT_ONCE


class SlowPeer(grpc.GenericRpcHandler):
    """Answers any unary call with an empty message, slowly."""

    def __init__(self, call_s: float) -> None:
        self.slow = Slow(call_s)
        self.order: list[str] = []

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method.rpartition("/")[2]

        async def answer(_: bytes, context: Any) -> bytes:
            del context
            self.order.append(method)
            await self.slow.turn(method)
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@asynccontextmanager
async def listening(add: Callable[[aio.Server], None]) -> AsyncIterator[str]:
    server = aio.server()
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def slow_peer(call_s: float = CALL_S) -> AsyncIterator[tuple[str, SlowPeer]]:
    peer = SlowPeer(call_s)
    async with listening(lambda server: server.add_generic_rpc_handlers((peer,))) as address:
        yield address, peer


async def answered(call: Callable[[], Awaitable[object]]) -> None:
    """Repeat a call until it is answered, as services do."""
    backoff = Backoff(0.05, 1.0)
    while True:
        try:
            await call()
        except (DomainError, SeqgateError):
            await asyncio.sleep(backoff.next_s())
        else:
            return


async def all_of(call: Callable[[int], Awaitable[object]], count: int = COUNT) -> list[object]:
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.gather(*(call(number) for number in range(count)))


PAIRS: dict[str, Callable[[Any], Callable[[int], Awaitable[object]]]] = {
    "dedup asks the cursor service for a policy": lambda channel: (
        lambda number: GrpcCursors(channel, timeout_s=LIMIT_S).get(topic(number), "c", whole=False)
    ),
    "the ledger asks the cursor service before a trim": lambda channel: (
        lambda number: GrpcCursors(channel, timeout_s=LIMIT_S).mark_deletes(topic(number))
    ),
    "the dispatcher takes leases": lambda channel: (
        lambda number: SubscriptionCursors(channel, timeout_s=LIMIT_S).acquire(
            topic(number), "s", "me:1", 1_000
        )
    ),
    "the dispatcher makes acknowledgements durable": lambda channel: (
        lambda number: SubscriptionCursors(channel, timeout_s=LIMIT_S).persist(
            topic(number), "s", Persist(0, (), (), ()), 1
        )
    ),
    "the dispatcher asks the ledger for the end of a log": lambda channel: (
        lambda number: GrpcLog(channel, timeout_s=LIMIT_S).ends(topic(number))
    ),
    "the ledger reports producers to dedup": lambda channel: (
        lambda number: GrpcDeduplicator(channel, timeout_s=LIMIT_S).keep(topic(number), ["p"])
    ),
    "the ledger asks dedup for snapshots": lambda channel: (
        lambda number: GrpcDeduplicator(channel, timeout_s=LIMIT_S).snapshot(topic(number))
    ),
}


def limit_of(pair: str) -> float:
    """The time limit of the pair's calls."""
    return UNARY_TIMEOUT_S if pair.startswith("the ledger") and "dedup" in pair else LIMIT_S


@pytest.mark.parametrize("pair", PAIRS)
async def test_many_calls_to_a_slow_peer_are_all_answered_once(pair: str) -> None:
    async with (
        slow_peer(CALL_S * max(1.0, limit_of(pair) / LIMIT_S)) as (address, peer),
        following_channel(address, keepalive_s=10) as channel,
    ):
        call = PAIRS[pair](channel)
        await all_of(lambda number: answered(lambda: call(number)))
    assert peer.slow.was_asked_once()


async def test_the_console_waits_for_a_slow_service() -> None:
    async with slow_peer() as (address, peer):
        calls = calls_of(ConsoleConfig(ledger_target=address, call_timeout_s=LIMIT_S))
        try:
            await all_of(
                lambda number: answered(lambda: calls.call(GetTopicRequest(topic=f"t/n/{number}")))
            )
        finally:
            await calls.close()
    assert peer.slow.was_asked_once()


async def test_a_lease_is_renewed_while_acknowledgements_wait() -> None:
    async with (
        slow_peer() as (address, peer),
        following_channel(address, keepalive_s=10) as channel,
    ):
        cursors = SubscriptionCursors(channel, timeout_s=LIMIT_S)
        bulk = [
            asyncio.create_task(cursors.persist(topic(each), "s", Persist(0, (), (), ()), 1))
            for each in range(MANY)
        ]
        await eventually(lambda: peer.slow.served.total() > 0)
        await all_of(lambda each: cursors.renew(topic(each), "s", "me:1", 1, 1_000), 10)
        assert peer.slow.served["Acknowledge"] < MANY / 2
        for each in bulk:
            each.cancel()
        await asyncio.wait(bulk)


async def test_a_call_whose_caller_has_gone_is_not_sent() -> None:
    async with (
        slow_peer() as (address, peer),
        following_channel(address, keepalive_s=10) as channel,
    ):
        cursors = GrpcCursors(channel, timeout_s=LIMIT_S)
        calls = [
            asyncio.create_task(cursors.get(topic(each), "c", whole=False)) for each in range(MANY)
        ]
        await eventually(lambda: peer.slow.served.total() > 0)
        for each in calls[2 * CALLS_AT_ONCE :]:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert len(peer.order) < MANY / 2


class SlowFilters(grpc.GenericRpcHandler):
    """Takes chains, slowly."""

    def __init__(self) -> None:
        self.slow = Slow()

    def service(self, handler_call_details: Any) -> Any:
        del handler_call_details
        return grpc.stream_stream_rpc_method_handler(
            self._evaluate,
            request_deserializer=filter_pb2.EvaluateRequest.FromString,
            response_serializer=filter_pb2.EvaluateResponse.SerializeToString,
        )

    async def _evaluate(
        self, requests: AsyncIterator[filter_pb2.EvaluateRequest], context: Any
    ) -> AsyncIterator[filter_pb2.EvaluateResponse]:
        del context
        async for request in requests:
            await self.slow.turn(request.WhichOneof("request") or "")
            yield filter_pb2.EvaluateResponse(
                request_id=request.request_id, chain_set=filter_pb2.ChainSet()
            )


async def test_many_subscriptions_wait_for_the_verdicts_of_a_slow_filter_service() -> None:
    slow = SlowFilters()
    async with (
        listening(lambda server: server.add_generic_rpc_handlers((slow,))) as address,
        peer_channel(address, keepalive_s=10) as channel,
    ):
        filters = GrpcFilters(channel, timeout_s=LIMIT_S)
        lines = [filters.line() for _ in range(COUNT)]
        rules = Rules((), "t/n/t", ())
        await all_of(lambda number: answered(lambda: lines[number].reads(rules)))
        for each in lines:
            await each.close()
    assert slow.slow.was_asked_once()  # no chain was sent again


class SlowLink(Forwarder):
    """A slow Redis: it serves the requests of all connections one after the other."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.slow = Slow(CALL_S / 2)

    async def there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(CHUNK_BYTES):
            await self.slow.turn()
            writer.write(some)
            await writer.drain()


async def test_many_topics_wait_for_a_slow_redis(redis: RedisServer) -> None:
    async def judged(number: int) -> None:
        claims = [ProducerClaims("p", (Claim(0, 0, None),))]
        name = TopicName.parse(f"overload/redis/t{number}")
        outcome = await store.admit(
            name, Writer(1, 1, None), None, claims, now_ms=1, max_producers=10
        )
        assert isinstance(outcome, Judged)

    async with (
        SlowLink(redis.port) as link,
        connect_redis(f"redis://{link.address}/0", timeout_s=LIMIT_S, connections_max=32) as client,
    ):
        store = RedisStateStore(client)
        await all_of(judged)
        assert link.connections <= 32


async def test_redis_is_not_asked_for_whom_nobody_waits(redis: RedisServer) -> None:
    async with (
        SlowLink(redis.port) as link,
        connect_redis(f"redis://{link.address}/0", timeout_s=LIMIT_S, connections_max=1) as client,
    ):
        store = RedisStateStore(client)
        await store.policy_token()
        link.slow.served.clear()
        deadline.set_remaining_s(5 * CALL_S)
        asked = [asyncio.create_task(store.policy_token()) for _ in range(COUNT)]
        deadline.set_remaining_s(None)
        ends = await asyncio.gather(*asked, return_exceptions=True)
        refused = [each for each in ends if isinstance(each, Exception)]
        assert all(isinstance(each, ServiceBusy) for each in refused)
        assert len(refused) > COUNT / 2
        assert link.slow.served.total() == COUNT - len(refused)


class SlowState(MemoryStateStore):
    def __init__(self) -> None:
        super().__init__()
        self.slow = Slow(CALL_S / 2)

    async def admit(self, *given: Any, **more: Any) -> Any:
        await self.slow.turn("admit")
        return await super().admit(*given, **more)

    async def confirm(self, *given: Any) -> Any:
        await self.slow.turn("confirm")
        return await super().confirm(*given)

    async def rollback(self, *given: Any) -> Any:
        await self.slow.turn("rollback")
        return await super().rollback(*given)

    async def keep(self, *given: Any) -> None:
        await self.slow.turn("keep")
        await super().keep(*given)


class Counting(GrpcDeduplicator):
    """Counts failed calls."""

    failed = 0

    async def _ask(self, *given: Any) -> Any:
        try:
            return await super()._ask(*given)
        except DedupUnavailable:
            self.failed += 1
            raise


@asynccontextmanager
async def dedup_over(state: SlowState) -> AsyncIterator[str]:
    """The address of a dedup service on this state."""
    policies = DurablePolicies(PolicyFile(None), NoCursors(), state)
    async with asyncio.TaskGroup() as tasks:
        snapshots = Snapshots(state, NoCursors(), policies, tasks)
        servicer = DedupWriterServicer(Deduplication(state, policies, snapshots), Drain())
        async with listening(
            lambda server: writer_pb2_grpc.add_DedupWriterServiceServicer_to_server(
                servicer, server
            )
        ) as address:
            yield address


@asynccontextmanager
async def ledger_over(dedup: Counting) -> AsyncIterator[str]:
    """The address of a ledger service with this deduplicator."""
    config = LedgerConfig(open_timeout_s=PATIENCE_S)
    async with asyncio.TaskGroup() as tasks:
        ledger = Ledger(config, MemoryLedgerStore(), dedup, MemoryCursors(), tasks)
        servicer = LedgerServicer(ledger, Drain(), EntryLimits(1 << 20, 1 << 20, 10))
        async with listening(
            lambda server: ledger_pb2_grpc.add_LedgerServiceServicer_to_server(servicer, server)
        ) as address:
            yield address
        await ledger.finish(1)


async def test_many_producers_open_and_publish_at_once_over_a_slow_dedup_service() -> None:
    state, stored = SlowState(), Counter[str]()

    async def publish(client: Any, number: int) -> None:
        how = {"send_timeout_s": None, "open_timeout_s": PATIENCE_S}
        async with client.producer(str(topic(number)), name="p", **how) as producer:
            for _ in range(2):
                await producer.send(b"x")
                stored[str(number)] += 1

    limiter = Limiter(CALLS_AT_ONCE)
    async with (
        dedup_over(state) as address,
        peer_channel(address, keepalive_s=10, limiter=limiter) as channel,
    ):
        dedup = Counting(channel, timeout_s=LIMIT_S / 2, limiter=limiter)
        async with ledger_over(dedup) as ledger, connect(ledger) as client:
            await all_of(lambda number: publish(client, number))
        dedup.close()
    assert stored.total() == 2 * COUNT
    assert dedup.failed <= COUNT / 10
    assert state.slow.served["rollback"] <= COUNT + dedup.failed  # each topic is aligned once
    assert state.slow.most <= CALLS_AT_ONCE


def _note(done: list[int], number: int, _: Any) -> None:
    done.append(number)


async def test_sqlite_drops_what_waits_for_nobody(tmp_path: Path) -> None:
    done: list[int] = []
    holding, over = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        holding.set()
        over.wait(PATIENCE_S)

    async with connections(tmp_path / "db", readers=1, prepare=lambda _: None) as opened:
        first = asyncio.create_task(opened.write(hold))
        await eventually(holding.is_set)
        writes = [
            asyncio.create_task(opened.write(partial(_note, done, each))) for each in range(COUNT)
        ]
        await asyncio.sleep(0)
        for each in writes[::2]:
            each.cancel()
        await asyncio.wait(writes[::2])
        over.set()
        await asyncio.gather(first, *writes[1::2])
    assert done == list(range(1, COUNT, 2))


async def test_postgresql_drops_what_waits_for_nobody(postgres: PostgresServer) -> None:
    done: list[int] = []
    url = await empty_database(postgres, "overload")
    async with open_postgres(Server(url, writers=1)) as database:
        first = asyncio.create_task(database.change("SELECT pg_sleep(0.05)"))
        await asyncio.sleep(0)
        writes = [
            asyncio.create_task(database.write(partial(_note, done, each))) for each in range(COUNT)
        ]
        await asyncio.sleep(0)
        for each in writes[::2]:
            each.cancel()
        await asyncio.wait(writes[::2])
        await asyncio.gather(first, *writes[1::2])
    assert done == list(range(1, COUNT, 2))
