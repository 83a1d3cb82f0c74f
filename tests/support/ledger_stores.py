"""The ledger stores that tests run over."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.adapters.postgres import open_postgres_store
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.ports import LedgerStore
from seqgate.services.runtime.postgres import Server
from tests.support.postgres_server import PostgresServer, empty_database


@asynccontextmanager
async def open_store(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[LedgerStore]:
    """An empty store of the kind that a fixture's parameter names: memory, sqlite or postgres."""
    match request.param:
        case "memory":
            yield MemoryLedgerStore()
        case "sqlite":
            async with open_sqlite_store(folder / "ledger.db") as sqlite:
                yield sqlite
        case "postgres":
            server: PostgresServer = request.getfixturevalue("postgres")
            url = await empty_database(server, "ledger_tests")
            async with open_postgres_store(
                Server(url, writers=4, readers=2), migrates=True
            ) as opened:
                yield opened
