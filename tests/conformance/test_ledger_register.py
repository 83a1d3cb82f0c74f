"""The contract of every register of ledger instances."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from seqgate.services.ledger.adapters.memory import MemoryRegister
from seqgate.services.ledger.adapters.postgres import open_postgres_register, open_postgres_store
from seqgate.services.ledger.core.ownership import Beat
from seqgate.services.ledger.ports import Register
from seqgate.services.runtime.postgres import Server
from seqgate.types import TopicName
from tests.support.postgres_server import PostgresServer, empty_database

TOPIC = TopicName.parse("public/default/one")
OTHER = TopicName.parse("public/default/other")


@pytest_asyncio.fixture(params=["memory", "postgres"])
async def register(request: pytest.FixtureRequest) -> AsyncIterator[Register]:
    if request.param == "memory":
        yield MemoryRegister()
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    at = Server(await empty_database(server, "ledger_tests"), writers=2, readers=2)
    async with (
        open_postgres_store(at, migrates=True) as store,
        open_postgres_register(at, store) as opened,
    ):
        yield opened


async def test_beats_are_counted_by_instance(register: Register) -> None:
    assert await register.beat("a", "a:1") == [Beat("a", "a:1", 1, 0)]
    await register.beat("b", "b:1")
    assert sorted(await register.beat("a", "a:2")) == [
        Beat("a", "a:2", 2, 0),
        Beat("b", "b:1", 1, 0),
    ]


async def test_the_last_to_take_a_topic_is_its_owner(register: Register) -> None:
    assert await register.owner(TOPIC) is None
    await register.own(TOPIC, 1, "a")
    await register.own(TOPIC, 3, "b")
    await register.own(TOPIC, 2, "a")
    assert await register.owner(TOPIC) == "b"
    assert await register.owner(OTHER) is None
    assert await register.owned("b") == {str(TOPIC)}
    assert await register.owned("a") == frozenset()


async def test_an_owner_hands_over(register: Register) -> None:
    await register.own(TOPIC, 1, "a")
    await register.own(TOPIC, 1, "b")
    assert await register.owner(TOPIC) == "b"


async def test_an_owner_gives_up_what_nobody_took_since(register: Register) -> None:
    await register.own(TOPIC, 1, "a")
    await register.own(OTHER, 2, "b")
    await register.disown(OTHER, 1)
    await register.disown(TOPIC, 1)
    await register.disown(TOPIC, 1)
    assert await register.owner(TOPIC) is None
    assert await register.owner(OTHER) == "b"


async def test_an_instance_leaves_with_its_topics(register: Register) -> None:
    await register.beat("a", "a:1")
    await register.beat("b", "b:1")
    await register.own(TOPIC, 1, "a")
    await register.own(OTHER, 1, "b")
    assert sorted(await register.beat("b", "b:1"))[0] == Beat("a", "a:1", 1, 1)
    await register.leave("a")
    await register.leave("a")
    assert await register.beat("b", "b:1") == [Beat("b", "b:1", 3, 1)]
    assert await register.owner(TOPIC) is None
    assert await register.owner(OTHER) == "b"
