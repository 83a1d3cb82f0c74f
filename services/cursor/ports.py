"""The cursor service's port: a store for cursors.

tests/conformance runs the same suite over every adapter.
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
    is_usual = True  # services ask for cursors that need not exist yet


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
        """Create a cursor unless it exists. Returns its head, and whether this call created it."""
        ...

    async def change(self, topic: TopicName, name: str, step: Callable[[CursorState, int], T]) -> T:
        """Run one step of the core on a cursor, with the store's time in milliseconds. The step's
        changes are durable on return; if it refuses, nothing changes. A step has no other effect
        than its result, and may run again."""
        ...

    async def look(
        self, topic: TopicName, name: str, look: Callable[[CursorState], T], *, whole: bool = True
    ) -> T:
        """Read a cursor in one consistent state; unless `whole`, without its mark-delete
        properties, which are not loaded then."""
        ...

    async def cursors(
        self, topic: TopicName | None, *, after: tuple[str, str], limit: int
    ) -> list[Head]:
        """Cursors of a topic, or of all topics, in the order of topic and name, after one of them,
        without the properties of their mark-delete positions, which may be large."""
        ...

    async def delete(self, topic: TopicName, name: str, *, created_ms: int | None = None) -> None:
        """Delete a cursor; with `created_ms`, only the one that was created then: another one of
        the name is not found. A later cursor of the topic never gets one of its epochs again. The
        topic's successions are deleted with its last cursor."""
        ...

    def now_ms(self) -> int:
        """The time in milliseconds, by this process's clock, by which its leases expire."""
        ...

    async def check(self) -> None:
        """Return if the store answers; raise otherwise."""
        ...
