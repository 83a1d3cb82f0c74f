"""SQLite and PostgreSQL, as far as the examples need them: transactions, and one dialect.

Values are $1, $2, ... in both. A BIGSERIAL PRIMARY KEY numbers the rows in both.
"""

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import Any

import asyncpg

Execute = Callable[..., Awaitable[Sequence[Sequence[Any]]]]
"""Executes a statement with its values. Returns its rows."""

Transaction = Callable[[], AbstractAsyncContextManager[Execute]]
"""Begins a transaction. The end of the context commits it, or an exception rolls it back."""


@asynccontextmanager
async def open_database(where: str, *tables: str) -> AsyncIterator[Transaction]:
    """A connection to a PostgreSQL server (a URL, postgresql://...), or to a SQLite file. Executes
    the statements that create the tables."""
    is_server = where.startswith(("postgresql://", "postgres://"))
    async with (_postgresql if is_server else _sqlite)(where) as transaction:
        async with transaction() as execute:
            if is_server:  # its CREATE TABLE IF NOT EXISTS fails if another one runs
                await execute("SELECT pg_advisory_xact_lock(7702)")
            for table in tables:
                await execute(table if is_server else table.replace("BIGSERIAL", "INTEGER"))
        yield transaction


@asynccontextmanager
async def _postgresql(url: str) -> AsyncIterator[Transaction]:
    connection = await asyncpg.connect(url)

    @asynccontextmanager
    async def transaction() -> AsyncIterator[Execute]:
        async with connection.transaction(isolation="read_committed"):
            yield connection.fetch

    try:
        yield transaction
    finally:
        await connection.close()


@asynccontextmanager
async def _sqlite(path: str) -> AsyncIterator[Transaction]:
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # one sync for each commit

        async def execute(statement: str, *values: object) -> Sequence[Sequence[Any]]:
            named = {str(number): value for number, value in enumerate(values, start=1)}
            return connection.execute(statement, named).fetchall()

        @asynccontextmanager
        async def transaction() -> AsyncIterator[Execute]:
            with connection:
                connection.execute("BEGIN IMMEDIATE")  # one writer at a time
                yield execute

        yield transaction
