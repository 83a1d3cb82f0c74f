"""Work on tables, written once for every database.

A piece of work is a synchronous function of a transaction. It refuses before it changes anything,
and has no other effect than its result, so it can run again. SQLite runs it in a thread, and
PostgreSQL on the event loop, suspended while a statement runs (sqlite.py, postgres.py).

Statements keep to what both understand: `?` or `?1` for values, ON CONFLICT, RETURNING.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

Value = int | str | bytes | None

RETRY_AFTER_S: Final = 0.5
"""RetryInfo for a caller after the store failed."""


class Transaction(Protocol):
    for_update: str
    """Ends a SELECT of the rows that the transaction reads and then changes, so that no other one
    changes them in between; empty if no other one can."""

    def rows(self, sql: str, *values: Value) -> list[Any]:
        """All rows of a query."""
        ...

    def scan(self, sql: str, *values: Value) -> Iterator[Any]:
        """The rows of a query, read as they are consumed."""
        ...

    def change(self, sql: str, *values: Value) -> int:
        """Run a statement. Returns the number of rows that it changed."""
        ...

    def each(self, sql: str, values: Iterable[Sequence[Value]]) -> None:
        """Run a statement for each row of values."""
        ...

    def reclaim(self) -> None:
        """Return the space of some removed rows, where the database does not do so by itself."""
        ...


Work = Callable[[Transaction], T]


class Database(Protocol):
    """
    Raises:
        DomainError: the refusal of the work; nothing changed.
        ServiceBusy: too much waits; nothing changed.
        StoreFull: nothing changed.
        StoreUnavailable: the outcome is unknown.
    """

    async def write(self, work: Work[T]) -> T:
        """Run work in a transaction, and return when it is durable. Cancelling the caller does not
        cancel work that has begun."""
        ...

    async def read(self, work: Work[T]) -> T:
        """Run work that changes nothing, on one state of the database."""
        ...
