"""Imports cursors from Pulsar, and exports them.

An import is two calls to the store, which create the cursor and fill it. Between them the cursor is
empty and marked. The next import continues one that was interrupted; a consumer in between receives
entries again, and misses none.
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
"""Marks a cursor whose import has begun."""

EXPORT_BYTES_MAX: Final = 30 * 1024 * 1024
"""The largest record that is exported, in bytes; a gRPC message has at most 32 MiB."""

EXPORT_NUMBERS_MAX: Final = 5_000_000
"""The most numbers gathered for one record: ranges, batches, and messages of batches."""

EXPORT_STEP: Final = 10_000
"""The number of ranges and batches gathered at a time."""

ReadManaged = Callable[[bytes, bytes], Imported]
"""Parses a ManagedCursorInfo and a PositionInfo; the latter may be empty."""

WriteManaged = Callable[[Head, Iterable[Range], Iterable[BatchAck]], bytes]
"""Serializes a ManagedCursorInfo."""


class CursorExists(DomainError):
    """A cursor of this name exists, and the request does not replace it."""

    kind = Kind.IN_USE
    reason = "CURSOR_EXISTS"


class CursorTooLarge(DomainError):
    """The cursor has more acknowledgements beyond its mark-delete position than a Pulsar record
    holds."""

    kind = Kind.EXHAUSTED
    reason = "CURSOR_TOO_LARGE"


class ManagedCursors:
    def __init__(self, store: CursorStore, read: ReadManaged, write: WriteManaged) -> None:
        self._store = store
        self.read: Final = read
        self._write = write

    async def import_cursor(
        self, topic: TopicName, name: str, imported: Imported, *, replacing: bool
    ) -> Head:
        """Create a cursor from an import, or replace an existing one.

        Raises:
            CursorExists: the cursor exists, and `replacing` is false.
        """
        begun = {IMPORTING: "begun"}
        await self._store.create(topic, name, mark_delete=None, properties=begun)

        def step(state: CursorState, _: int) -> Head:
            # Checked inside the step: another import may have completed since, and be in use.
            if not replacing and IMPORTING not in state.head.properties:
                raise CursorExists("cursor already exists", topic=topic, cursor=name)
            _become(state, imported)
            return replace(state.head)

        return await self._store.change(topic, name, step)

    async def export_cursor(self, topic: TopicName, name: str) -> bytes:
        """Export a cursor as Pulsar's record.

        Raises:
            CursorTooLarge: it exceeds the limits of a record.
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
    """Replace a cursor by an imported one. Fenced callers stay fenced, and so is the lease
    holder now."""
    state.reset(imported.mark_delete, Caller())
    state.head.mark_delete_properties = dict(imported.mark_delete_properties)
    caller = Caller(successions=imported.successions)
    state.acknowledge(imported.ranges, imported.batches, caller)
    before = list(state.head.properties)
    state.update_properties(imported.properties, before, Caller(), clear=True)


def _holes(state: CursorState) -> tuple[list[Range], list[BatchAck]]:
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
