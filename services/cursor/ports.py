"""What the cursor service needs from outside: a store for cursors.

tests/conformance judges every adapter by the same suite. PostgreSQL fits behind it: a step is one
transaction, and a page one row.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.state import Head
from seqgate.services.errors import DomainError, Kind
from seqgate.types import Position, TopicName

T = TypeVar("T")


class CursorNotFound(DomainError):
    """The cursor does not exist."""

    kind = Kind.NOT_FOUND
    reason = "CURSOR_NOT_FOUND"


class CursorCorrupt(DomainError):
    """A cursor's stored data does not match its checksum."""

    kind = Kind.DATA_LOSS
    reason = "CURSOR_CORRUPT"


class CursorStore(Protocol):
    """Cursors by topic and name.

    Raises:
        CursorNotFound: from change, look and delete.
        StoreUnavailable, StoreFull: from every method; see seqgate.services.runtime.sqlite.
    """

    async def create(
        self,
        topic: TopicName,
        name: str,
        *,
        mark_delete: Position | None,
        properties: Mapping[str, str],
    ) -> tuple[Head, bool]:
        """Make the cursor unless it exists; whether this call made it."""
        ...

    async def change(self, topic: TopicName, name: str, step: Callable[[CursorState, int], T]) -> T:
        """Do one step of the core with a cursor and the store's time in milliseconds. What it
        changed is durable when this returns; nothing is, when the step refuses. The step finds the
        lease bounded; see Lease.bounded."""
        ...

    async def look(
        self, topic: TopicName, name: str, look: Callable[[CursorState], T], *, whole: bool = True
    ) -> T:
        """Read a cursor, in one state of it; unless `whole`, without what is attached to its
        mark-delete position, which is not even read then."""
        ...

    async def cursors(
        self, topic: TopicName | None, *, after: tuple[str, str], limit: int
    ) -> list[Head]:
        """Cursors of a topic, or of all, in the order of topic and name, after one; without what is
        attached to their mark-delete positions, which may be large."""
        ...

    async def delete(self, topic: TopicName, name: str) -> None:
        """Remove the cursor. One that is made in its place never has an epoch again that this one
        had. With a topic's last cursor goes what is known of its log."""
        ...

    def now_ms(self) -> int:
        """The store's time in milliseconds, by which leases last."""
        ...

    async def check(self) -> None:
        """Return if the store answers."""
        ...
