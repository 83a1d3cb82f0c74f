"""Unread pages of all readers share one limit, and a slow reader is ended when others wait."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.services.errors import DomainError
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.service import Ledger
from seqgate.services.ledger.servicer import EntryLimits, LedgerServicer
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.room import Room
from seqgate.types import Position, TopicName
from tests.simulation.defects import find
from tests.support.entries import single
from tests.support.remembering import RememberingDeduplicator

TOPIC = TopicName.parse("public/default/t")
BUDGET_BYTES = 24 * 1024 * 1024
"""Holds two pages of 8 MiB, and some of 1 MiB."""

COUNT = 50
PAYLOAD = b"x" * 200_000
METADATA = entry_pb2.EntryMetadata(producer_name="p").SerializeToString()


class Caller:
    """A reader's end of a stream, which can be blocked."""

    def __init__(self) -> None:
        self.entries = self.responses = 0
        self.takes = asyncio.Event()
        self.task: asyncio.Task[None]
        self._over: list[Callable[[Any], None]] = []

    async def write(self, response: Any) -> None:
        kind = response.WhichOneof("response")
        if kind != "started":
            await self.takes.wait()
        self.responses += 1
        self.entries += len(response.entries.entries) if kind == "entries" else 0

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._over.append(callback)

    def call(self, method: Any, request: Any) -> "Caller":
        async def call() -> None:
            try:
                await method(request, self)
            finally:
                for each in self._over:
                    each(self)

        self.task = asyncio.create_task(call())
        return self

    async def all(self) -> int:
        """The number of entries received, once the stream has ended."""
        async with asyncio.timeout(20):
            await self.task
        return self.entries


class Parts(NamedTuple):
    """A ledger's servicer over memory."""

    servicer: Any
    ledger: Ledger

    @property
    def room(self) -> Room:
        return self.ledger.readers.room

    def read(self, count: int = 1) -> list[Caller]:
        """Readers of the whole topic."""
        request = pb.ReadRequest(
            topic=str(TOPIC), start=common_pb2.Start(earliest=common_pb2.Earliest())
        )
        return [Caller().call(self.servicer.Read, request) for _ in range(count)]


@asynccontextmanager
async def reading(
    payload: bytes = PAYLOAD, count: int = COUNT, **settings: Any
) -> AsyncIterator[Parts]:
    config = LedgerConfig(
        **{"read_bytes_max": BUDGET_BYTES, "max_message_bytes": 200_000, **settings}
    )
    async with asyncio.TaskGroup() as tasks:
        store = MemoryLedgerStore()
        dedup = RememberingDeduplicator()
        ledger = Ledger(config, store, dedup, MemoryCursors(), tasks)
        log = await store.take(TOPIC, create=True)
        entries = [single(n, payload=payload)._replace(metadata=METADATA) for n in range(count)]
        await store.append(TOPIC, log.ledger_id, None, entries, 0)
        yield Parts(LedgerServicer(ledger, Drain(), EntryLimits(1, 1, 1)), ledger)
        assert ledger.readers.streams == ledger.readers.room.used_bytes == 0


async def crowd() -> int:
    """The most bytes held while twenty readers read nothing, and then everything."""
    async with reading(slow_reader_s=3_600) as parts:
        callers = parts.read(20)
        async with asyncio.timeout(20):
            while not (parts.room.is_waited_for or parts.room.used_bytes > BUDGET_BYTES):
                await asyncio.sleep(0)
        for each in callers:
            each.takes.set()
        for each in callers:
            assert await each.all() == COUNT
        return parts.room.peak_bytes


async def test_slow_readers_share_one_budget() -> None:
    assert await crowd() <= BUDGET_BYTES


@pytest.mark.deep
async def test_unshared_pages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find("B6").apply(monkeypatch)
    assert await crowd() > BUDGET_BYTES


async def test_a_slow_reader_is_ended_when_others_wait() -> None:
    async with reading(slow_reader_s=0.05) as parts:
        slow = parts.read(20)
        (quick,) = parts.read()
        quick.takes.set()
        assert await quick.all() == COUNT
        ended = [each for each in slow if each.task.done()]
        assert ended
        for each in ended:
            with pytest.raises(DomainError) as refusal:
                await each.task
            assert refusal.value.reason == "SLOW_READER"
            assert refusal.value.retry_after_s
        for each in slow:
            each.takes.set()
        for each in slow:
            if each not in ended:
                assert await each.all() == COUNT


async def test_a_slow_reader_is_kept_while_no_other_waits() -> None:
    async with reading(slow_reader_s=0.001) as parts:
        (slow,) = parts.read()
        for _ in range(10):
            await asyncio.sleep(0.01)
        slow.takes.set()
        assert await slow.all() == COUNT


async def test_an_entry_above_the_budget_is_still_read() -> None:
    settings: dict[str, Any] = {"read_bytes_max": 64 * 1024, "max_message_bytes": 1_024}
    async with reading(count=3, **settings) as parts:
        callers = parts.read(3)
        for each in callers:
            each.takes.set()
        for each in callers:
            assert await each.all() == 3


async def test_an_ended_stream_frees_its_pages() -> None:
    async with reading(slow_reader_s=3_600) as parts:
        callers = parts.read(20)
        async with asyncio.timeout(20):
            while not parts.room.is_waited_for:
                await asyncio.sleep(0)
        for each in callers:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in callers), return_exceptions=True)
        assert parts.room.used_bytes == 0


@pytest.mark.parametrize("method", ["Read", "ReadEntries", "ReadColumns"])
async def test_streams_beyond_the_limit_get_a_retry_delay(method: str) -> None:
    at = common_pb2.Position(ledger_id=1, entry_id=0)
    topic = str(TOPIC)
    request = {
        "Read": pb.ReadRequest(topic=topic, start=common_pb2.Start(earliest=common_pb2.Earliest())),
        "ReadEntries": pb.ReadEntriesRequest(topic=topic, positions=[at]),
        "ReadColumns": pb.ReadColumnsRequest(topic=topic),
    }[method]
    async with reading(count=1, read_streams_max=2) as parts:
        first, second, third = (
            Caller().call(getattr(parts.servicer, method), request) for _ in range(3)
        )
        with pytest.raises(DomainError) as refusal:
            await third.task
        assert refusal.value.reason == "TOO_MANY_STREAMS"
        assert refusal.value.retry_after_s
        assert refusal.value.details == {"read_streams_max": 2}
        for each in (first, second):
            each.takes.set()
            await each.all()
        again = Caller().call(getattr(parts.servicer, method), request)
        again.takes.set()
        await again.all()
        assert again.responses


async def test_missing_positions_do_not_end_a_read_of_others() -> None:
    asked = [Position(1, each) for each in range(COUNT)]
    gone = [Position(0, each) for each in range(5_000)]
    request = pb.ReadEntriesRequest(
        topic=str(TOPIC),
        positions=[common_pb2.Position(**each._asdict()) for each in [*gone, *asked]],
    )
    async with reading(b"x") as parts:
        caller = Caller().call(parts.servicer.ReadEntries, request)
        caller.takes.set()
        assert await caller.all() == COUNT
