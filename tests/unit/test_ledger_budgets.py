"""Unanswered bytes of all producers share one limit; an unexpected error affects one topic."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from seqgate.services.deduplication import (
    Behind,
    Changed,
    Confirmation,
    Disabled,
    Judged,
    ProducerClaims,
    Writer,
)
from seqgate.services.errors import DomainError
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core.entry import unit_of
from seqgate.services.ledger.core.receipt import Receipt, Status
from seqgate.services.ledger.live import REPLAYS_MAX, UNREAD_RECEIPTS_MAX
from seqgate.services.ledger.metrics import LedgerMetrics
from seqgate.services.ledger.ports import DedupUnavailable
from seqgate.services.ledger.service import Ledger, Opened, Opening
from seqgate.services.ledger.servicer import NotOpened
from seqgate.services.runtime.budget import Budget
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.types import TopicName
from tests.simulation.defects import find
from tests.support.entries import single
from tests.support.remembering import RememberingDeduplicator
from tests.support.waiting import eventually

ONE = TopicName.parse("public/default/one")
OTHER = TopicName.parse("public/default/other")
BUDGET_BYTES = 64 * 1024
PAYLOAD = b"x" * 20_000
RECEIPTS_MAX = LedgerConfig().window_messages + UNREAD_RECEIPTS_MAX


class Slow(MemoryLedgerStore):
    """A store whose appends can be blocked."""

    def __init__(self) -> None:
        super().__init__()
        self.let = asyncio.Event()
        self.let.set()

    async def append(self, *args: Any, **kwargs: Any) -> None:
        await self.let.wait()
        await super().append(*args, **kwargs)


class Surprising(RememberingDeduplicator):
    """Gives an invalid answer for one topic."""

    surprised: TopicName | None = None

    async def admit(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
    ) -> Judged | Behind | Changed | Disabled:
        if topic == self.surprised:
            raise RuntimeError("nobody foresaw this")
        return await super().admit(topic, writer, confirmation, claims)


class Parts:
    """A ledger with a small budget, over memory."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.store, self.dedup = Slow(), Surprising()
        config = LedgerConfig(unanswered_bytes_max=BUDGET_BYTES)
        self.ledger = Ledger(config, self.store, self.dedup, MemoryCursors(), tasks)

    async def open(self, topic: TopicName, producer: str = "p") -> Opened:
        opening = Opening(topic, producer, initial_sequence_id=None, takeover=False, instance=b"")
        return await self.ledger.open(opening)

    @property
    def metrics(self) -> LedgerMetrics:
        return self.ledger._metrics

    @property
    def held(self) -> int:
        return self.ledger.unanswered.used


@asynccontextmanager
async def running() -> AsyncIterator[Parts]:
    async with asyncio.TaskGroup() as tasks:
        parts = Parts(tasks)
        yield parts
        await parts.ledger.finish(1)


def send(opened: Opened, *sequence_ids: int, resume: bool = False) -> None:
    for each in sequence_ids:
        entry = single(each, opened.session.producer, PAYLOAD)
        unit = unit_of(opened.session.number, each, [entry], resume=resume)
        opened.topic.submit(opened.session, [unit])


async def receipts(opened: Opened, count: int) -> dict[int, Receipt]:
    found: dict[int, Receipt] = {}
    async with asyncio.timeout(5):
        while len(found) < count:
            news = await opened.session.news()
            assert news is not None
            found |= {each: receipt for ids, receipt in news.receipts for each in ids}
    return found


async def flood(parts: Parts) -> int:
    """The most bytes held while five producers send and nothing can be stored."""
    streams = [await parts.open(ONE, f"p{each}") for each in range(5)]
    parts.store.let.clear()
    most = 0
    for each in streams:
        send(each, 1, 2)
        most = max(most, parts.held)
    parts.store.let.set()
    for each in streams:
        answered = await receipts(each, 2)
        for sequence_id, receipt in sorted(answered.items()):
            status, error = receipt.status, receipt.error
            assert status in (Status.STORED, Status.FAILED, Status.SKIPPED)
            if status is Status.FAILED:
                assert error is not None
                assert (error.reason, bool(error.retry_after_s)) == ("LEDGER_BUSY", True)
            if status is not Status.STORED:
                send(each, sequence_id, resume=True)
                again = await receipts(each, 1)
                assert again[sequence_id].status is Status.STORED, "in order, once there is room"
    assert parts.held == 0
    for each in streams:
        parts.ledger.close(each)
    return most


async def test_flooding_producers_share_one_budget() -> None:
    async with running() as parts:
        assert await flood(parts) <= BUDGET_BYTES


@pytest.mark.deep
async def test_unshared_windows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find("B6").apply(monkeypatch)
    async with running() as parts:
        assert await flood(parts) > BUDGET_BYTES


async def test_a_publication_above_the_budget_is_taken_alone() -> None:
    async with running() as parts:
        opened = await parts.open(ONE)
        entry = single(1, "p", b"x" * (2 * BUDGET_BYTES))
        opened.topic.submit(opened.session, [unit_of(opened.session.number, 1, [entry])])
        assert (await receipts(opened, 1))[1].status is Status.STORED
        parts.ledger.close(opened)


async def test_an_ended_stream_frees_its_unanswered_bytes() -> None:
    async with running() as parts:
        streams = [await parts.open(topic) for topic in (ONE, OTHER)]
        parts.store.let.clear()
        for each in streams:
            send(each, 1)
        assert parts.held > 0
        parts.ledger.close(streams[0])
        streams[1].session.fail(RuntimeError("cut"))
        parts.ledger.close(streams[1])
        assert parts.held == 0
        parts.store.let.set()


async def test_a_blocked_stream_resumes_when_budget_is_free() -> None:
    budget = Budget(100)
    budget.take(100)
    waiting = asyncio.create_task(budget.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.give(1)
    await waiting
    assert (budget.used, budget.free) == (99, 1)


@pytest.mark.deep
async def test_too_many_unread_receipts_end_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await left_unread() <= RECEIPTS_MAX
    find("B6").apply(monkeypatch)
    assert await left_unread() > RECEIPTS_MAX


async def left_unread() -> int:
    """The receipts that wait for a producer that sends invalid publications and does not read."""
    async with running() as parts:
        opened = await parts.open(ONE)
        session, most = opened.session, 0
        cut: list[Exception] = []
        session.cut = cut.append
        for request_id in range(RECEIPTS_MAX + 10):
            parts.ledger.refuse(opened, request_id, NotOpened("it is wrong"))
            most = max(most, len(session._receipts))
        if session.closing:
            with pytest.raises(DomainError) as refusal:
                await session.news()
            assert refusal.value.reason == "RECEIPTS_UNREAD"
            assert refusal.value.details == {"receipts_max": RECEIPTS_MAX}
            assert cut == [refusal.value], "it may be waiting for the producer to read"
        parts.ledger.close(opened)
        return most


async def test_an_unexpected_error_affects_only_its_topic() -> None:
    async with running() as parts:
        one, other = await parts.open(ONE), await parts.open(OTHER)
        parts.dedup.surprised = ONE
        send(one, 1)
        send(other, 1)
        assert (await receipts(other, 1))[1].status is Status.STORED
        with pytest.raises(DomainError) as refusal:
            await receipts(one, 1)
        assert refusal.value.reason == "TOPIC_FAILED"
        assert refusal.value.retry_after_s
        assert parts.metrics.of(ONE).failures == 1, "it is counted, for an alert"
        parts.ledger.close(one)
        parts.dedup.surprised = None
        again = await parts.open(ONE)
        send(again, 1)
        assert (await receipts(again, 1))[1].status is Status.STORED
        send(other, 2)
        assert (await receipts(other, 1))[2].status is Status.STORED
        for each in (again, other):
            parts.ledger.close(each)


@pytest.mark.deep
async def test_an_uncontained_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find("B6").apply(monkeypatch)
    with pytest.raises(BaseExceptionGroup):
        await surprise()


async def surprise() -> None:
    async with running() as parts:
        one = await parts.open(ONE)
        parts.dedup.surprised = ONE
        send(one, 1)
        await receipts(one, 1)


# ---- replays

REPLAYED = [TopicName.parse(f"public/default/replayed-{each}") for each in range(3 * REPLAYS_MAX)]


class Replaying(Parts):
    """A ledger whose deduplication has lost all topics, and whose pages can be delayed."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        super().__init__(tasks)
        self.pages = self.most = self.confirmed = 0
        self.let = asyncio.Event()
        self._read = self.store.replay
        self._confirm = self.dedup.confirm
        self.store.replay = self.replay  # type: ignore[method-assign]
        self.dedup.confirm = self.confirm  # type: ignore[method-assign,assignment]

    async def replay(self, *args: Any, **named: Any) -> Any:
        self.pages += 1
        self.most = max(self.most, self.pages)
        return await self._read(*args, **named)

    async def confirm(self, *args: Any) -> Any:
        await self.let.wait()
        self.pages -= 1
        self.confirmed += 1
        return await self._confirm(*args)


async def replay(parts: Replaying) -> int:
    """The most pages held while all topics are replayed."""
    for topic in REPLAYED:
        writer = await parts.store.take(topic, create=True)
        await parts.store.append(topic, writer.ledger_id, None, [single(1)], 5)
    opening = [asyncio.create_task(parts.open(each)) for each in REPLAYED]
    await eventually(lambda: parts.let.is_set() or parts.pages >= REPLAYS_MAX)
    parts.let.set()
    for opened in await asyncio.gather(*opening):
        parts.ledger.close(opened)
    assert parts.confirmed == len(REPLAYED)
    return parts.most


async def test_pages_of_concurrent_replays_are_bounded() -> None:
    async with asyncio.TaskGroup() as tasks:
        parts = Replaying(tasks)
        assert await replay(parts) == REPLAYS_MAX
        await parts.ledger.finish(1)


async def test_unbounded_pages_of_replays_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqgate.services.ledger.service.REPLAYS_MAX", len(REPLAYED))
    async with asyncio.TaskGroup() as tasks:
        parts = Replaying(tasks)
        assert await replay(parts) > REPLAYS_MAX
        await parts.ledger.finish(1)


async def test_a_failed_replay_releases_its_slot() -> None:
    async with asyncio.TaskGroup() as tasks:
        parts = Replaying(tasks)
        parts.let.set()
        failing = iter(range(2 * REPLAYS_MAX))
        confirm = parts.confirm

        async def fails(*args: Any) -> Any:
            if next(failing, None) is not None:
                parts.pages -= 1
                raise DedupUnavailable("away")
            return await confirm(*args)

        parts.dedup.confirm = fails  # type: ignore[method-assign,assignment]
        assert await replay(parts) <= REPLAYS_MAX
        await parts.ledger.finish(1)
