"""Trims, by request and by retention: neither removes entries above a cursor."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from seqgate.services.cursors import Cursor, CursorsUnavailable, IsGone
from seqgate.services.errors import StoreUnavailable
from seqgate.services.ledger.adapters import trims
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.ports import EntryCorrupt, LogState, TopicNotFound, Trimmed
from seqgate.services.ledger.service import Ledger, Opening, Trim
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.types import DEDUP_CURSOR, SEQUENCE_ID_MAX, Position, TopicName
from tests.simulation.defects import find
from tests.support.deduplicator import FakeDeduplicator
from tests.support.entries import single
from tests.support.waiting import eventually

TOPIC = TopicName.parse("public/default/trimmed")
OTHER = TopicName.parse("public/default/untouched")
FAR = Position(9, 0)


class PlacedCursors(MemoryCursors):
    """Cursors that consist of positions."""

    def place(self, topics: Mapping[TopicName, Mapping[str, Position | None]]) -> None:
        """Replace the cursors of these topics."""
        for topic, cursors in topics.items():
            for name in self.placed.get(topic, {}):
                del self.cursors[topic, name]
            for name, position in cursors.items():
                self.cursors[topic, name] = Cursor(name, position, {}, {}, 0)

    @property
    def placed(self) -> dict[TopicName, dict[str, Position | None]]:
        placed: dict[TopicName, dict[str, Position | None]] = {}
        for (topic, name), cursor in self.cursors.items():
            placed.setdefault(topic, {})[name] = cursor.mark_delete
        return placed


class Parts:
    """A ledger over memory, with a log of two ledgers: 1:0 to 1:4, and 2:0 to 2:2."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self.store = MemoryLedgerStore()
        self.dedup = FakeDeduplicator()
        self.cursors = PlacedCursors()
        self.ledger = self.with_settings()

    def with_settings(self, **settings: float) -> Ledger:
        config = LedgerConfig(**settings)  # type: ignore[arg-type]
        return Ledger(config, self.store, self.dedup, self.cursors, self._tasks)

    async def fill(self, topic: TopicName = TOPIC, *, append_ms: int = 0) -> None:
        for count in (5, 3):
            state = await self.store.take(topic, create=True)
            entries = [single(each) for each in range(count)]
            await self.store.append(topic, state.ledger_id, state.tail, entries, append_ms)

    async def first(self, topic: TopicName = TOPIC) -> Position | None:
        return (await self.store.get(topic)).first

    @contextmanager
    def trimming(self, **settings: float) -> Iterator[asyncio.Task[None]]:
        ledger = self.with_settings(trim_interval_s=0.001, **settings)
        task = self._tasks.create_task(ledger.trim_forever())
        yield task
        task.cancel()


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async with asyncio.TaskGroup() as tasks:
        parts = Parts(tasks)
        await parts.fill()
        yield parts


async def test_without_cursors_nothing_limits_a_trim(parts: Parts) -> None:
    trimmed, held_back_by = await parts.ledger.trim(TOPIC, Position(1, 3))
    assert (trimmed.removed_entries, trimmed.first, held_back_by) == (3, (1, 3), [])


@pytest.mark.parametrize(
    ("before", "first", "held_back_by"),
    [
        (Position(1, 1), (1, 1), []),
        (Position(1, 3), (1, 3), []),
        (Position(1, 4), (1, 3), ["a", "b"]),
        (FAR, (1, 3), ["a", "b"]),
    ],
)
async def test_a_trim_stops_at_the_slowest_cursor(
    parts: Parts, before: Position, first: Position, held_back_by: list[str]
) -> None:
    parts.cursors.place({TOPIC: {"c": Position(1, 4), "b": Position(1, 2), "a": Position(1, 2)}})
    parts.cursors.place({OTHER: {"nothing": None}})
    trim = await parts.ledger.trim(TOPIC, before)
    assert (trim.trimmed.first, trim.held_back_by) == (first, held_back_by)


async def test_a_cursor_without_acknowledgements_prevents_a_trim(parts: Parts) -> None:
    parts.cursors.place({TOPIC: {"late": Position(1, 0), "never": None}})
    trim = await parts.ledger.trim(TOPIC, Position(1, 1))
    assert trim == Trim(trim.trimmed, ["never"])
    assert (trim.trimmed.removed_entries, trim.trimmed.first) == (0, (1, 0))


@pytest.mark.parametrize("mark_delete", [Position(1, 4), Position(1, SEQUENCE_ID_MAX)])
async def test_a_cursor_at_the_end_of_a_ledger_allows_a_trim_of_all_of_it(
    parts: Parts, mark_delete: Position
) -> None:
    parts.cursors.place({TOPIC: {"c": mark_delete}})
    assert (await parts.ledger.trim(TOPIC, Position(2, 0))).held_back_by == []
    assert await parts.first() == (2, 0)
    trim = await parts.ledger.trim(TOPIC, FAR)
    assert (trim.trimmed.first, trim.held_back_by) == ((2, 0), ["c"])


async def test_a_cursor_at_the_end_of_the_log_limits_nothing(parts: Parts) -> None:
    parts.cursors.place({TOPIC: {"c": Position(2, 2)}})
    trim = await parts.ledger.trim(TOPIC, FAR)
    assert (trim.trimmed.removed_entries, trim.trimmed.first) == (8, None)
    assert trim.held_back_by == []


async def test_nothing_is_removed_while_the_cursor_service_is_unavailable(parts: Parts) -> None:
    parts.cursors.available = False
    with pytest.raises(CursorsUnavailable):
        await parts.ledger.trim(TOPIC, FAR)
    assert await parts.first() == (1, 0)
    with pytest.raises(TopicNotFound):
        await parts.ledger.trim(OTHER, FAR)


# ---- deduplication's own cursor


async def test_deduplication_advances_its_cursor_for_a_trim(parts: Parts) -> None:
    own = {DEDUP_CURSOR: Position(1, 1), "c": Position(1, 3)}
    parts.cursors.place({TOPIC: own})

    def snapshot(topic: TopicName) -> Position:
        parts.cursors.place({TOPIC: own | {DEDUP_CURSOR: Position(2, 1)}})
        return Position(2, 1)

    parts.dedup.on_snapshot = snapshot
    assert (await parts.ledger.trim(TOPIC, Position(1, 2))).held_back_by == []
    assert parts.dedup.asked == []
    assert (await parts.ledger.trim(TOPIC, Position(2, 0))).held_back_by == ["c"]
    assert parts.dedup.asked == ["snapshot"]
    assert await parts.first() == (1, 4)
    assert (await parts.ledger.trim(TOPIC, FAR)).held_back_by == ["c"]
    assert parts.dedup.asked == ["snapshot"]


async def test_without_deduplication_state_its_cursor_is_ignored(parts: Parts) -> None:
    parts.cursors.place({TOPIC: {DEDUP_CURSOR: None, "c": Position(1, 3)}})
    trim = await parts.ledger.trim(TOPIC, Position(1, 4))
    assert (trim.trimmed.first, trim.held_back_by) == ((1, 4), [])


async def test_without_a_new_snapshot_a_trim_stops_at_the_old_one(parts: Parts) -> None:
    parts.cursors.place({TOPIC: {DEDUP_CURSOR: Position(1, 1)}})
    parts.dedup.available = False
    trim = await parts.ledger.trim(TOPIC, Position(2, 0))
    assert (trim.trimmed.first, trim.held_back_by) == ((1, 2), [DEDUP_CURSOR])


async def test_a_cursor_service_lost_after_the_snapshot_stops_the_trim(parts: Parts) -> None:
    parts.cursors.place({TOPIC: {DEDUP_CURSOR: Position(1, 1)}})

    def snapshot(topic: TopicName) -> Position:
        parts.cursors.available = False
        return Position(2, 1)

    parts.dedup.on_snapshot = snapshot
    with pytest.raises(CursorsUnavailable):
        await parts.ledger.trim(TOPIC, FAR)
    assert await parts.first() == (1, 0)


# ---- retention


async def test_unlimited_retention_removes_nothing(parts: Parts) -> None:
    with parts.trimming() as task:
        await task
    assert await parts.first() == (1, 0)


async def test_old_entries_are_removed_up_to_the_cursors(parts: Parts) -> None:
    now_ms = time.time_ns() // 1_000_000
    await parts.fill(OTHER, append_ms=now_ms)
    parts.cursors.place({TOPIC: {"c": Position(1, 2)}})
    with parts.trimming(retention_minutes=60):
        await eventually(lambda: reaches(parts, Position(1, 3)))
        parts.cursors.place({TOPIC: {"c": Position(2, 0)}})
        await eventually(lambda: reaches(parts, Position(2, 1)))
        parts.cursors.place({TOPIC: {}})
        await eventually(lambda: reaches(parts, None))
    assert await parts.first(OTHER) == (1, 0), "young enough"


async def test_a_clock_set_forward_ages_no_entry(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await parts.fill(OTHER, append_ms=time.time_ns() // 1_000_000)
    with parts.trimming(retention_minutes=60):
        before = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: before() + 7_200_000_000_000)
        await eventually(lambda: reaches(parts, None))  # old entries, in the same round
        await parts.fill()
        await eventually(lambda: reaches(parts, None))
    assert await parts.first(OTHER) == (1, 0)


async def test_excess_entries_are_removed_oldest_first(parts: Parts) -> None:
    (size_bytes,) = {each.size_bytes for each in parts.store.logs[TOPIC].entries}
    with parts.trimming(retention_bytes=2 * size_bytes):
        await eventually(lambda: reaches(parts, Position(2, 1)))
        await parts.fill(OTHER)
        await eventually(lambda: reaches(parts, Position(2, 1), OTHER))
    assert await parts.first() == (2, 1)


async def test_a_failed_trim_does_not_stop_other_topics(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = TopicName.parse("public/default/damaged")
    gone = TopicName.parse("public/default/gone")
    for topic in (damaged, gone):
        await parts.fill(topic)
    cuts_unfinished = parts.store.cuts_unfinished

    async def failing(topic: TopicName, before: Position) -> bool:
        if topic == damaged:
            raise EntryCorrupt("damaged", topic=topic, reason="x", ledger_id=1, entry_id=0)
        if topic == gone:
            await parts.store.delete(topic)
        return await cuts_unfinished(topic, before)

    monkeypatch.setattr(parts.store, "cuts_unfinished", failing)
    monkeypatch.setattr("seqgate.services.ledger.service.TOPICS_PAGE", 1)
    with parts.trimming(retention_minutes=0):
        await eventually(lambda: reaches(parts, None))
        await parts.fill()
        await eventually(lambda: reaches(parts, None))
    assert await parts.first(damaged) == (1, 0)
    assert gone not in parts.store.logs


async def test_the_trimmer_outlasts_failures(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    topics, failures = parts.store.topics, 0

    async def failing(*, prefix: str, after: str, limit: int) -> list[LogState]:
        nonlocal failures
        failures += 1
        if failures <= 2:
            raise EntryCorrupt("damaged")
        return await topics(prefix=prefix, after=after, limit=limit)

    monkeypatch.setattr(parts.store, "topics", failing)
    parts.cursors.available = False
    with parts.trimming(retention_bytes=0):
        await eventually(lambda: failures > 3)
        assert await parts.first() == (1, 0)
        parts.cursors.available = True
        await eventually(lambda: reaches(parts, None))


async def reaches(parts: Parts, first: Position | None, topic: TopicName = TOPIC) -> bool:
    return await parts.first(topic) == first


# ---- deletion


async def test_deleting_a_topic_deletes_its_state_and_cursors(parts: Parts) -> None:
    parts.cursors.place({TOPIC: {"c": None}, OTHER: {"c": None}})
    await parts.ledger.delete(TOPIC, force=False)
    assert parts.cursors.placed == {OTHER: {"c": None}}
    assert parts.dedup.asked == [f"forget {TOPIC} 1 deleted"]


async def test_cursors_whose_removal_failed_are_removed_later(parts: Parts) -> None:
    parts.cursors.place({TOPIC: {"c": None}, OTHER: {"c": None}})
    await parts.fill(OTHER)
    parts.cursors.available = False
    for topic in (TOPIC, OTHER):
        await parts.ledger.delete(topic, force=False)
    await parts.fill(OTHER)  # recreated: its cursors may be new
    parts.cursors.available = True
    await swept(parts)
    assert parts.cursors.placed == {OTHER: {"c": None}}


async def swept(parts: Parts, ledger: Ledger | None = None) -> None:
    """Wait until nothing is left of deleted topics."""
    async with asyncio.TaskGroup() as tasks:
        sweeping = tasks.create_task((ledger or parts.ledger).sweep_forever(0.001))

        async def done() -> bool:
            return not await parts.store.leaving(after="", limit=1)

        await eventually(done)
        sweeping.cancel()


async def test_leftover_cursors_are_removed_after_a_restart(parts: Parts) -> None:
    parts.cursors.place({TOPIC: {"c": None}})
    parts.cursors.available = False
    await parts.ledger.delete(TOPIC, force=False)
    parts.cursors.available = True
    await swept(parts, parts.with_settings())
    assert parts.cursors.placed == {}


async def test_a_failed_removal_of_cursors_does_not_block_others(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.cursors.place({TOPIC: {"c": None}, OTHER: {"c": None}})
    await parts.fill(OTHER)
    delete_all, stuck = parts.cursors.delete_all, [TOPIC]

    async def failing(topic: TopicName, is_gone: IsGone) -> bool:
        if topic in stuck:
            raise CursorsUnavailable("one of them is damaged")
        return await delete_all(topic, is_gone)

    parts.cursors.available = False
    for topic in (TOPIC, OTHER):
        await parts.ledger.delete(topic, force=False)
    parts.cursors.available = True
    monkeypatch.setattr(parts.cursors, "delete_all", failing)
    async with asyncio.TaskGroup() as tasks:
        sweeping = tasks.create_task(parts.ledger.sweep_forever(0.001))
        await eventually(lambda: OTHER not in parts.cursors.placed)
        assert await parts.store.leaving(after="", limit=9) == [TOPIC]
        stuck.clear()
        await eventually(lambda: TOPIC not in parts.cursors.placed)
        sweeping.cancel()


async def test_a_topic_recreated_during_its_deletion_keeps_its_new_cursors(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.cursors.place({TOPIC: {"old": None}})
    delete_all, begun, go_on = parts.cursors.delete_all, asyncio.Event(), asyncio.Event()

    async def slow(topic: TopicName, is_gone: IsGone) -> bool:
        begun.set()
        await go_on.wait()
        return await delete_all(topic, is_gone)

    async def make_again() -> None:
        _, is_new = await parts.ledger.create(TOPIC)
        assert is_new
        parts.cursors.cursors[TOPIC, "new"] = Cursor("new", None, {}, {}, 0)

    monkeypatch.setattr(parts.cursors, "delete_all", slow)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(parts.ledger.delete(TOPIC, force=False))
        await begun.wait()
        tasks.create_task(make_again())
        for _ in range(10):  # as far as it gets
            await asyncio.sleep(0)
        go_on.set()
    assert parts.cursors.placed == {TOPIC: {"new": None}}


@pytest.mark.parametrize("failing", ["dedup", "cursors"])
async def test_a_topic_is_deleted_although_its_state_and_cursors_cannot_be(
    parts: Parts, failing: str
) -> None:
    parts.cursors.place({TOPIC: {"c": None}})
    getattr(parts, failing).available = False
    await parts.ledger.delete(TOPIC, force=False)
    with pytest.raises(TopicNotFound):
        await parts.ledger.get(TOPIC)
    assert parts.dedup.asked == [f"forget {TOPIC} 1 deleted"]
    assert (TOPIC in parts.cursors.placed) == (failing == "cursors")


async def test_a_topic_whose_deletion_fails_keeps_its_writer(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = Opening(TOPIC, "p", initial_sequence_id=None, takeover=False, instance=b"")
    opened = await parts.ledger.open(opening)

    async def failing(_: TopicName) -> LogState:
        raise StoreUnavailable("the store failed")

    with monkeypatch.context() as patch:
        patch.setattr(parts.store, "get", failing)
        with pytest.raises(StoreUnavailable):
            await parts.ledger.delete(TOPIC, force=True)
    assert parts.ledger.connected(TOPIC) == 1
    await parts.ledger.delete(TOPIC, force=True)
    assert opened.topic.stopped, "the next deletion reaches who writes it"
    parts.ledger.close(opened)


# ---- topics do not wait for one another


async def open_other_meanwhile(parts: Parts, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Open another topic during a slow trim or deletion of one."""
    await parts.fill(OTHER)
    act, begun, go_on = getattr(parts.store, verb), asyncio.Event(), asyncio.Event()

    async def slow(topic: TopicName, *args: Any, **kwargs: Any) -> object:
        begun.set()
        await go_on.wait()
        return await act(topic, *args, **kwargs)

    monkeypatch.setattr(parts.store, verb, slow)
    acting: asyncio.Task[object] = asyncio.create_task(
        parts.ledger.trim(TOPIC, FAR) if verb == "trim" else parts.ledger.delete(TOPIC, force=False)
    )
    await begun.wait()
    try:
        async with asyncio.timeout(0.5):
            opening = Opening(OTHER, "p", initial_sequence_id=None, takeover=False, instance=b"")
            opened = await parts.ledger.open(opening)
        parts.ledger.close(opened)
    finally:
        go_on.set()
        await acting


@pytest.mark.parametrize("verb", ["trim", "delete"])
async def test_opening_a_topic_does_not_wait_for_another_topic(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    await open_other_meanwhile(parts, monkeypatch, verb)
    assert not parts.ledger._changing._locks


@pytest.mark.deep
@pytest.mark.parametrize("verb", ["trim", "delete"])
async def test_a_lock_shared_by_all_topics_is_found(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    find("B5").apply(monkeypatch)
    with pytest.raises(TimeoutError):
        await open_other_meanwhile(parts, monkeypatch, verb)


async def test_a_long_trim_yields_its_topic_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trims, "REMOVE_BLOCKS_MAX", 1)
    async with (
        open_sqlite_store(tmp_path / "ledger.db") as store,
        asyncio.TaskGroup() as tasks,
    ):
        ledger = Ledger(LedgerConfig(), store, FakeDeduplicator(), MemoryCursors(), tasks)
        state = await store.take(TOPIC, create=True)
        for each in range(5):
            tail = (await store.get(TOPIC)).tail
            await store.append(TOPIC, state.ledger_id, tail, [single(each)], 0)
        trim, turns = store.trim, list[Position | None]()

        async def then_wait_for_a_turn(*args: Any, **kwargs: Any) -> Trimmed:
            trimmed = await trim(*args, **kwargs)
            waits = tasks.create_task(ledger.create(TOPIC))
            waits.add_done_callback(lambda _: turns.append(trimmed.first))
            return trimmed

        monkeypatch.setattr(store, "trim", then_wait_for_a_turn)
        assert (await ledger.trim(TOPIC, FAR)).trimmed == Trimmed(5, None)
        await eventually(lambda: len(turns) == 5)
        assert turns == [*(Position(1, each) for each in range(1, 5)), None]
