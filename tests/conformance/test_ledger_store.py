"""The contract of every ledger store. A new adapter starts by being added to the fixture."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest

from seqgate.services.errors import DomainError, Fenced
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.core.attempts import OpenAttempt
from seqgate.services.ledger.core.entry import Entry, StoredEntry
from seqgate.services.ledger.core.receipt import Fate, Found, Missing, Unfinished
from seqgate.services.ledger.ports import (
    NO_INSTANCES,
    EntryCorrupt,
    LedgerRange,
    LedgerStore,
    LogState,
    TopicNotFound,
    Trimmed,
)
from seqgate.types import Position, TopicName
from tests.support.columns import Row, row_of, rows_of
from tests.support.depth import times
from tests.support.entries import batch, chunk, large, marker, single

TOPIC = TopicName.parse("test/store/topic")
OTHER = TopicName.parse("test/store/topic2")
A0, A1, A2 = A = large(5, "a", 3)
B0, B1 = B = large(5, "b", 2)
ENDS_A = single(7)._replace(aborts="a")
EVERYTHING: dict[str, Any] = {"entries_max": 1000, "bytes_max": 1_000_000, "payloads": True}


@pytest.fixture
def store(ledger_store: LedgerStore) -> LedgerStore:
    return ledger_store


HISTORIES = times(quick=10, full=100)
"""Of each kind, on each store."""


class Writer:
    """Appends at the end of a topic."""

    def __init__(self, store: LedgerStore, state: LogState) -> None:
        self.store = store
        self.state = state
        self.tail = state.tail

    @classmethod
    async def of(cls, store: LedgerStore, topic: TopicName = TOPIC) -> "Writer":
        return cls(store, await store.take(topic, create=True))

    async def append(
        self, *entries: Entry, append_ms: int = 5, instances: Mapping[str, bytes] = NO_INSTANCES
    ) -> None:
        place = (self.state.topic, self.state.ledger_id, self.tail)
        await self.store.append(*place, entries, append_ms, instances=instances)
        self.tail = (await self.store.get(self.state.topic)).tail


async def fill(store: LedgerStore, entries: Sequence[Entry], *, apart: bool) -> None:
    """Append entries, one by one or as one group."""
    writer = await Writer.of(store)
    for group in [[each] for each in entries] if apart else [entries]:
        await writer.append(*group)


async def positions(store: LedgerStore, after: Position | None = None) -> list[Position]:
    return [each.position for each in await store.read(TOPIC, after, **EVERYTHING)]


async def test_entries_are_read_back_unchanged(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    entries = [single(3, payload=b""), batch([4, 6, 9], "q"), marker(1), chunk(7, "ü/ %", 0, 2)]
    entries += [chunk(7, "next", 0, 300, aborts="ü/ %"), single(8)._replace(aborts="next")]
    await writer.append(*entries, append_ms=77)
    read = await store.read(TOPIC, None, **EVERYTHING)
    assert [each.entry for each in read] == entries
    assert [each.position for each in read] == [(1, place) for place in range(6)]
    assert {each.append_ms for each in read} == {77}
    assert [each.payload_bytes for each in read] == [0, 5, 1, 3, 3, 1]


async def test_each_writer_gets_a_higher_ledger_id_and_fences_its_predecessor(
    store: LedgerStore,
) -> None:
    first = await Writer.of(store)
    await first.append(single(0))
    second = await Writer.of(store)
    assert second.state.ledger_id == first.state.ledger_id + 1
    assert second.state.tail == first.tail
    with pytest.raises(Fenced):
        await first.append(single(1))
    await second.append(single(1))
    assert await positions(store) == [(1, 0), (2, 0)]


async def test_a_replaced_writer_is_fenced_in_every_call(
    store: LedgerStore,
) -> None:
    first = (await Writer.of(store)).state
    again = await store.take(TOPIC, create=False, ledger_id=first.ledger_id)
    assert again.ledger_id == first.ledger_id + 1
    with pytest.raises(Fenced):
        await store.take(TOPIC, create=False, ledger_id=first.ledger_id)
    with pytest.raises(Fenced):
        await store.highest(TOPIC, first.ledger_id, "p")
    assert (await store.get(TOPIC)).ledger_id == again.ledger_id


async def test_an_append_with_a_stale_tail_changes_nothing(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    await writer.append(single(0))
    for wrong in (None, Position(1, 1), Position(0, 0)):
        with pytest.raises(Fenced):
            await store.append(TOPIC, writer.state.ledger_id, wrong, [single(1)], 0)
    assert await positions(store) == [(1, 0)]


async def test_a_topic_is_created_once(store: LedgerStore) -> None:
    with pytest.raises(TopicNotFound):
        await store.take(TOPIC, create=False)
    state, created = await store.create(TOPIC)
    assert created
    assert (state.entries, state.first, state.tail) == (0, None, None)
    assert not (await store.create(TOPIC))[1]
    assert (await store.take(TOPIC, create=True)).ledger_id == state.ledger_id + 1


@pytest.mark.parametrize(
    "call",
    [
        *(
            "read",
            "count_after",
            "find",
            "highest",
            "trimmed",
            "newest",
            "replay",
            "last_append",
            "get",
            "trim",
            "retained",
            "cuts",
        ),
        *("renew", "delete", "columns", "ledgers", "read_at", "find_time"),
    ],
)
async def test_a_missing_topic_is_not_found(store: LedgerStore, call: str) -> None:
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "read": lambda: store.read(TOPIC, None, **EVERYTHING),
        "read_at": lambda: read_at(store, Position(1, 0)),
        "count_after": lambda: store.count_after(TOPIC, None),
        "find": lambda: store.find(TOPIC, "p", [0]),
        "highest": lambda: store.highest(TOPIC, 1, "p"),
        "trimmed": lambda: store.trimmed_producers(TOPIC, skip=0, limit=1),
        "through": lambda: store.trimmed_through(TOPIC),
        "newest": lambda: store.newest(TOPIC, "p"),
        "replay": lambda: store.replay(TOPIC, None, producers_after="", limit=1, bytes_max=1),
        "last_append": lambda: store.last_append_ms(TOPIC),
        "get": lambda: store.get(TOPIC),
        "find_time": lambda: store.find_time(TOPIC, 0),
        "trim": lambda: store.trim(TOPIC, Position(1, 0)),
        "retained": lambda: store.retained_from(TOPIC, appended_since_ms=0, bytes_max=0),
        "cuts": lambda: store.cuts_unfinished(TOPIC, Position(1, 0)),
        "columns": lambda: columns(store, None, Position(1, 0)),
        "ledgers": lambda: store.ledgers(TOPIC, after=0, limit=1),
        "delete": lambda: store.delete(TOPIC, leaves_cursors=True),
        "renew": lambda: store.renew(TOPIC),
    }
    with pytest.raises(TopicNotFound):
        await calls[call]()
    assert await store.leaving(after="", limit=1) == []


async def test_reading_starts_after_any_position(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    await writer.append(single(0), single(1), single(2))
    await writer.append(single(3))
    successor = await Writer.of(store)
    await successor.append(single(4), single(5))
    everything = [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert await positions(store) == everything
    for count, after in enumerate(everything, start=1):
        assert await positions(store, Position(*after)) == everything[count:]
    assert await positions(store, Position(0, 99)) == everything
    assert await positions(store, Position(1, 99)) == everything[4:]
    assert await positions(store, Position(9, 0)) == []


async def test_a_page_stays_within_its_limits_but_has_at_least_one_entry(
    store: LedgerStore,
) -> None:
    writer = await Writer.of(store)
    await writer.append(*(single(i, payload=b"x" * 100) for i in range(10)))
    few = await store.read(TOPIC, None, entries_max=3, bytes_max=10_000, payloads=True)
    assert len(few) == 3
    small = await store.read(TOPIC, None, entries_max=10, bytes_max=250, payloads=True)
    assert len(small) == 2
    assert len(await store.read(TOPIC, None, entries_max=10, bytes_max=1, payloads=True)) == 1
    without = await store.read(TOPIC, None, entries_max=10, bytes_max=250, payloads=False)
    assert len(without) == 10
    assert {each.entry.payload for each in without} == {b""}
    assert {each.payload_bytes for each in without} == {100}


async def read_at(
    store: LedgerStore, *places: Position, bytes_max: int = 1_000_000, payloads: bool = True
) -> list[StoredEntry]:
    return await store.read_at(TOPIC, places, bytes_max=bytes_max, payloads=payloads)


async def test_entries_are_read_at_positions_whole_or_without_their_payloads(
    store: LedgerStore,
) -> None:
    writer = await Writer.of(store)
    mixed = [single(3, payload=b""), batch([4, 6, 9], "q"), marker(1), chunk(7, "ü/ %", 0, 2)]
    await writer.append(*mixed, append_ms=77)
    await writer.append(chunk(7, "next", 0, 300, aborts="ü/ %"), append_ms=78)
    read = await store.read(TOPIC, None, **EVERYTHING)
    bare = await store.read(TOPIC, None, **(EVERYTHING | {"payloads": False}))
    for entry_ids in ([0], [4], [1, 3], [0, 4], [2, 3, 4], range(5)):
        places = [Position(1, each) for each in entry_ids]
        assert await read_at(store, *places) == [read[each] for each in entry_ids]
        assert await read_at(store, *places, payloads=False) == [bare[each] for each in entry_ids]


async def test_missing_positions_are_left_out(store: LedgerStore) -> None:
    await store.create(TOPIC)
    assert await read_at(store, Position(1, 0)) == []
    writer = await Writer.of(store)
    await writer.append(single(0), single(1))
    await writer.append(single(2))
    await Writer.of(store)
    successor = await Writer.of(store)
    await successor.append(single(4), single(5))
    asked = [Position(ledger_id, entry_id) for ledger_id in range(5) for entry_id in range(4)]
    everything = await store.read(TOPIC, None, **EVERYTHING)
    assert len(everything) == 5
    assert await read_at(store) == []
    assert await read_at(store, *asked) == everything
    await store.trim(TOPIC, Position(1, 1))
    assert await read_at(store, *asked) == everything[1:]
    await store.trim(TOPIC, Position(3, 1))
    assert await read_at(store, *asked) == everything[4:]
    await store.trim(TOPIC, END)
    assert await read_at(store, *asked) == []


async def test_reads_at_positions_stay_within_their_limit_but_return_one_entry(
    store: LedgerStore,
) -> None:
    writer = await Writer.of(store)
    await writer.append(*(single(i, payload=b"x" * 100) for i in range(5)))
    await writer.append(*(single(i, payload=b"x" * 100) for i in range(5, 10)))
    places = [Position(1, each) for each in range(1, 30, 2)]
    assert len(await read_at(store, *places, bytes_max=250)) == 2
    assert len(await read_at(store, *places, bytes_max=400)) == 3
    assert len(await read_at(store, *places, bytes_max=1)) == 1
    without = await read_at(store, *places, bytes_max=250, payloads=False)
    assert [each.position for each in without] == places[:5]
    assert {each.payload_bytes for each in without} == {100}


async def test_messages_are_found_by_producer_and_id(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    await writer.append(single(0), batch([2, 3, 5]), single(0, "q"))
    await writer.append(batch([7, 8]), marker(6))
    assert await store.find(TOPIC, "p", [8, 0, 1, 5, 4, 6, 9]) == [
        Found(Position(1, 3), 1),
        Found(Position(1, 0), None),
        Missing.STALE,
        Found(Position(1, 1), 2),
        Missing.STALE,  # within the batch's range, but not in the batch
        Missing.STALE,  # a marker is no message
        Missing.STALE,
    ]
    assert await store.find(TOPIC, "q", [0, 2]) == [Found(Position(1, 2), None), Missing.STALE]
    assert await store.find(TOPIC, "nobody", [0]) == [Missing.STALE]
    assert await store.highest(TOPIC, 1, "p") == 8
    assert await store.highest(TOPIC, 1, "nobody") is None


async def test_a_message_stored_twice_is_found_at_its_last_position(store: LedgerStore) -> None:
    writer = await Writer.of(store)  # deduplication was off
    await writer.append(single(5))
    await writer.append(batch([4, 5]))
    assert await store.find(TOPIC, "p", [5]) == [Found(Position(1, 1), 1)]


async def test_a_message_in_many_blocks_is_found_at_its_last_position(store: LedgerStore) -> None:
    writer = await Writer.of(store)  # deduplication was off
    await writer.append(single(1))
    await writer.append(*large(2, "a", 2)[:1])
    for _ in range(100):
        await writer.append(single(0))
    await writer.append(single(2))
    await writer.append(*large(2, "a", 2)[1:])
    for _ in range(5):
        await writer.append(single(0))
    assert await store.find(TOPIC, "p", [0, 1, 2, 3]) == [
        Found(Position(1, 108), None),
        Found(Position(1, 0), None),
        Found(Position(1, 103), None, (Position(1, 1), Position(1, 103)), "a"),
        Missing.STALE,
    ]


async def test_batches_with_interleaved_ids_are_told_apart(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    await writer.append(batch([1, 2]), batch([0, 3, 4]))
    found = await store.find(TOPIC, "p", [0, 1, 2, 3, 4])
    entry_ids = [each.position.entry_id for each in found if isinstance(each, Found)]
    assert entry_ids == [1, 0, 0, 1, 1]


async def test_a_trim_removes_the_entries_before_its_position(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    for first in range(0, 9, 3):
        await writer.append(*(single(i, payload=b"12345") for i in range(first, first + 3)))
    assert await store.trim(TOPIC, Position(1, 4)) == Trimmed(4, Position(1, 4))
    assert await positions(store) == [(1, entry_id) for entry_id in range(4, 9)]
    state = await store.get(TOPIC)
    assert (state.first, state.tail) == (Position(1, 4), Position(1, 8))
    assert (state.entries, state.messages, state.size_bytes) == (5, 5, 5 * (4 + 5))
    assert await store.find(TOPIC, "p", [0, 3, 4]) == [
        Missing.TRIMMED,
        Missing.TRIMMED,
        Found(Position(1, 4), None),
    ]
    assert await store.trim(TOPIC, Position(1, 2)) == Trimmed(0, Position(1, 4))
    assert await store.trim(TOPIC, Position(1, 5)) == Trimmed(1, Position(1, 5))


async def test_trimmed_ids_are_remembered_by_producer(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    await writer.append(single(7, "a"), batch([1, 2], "b"), marker(9, "m"), single(5, "c"))
    await writer.append(single(8, "a"), single(6, "c"))
    assert await store.trimmed_producers(TOPIC, skip=0, limit=9) == []
    await store.trim(TOPIC, Position(1, 3))  # in the middle of a group
    assert await store.trimmed_producers(TOPIC, skip=0, limit=9) == [("a", 7), ("b", 2)]
    await store.trim(TOPIC, Position(1, 99))
    assert await store.trimmed_producers(TOPIC, skip=0, limit=2) == [("a", 8), ("b", 2)]
    assert await store.trimmed_producers(TOPIC, skip=2, limit=2) == [("c", 6)]
    assert await store.trimmed_producers(TOPIC, skip=3, limit=2) == []
    assert await store.trimmed_producers(TOPIC, after="a", limit=1) == [("b", 2)]
    assert await store.trimmed_producers(TOPIC, after="bb", limit=9) == [("c", 6)]
    assert await store.trimmed_producers(TOPIC, after="c", limit=9) == []


async def test_the_last_instance_of_a_producer_outlasts_its_entries(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    assert (await store.newest(TOPIC, "p")).instance is None
    await writer.append(single(1), single(1, "q"), instances={"p": b"one", "q": b""})
    await writer.append(single(2))
    assert (await store.newest(TOPIC, "p")).instance == b"one"
    assert (await store.newest(TOPIC, "q")).instance == b""
    with pytest.raises(Fenced):
        await store.append(TOPIC, 1, None, [single(3)], 5, instances={"p": b"fenced"})
    await writer.append(single(3), instances={"p": b"two"})
    await store.trim(TOPIC, Position(1, 99))
    await store.take(TOPIC, create=False)
    assert (await store.newest(TOPIC, "p")).instance == b"two"
    await store.delete(TOPIC)
    await Writer.of(store)
    assert (await store.newest(TOPIC, "p")).instance is None


async def test_leftovers_of_deleted_topics_are_listed_until_removed(store: LedgerStore) -> None:
    topics = [TOPIC, OTHER, TopicName.parse("test/store/topic3")]
    for topic in topics:
        await store.create(topic)
        await store.delete(topic, leaves_cursors=True)
    await store.create(TopicName.parse("test/store/nothing"))
    await store.delete(TopicName.parse("test/store/nothing"))
    assert await store.leaving(after="", limit=2) == topics[:2]
    assert await store.leaving(after=str(topics[1]), limit=2) == topics[2:]
    assert all([await store.is_leaving(topic) for topic in topics])
    await store.left(topics[0])
    await store.left(topics[0])
    await store.create(topics[1])  # its cursors may be new
    assert [await store.is_leaving(topic) for topic in topics] == [False, False, True]
    assert await store.leaving(after="", limit=9) == topics[2:]
    await store.take(topics[2], create=True)
    assert await store.leaving(after="", limit=9) == []


async def test_leftovers_of_deleted_topics_survive_a_restart(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path / "ledger.db") as store:
        await store.create(TOPIC)
        await store.delete(TOPIC, leaves_cursors=True)
    async with open_sqlite_store(tmp_path / "ledger.db") as store:
        assert await store.leaving(after="", limit=9) == [TOPIC]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("entries", "whole"),
    [
        ([A0], None),
        ([single(3), A0], 3),
        ([single(3), A0, A1, B0], 3),
        ([single(3), *A], 5),
        ([single(7), single(3), marker(9), A0, single(8, "q")], 3),
        ([batch([1, 2]), A0], 2),
    ],
)
async def test_the_last_complete_message_is_known(
    store: LedgerStore, entries: list[Entry], whole: int | None, apart: bool
) -> None:
    await fill(store, entries, apart=apart)
    assert (await store.newest(TOPIC, "p")).whole == whole


def left(newest: Entry, *, is_whole: bool = True) -> OpenAttempt:
    """The attempt that this entry leaves unfinished."""
    assert newest.chunk is not None
    return OpenAttempt(newest.highest, newest.chunk, is_whole)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("entries", "unfinished"),
    [
        ([single(3)], None),
        ([A0], left(A0)),
        ([A0, A1], left(A1)),
        ([A0, A1, A0], left(A0)),
        ([A0, A1, B0], left(B0)),
        ([*A], None),
        ([A0, single(8)], None),
        ([A0, marker(9), single(8, "q")], left(A0)),
        ([A0, marker(9), chunk(5, "a", 0, 3, "q"), A1], left(A1)),
        # stored by a version that admitted any chunk while deduplication was off
        ([A0, single(8), A1], left(A1, is_whole=False)),
        ([A0, B0, A1], left(A1, is_whole=False)),
        ([A0, B0, A1, B1], None),
        ([A0, A1, A1], left(A1, is_whole=False)),
        ([A0, chunk(6, "a", 1, 3)], left(chunk(6, "a", 1, 3), is_whole=False)),
    ],
)
async def test_the_unfinished_attempt_of_the_newest_entry_is_known(
    store: LedgerStore, entries: list[Entry], unfinished: OpenAttempt | None, apart: bool
) -> None:
    await fill(store, entries, apart=apart)
    assert (await store.newest(TOPIC, "p")).unfinished == unfinished


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("entries", "goes_on"),
    [
        ([A0, A1, ENDS_A], False),
        ([A0, ENDS_A, A1, A2], True),
        ([A0, A1, ENDS_A, A2], True),
        ([A0, ENDS_A, A1], False),
        ([A0, ENDS_A, *A], False),  # it began again
        ([*A, A0, ENDS_A], False),
        ([A0, marker(9), single(8, "q"), ENDS_A, single(8, "q"), A1, A2], True),
        ([chunk(5, "a", 0, 3, "q"), ENDS_A, A1, A2], False),
        ([chunk(6, "a", 0, 3), ENDS_A, A1, A2], False),
        ([ENDS_A], False),
    ],
)
async def test_an_attempt_that_goes_on_after_an_abort_is_known(
    store: LedgerStore, entries: list[Entry], goes_on: bool, apart: bool
) -> None:
    """Version 0.2.0 stored such while deduplication was off."""
    await fill(store, entries, apart=apart)
    where = Position(1, entries.index(ENDS_A))
    assert await store.goes_on(TOPIC, "p", "a", where) is goes_on
    await store.trim(TOPIC, Position(1, 1))
    if entries[0] == A0 and where > Position(1, 0):
        assert not await store.goes_on(TOPIC, "p", "a", where)


async def test_the_rest_of_a_trimmed_attempt_is_unfinished(
    store: LedgerStore,
) -> None:
    await fill(store, [A0, A1], apart=True)
    await store.trim(TOPIC, Position(1, 1))
    assert (await store.newest(TOPIC, "p")).unfinished == left(A1, is_whole=False)
    await store.trim(TOPIC, Position(1, 2))
    assert (await store.newest(TOPIC, "p")).unfinished is None


async def test_a_trimmed_message_counts_as_complete(store: LedgerStore) -> None:
    await fill(store, [single(3), A0, A1], apart=True)
    await store.trim(TOPIC, Position(1, 1))
    assert (await store.newest(TOPIC, "p")).whole == 3


async def test_the_last_trimmed_entry_is_known(store: LedgerStore) -> None:
    for ledger_id in (1, 2):
        writer = await Writer.of(store)
        await writer.append(single(ledger_id * 10), single(ledger_id * 10 + 1), single(7))
        await writer.append(single(ledger_id * 10 + 2))
    assert await store.trimmed_through(TOPIC) is None
    for before, last in [
        (Position(0, 5), None),
        (Position(1, 2), Position(1, 1)),
        (Position(1, 1), Position(1, 1)),
        (Position(1, 99), Position(1, 3)),
        (Position(2, 0), Position(1, 3)),
        (Position(9, 9), Position(2, 3)),
    ]:
        await store.trim(TOPIC, before)
        assert await store.trimmed_through(TOPIC) == last
    await store.delete(TOPIC)
    await Writer.of(store)
    assert await store.trimmed_through(TOPIC) is None


def at(*entry_ids: int) -> tuple[Position, ...]:
    return tuple(Position(1, each) for each in entry_ids)


def found(uuid: str, *entry_ids: int) -> Found:
    chunks = at(*entry_ids)
    return Found(chunks[-1], None, chunks, uuid)


def unfinished(*attempts: tuple[Entry, tuple[Position, ...]]) -> Unfinished:
    return Unfinished({entry.chunk.layout: places for entry, places in attempts if entry.chunk})


together_and_apart = pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])


@together_and_apart
@pytest.mark.parametrize(
    ("entries", "fate"),
    [
        (A, found("a", 0, 1, 2)),
        ([A0, single(0, "q"), *large(5, "a", 2, "q"), A1, A2, single(6)], found("a", 0, 4, 5)),
        ([A0, A1], unfinished((A0, at(0, 1)))),
        ([A0, A1, single(6)], unfinished((A0, at(0, 1)))),
        ([A0, A2], unfinished((A0, at(0)))),
        ([A1, A2], Missing.STALE),
        ([A0, chunk(5, "a", 1, 2)], unfinished((A0, at(0)))),  # cut differently
        # another attempt
        ([A0, A1, B0, B1], found("b", 2, 3)),
        ([A0, B0], unfinished((A0, at(0)), (B0, at(1)))),
        ([A0, B0, A0], unfinished((A0, at(2)), (B0, at(1)))),
        ([A0, A1, *A], found("a", 2, 3, 4)),
        ([A0, single(5)], Found(Position(1, 1), None)),
        ([A0, batch([4, 5])], Found(Position(1, 1), 1)),
        # deduplication was off
        ([A0, A1, A1, A2], found("a", 0, 1, 3)),
        ([*A, *A], found("a", 3, 4, 5)),
        ([*A, B0], found("a", 0, 1, 2)),
        ([*A, single(5)], Found(Position(1, 3), None)),
    ],
)
async def test_a_large_message_is_found_when_one_attempt_is_complete(
    store: LedgerStore, entries: list[Entry], fate: Fate, apart: bool
) -> None:
    await fill(store, entries, apart=apart)
    assert await store.find(TOPIC, "p", [5]) == [fate]


@together_and_apart
@pytest.mark.parametrize(
    ("entries", "highest"),
    [
        (A, 5),
        ([A0, A1], 4),
        ([single(2), A0], 4),
        ([A0, A1, B0], 4),
        ([A0, *B], 5),
        ([A0, single(5)], 5),
        ([A0, single(6)], 6),
        ([A0, single(9, "q"), marker(9)], 4),
        (large(0, "a", 2)[:1], None),
        ([*A, chunk(6, "b", 0, 2)], 5),
    ],
)
async def test_the_id_of_an_incomplete_message_is_not_the_highest(
    store: LedgerStore, entries: list[Entry], highest: int | None, apart: bool
) -> None:
    await fill(store, entries, apart=apart)
    assert await store.highest(TOPIC, 1, "p") == highest


@together_and_apart
async def test_a_large_message_is_counted_once_at_its_last_chunk(
    store: LedgerStore, apart: bool
) -> None:
    await fill(store, [single(4), *A, chunk(6, "b", 0, 2)], apart=apart)
    left = [(await store.get(TOPIC)).messages]
    for entry_id in range(1, 5):
        await store.trim(TOPIC, Position(1, entry_id))
        left.append((await store.get(TOPIC)).messages)
    assert left == [2, 1, 1, 1, 0]


@together_and_apart
@pytest.mark.parametrize(
    ("entries", "before", "trimmed", "fate"),
    [
        (A, 1, 5, Missing.TRIMMED),
        (A, 3, 5, Missing.TRIMMED),
        ([*A, chunk(6, "b", 0, 2)], 4, 5, Missing.TRIMMED),
        ([A0, *B], 1, 5, found("b", 1, 2)),
        ([A0, A1], 1, 4, Missing.STALE),
        ([A0, A1], 2, 4, Missing.STALE),
        ([A0, A1, B0], 1, 4, unfinished((B0, at(2)))),
        ([A0, single(6), A1], 1, 5, Missing.TRIMMED),  # overtaken: it will never be complete
    ],
)
async def test_a_large_message_is_trimmed_with_its_first_chunk(
    store: LedgerStore, entries: list[Entry], before: int, trimmed: int, fate: Fate, apart: bool
) -> None:
    await fill(store, entries, apart=apart)
    highest = await store.highest(TOPIC, 1, "p")
    await store.trim(TOPIC, Position(1, before))
    assert await store.trimmed_producers(TOPIC, skip=0, limit=9) == [("p", trimmed)]
    assert await store.find(TOPIC, "p", [5]) == [fate]
    assert await store.highest(TOPIC, 1, "p") == highest


async def test_a_trimmed_incomplete_message_leaves_no_id(
    store: LedgerStore,
) -> None:
    await fill(store, large(0, "a", 3)[:2], apart=False)
    await store.trim(TOPIC, Position(1, 1))
    assert await store.trimmed_producers(TOPIC, skip=0, limit=9) == []


@together_and_apart
@pytest.mark.parametrize(
    ("entries", "before", "cuts"),
    [
        ([A0, A1], 0, False),
        ([A0, A1], 1, True),
        ([A0, A1], 9, True),
        ([single(0), A0], 2, True),
        (A, 1, False),  # complete
        ([A0, single(5)], 1, False),  # in one piece
        ([A0, single(6)], 1, False),  # overtaken
        ([A0, chunk(6, "b", 0, 2)], 2, True),
        ([A0, *B], 1, False),
        ([A0, A1, B0], 2, True),
        ([A0, single(9, "q"), marker(9)], 1, True),
        ([*A, chunk(5, "a", 0, 2, "q")], 4, True),
    ],
)
async def test_a_trim_through_an_unfinished_message_is_noticed(
    store: LedgerStore, entries: list[Entry], before: int, cuts: bool, apart: bool
) -> None:
    await fill(store, entries, apart=apart)
    assert await store.cuts_unfinished(TOPIC, Position(1, before)) is cuts


@together_and_apart
@pytest.mark.parametrize(
    ("entries", "before"),
    [
        ([single(0), A0], 1),
        ([A0, chunk(6, "b", 0, 2)], 1),
        ([*A, chunk(5, "a", 0, 2, "q")], 3),
    ],
)
async def test_a_message_that_begins_at_the_trim_position_is_not_cut(
    store: LedgerStore, entries: list[Entry], before: int, apart: bool
) -> None:
    await fill(store, entries, apart=apart)
    assert not await store.cuts_unfinished(TOPIC, Position(1, before))


async def test_a_cut_message_is_not_reported_again(store: LedgerStore) -> None:
    await fill(store, [A0, A1], apart=False)
    await store.trim(TOPIC, Position(1, 1))
    assert not await store.cuts_unfinished(TOPIC, Position(1, 1))


async def retained(
    store: LedgerStore, *, since_ms: int | None = None, bytes_max: int | None = None
) -> Position | None:
    return await store.retained_from(TOPIC, appended_since_ms=since_ms, bytes_max=bytes_max)


async def test_retention_by_age_keeps_young_entries(store: LedgerStore) -> None:
    assert (await store.create(TOPIC))[1]
    assert await retained(store, since_ms=100) is None
    writer = await Writer.of(store)
    for sequence_id, append_ms in enumerate((10, 20, 20, 30)):
        await writer.append(single(sequence_id), append_ms=append_ms)
    writer = await Writer.of(store)
    await writer.append(single(4), single(5), append_ms=40)
    assert await retained(store) == (1, 0)
    for since_ms, first in (
        (0, (1, 0)),
        (10, (1, 0)),
        (11, (1, 1)),
        (20, (1, 1)),
        (21, (1, 3)),
        (31, (2, 0)),
        (40, (2, 0)),
        (41, (2, 2)),
    ):
        assert await retained(store, since_ms=since_ms) == first
    await store.trim(TOPIC, Position(1, 2))
    assert await retained(store, since_ms=11) == (1, 2)
    assert await retained(store, since_ms=21) == (1, 3)
    await store.trim(TOPIC, Position(9, 0))
    assert await retained(store, since_ms=41) is None


async def test_retention_by_size_keeps_the_topic_within_its_limit(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    for sequence_id, size_bytes in enumerate((50, 10, 30)):
        await writer.append(single(sequence_id, payload=b"x" * size_bytes))
    first, second, third = [each.size_bytes for each in await store.read(TOPIC, None, **EVERYTHING)]
    everything = (await store.get(TOPIC)).size_bytes
    assert everything == first + second + third
    for bytes_max, place in (
        (everything, (1, 0)),
        (everything - 1, (1, 1)),
        (second + third, (1, 1)),
        (second + third - 1, (1, 2)),
        (third, (1, 2)),
        (third - 1, (1, 3)),
        (0, (1, 3)),
    ):
        assert await retained(store, bytes_max=bytes_max) == place


async def test_retention_removes_entries_beyond_age_or_size(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    for sequence_id, append_ms in enumerate((10, 20, 30)):
        await writer.append(single(sequence_id), append_ms=append_ms)
    (size_bytes,) = {each.size_bytes for each in await store.read(TOPIC, None, **EVERYTHING)}
    assert await retained(store, since_ms=20, bytes_max=size_bytes) == (1, 2)
    assert await retained(store, since_ms=30, bytes_max=2 * size_bytes) == (1, 2)
    assert await retained(store, since_ms=20, bytes_max=2 * size_bytes) == (1, 1)


async def test_a_long_trim_is_done_in_parts(store: LedgerStore) -> None:
    """It has more blocks than one query returns."""
    writer = await Writer.of(store)
    for sequence_id in range(1_030):
        await writer.append(single(sequence_id))
    questions = 0
    while (place := await retained(store, bytes_max=0)) is not None:
        questions += 1
        assert place > ((await store.get(TOPIC)).first or place)
        await store.trim(TOPIC, place)
    assert questions <= 2
    assert (await store.get(TOPIC)).tail == (1, 1_029)


async def test_the_first_entry_since_a_time_is_found(store: LedgerStore) -> None:
    await store.create(TOPIC)
    assert await store.find_time(TOPIC, 0) is None
    writer = await Writer.of(store)
    await writer.append(single(0), single(1), append_ms=10)
    await writer.append(single(2), append_ms=20)
    await writer.append(single(3), single(4), append_ms=20)
    for _ in range(3):  # ledgers without entries between
        writer = await Writer.of(store)
    await writer.append(single(5), append_ms=30)
    await writer.append(single(6), append_ms=40)
    found = [
        (0, (1, 0)), (10, (1, 0)), (11, (1, 2)), (20, (1, 2)), (21, (4, 0)), (30, (4, 0)),
        (31, (4, 1)), (40, (4, 1)), (41, None), (2**64 - 1, None),
    ]  # fmt: skip
    assert [(each, await store.find_time(TOPIC, each)) for each, _ in found] == found
    await store.trim(TOPIC, Position(1, 1))  # in the middle of a group
    assert await store.find_time(TOPIC, 10) == (1, 1)
    assert await store.find_time(TOPIC, 20) == (1, 2)
    await store.trim(TOPIC, Position(4, 0))
    assert await store.find_time(TOPIC, 10) == (4, 0)
    assert await store.find_time(TOPIC, 40) == (4, 1)
    await store.trim(TOPIC, END)
    assert await store.find_time(TOPIC, 0) is None


@pytest.mark.parametrize("history", range(HISTORIES))
async def test_entries_are_found_by_time_although_the_clock_went_back(
    store: LedgerStore, seed: int, history: int
) -> None:
    random = Random(f"times {seed + history}")
    goes_back = history % 2 == 0
    writer = await Writer.of(store)
    now_ms = 20
    for each in range(random.randint(1, 30)):
        while random.random() < 0.3:
            writer = await Writer.of(store)
        now_ms += random.randint(-5 if goes_back else 0, 5)
        count = random.choice((1, 1, 2, 7))
        await writer.append(*(single(each) for _ in range(count)), append_ms=max(now_ms, 0))
    if random.random() < 0.5:
        places = await positions(store)
        await store.trim(TOPIC, random.choice(places))
    log = await store.read(TOPIC, None, **EVERYTHING)
    appended = {stored.position: stored.append_ms for stored in log}
    before = dict(zip(appended, [-1, *appended.values()], strict=False))
    for append_ms in range(max(appended.values()) + 2):
        found = await store.find_time(TOPIC, append_ms)
        if found is None:
            assert log[-1].append_ms < append_ms
        else:
            assert before[found] < append_ms <= appended[found]
        if not goes_back:
            assert found == next((each for each in appended if appended[each] >= append_ms), None)


END = Position(99, 0)
"""Beyond every append of these tests."""


async def columns(
    store: LedgerStore,
    after: Position | None,
    through: Position,
    *,
    metadata: bool = False,
    runs_max: int = 1_000,
    bytes_max: int = 1_000_000,
) -> list[list[Row]]:
    """The runs of a page, entry by entry."""
    runs = await store.columns(
        TOPIC,
        after,
        through=through,
        metadata=metadata,
        runs_max=runs_max,
        bytes_max=bytes_max,
    )
    assert len(runs) <= runs_max
    return [rows_of(run) for run in runs]


async def test_columns_hold_the_entries_of_a_group(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    mixed = [single(3, payload=b""), batch([4, 6, 9], "q"), marker(1), chunk(7, "ü/ %", 0, 2)]
    await writer.append(*mixed, append_ms=77)
    await writer.append(chunk(7, "next", 0, 300, aborts="ü/ %"), append_ms=78)
    await writer.append(single(8), single(9), append_ms=79)
    read = await store.read(TOPIC, None, **EVERYTHING)
    for metadata in (False, True):
        expected = [row_of(each, metadata=metadata) for each in read]
        runs = await columns(store, None, END, metadata=metadata)
        assert runs == [expected[:4], expected[4:5], expected[5:]]
    assert await columns(store, Position(1, 2), Position(1, 5)) == [
        [row_of(read[3])],
        [row_of(read[4])],
        [row_of(read[5])],
    ]


async def test_a_page_of_columns_stays_within_its_limits_but_has_one_run(
    store: LedgerStore,
) -> None:
    writer = await Writer.of(store)
    for each in range(4):
        await writer.append(*(single(10 * each + i) for i in range(10)))
    assert [len(run) for run in await columns(store, None, END, runs_max=3)] == [10, 10, 10]
    assert [len(run) for run in await columns(store, None, END, bytes_max=1)] == [10]
    assert len(await columns(store, None, END, bytes_max=400)) == 2
    assert len(await columns(store, None, END, bytes_max=400, metadata=True)) == 1


async def test_ranges_without_entries_have_no_columns(store: LedgerStore) -> None:
    await store.create(TOPIC)
    assert await columns(store, None, END) == []
    await fill(store, [single(0), single(1)], apart=False)
    assert await columns(store, Position(1, 1), END) == []
    assert await columns(store, Position(1, 1), Position(1, 0)) == []
    assert await columns(store, Position(1, 0), Position(1, 0)) == []
    assert await columns(store, None, Position(0, 9)) == []
    await store.trim(TOPIC, Position(1, 1))
    assert await columns(store, None, Position(1, 0)) == []
    await store.trim(TOPIC, END)
    assert await columns(store, None, END) == []


@pytest.mark.parametrize("history", range(HISTORIES))
async def test_columns_agree_with_reads(store: LedgerStore, seed: int, history: int) -> None:
    random = Random(f"columns {seed + history}")
    writer = await Writer.of(store)
    for append_ms in range(random.randint(1, 12)):
        if random.random() < 0.2:
            writer = await Writer.of(store)
        group = [_entry(random) for _ in range(random.choice((1, 1, 2, 7)))]
        await writer.append(*group, append_ms=append_ms)
    places = [None, *(Position(*divmod(each, 12)) for each in range(48)), *await positions(store)]
    for _ in range(random.randint(0, 2)):
        await store.trim(TOPIC, random.choice(places) or Position(0, 0))
    read = await store.read(TOPIC, None, **EVERYTHING)
    for _ in range(20):
        after, through = random.choice(places), random.choice(places) or END
        metadata = random.random() < 0.5
        limits = {"runs_max": random.randint(1, 5), "bytes_max": random.choice((1, 100, 10_000))}
        found: list[list[Row]] = []
        reached = after
        while page := await columns(store, reached, through, metadata=metadata, **limits):
            found += page
            reached = page[-1][-1].position
        assert [row for run in found for row in run] == [
            row_of(each, metadata=metadata)
            for each in read
            if (after is None or each.position > after) and each.position <= through
        ]
        appends = [{row.append_ms for row in run} for run in found]
        assert all(len(each) == 1 for each in appends), "a run was appended together"
        assert len({min(each) for each in appends}) == len(found), "and nothing else was with it"


def _entry(random: Random) -> Entry:
    sequence_id, producer = random.randint(0, 30), random.choice(("p", "q", "ü"))
    entry = random.choice(
        (
            single(sequence_id, producer),
            single(sequence_id, producer),
            single(sequence_id, producer, payload=b""),
            batch([sequence_id, sequence_id + 1], producer),
            batch([sequence_id, sequence_id + 1, sequence_id + 7], producer),
            marker(sequence_id, producer),
            chunk(sequence_id, "u", 1, 3, producer, aborts=random.choice(("", "v"))),
        )
    )
    return entry._replace(metadata=random.randbytes(random.randint(0, 9)))


async def test_a_damaged_entry_is_reported_after_those_before_it(
    tmp_path: Path,
) -> None:
    async with open_sqlite_store(tmp_path / "ledger.db") as store:
        writer = await Writer.of(store)
        for first in range(0, 9, 3):
            await writer.append(*(single(first + each) for each in range(3)))
        with apsw.Connection(str(tmp_path / "ledger.db")) as database:
            damaged = "CAST(substr(payloads, 2) || x'00' AS BLOB)"
            database.execute(f"UPDATE block SET payloads = {damaged} WHERE first_entry = 3")
        database.close()
        assert [each.position for each in await read_at(store, *at(0, 2, 4, 8))] == [*at(0, 2)]
        with pytest.raises(EntryCorrupt) as damage:
            await read_at(store, *at(4, 8))
        assert damage.value.details == {"ledger_id": 1, "entry_id": 5, "first_entry_id": 3}
        assert [each.position for each in await read_at(store, *at(1, 8))] == [*at(1, 8)]
        assert len(await read_at(store, *at(0, 2, 4, 8), payloads=False)) == 4


@pytest.mark.parametrize("blob", ["entries", "metadata"])
async def test_damaged_columns_are_reported_after_those_before_them(
    tmp_path: Path, blob: str
) -> None:
    """As with reads; a call without metadata does not notice damage in it."""
    async with open_sqlite_store(tmp_path / "ledger.db") as store:
        writer = await Writer.of(store)
        for first in range(0, 9, 3):
            await writer.append(*(single(first + each) for each in range(3)))
        with apsw.Connection(str(tmp_path / "ledger.db")) as database:
            damaged = f"CAST(substr({blob}, 2) || x'00' AS BLOB)"
            database.execute(f"UPDATE block SET {blob} = {damaged} WHERE first_entry = 3")
        database.close()
        (before,) = await columns(store, None, END, metadata=True)
        assert [row.lowest for row in before] == [0, 1, 2]
        for after in (Position(1, 2), Position(1, 4)):
            with pytest.raises(EntryCorrupt) as damage:
                await columns(store, after, END, metadata=True)
            where = {"ledger_id": 1, "entry_id": 5, "first_entry_id": 3}
            assert damage.value.details == where
            with pytest.raises(EntryCorrupt) as same:
                await store.read(TOPIC, after, **EVERYTHING)
            assert same.value.details == where
        assert await columns(store, None, Position(1, 2), metadata=True) == [before]
        ((behind, *_),) = await columns(store, Position(1, 5), END, metadata=True)
        assert behind.lowest == 6
        if blob == "metadata":
            assert [len(run) for run in await columns(store, None, END)] == [3, 3, 3]


async def test_ledgers_that_hold_entries_are_listed_in_order(store: LedgerStore) -> None:
    assert (await store.create(TOPIC))[1]
    assert await store.ledgers(TOPIC, after=-1, limit=9) == []
    for count in (3, 0, 1, 0, 0, 2):
        writer = await Writer.of(store)
        for each in range(count):
            await writer.append(single(each), single(each))
    everything = [LedgerRange(1, 0, 5), LedgerRange(3, 0, 1), LedgerRange(6, 0, 3)]
    assert await store.ledgers(TOPIC, after=-1, limit=9) == everything
    assert await store.ledgers(TOPIC, after=0, limit=3) == everything
    assert await store.ledgers(TOPIC, after=0, limit=2) == everything[:2]
    assert await store.ledgers(TOPIC, after=1, limit=1) == everything[1:2]
    assert await store.ledgers(TOPIC, after=2, limit=9) == everything[1:]
    assert await store.ledgers(TOPIC, after=6, limit=9) == []
    await Writer.of(store, OTHER)
    assert await store.ledgers(OTHER, after=0, limit=9) == []


async def test_a_ledger_begins_with_its_first_remaining_entry(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    await writer.append(single(0), single(1), single(2))
    writer = await Writer.of(store)
    await writer.append(single(3), single(4))
    await store.trim(TOPIC, Position(1, 2))
    assert await store.ledgers(TOPIC, after=0, limit=9) == [LedgerRange(1, 2, 2), (2, 0, 1)]
    await store.trim(TOPIC, Position(2, 1))
    assert await store.ledgers(TOPIC, after=0, limit=9) == [LedgerRange(2, 1, 1)]
    await store.trim(TOPIC, END)
    assert await store.ledgers(TOPIC, after=0, limit=9) == []


async def test_a_topic_trimmed_to_its_end_keeps_its_end(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    await writer.append(single(0), batch([1, 2]))
    assert await store.trim(TOPIC, Position(99, 0)) == Trimmed(2, None)
    state = await store.get(TOPIC)
    assert (state.first, state.tail, state.entries) == (None, Position(1, 1), 0)
    assert (state.messages, state.size_bytes) == (0, 0)
    assert await positions(store) == []
    assert await store.find(TOPIC, "p", [2]) == [Missing.TRIMMED]
    assert await store.highest(TOPIC, 1, "p") == 2
    await writer.append(single(3))
    assert await positions(store) == [(1, 2)]
    assert (await store.get(TOPIC)).first == Position(1, 2)


async def test_a_recreated_topic_has_another_incarnation(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    await writer.append(single(0))
    await store.delete(TOPIC)
    with pytest.raises(TopicNotFound):
        await store.get(TOPIC)
    with pytest.raises(DomainError):
        await writer.append(single(1))
    again = await Writer.of(store)
    assert again.state.incarnation > writer.state.incarnation
    assert again.state.ledger_id > writer.state.ledger_id
    assert again.state.tail is None
    assert await store.find(TOPIC, "p", [0]) == [Missing.STALE]
    assert await store.highest(TOPIC, again.state.ledger_id, "p") is None


async def test_a_renewed_topic_has_another_incarnation_and_the_same_log(
    store: LedgerStore,
) -> None:
    """Its writer is fenced; a topic deleted and recreated has yet another incarnation."""
    writer = await Writer.of(store)
    await writer.append(single(0))
    await store.renew(TOPIC)
    with pytest.raises(Fenced):
        await writer.append(single(1))
    renewed = await Writer.of(store)
    assert renewed.state.incarnation > writer.state.incarnation
    assert renewed.state.ledger_id > writer.state.ledger_id
    assert renewed.tail == writer.tail
    await renewed.append(single(1))
    assert await positions(store) == [(1, 0), (renewed.state.ledger_id, 0)]
    await store.renew(TOPIC)
    await store.delete(TOPIC)
    again = await Writer.of(store)
    assert again.state.incarnation > renewed.state.incarnation


async def test_a_renewed_topic_is_above_what_others_have_seen(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    await writer.append(single(0))
    renewed = await store.renew(TOPIC, above=41)
    assert (renewed.ledger_id, renewed.incarnation, renewed.tail) == (42, 42, writer.tail)
    assert (await store.renew(TOPIC, above=5)).ledger_id == 43
    assert (await Writer.of(store)).state.ledger_id == 44


async def test_a_topic_that_does_not_exist_begins_above_what_others_have_seen(
    store: LedgerStore,
) -> None:
    await store.reserve(TOPIC, 41)
    await store.reserve(TOPIC, 7)
    writer = await Writer.of(store)
    assert (writer.state.ledger_id, writer.state.incarnation) == (42, 42)
    await store.reserve(TOPIC, 99)
    assert await store.get(TOPIC) == writer.state
    await store.delete(TOPIC)
    await store.reserve(TOPIC, 7)
    assert (await Writer.of(store)).state.ledger_id == 43


async def test_a_previous_writer_neither_trims_nor_renews_nor_deletes(
    store: LedgerStore,
) -> None:
    writer = await Writer.of(store)
    await writer.append(single(0), single(1))
    await Writer.of(store)
    theirs = await store.get(TOPIC)
    before = Position(1, 1)
    for change in (
        lambda: store.trim(TOPIC, before, ledger_id=writer.state.ledger_id),
        lambda: store.renew(TOPIC, ledger_id=writer.state.ledger_id),
        lambda: store.delete(TOPIC, ledger_id=writer.state.ledger_id, leaves_cursors=True),
    ):
        with pytest.raises(Fenced) as refused:
            await change()
        assert refused.value.details["epoch"] == theirs.ledger_id
    assert await store.get(TOPIC) == theirs
    trimmed = await store.trim(TOPIC, before, ledger_id=theirs.ledger_id)
    assert trimmed == Trimmed(1, before)
    await store.renew(TOPIC, ledger_id=theirs.ledger_id)
    await store.delete(TOPIC, ledger_id=theirs.ledger_id + 1)


async def test_an_attempt_is_found_by_its_uuid(store: LedgerStore) -> None:
    writer = await Writer.of(store)  # deduplication was off
    await writer.append(*A, single(5), *B)
    assert await store.find(TOPIC, "p", [5]) == [found("b", 4, 5)]
    assert await store.find(TOPIC, "p", [5], uuid="b") == [found("b", 4, 5)]
    assert await store.find(TOPIC, "p", [5], uuid="c") == [Missing.STALE]


async def test_topics_are_listed_in_order_by_prefix_and_page(store: LedgerStore) -> None:
    names = ["a/b/1", "a/b/2", "a/b/3", "a/bc/1", "b/b/1"]
    for name in reversed(names):
        await store.create(TopicName.parse(name))

    async def listed(**wanted: object) -> list[str]:
        asked: dict[str, Any] = {"prefix": "", "after": "", "limit": 10} | wanted
        return [str(state.topic) for state in await store.topics(**asked)]

    assert await listed() == names
    assert await listed(prefix="a/b/") == names[:3]
    assert await listed(limit=2) == names[:2]
    assert await listed(after="a/b/2") == names[2:]
    assert await listed(prefix="a/b/%") == []


async def test_counting_after_the_tail_gives_zero(store: LedgerStore) -> None:
    writer = await Writer.of(store)
    assert await store.count_after(TOPIC, None) == 0
    await writer.append(single(0), single(1))
    await writer.append(single(2))
    assert await store.count_after(TOPIC, None) == 3
    assert await store.count_after(TOPIC, Position(1, 0)) == 2
    assert await store.count_after(TOPIC, Position(1, 1)) == 1
    assert await store.count_after(TOPIC, Position(1, 2)) == 0


async def test_topics_are_written_concurrently(store: LedgerStore) -> None:
    names = [TopicName.parse(f"many/topics/{i}") for i in range(20)]

    async def fill(name: TopicName) -> None:
        writer = await Writer.of(store, name)
        for i in range(10):
            await writer.append(single(i))

    await asyncio.gather(*(fill(name) for name in names))
    for name in names:
        assert (await store.get(name)).entries == 10


@pytest.mark.parametrize("history", range(HISTORIES))
async def test_every_store_agrees_with_the_memory_store(
    store: LedgerStore, seed: int, history: int
) -> None:
    random = Random(seed + history)
    model = MemoryLedgerStore()
    script = [_call(random) for _ in range(60)]
    for step, call in enumerate(script):
        assert await _outcome(store, call) == await _outcome(model, call), script[: step + 1]


VERBS = ("append",) * 9 + (
    "take",
    "read",
    "read_at",
    "columns",
    "ledgers",
    "find",
    "find",
    "highest",
    "trim",
    "cuts",
    "delete",
    "get",
)


def _call(random: Random) -> tuple[str, Sequence[object]]:
    topic = random.choice((TOPIC, OTHER))
    producer = random.choice(("p", "q"))
    position = random.choice((None, Position(random.randint(1, 4), random.randint(0, 6))))
    lowest = random.randint(0, 30)
    match random.choice(VERBS):
        case "append":
            entries = [
                random.choice((single(lowest + i, producer), batch([lowest, lowest + 2], producer)))
                for i in range(random.randint(1, 3))
            ]
            chunks = large(random.choice((lowest, 10)), random.choice("ab"), 3, producer)
            some = chunks[random.choice((0, 0, 1, 2)) : random.choice((1, 2, 3, 3))]
            return "append", (topic, random.choice((entries, entries + some, some or entries)))
        case "take":
            return "take", (topic,)
        case "read":
            return "read", (topic, position, random.randint(1, 5))
        case "read_at":
            places = [Position(random.randint(1, 4), random.randint(0, 9)) for _ in range(6)]
            return "read_at", (topic, sorted({*places}), random.choice((1, 20, 10_000)))
        case "columns":
            return "columns", (topic, position, random.randint(1, 5))
        case "ledgers":
            return "ledgers", (topic, random.randint(-1, 4), random.randint(1, 3))
        case "find":
            return "find", (topic, producer, list(range(lowest, lowest + 8)))
        case "highest":
            return "highest", (topic, producer)
        case ("trim" | "cuts") as verb if position is not None:
            return verb, (topic, position)
        case "delete" if random.random() < 0.3:
            return "delete", (topic,)
        case _:
            return "get", (topic,)


async def _outcome(store: LedgerStore, call: tuple[str, Sequence[Any]]) -> object:
    verb, (topic, *rest) = call
    try:
        match verb:
            case "append":
                state = await store.get(topic)
                await store.append(topic, state.ledger_id, state.tail, rest[0], 1)
                return None
            case "take":
                return (await store.take(topic, create=True))._replace(created_ms=0)
            case "read":
                return await store.read(
                    topic, rest[0], entries_max=rest[1], bytes_max=10_000, payloads=True
                )
            case "read_at":
                return await store.read_at(topic, rest[0], bytes_max=rest[1], payloads=True)
            case "columns":
                runs = await store.columns(
                    topic,
                    rest[0],
                    through=END,
                    metadata=True,
                    runs_max=rest[1],
                    bytes_max=200,
                )
                return [rows_of(run) for run in runs]
            case "ledgers":
                return await store.ledgers(topic, after=rest[0], limit=rest[1])
            case "find":
                # A store may know more about trimmed messages than the model.
                found = await store.find(topic, *rest)
                return ["missing" if isinstance(each, Missing) else each for each in found]
            case "highest":
                ledger_id = (await store.get(topic)).ledger_id
                return await store.highest(topic, ledger_id, *rest)
            case "cuts":
                return await store.cuts_unfinished(topic, *rest)
            case "trim":
                trimmed = await store.trim(topic, *rest)
                return trimmed, await store.trimmed_producers(topic, skip=0, limit=10)
            case "delete":
                await store.delete(topic)
                return None
            case _:
                return (await store.get(topic))._replace(created_ms=0)
    except DomainError as error:
        return error.reason


async def test_the_time_of_the_last_append_outlasts_its_entry(store: LedgerStore) -> None:
    await store.create(TOPIC)
    assert await store.last_append_ms(TOPIC) == 0
    writer = await Writer.of(store)
    await writer.append(single(0), single(1), append_ms=70)
    await writer.append(single(2), append_ms=90)
    assert await store.last_append_ms(TOPIC) == 90
    await store.trim(TOPIC, END)
    assert await store.last_append_ms(TOPIC) == 90
    writer = await Writer.of(store)
    await writer.append(single(3), append_ms=95)
    assert await store.last_append_ms(TOPIC) == 95
