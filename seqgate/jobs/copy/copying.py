"""Copies the tables of a SQLite store to PostgreSQL, row by row in the order of their keys.

The tables of both have the same names and columns, so that no row needs a translation. The table
without which the others do not count comes last, in one transaction with the record that the copy
is whole: an interrupted copy is continued, and a whole one is not begun again.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw
import asyncpg

ROWS_MAX: Final = 1_000
BYTES_MAX: Final = 16 * 1024 * 1024
"""The most rows, and the most bytes of their blobs (though at least one row), copied at a time."""

_RECORDS: Final = """CREATE TABLE IF NOT EXISTS seqgate_copy (
    service  text PRIMARY KEY,
    source   text NOT NULL,         -- the database that is copied
    is_whole boolean NOT NULL DEFAULT false
)"""


class CopyError(Exception):
    """A store cannot be copied; the message says what to do."""


class Plan(NamedTuple):
    """A service's tables by name, each with its key, in the order in which they are copied."""

    service: str
    application_id: int
    layout: int
    tables: dict[str, tuple[str, ...]]

    @property
    def heads(self) -> str:
        return [*self.tables][-1]


class Report(NamedTuple):
    """What a table's copy came to: rows that were copied now, and rows that both ends have."""

    table: str
    copied: int
    rows: int


Show = Callable[[str, int], None]
"""Shows progress: a table, and its rows so far."""


def open_source(path: Path, plans: Sequence[Plan]) -> tuple[apsw.Connection, Plan]:
    """Open a SQLite store, and keep everybody else from changing it. Returns the plan for it, too.

    Raises:
        CopyError: it is none, has another layout, or is in use.
    """
    if not path.is_file():
        raise CopyError(f"{path} does not exist")
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        found = connection.pragma("application_id")
        plan = next((each for each in plans if each.application_id == found), None)
        if plan is None:
            raise CopyError(f"{path} is no store of Seqgate's")
        layout = connection.pragma("user_version")
        if layout != plan.layout:
            raise CopyError(
                f"{path} has layout {layout}, where {plan.layout} is known: start and stop the "
                f"{plan.service} service of this version on it, then copy"
            )
        connection.execute("BEGIN IMMEDIATE")
    except apsw.BusyError:
        connection.close()
        raise CopyError(f"{path} is in use: stop the service, then copy") from None
    except apsw.Error as error:
        connection.close()
        raise CopyError(f"{path} cannot be read: {error}") from error
    except CopyError:
        connection.close()
        raise
    return connection, plan


class Copying:
    """One store's copy."""

    def __init__(
        self,
        source: apsw.Connection,
        target: "asyncpg.Connection[asyncpg.Record]",
        plan: Plan,
        show: Show,
    ) -> None:
        self._source = source
        self._target = target
        self._plan = plan
        self._show = show

    async def run(self, name: str) -> list[Report]:
        """Copy what is missing, then compare every row. `name` identifies the source.

        Raises:
            CopyError: the target holds something else; or both ends differ.
        """
        is_whole = await self._begin(name)
        copied = dict.fromkeys(self._plan.tables, 0)
        if not is_whole:
            for table in self._plan.tables:
                if table != self._plan.heads:
                    copied[table] = await self._copy(table)
            async with self._target.transaction():
                copied[self._plan.heads] = await self._copy(self._plan.heads)
                await self._number()
                await self._target.execute(
                    "UPDATE seqgate_copy SET is_whole = true WHERE service = $1", self._plan.service
                )
        return [Report(each, copied[each], await self._compare(each)) for each in copied]

    async def _begin(self, name: str) -> bool:
        """Record the copy's beginning. Returns whether it is whole already."""
        async with self._target.transaction():
            await self._target.execute(_RECORDS)
            found = await self._target.fetchrow(
                "SELECT source, is_whole FROM seqgate_copy WHERE service = $1", self._plan.service
            )
            if found is None:
                for table in self._plan.tables:
                    if await self._target.fetchrow(f"SELECT 1 FROM {table} LIMIT 1"):
                        raise CopyError(
                            f"the table {table} of the target holds other data: copy into an empty "
                            "database"
                        )
                await self._target.execute(
                    "INSERT INTO seqgate_copy VALUES ($1, $2)", self._plan.service, name
                )
                return False
        if found["source"] != name:
            raise CopyError(f"the target is a copy of {found['source']}, not of {name}")
        return bool(found["is_whole"])

    async def _copy(self, table: str) -> int:
        """Copy the rows after the last one that is there. Returns their number."""
        columns = await self._columns(table)
        key = self._plan.tables[table]
        order = ", ".join(f"{each} DESC" for each in key)
        last = await self._target.fetchrow(
            f"SELECT {', '.join(key)} FROM {table} ORDER BY {order} LIMIT 1"
        )
        copied = 0
        for rows in _in_parts(self._rows(table, columns, None if last is None else tuple(last))):
            await self._target.copy_records_to_table(table, records=rows, columns=[*columns])
            copied += len(rows)
            self._show(table, copied)
        return copied

    def _rows(
        self, table: str, columns: dict[str, str], after: tuple[Any, ...] | None
    ) -> Iterator[tuple[Any, ...]]:
        """The source's rows after a key, in its order, as the target has them."""
        key = ", ".join(self._plan.tables[table])
        where = ""
        if after is not None:
            where = f"WHERE ({key}) > ({', '.join('?' for _ in after)})"
        flags = [number for number, kind in enumerate(columns.values()) if kind == "boolean"]
        found = self._source.execute(
            f"SELECT {', '.join(columns)} FROM {table} {where} ORDER BY {key}", after or ()
        )
        if not flags:
            return iter(found)
        return (
            tuple(bool(each) if place in flags else each for place, each in enumerate(row))
            for row in found
        )

    async def _columns(self, table: str) -> dict[str, str]:
        """The types of the columns that both ends have, by name."""
        ours = {row[1] for row in self._source.execute(f"PRAGMA table_info({table})")}
        theirs = await self._target.fetch(
            """SELECT attname, format_type(atttypid, NULL) AS kind FROM pg_attribute
                WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped
                ORDER BY attnum""",
            table,
        )
        found = {each["attname"]: each["kind"] for each in theirs if each["attname"] in ours}
        if lost := ours - found.keys():
            raise CopyError(f"the table {table} of the target lacks {', '.join(sorted(lost))}")
        return found

    async def _number(self) -> None:
        """Continue the numbers of rows where the source's end."""
        for table, key in self._plan.tables.items():
            if key == ("id",):
                await self._target.execute(
                    f"""SELECT setval(pg_get_serial_sequence('{table}', 'id'),
                        coalesce((SELECT max(id) FROM {table}), 0) + 1, false)"""
                )

    async def _compare(self, table: str) -> int:
        """Compare every row of both ends. Returns their number."""
        columns = await self._columns(table)
        ours, count = self._rows(table, columns, None), 0
        async for theirs in self._stored(table, columns):
            if next(ours, None) != theirs:
                key = dict(zip(columns, theirs, strict=True))
                about = ", ".join(f"{each} {key[each]}" for each in self._plan.tables[table])
                raise CopyError(f"both ends differ in the table {table}, at {about}")
            count += 1
        if next(ours, None) is not None:
            raise CopyError(f"the table {table} of the target lacks rows after the first {count:,}")
        self._show(f"{table}, compared", count)
        return count

    async def _stored(self, table: str, columns: dict[str, str]) -> AsyncIterator[tuple[Any, ...]]:
        key = ", ".join(self._plan.tables[table])
        async with self._target.transaction(readonly=True):
            async for row in self._target.cursor(
                f"SELECT {', '.join(columns)} FROM {table} ORDER BY {key}", prefetch=16
            ):
                yield tuple(row)


def _in_parts(rows: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """The rows in parts within the limits."""
    part: list[tuple[Any, ...]] = []
    size_bytes = 0
    for row in rows:
        row_bytes = sum(len(each) for each in row if isinstance(each, bytes))
        if part and (len(part) >= ROWS_MAX or size_bytes + row_bytes > BYTES_MAX):
            yield part
            part, size_bytes = [], 0
        part.append(row)
        size_bytes += row_bytes
    if part:
        yield part
