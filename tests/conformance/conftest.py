"""The ledger stores that tests run over."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.adapters.postgres import PostgresLedgerStore, open_postgres_store
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.ports import LedgerStore
from seqgate.services.runtime.postgres import Server
from tests.support.postgres_server import PostgresServer, empty_database, empty_tables


@pytest_asyncio.fixture(scope="session")
async def postgres_store(postgres: PostgresServer) -> AsyncIterator[PostgresLedgerStore]:
    """One store for all tests: connecting costs more than most of them do."""
    server = Server(await empty_database(postgres, "ledger_store"), writers=4, readers=2)
    async with open_postgres_store(server, migrates=True) as opened:
        yield opened


@pytest_asyncio.fixture(params=["memory", "sqlite", "postgres"])
async def ledger_store(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_store: PostgresLedgerStore
) -> AsyncIterator[LedgerStore]:
    """An empty store of each kind."""
    match request.param:
        case "memory":
            yield MemoryLedgerStore()
        case "sqlite":
            async with open_sqlite_store(tmp_path / "ledger.db") as sqlite:
                yield sqlite
        case "postgres":
            await postgres_store.database.write(empty_tables)
            yield postgres_store
