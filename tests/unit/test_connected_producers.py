"""Connected producers stay alive, so that they are not forgotten for inactivity and their messages
stored again; append times never go back."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from seqgate.services.errors import DomainError
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core.entry import Entry, unit_of
from seqgate.services.ledger.core.receipt import Status
from seqgate.services.ledger.ports import DedupUnavailable
from seqgate.services.ledger.service import Ledger, Opened, Opening
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.types import Position, TopicName
from tests.simulation.defects import find
from tests.support.entries import chunk, single
from tests.support.remembering import RememberingDeduplicator
from tests.support.waiting import eventually

TOPIC = TopicName.parse("public/default/connected")
MINUTE_MS = 60_000
ENOUGH_S = 0.5  # for an open to begin to wait, on a busy machine


class Parts:
    """A ledger over memory, and deduplication with a clock of its own."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.dedup = RememberingDeduplicator()
        self.dedup.now_ms = time.time_ns() // 1_000_000
        self.store = MemoryLedgerStore()
        self._tasks = tasks
        self.ledger = self.again()

    def again(self, open_timeout_s: float = 30) -> Ledger:
        """A restarted process."""
        config = LedgerConfig(keep_interval_s=3600, open_timeout_s=open_timeout_s)
        return Ledger(config, self.store, self.dedup, MemoryCursors(), self._tasks)

    async def open(self, ledger: Ledger | None = None) -> Opened:
        opening = Opening(TOPIC, "p", initial_sequence_id=None, takeover=False, instance=b"")
        return await (ledger or self.ledger).open(opening)

    async def publish(self, opened: Opened, what: int | Entry) -> Status:
        entry = single(what) if isinstance(what, int) else what
        unit = unit_of(opened.session.number, 1, [entry], resume=True)
        opened.topic.submit(opened.session, [unit])
        async with asyncio.timeout(5):
            news = await opened.session.news()
        assert news is not None
        ((_, receipt),) = news.receipts
        await opened.topic.quiet()
        return receipt.status


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async with asyncio.TaskGroup() as tasks:
        parts = Parts(tasks)
        yield parts
        await parts.ledger.finish(1)


async def test_a_producer_that_returns_just_in_time_is_not_stored_twice(parts: Parts) -> None:
    opened = await parts.open()
    assert await parts.publish(opened, 7) is Status.STORED
    parts.ledger.close(opened)
    (stored,) = parts.store.logs[TOPIC].entries
    parts.dedup.now_ms = stored.append_ms + MINUTE_MS - 3_000
    opened = await parts.open()
    parts.dedup.now_ms += 4_000
    parts.dedup.purge(TOPIC, MINUTE_MS)
    assert await parts.publish(opened, 7) is Status.DUPLICATE


async def test_connected_producers_stay_alive_after_lost_state(parts: Parts) -> None:
    """The log has the time of the last append, but not the producers connected since."""
    opened = await parts.open()
    assert await parts.publish(opened, 7) is Status.STORED
    for stored in range(len(parts.store.logs[TOPIC].entries)):
        entry = parts.store.logs[TOPIC].entries[stored]
        parts.store.logs[TOPIC].entries[stored] = entry._replace(append_ms=1)
    parts.dedup.states.clear()
    assert await parts.publish(opened, 7) is Status.DUPLICATE
    assert parts.dedup.purge(TOPIC, MINUTE_MS) == []


async def test_an_attempt_of_a_forgotten_producer_is_aborted_in_the_log(parts: Parts) -> None:
    """Whether the producer reconnects, or stays connected; also by a ledger that never knew it."""
    opened = await parts.open()
    assert await parts.publish(opened, chunk(5, "a", 0, 3)) is Status.STORED
    parts.dedup.evict(TOPIC, "p")
    assert await parts.publish(opened, chunk(5, "a", 1, 3)) is Status.CHUNK_GAP
    assert await parts.publish(opened, chunk(5, "b", 0, 3)) is Status.STORED
    parts.ledger.close(opened)
    parts.dedup.evict(TOPIC, "p")
    opened = await parts.open()
    assert await parts.publish(opened, chunk(6, "c", 0, 3)) is Status.STORED
    parts.dedup.evict(TOPIC, "p")
    opened = await parts.open(parts.again())
    assert await parts.publish(opened, single(7)) is Status.STORED
    assert await parts.publish(opened, single(8)) is Status.STORED
    aborts = [each.entry.aborts for each in parts.store.logs[TOPIC].entries]
    assert aborts == ["", "a", "b", "c", ""]


async def test_a_producer_that_cannot_be_marked_alive_is_not_opened(
    parts: Parts,
) -> None:
    def failing(call: str) -> asyncio.Future[None] | None:
        if call == "keep":
            raise DedupUnavailable("away", retry_after_s=0.1)
        return None

    parts.dedup.before = failing
    with pytest.raises(DomainError) as refusal:
        await parts.open()
    assert refusal.value.reason == "DEDUP_UNAVAILABLE"
    assert parts.ledger.connected(TOPIC) == 0
    parts.dedup.before = lambda _: None
    await parts.open()


async def test_producers_are_reported_as_often_as_deduplication_asks(parts: Parts) -> None:
    """The setting is an hour."""
    parts.dedup.keep_within_s = 0.001
    opened = await parts.open()
    keeping = asyncio.create_task(parts.ledger.keep_forever())
    parts.dedup.kept.clear()
    await eventually(lambda: len(parts.dedup.kept) > 3)
    assert set(map(str, parts.dedup.kept)) == {str((TOPIC, ["p"]))}
    keeping.cancel()
    parts.ledger.close(opened)


@pytest.mark.deep
async def test_forgetting_a_connected_producer_is_found(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    find("A5").apply(monkeypatch)
    with pytest.raises(AssertionError):
        await test_a_producer_that_returns_just_in_time_is_not_stored_twice(parts)


# ---- times


async def test_append_times_do_not_go_back_when_the_clock_did_during_a_restart(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await parts.open()
    await parts.publish(opened, 1)
    (first,) = parts.store.logs[TOPIC].entries
    hour_ago_ns = time.time_ns() - 3_600 * 10**9
    monkeypatch.setattr("seqgate.services.ledger.live.time.time_ns", lambda: hour_ago_ns)
    restarted = parts.again()
    opened = await parts.open(restarted)
    await parts.publish(opened, 2)
    assert [each.append_ms for each in parts.store.logs[TOPIC].entries] == [first.append_ms] * 2
    await restarted.trim(TOPIC, Position(99, 0))
    restarted = parts.again()
    opened = await parts.open(restarted)
    await parts.publish(opened, 3)
    assert await restarted.find_time(TOPIC, first.append_ms) == opened_at(opened)


def opened_at(opened: Opened) -> Position:
    """The first entry of a stream's ledger."""
    return Position(opened.topic.ledger_id, 0)


# ---- what delays an open


@pytest.mark.parametrize("call", ["rollback", "admit"])
async def test_an_open_blocked_by_deduplication_is_reported(parts: Parts, call: str) -> None:
    """Not reported as a rebuild."""
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    parts.dedup.before = lambda name: never if name == call else None
    try:
        with pytest.raises(DomainError) as refusal:
            await parts.open(parts.again(open_timeout_s=ENOUGH_S))
        assert refusal.value.reason == "DEDUP_UNAVAILABLE"
        assert refusal.value.retry_after_s
    finally:
        parts.dedup.before = lambda _: None
        never.set_result(None)


async def test_an_open_blocked_by_the_store_is_reported(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, go_on = parts.store.append, asyncio.Event()

    async def slow(*args: Any, **kwargs: Any) -> None:
        await go_on.wait()
        await append(*args, **kwargs)

    ledger = parts.again(open_timeout_s=ENOUGH_S)
    opened = await parts.open(ledger)
    monkeypatch.setattr(parts.store, "append", slow)
    opened.topic.submit(opened.session, [unit_of(opened.session.number, 1, [single(1)])])
    await eventually(lambda: not opened.topic.idle and not go_on.is_set())
    ledger.close(opened)
    with pytest.raises(DomainError) as refusal:
        await parts.open(ledger)
    assert refusal.value.reason == "STORE_UNAVAILABLE"
    go_on.set()
    await opened.topic.quiet()
