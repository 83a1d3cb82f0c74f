"""A look-up reads only the blocks it needs, and delays no other one."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.ledger.adapters import producers, rows
from seqgate.services.ledger.adapters.block import Block, decode_block
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core.entry import StoredEntry, unit_of
from seqgate.services.ledger.core.find import clusters
from seqgate.services.ledger.core.receipt import Fate, Found, Missing, Status
from seqgate.services.ledger.service import Ledger, Opened, Opening
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.types import Position, TopicName
from tests.simulation.defects import find
from tests.support.entries import single
from tests.support.remembering import RememberingDeduplicator

TOPIC = TopicName.parse("public/default/found")
BLOCKS = 200


@contextmanager
def opened_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The first entries of the decoded blocks."""
    opened: list[int] = []

    def decode(block: Block) -> list[StoredEntry]:
        opened.append(block.first_entry)
        return decode_block(block)

    with monkeypatch.context() as patch:
        for module in (producers, rows):
            patch.setattr(module, "decode_block", decode)
        yield opened


async def look_far_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    async with open_sqlite_store(folder / "ledger.db") as store:
        state = await store.take(TOPIC, create=True)
        tail = None
        for each in range(BLOCKS):
            entries = [single(10 * each), single(10 * each + 5)]
            await store.append(TOPIC, state.ledger_id, tail, entries, 1)
            tail = Position(state.ledger_id, 2 * each + 1)
        with opened_blocks(monkeypatch) as opened:
            far = 10 * (BLOCKS - 1)
            assert await store.find(TOPIC, "p", [5, far, 12, far + 3]) == [
                Found(Position(1, 1), None),
                Found(Position(1, 2 * BLOCKS - 2), None),
                Missing.STALE,
                Missing.STALE,
            ]
        return opened


async def test_a_look_up_decodes_only_blocks_that_may_hold_its_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(await look_far_apart(tmp_path, monkeypatch)) == [0, 2, 2 * BLOCKS - 2]


@pytest.mark.deep
async def test_a_look_up_of_the_whole_range_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find("B3").apply(monkeypatch)
    assert len(await look_far_apart(tmp_path, monkeypatch)) > BLOCKS / 2


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 5))
def test_clusters_hold_all_ids_and_leave_out_the_widest_gaps(ids: set[int], count_max: int) -> None:
    ordered = sorted(ids)
    found = clusters(ordered, count_max)
    assert len(found) <= count_max
    assert {each for each in ids if any(low <= each <= high for low, high in found)} == ids
    assert all(low in ids and high in ids for low, high in found)
    between = [low - high for (_, high), (low, _) in pairwise(found)]
    inside = [
        later - earlier
        for low, high in found
        for earlier, later in pairwise(each for each in ordered if low <= each <= high)
    ]
    if between and len(found) == count_max:
        assert min(between) >= max(inside, default=0)


class Waiting(MemoryLedgerStore):
    """A store whose look-ups of the ids in `slow` can be blocked."""

    def __init__(self) -> None:
        super().__init__()
        self.let = asyncio.Event()
        self.asked: list[int] = []

    async def find(
        self, topic: TopicName, producer: str, sequence_ids: Sequence[int], *, uuid: str = ""
    ) -> list[Fate]:
        self.asked.append(len(sequence_ids))
        if producer == "slow":
            await self.let.wait()
        return await super().find(topic, producer, sequence_ids, uuid=uuid)


async def statuses(opened: Opened, count: int) -> list[Status]:
    found: list[Status] = []
    async with asyncio.timeout(5):
        while len(found) < count:
            news = await opened.session.news()
            assert news is not None
            found += [receipt.status for _, receipt in news.receipts]
    return found


def send(opened: Opened, *sequence_ids: int) -> None:
    units: list[Any] = [
        unit_of(opened.session.number, each, [single(each, opened.session.producer)])
        for each in sequence_ids
    ]
    opened.topic.submit(opened.session, units)


async def test_producers_do_not_wait_for_each_others_look_ups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although their messages were judged together; a long look-up is done in parts."""
    monkeypatch.setattr("seqgate.services.ledger.live.LOOK_UP_IDS_MAX", 4)
    store = Waiting()
    async with asyncio.TaskGroup() as tasks:
        dedup = RememberingDeduplicator()
        ledger = Ledger(LedgerConfig(), store, dedup, MemoryCursors(), tasks)
        slow, quick = [
            await ledger.open(
                Opening(TOPIC, name, initial_sequence_id=None, takeover=False, instance=b"")
            )
            for name in ("slow", "quick")
        ]
        for each in (slow, quick):
            send(each, *range(10))
            assert await statuses(each, 10) == [Status.STORED] * 10
        send(slow, *range(10))
        send(quick, *range(10))
        assert await statuses(quick, 10) == [Status.DUPLICATE] * 10
        assert max(store.asked) == 4
        store.let.set()
        assert await statuses(slow, 10) == [Status.DUPLICATE] * 10
        for each in (slow, quick):
            ledger.close(each)
        await ledger.finish(1)
