"""Whatever fails in a reader, or in a callback of the application's: it misses nothing."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2_grpc import (
    LedgerServiceServicer,
    add_LedgerServiceServicer_to_server,
)
from seqgate.client import Client, DropReason, Message, Reader, connect
from seqgate.client._tracing import Reading
from tests.support.depth import deep
from tests.support.fake_dispatcher import Broker
from tests.support.surprises import Boom, Plan, in_steps, is_clients, surprising
from tests.support.waiting import WITHIN_S, eventually

TOPIC = "public/default/orders"

EACH = deep(quick=6, full=1)
"""One of so many places is tried; which ones, depends on the seed."""


class Log(LedgerServiceServicer):
    """A topic in memory."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.streams = 0

    async def Read(self, request: pb.ReadRequest, context: Any) -> AsyncIterator[pb.ReadResponse]:
        self.streams += 1
        try:
            first = request.start.after.entry_id + 1 if request.start.HasField("after") else 0
            yield pb.ReadResponse(started=pb.Started())
            for entry in self.broker.log[first:]:
                yield pb.ReadResponse(entries=pb.StoredEntries(entries=[entry]))
            if request.follow:
                await asyncio.Event().wait()
        finally:
            self.streams -= 1


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Log, Client]]:
    server, log = aio.server(), Log()  # type: ignore[abstract]  # only what is called
    add_LedgerServiceServicer_to_server(log, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as client:
            yield log, client
    finally:
        await server.stop(0)


async def outcome(call: Coroutine[Any, Any, Any]) -> Any:
    """What a call of the application's returns, or Boom."""
    task = asyncio.create_task(call)
    done, _ = await asyncio.wait([task], timeout=WITHIN_S)
    assert done, "a call hangs"
    error = task.exception()
    if error is None:
        return task.result()
    assert isinstance(error, Boom), repr(error)
    return Boom


async def read_all(reader: Reader) -> list[Message]:
    """Read to the end, whatever fails."""
    found: list[Message] = []
    while True:
        one = await outcome(reader.read())
        if one is None:
            return found
        if one is not Boom:
            found.append(one)
        if many := await outcome(reader.read_many(3)):
            found += [] if many is Boom else many


async def lived(at: int | None, patch: pytest.MonkeyPatch) -> int:
    """Read a topic with an exception at this place. Returns how many places there were."""
    plan = Plan(at)
    async with serving() as (log, client):
        broker = log.broker
        broker.publish(b"0", properties={"traceparent": f"00-{1:032x}-{1:016x}-01"})
        broker.publish_large(b"x" * 30, "k", 10)
        broker.publish_large(b"gap" * 10, "k", 10, only=[0, 2])
        broker.publish_batch([b"a", b"b", b"c"], "k")
        broker.publish_large(b"gap" * 10, "k", 10, only=[0])
        broker.publish_large(b"y" * 20, "k", 10)
        broker.publish(b"last", properties={"traceparent": f"00-{2:032x}-{2:016x}-01"})
        dropped: list[Any] = []

        def on_dropped(what: Any) -> None:
            dropped.append(what)
            plan.pass_by("on_dropped")

        with patch.context() as inner:
            inner.setattr(Reading, "record", surprising(plan, Reading.record))
            reader = client.reader(TOPIC, follow=False, on_dropped=on_dropped)
            reader._spans.is_on = True
            loop = asyncio.get_running_loop()
            loop.set_task_factory(in_steps(plan))
            messages = await read_all(reader)
            await outcome(reader.close())
            loop.set_task_factory(None)
        wanted = [b"0", b"x" * 30, b"a", b"b", b"c", b"y" * 20, b"last"]
        assert [each.payload for each in messages] == wanted, plan.where
        assert [each.reason for each in dropped] == [DropReason.GAP], plan.where
        await eventually(lambda: not log.streams, f"the stream ends after {plan.where}")
        left = [task for task in asyncio.all_tasks() if is_clients(task.get_coro())]
        assert not left, plan.where
    return plan.places


async def test_a_reader_misses_nothing_whatever_fails(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    places = await lived(None, monkeypatch)
    assert places > 20
    for at in range(random.Random(seed).randrange(EACH), places, EACH):
        await lived(at, monkeypatch)


async def test_closing_the_client_first_ends_a_reader_that_waits() -> None:
    async with serving() as (log, client):
        log.broker.publish(b"0")
        reader = client.reader(TOPIC)
        found = await reader.read()
        assert found is not None
        reading = asyncio.create_task(reader.read())
        await asyncio.sleep(0)
        await client.close()
        async with asyncio.timeout(WITHIN_S):
            assert await reading is None
            await reader.close()
