"""Cursors that come from Pulsar, and go back: a store's calls put together.

An import is two calls, to make the cursor and to fill it. Between them it is empty and marked, so
that an import that was cut short is taken up by the next one, and what comes again is too much,
never too little.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from seqgate.services.cursor.core.cursor import BatchAck, Caller, CursorState, Range
from seqgate.services.cursor.core.managed import Imported
from seqgate.services.cursor.core.state import Head
from seqgate.services.cursor.ports import CursorStore
from seqgate.services.errors import DomainError, Kind
from seqgate.types import TopicName

IMPORTING: Final = "#seqgate.internal.importing"
"""A property of a cursor whose import has begun."""

EXPORT_BYTES_MAX: Final = 30 * 1024 * 1024
"""The largest record that is exported, in bytes; a gRPC message is 32 MiB large."""

EXPORT_NUMBERS_MAX: Final = 5_000_000
"""How many ranges, batches and messages of batches are gathered for it."""

EXPORT_STEP: Final = 10_000
"""How many ranges and batches are gathered at a time."""

ReadManaged = Callable[[bytes, bytes], Imported]
"""Reads a ManagedCursorInfo and a PositionInfo; the latter may be empty."""

WriteManaged = Callable[[Head, Iterable[Range], Iterable[BatchAck]], bytes]
"""Writes a ManagedCursorInfo."""


class CursorExists(DomainError):
    """A cursor of that name exists, and the request does not replace it."""

    kind = Kind.IN_USE
    reason = "CURSOR_EXISTS"


class CursorTooLarge(DomainError):
    """More is acknowledged beyond the mark-delete position than a Pulsar cursor record can hold."""

    kind = Kind.EXHAUSTED
    reason = "CURSOR_TOO_LARGE"


class ManagedCursors:
    """See the module."""

    def __init__(self, store: CursorStore, read: ReadManaged, write: WriteManaged) -> None:
        self._store = store
        self.read: Final = read
        self._write = write

    async def import_cursor(
        self, topic: TopicName, name: str, imported: Imported, *, replacing: bool
    ) -> Head:
        """Create a cursor as it was read, or make one that exists the same.

        Raises:
            CursorExists: it does, and is not to be replaced.
        """
        begun = {IMPORTING: "begun"}
        await self._store.create(topic, name, mark_delete=None, properties=begun)

        def step(state: CursorState, _: int) -> Head:
            # Only here is it known: another import may have been finished since, and used.
            if not replacing and IMPORTING not in state.head.properties:
                raise CursorExists("cursor already exists", topic=topic, cursor=name)
            _become(state, imported)
            return replace(state.head)

        return await self._store.change(topic, name, step)

    async def export_cursor(self, topic: TopicName, name: str) -> bytes:
        """Write a cursor as Pulsar's record.

        Raises:
            CursorTooLarge: it does not fit.
        """
        return await self._store.look(topic, name, self._exported)

    def _exported(self, state: CursorState) -> bytes:
        info = self._write(state.head, *_holes(state))
        if len(info) > EXPORT_BYTES_MAX:
            raise CursorTooLarge(
                "the exported record is too large", bytes=len(info), bytes_max=EXPORT_BYTES_MAX
            )
        return info


def _become(state: CursorState, imported: Imported) -> None:
    """Make a cursor what was imported. Who was fenced off stays so, and so is now who holds the
    lease."""
    state.reset(imported.mark_delete, Caller())
    state.head.mark_delete_properties = dict(imported.mark_delete_properties)
    caller = Caller(successions=imported.successions)
    state.acknowledge(imported.ranges, imported.batches, caller)
    before = list(state.head.properties)
    state.update_properties(imported.properties, before, Caller(), clear=True)


def _holes(state: CursorState) -> tuple[list[Range], list[BatchAck]]:
    """What is acknowledged beyond the mark-delete position."""
    ranges: list[Range] = []
    batches: list[BatchAck] = []
    after, numbers = None, 0
    while numbers <= EXPORT_NUMBERS_MAX:
        page = state.acknowledged(after, EXPORT_STEP)
        ranges += page.ranges
        batches += page.batches
        numbers += len(page.ranges) + sum(1 + len(each.indexes) for each in page.batches)
        after = page.next_after
        if after is None:
            return ranges, batches
    raise CursorTooLarge("too many acknowledged ranges for one record", numbers=numbers)
