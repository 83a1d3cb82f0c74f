"""A topic whose deduplication state is lost: replayed by the ledger, or left to a rebuild."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from seqgate.services.deduplication import Confirmation
from seqgate.services.errors import DomainError, StoreUnavailable
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core import writer
from seqgate.services.ledger.core.entry import StoredEntry, unit_of
from seqgate.services.ledger.core.receipt import Receipt, Status
from seqgate.services.ledger.live import Recovering
from seqgate.services.ledger.ports import EntryCorrupt
from seqgate.services.ledger.service import Ledger, Opened, Opening
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.types import Position, TopicName
from tests.support.deduplicator import FakeDeduplicator
from tests.support.entries import single
from tests.support.waiting import eventually

TOPIC = TopicName.parse("public/default/recovering")
ENTRIES = 8
TAIL = Position(1, ENTRIES - 1)


class Parts:
    """A ledger over memory, and a log of one ledger."""

    def __init__(self, tasks: asyncio.TaskGroup, **settings: int) -> None:
        self.store = MemoryLedgerStore()
        self.dedup = FakeDeduplicator()
        config = LedgerConfig(**settings)  # type: ignore[arg-type]
        self.ledger = Ledger(config, self.store, self.dedup, MemoryCursors(), tasks)

    async def fill(self) -> None:
        state = await self.store.take(TOPIC, create=True)
        for each in range(ENTRIES):
            tail = (await self.store.get(TOPIC)).tail
            await self.store.append(TOPIC, state.ledger_id, tail, [single(each)], 0)

    async def open(self, producer: str = "p") -> Opened:
        return await self.ledger.open(
            Opening(TOPIC, producer, initial_sequence_id=None, takeover=False, instance=b"")
        )

    async def refusal(self) -> DomainError:
        with pytest.raises(DomainError) as caught:
            await self.open()
        return caught.value

    async def opens(self) -> bool:
        try:
            self.ledger.close(await self.open())
        except (Recovering, EntryCorrupt):
            return False
        return True

    @property
    def lacking(self) -> int:
        return self.ledger.entries_to_replay(TOPIC)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of two entries, and short waits."""
    monkeypatch.setattr(writer, "REPLAY_PAGE_ENTRIES", 2)
    monkeypatch.setattr(writer, "BACKOFF_MAX_S", 0.001)


@asynccontextmanager
async def running(**settings: int) -> AsyncIterator[Parts]:
    async with asyncio.TaskGroup() as tasks:
        parts = Parts(tasks, **settings)
        await parts.fill()
        yield parts
        await parts.ledger.finish(1)


async def receipt(opened: Opened, sequence_id: int) -> Receipt:
    unit = unit_of(opened.session.number, 1, [single(sequence_id)], resume=True)
    opened.topic.submit(opened.session, [unit])
    async with asyncio.timeout(5):
        news = await opened.session.news()
    assert news is not None
    ((_, receipt),) = news.receipts
    return receipt


@pytest.mark.parametrize("entries_max", [0, ENTRIES, ENTRIES + 1])
async def test_a_replay_within_the_limit_runs_to_the_end(entries_max: int) -> None:
    async with running(inline_replay_entries_max=entries_max) as parts:
        seen: list[tuple[int, int]] = []
        parts.dedup.on_confirm = lambda each: seen.append((each.remaining, parts.lacking))
        assert await parts.opens()
        assert [remaining for remaining, _ in seen] == [6, 4, 2, 0]
        assert all(lacking > 0 for _, lacking in seen)
        assert parts.lacking == 0
        assert parts.dedup.asked.count("confirm") == 4


async def test_a_long_replay_waits_for_a_state_and_resumes_by_itself() -> None:
    async with running(inline_replay_entries_max=ENTRIES - 1) as parts:
        assert parts.lacking == 0, "nobody has asked yet"
        refusal = await parts.refusal()
        assert (refusal.reason, refusal.details) == ("RECOVERING", {"entries_to_replay": ENTRIES})
        assert refusal.retry_after_s
        assert parts.lacking == ENTRIES
        asked = len(parts.dedup.asked)
        await eventually(lambda: len(parts.dedup.asked) > asked + 5, "it asks again")
        assert set(parts.dedup.asked) == {"rollback"}

        parts.dedup.confirmed[TOPIC] = Position(1, 4)
        await eventually(parts.opens)
        assert parts.dedup.asked.count("confirm") == 2
        assert (parts.dedup.confirmed[TOPIC], parts.lacking) == (TAIL, 0)


async def test_connected_producers_learn_that_the_topic_waits() -> None:
    async with running(inline_replay_entries_max=ENTRIES) as parts:
        opened = await parts.open()
        assert (await receipt(opened, 100)).status is Status.STORED
        del parts.dedup.confirmed[TOPIC]
        for _ in range(2):
            told = await receipt(opened, 101)
            assert told.status is Status.FAILED
            assert isinstance(told.error, Recovering)
            assert told.error.retry_after_s
        parts.dedup.confirmed[TOPIC] = TAIL
        await eventually(lambda: parts.lacking == 0)
        assert (await receipt(opened, 101)).status is Status.STORED
        parts.ledger.close(opened)


async def test_a_running_replay_is_not_interrupted() -> None:
    """Deduplication fails midway: the rest is replayed, since it is within the limit."""
    async with running(inline_replay_entries_max=ENTRIES) as parts:

        def fails_once(confirmation: Confirmation) -> None:
            if confirmation.remaining == 4 and parts.dedup.asked.count("confirm") < 5:
                parts.dedup.available = False
                asyncio.get_running_loop().call_later(0.02, come_back)

        def come_back() -> None:
            parts.dedup.available = True

        parts.dedup.on_confirm = fails_once
        await eventually(parts.opens)
        assert parts.dedup.confirmed[TOPIC] == TAIL


async def test_a_log_is_counted_once_while_its_topic_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(inline_replay_entries_max=4) as parts:
        count_after, counted = parts.store.count_after, []

        async def counting(topic: TopicName, position: Position | None) -> int:
            counted.append(position)
            return await count_after(topic, position)

        monkeypatch.setattr(parts.store, "count_after", counting)
        assert isinstance(await parts.refusal(), Recovering)
        asked = len(parts.dedup.asked)
        await eventually(lambda: len(parts.dedup.asked) > asked + 5)
        assert counted == [None]

        await parts.ledger.trim(TOPIC, Position(1, 5))
        await eventually(parts.opens, "what is left is little enough")
        assert counted == [None, None]
        assert parts.dedup.confirmed[TOPIC] == TAIL


class Damage:
    """An unreadable entry."""

    def __init__(self, store: MemoryLedgerStore, place: Position) -> None:
        self._read = store.read
        self._place = place

    async def read(
        self, topic: TopicName, after: Position | None, **limits: Any
    ) -> list[StoredEntry]:
        found = await self._read(topic, after, **limits)
        before = [each for each in found if each.position < self._place]
        if found and not before and found[0].position == self._place:
            raise EntryCorrupt("no", ledger_id=self._place.ledger_id, entry_id=self._place.entry_id)
        return before or found


async def test_a_damaged_entry_gives_no_verdict_until_a_state_is_loaded_past_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as parts:
        damage = Damage(parts.store, Position(1, 5))
        monkeypatch.setattr(parts.store, "read", damage.read)
        refusal = await parts.refusal()
        assert (refusal.reason, refusal.details) == (
            "ENTRY_CORRUPT",
            {"ledger_id": 1, "entry_id": 5},
        )
        assert refusal.retry_after_s
        assert parts.dedup.confirmed[TOPIC] == Position(1, 4)
        assert parts.lacking == 3
        asked = parts.dedup.asked.count("rollback")
        await eventually(lambda: parts.dedup.asked.count("rollback") > asked + 5)

        parts.dedup.confirmed[TOPIC] = Position(1, 5)
        await eventually(parts.opens)
        assert parts.dedup.confirmed[TOPIC] == TAIL


@pytest.mark.parametrize(
    ("error", "level"),
    [(EntryCorrupt("damaged"), "critical"), (StoreUnavailable("away"), "warning")],
)
async def test_only_a_damaged_entry_is_reported_as_one(
    monkeypatch: pytest.MonkeyPatch, error: DomainError, level: str
) -> None:
    async with running() as parts:
        read, errors = parts.store.read, [error]

        async def failing_once(
            topic: TopicName, after: Position | None, **limits: Any
        ) -> list[StoredEntry]:
            if errors:
                raise errors.pop()
            return await read(topic, after, **limits)

        monkeypatch.setattr(parts.store, "read", failing_once)
        with capture_logs() as lines:
            await eventually(parts.opens)
        (failed,) = [line for line in lines if line["event"].startswith("replay failed")]
        assert failed["log_level"] == level
        assert ("damaged" in failed["event"]) is (level == "critical")
        assert failed["reason"] == error.reason


async def test_a_replay_from_the_start_counts_trimmed_entries() -> None:
    """They are counted once, at the beginning."""
    async with running(inline_replay_entries_max=3) as parts:
        await parts.ledger.trim(TOPIC, Position(1, 5))
        confirmations: list[Confirmation] = []
        parts.dedup.on_confirm = confirmations.append
        assert await parts.opens()
        first, *rest = confirmations
        assert [(each.producer, each.highest) for each in first.producers] == [("p", (4,))]
        assert [each.remaining for each in confirmations] == [3, 1, 0]
        assert [each.entry_count for each in rest] == [2, 1]
