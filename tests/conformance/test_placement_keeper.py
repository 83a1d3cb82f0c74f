"""What every keeper of places does. A new adapter starts by appearing in the fixture."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from services.cursor.adapters.rows import CursorRows
from services.cursor.adapters.sqlite import open_sqlite_store as open_cursor_store
from services.ledger.adapters.rows import LedgerRows
from services.ledger.adapters.sqlite import open_sqlite_store as open_ledger_store
from services.placement.adapters.memory import MemoryKeeper
from services.placement.adapters.sqlite import SqliteKeeper, make_tables
from services.placement.core.placing import Placement
from services.placement.ports import Keeper

INSTANCES = ("a:1", "b:1", "c:1")
TOPIC = "test/keeper/topic"


@pytest_asyncio.fixture(params=["memory", "ledger", "cursor"])
async def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Keeper]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            yield MemoryKeeper(INSTANCES)
            return
        is_ledger = request.param == "ledger"
        open_store = open_ledger_store if is_ledger else open_cursor_store
        store = await stack.enter_async_context(open_store(tmp_path / "store.db"))
        await make_tables(store.connections, LedgerRows() if is_ledger else CursorRows(lambda: 0))
        yield SqliteKeeper(store.connections, INSTANCES)


async def test_a_topic_has_no_record_until_it_is_placed(keeper: Keeper) -> None:
    assert await keeper.find(TOPIC) is None
    placed = Placement(TOPIC, "b:1", 1, "")
    assert await keeper.place(TOPIC, version=0, owner="b:1", move="") == (placed, True)
    assert await keeper.find(TOPIC) == placed


async def test_a_topic_that_is_placed_is_not_placed_again(keeper: Keeper) -> None:
    first, _ = await keeper.place(TOPIC, version=0, owner="b:1", move="")
    assert await keeper.place(TOPIC, version=0, owner="a:1", move="m") == (first, False)
    assert await keeper.place(TOPIC, version=0, owner="", move="") == (first, False)
    assert await keeper.find(TOPIC) == first


async def test_new_topics_go_where_the_fewest_are(keeper: Keeper) -> None:
    for i in range(3):
        await keeper.place(f"{TOPIC}-{i}", version=0, owner="a:1", move="")
    for i in range(3, 9):
        await keeper.place(f"{TOPIC}-{i}", version=0, owner="", move="")
    found = await keeper.page(prefix="", after="", limit=100)
    assert Counter(each.owner for each in found) == {"a:1": 3, "b:1": 3, "c:1": 3}


async def test_a_record_changes_only_if_it_is_as_expected(keeper: Keeper) -> None:
    first, _ = await keeper.place(TOPIC, version=0, owner="a:1", move="")
    second = Placement(TOPIC, "b:1", 2, "m")
    assert await keeper.place(TOPIC, version=1, owner="b:1", move="m") == (second, True)
    assert await keeper.place(TOPIC, version=1, owner="c:1", move="late") == (second, False)
    assert await keeper.place(TOPIC, version=3, owner="c:1", move="early") == (second, False)
    assert first.version == 1
    assert await keeper.find(TOPIC) == second


async def test_of_many_changes_at_once_one_is_made(keeper: Keeper) -> None:
    await keeper.place(TOPIC, version=0, owner="a:1", move="")
    answers = await asyncio.gather(
        *(keeper.place(TOPIC, version=1, owner="b:1", move=str(i)) for i in range(50))
    )
    assert sum(changed for _, changed in answers) == 1
    assert {record for record, _ in answers} == {await keeper.find(TOPIC)}


async def test_records_come_in_pages_by_name(keeper: Keeper) -> None:
    names = [f"test/keeper/{letter}" for letter in "dbace"]
    for name in [*names, "test/other/a"]:
        await keeper.place(name, version=0, owner="", move="")
    found: list[str] = []
    after = ""
    while page := await keeper.page(prefix="test/keeper/", after=after, limit=2):
        found += [each.topic for each in page]
        after = found[-1]
    assert found == sorted(names)
    assert len(await keeper.page(prefix="", after="", limit=100)) == 6
    assert await keeper.page(prefix="", after="test/other/a", limit=100) == []
