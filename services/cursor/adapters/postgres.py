"""Cursors in a PostgreSQL database: one row per page of holes, a step in one transaction.

Several cursor services share a database. A step holds the lock of its cursor's row. Steps of one
cursor queue before they take a connection, so that a busy cursor leaves connections to the others.
Any service answers a read of a cursor that another has just changed, so reads are confirmed.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from seqgate.services.cursor.adapters.tables import TableCursorStore
from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.runtime.clock import Clock, SteadyClock
from seqgate.services.runtime.layouts import prepare
from seqgate.services.runtime.postgres import (
    CLOSE_MAX_S,
    Server,
    insisted,
    open_postgres,
    size_of,
)
from seqgate.services.runtime.transactions import Database
from seqgate.services.runtime.turns import Turns
from seqgate.types import TopicName

T = TypeVar("T")

MIGRATIONS: Final = Path(__file__).parent.parent / "migrations"

TABLES: Final = ("cursor", "properties", "page", "batch", "attempt", "succession", "spent")


@asynccontextmanager
async def open_postgres_store(
    server: Server, *, migrates: bool, clock: Clock | None = None
) -> AsyncIterator["PostgresCursorStore"]:
    """Connect to the database; with `migrates`, change its layout to this version's.

    Raises:
        StoreUnavailable: the database does not answer, has a setting that is refused, or a layout
            that this version cannot use.
    """
    async with open_postgres(server, confirms_reads=True) as database:
        await insisted(lambda: prepare(database, "cursor", MIGRATIONS, migrates=migrates))
        store = PostgresCursorStore(database, clock or SteadyClock())
        await insisted(store.begin)
        try:
            yield store
        finally:
            await store.close()


class PostgresCursorStore(TableCursorStore):
    """See seqgate.services.cursor.ports.CursorStore."""

    def __init__(self, database: Database, now_ms: Clock) -> None:
        super().__init__(database, now_ms)
        self._turns = Turns[tuple[TopicName, str]]("steps")

    async def change(self, topic: TopicName, name: str, step: Callable[[CursorState, int], T]) -> T:
        change = super().change
        return await self._turns.take((topic, name), lambda: change(topic, name, step))

    async def size_bytes(self) -> int:
        """The size of the cursors' tables with their indexes, in bytes."""
        return await self._database.read(lambda db: size_of(db, TABLES))

    async def close(self) -> None:
        """Finish the steps that wait, if that takes no longer than CLOSE_MAX_S."""
        await self._turns.close(CLOSE_MAX_S)
