"""The keeper's records, and what an instance holds, in the SQLite database of its service.

They lie beside the topics' own rows, so that a topic is sealed, shown or forgotten in the same
transaction in which that is noted.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import apsw

from services.errors import DomainError
from services.placement.core.placing import Holding, Placement, State, fewest
from services.placement.ports import Row
from services.runtime.sqlite import Connections

TABLES: Final = """
-- The keeper's records.
CREATE TABLE IF NOT EXISTS placement (
    topic   TEXT PRIMARY KEY,
    owner   TEXT NOT NULL,
    version INTEGER NOT NULL,
    move    TEXT NOT NULL
) WITHOUT ROWID;
-- What is, or was, here.
CREATE TABLE IF NOT EXISTS holding (
    topic   TEXT PRIMARY KEY,
    state   TEXT NOT NULL,
    version INTEGER NOT NULL,
    move    TEXT NOT NULL,
    other   TEXT NOT NULL
) WITHOUT ROWID;
-- What arrives; the service's table `staged` has the ids of its rows.
CREATE TABLE IF NOT EXISTS incoming (
    move     TEXT PRIMARY KEY,
    topic    TEXT NOT NULL,
    version  INTEGER NOT NULL,
    complete INTEGER NOT NULL
) WITHOUT ROWID;
"""

STAGED: Final = """CREATE TABLE IF NOT EXISTS staged (
    id   INTEGER PRIMARY KEY,
    move TEXT NOT NULL
)"""
"""Rows of a service's own that nobody sees yet, and that are not to be removed for that."""

UNSEEN: Final = "/"
"""Before the name of a move it makes what stands for a topic's name while that is not shown: no
topic's name begins so."""

PAGE_BYTES: Final = 1024 * 1024
"""How many bytes of rows are read, and written, at a time; one row always is."""

_PUT: Final = "INSERT OR REPLACE INTO holding VALUES (?, ?, ?, ?, ?)"
_RECORD: Final = "SELECT topic, owner, version, move FROM placement "
_PAGE: Final = (
    _RECORD
    + """WHERE topic > ?1 AND topic >= ?2 AND substr(topic, 1, length(?2)) = ?2
    ORDER BY topic LIMIT ?3"""
)


async def make_tables(connections: Connections, rows: "Rows") -> None:
    """Make the tables unless they are there, and drop what came only in part."""

    def work(db: apsw.Connection) -> None:
        db.execute(TABLES)
        for (move,) in _rows(db, "SELECT move FROM incoming WHERE NOT complete"):
            _drop(db, rows, move)

    await connections.write(work)


class SqliteKeeper:
    """See services.placement.ports.Keeper."""

    def __init__(self, connections: Connections, instances: Sequence[str]) -> None:
        self._connections = connections
        self._instances = instances
        self._counts: Counter[str] | None = None

    async def find(self, topic: str) -> Placement | None:
        return await self._connections.read(lambda db: _record(db, topic))

    async def place(
        self, topic: str, *, version: int, owner: str, move: str
    ) -> tuple[Placement, bool]:
        def work(db: apsw.Connection) -> tuple[Placement, bool]:
            record = _record(db, topic)
            if record is not None and record.version != version:
                return record, False
            counts = self._counts = self._counts or _counted(db)
            before = 0 if record is None else version
            placed = Placement(topic, owner or fewest(self._instances, counts), before + 1, move)
            db.execute("INSERT OR REPLACE INTO placement VALUES (?, ?, ?, ?)", placed)
            counts[placed.owner] += 1
            if record is not None:
                counts[record.owner] -= 1
            return placed, True

        if version == 0 and (record := await self.find(topic)) is not None:
            return record, False
        try:
            return await self._connections.write(work)
        except DomainError:
            self._counts = None  # it may have been done, or not
            raise

    async def page(self, *, prefix: str, after: str, limit: int) -> list[Placement]:
        def work(db: apsw.Connection) -> list[Placement]:
            rows = _rows(db, _PAGE, after, prefix, limit)
            return [Placement(*row) for row in rows]

        return await self._connections.read(work)


class Place(NamedTuple):
    """How far the rows of a topic were read: kind by kind, each from a key on."""

    kind: str
    after: tuple[Any, ...]


class Rows(Protocol):
    """What a service's store does with the rows of a topic, within a transaction."""

    layout: int

    def strays(self, db: apsw.Connection, limit: int) -> list[str]:
        """Topics that have rows, and no holding."""
        ...

    def seal(self, db: apsw.Connection, topic: str) -> None:
        """Fence off whoever writes the topic."""
        ...

    def page(
        self, db: apsw.Connection, topic: str, place: Place | None
    ) -> tuple[list[Row], Place | None]:
        """Rows from a place on (None: all), about PAGE_BYTES of them, and where to go on."""
        ...

    def insert(self, db: apsw.Connection, move: str, parent: int, row: Row) -> int:
        """Insert a row of a topic that arrives; `parent` is the id of the row before it that others
        belong to. Returns that of this row, if it is one, or the same again.

        Raises:
            InvalidMove: there is no such row.
        """
        ...

    def show(self, db: apsw.Connection, topic: str, move: str) -> None:
        """Make what is staged the topic's."""
        ...

    def forget(self, db: apsw.Connection, topic: str) -> None:
        """Make the topic's rows nobody's."""
        ...

    def unstage(self, db: apsw.Connection, move: str) -> None:
        """Remove what a move brought, but for rows that `staged` names."""
        ...


class SqliteShelf:
    """See services.placement.ports.Shelf."""

    def __init__(self, connections: Connections, rows: Rows, remove: "Remove") -> None:
        self._connections = connections
        self._rows = rows
        self._remove = remove
        self.layout = rows.layout

    async def holdings(self) -> list[Holding]:
        def work(db: apsw.Connection) -> list[Holding]:
            found = _rows(db, "SELECT topic, state, version, move, other FROM holding")
            return [Holding(topic, State(state), *more) for topic, state, *more in found]

        return await self._connections.read(work)

    async def strays(self, *, limit: int) -> list[str]:
        return await self._connections.read(lambda db: self._rows.strays(db, limit))

    async def hold(self, holding: Holding) -> None:
        await self._connections.write(lambda db: _put(db, holding))

    async def seal(self, holding: Holding) -> None:
        def work(db: apsw.Connection) -> None:
            _put(db, holding)
            self._rows.seal(db, holding.topic)

        await self._connections.write(work)

    async def rows(self, topic: str) -> AsyncIterator[Sequence[Row]]:
        place: Place | None = None
        while True:
            start = place
            page, place = await self._connections.read(
                lambda db: self._rows.page(db, topic, start)  # noqa: B023 - called at once
            )
            yield page
            if place is None:
                return

    async def forget(self, holding: Holding) -> None:
        def work(db: apsw.Connection) -> None:
            _put(db, holding)
            self._rows.forget(db, holding.topic)

        await self._connections.write(work)
        await self._remove()

    async def stage(self, topic: str, move: str, version: int) -> "SqliteStaging":
        def work(db: apsw.Connection) -> None:
            earlier = _rows(
                db, "SELECT move FROM incoming WHERE topic = ? AND version < ?", topic, version
            )
            for (each,) in earlier:
                _drop(db, self._rows, each)
            db.execute("INSERT INTO incoming VALUES (?, ?, ?, 0)", (move, topic, version))

        await self._connections.write(work)
        await self._remove()
        return SqliteStaging(self._connections, self._rows, move)

    async def staged(self) -> list[Placement]:
        def work(db: apsw.Connection) -> list[Placement]:
            found = _rows(db, "SELECT topic, version, move FROM incoming WHERE complete")
            return [Placement(topic, "", version, move) for topic, version, move in found]

        return await self._connections.read(work)

    async def show(self, holding: Holding, move: str) -> None:
        def work(db: apsw.Connection) -> None:
            _put(db, holding)
            # Again, where whether it was done is not known: then it was, and stays.
            if _rows(db, "SELECT 1 FROM incoming WHERE move = ?", move):
                self._rows.show(db, holding.topic, move)
                _drop(db, self._rows, move)

        await self._connections.write(work)

    async def drop(self, move: str) -> None:
        await self._connections.write(lambda db: _drop(db, self._rows, move))
        await self._remove()


class Remove(Protocol):
    """Removes rows that are nobody's, bit by bit."""

    async def __call__(self) -> None: ...


class SqliteStaging:
    """See services.placement.ports.Staging."""

    def __init__(self, connections: Connections, rows: Rows, move: str) -> None:
        self._connections = connections
        self._rows = rows
        self._move = move
        self._parent = 0

    async def add(self, rows: Sequence[Row]) -> None:
        def work(db: apsw.Connection) -> int:
            parent = self._parent
            for row in rows:
                parent = self._rows.insert(db, self._move, parent, row)
            return parent

        # A transaction that refuses a row in the middle keeps those before: all of it is dropped.
        self._parent = await self._connections.write(work)

    async def complete(self) -> None:
        await self._connections.write(
            lambda db: _execute(db, "UPDATE incoming SET complete = 1 WHERE move = ?", self._move)
        )


def _drop(db: apsw.Connection, rows: Rows, move: str) -> None:
    rows.unstage(db, move)
    db.execute("DELETE FROM staged WHERE move = ?", (move,))
    db.execute("DELETE FROM incoming WHERE move = ?", (move,))


def _put(db: apsw.Connection, holding: Holding) -> None:
    topic, state, *more = holding
    db.execute(_PUT, (topic, state.value, *more))


def _counted(db: apsw.Connection) -> Counter[str]:
    """How many topics each instance has."""
    return Counter(dict(_rows(db, "SELECT owner, count(*) FROM placement GROUP BY owner")))


def _record(db: apsw.Connection, topic: str) -> Placement | None:
    rows = _rows(db, _RECORD + "WHERE topic = ?", topic)
    return Placement(*rows[0]) if rows else None


def _execute(db: apsw.Connection, sql: str, *values: int | str) -> None:
    db.execute(sql, values)


def _rows(db: apsw.Connection, sql: str, *values: int | str) -> list[Any]:
    return db.execute(sql, values).fetchall()
