"""The admin client's calls about cursors."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.client._arguments import properties_of, text
from seqgate.client._calls import PAGE, Calls
from seqgate.client._fields import full_name, optional, optional_name, optional_position, time_of
from seqgate.client._log import before, check_within, to_wire
from seqgate.client._reader import EARLIEST
from seqgate.client._subscribing import Place
from seqgate.types import Position


@dataclass(frozen=True, slots=True)
class CursorInfo:
    """A cursor.

    Attributes:
        mark_delete: everything up to here is acknowledged; None: nothing is.
        acknowledged_entries: how many entries beyond it are.
        partial_batches: how many batches are acknowledged in part.
        properties: the cursor's own.
        revision: grows with each change of its position or properties.
        owner: who holds its lease; None: nobody ever did.
    """

    topic: str
    name: str
    mark_delete: Position | None
    acknowledged_entries: int
    partial_batches: int
    properties: Mapping[str, str]
    revision: int
    created_at: datetime
    owner: str | None


class CursorCalls:
    """The part of Admin for cursors."""

    _calls: Calls

    async def create_cursor(
        self,
        topic: str,
        cursor: str,
        *,
        start: Place = EARLIEST,
        properties: Mapping[str, str] | None = None,
    ) -> CursorInfo:
        """Create a cursor; an existing one is left unchanged.

        Args:
            start: everything before it counts as acknowledged.
            properties: at most 2,000, of at most 4 KiB each, and 4 MiB together.

        Raises:
            InvalidRequestError: start is beyond the end of the topic.
        """
        request = cursor_pb2.CreateCursorRequest(
            topic=full_name(topic),
            cursor=text("cursor", cursor),
            properties=properties_of("properties", properties),
        )
        await check_within(self._calls, request.topic, start, field="start")
        _put_after(request, await before(self._calls, request.topic, start))
        return _cursor((await self._calls.call(request)).cursor)

    async def cursor(self, topic: str, cursor: str) -> CursorInfo:
        """A cursor. Raises NotFoundError."""
        request = cursor_pb2.GetCursorRequest(topic=full_name(topic), cursor=text("cursor", cursor))
        return _cursor((await self._calls.call(request)).cursor)

    async def cursors(self, topic: str = "") -> AsyncIterator[CursorInfo]:
        """The cursors of a topic, or of all topics, sorted by topic and name."""
        request = cursor_pb2.ListCursorsRequest(topic=optional_name(topic), page_size=PAGE)
        async for each in self._calls.pages(request):
            yield _cursor(each)

    async def reset_cursor(self, topic: str, cursor: str, to: Place) -> CursorInfo:
        """Move a cursor forwards or backwards. What was acknowledged beyond the place is discarded.
        Raises NotFoundError, InUseError if somebody holds its lease, and InvalidRequestError for a
        place beyond the end of the topic."""
        request = cursor_pb2.ResetCursorRequest(
            topic=full_name(topic), cursor=text("cursor", cursor)
        )
        await check_within(self._calls, request.topic, to, field="to")
        _put_after(request, await before(self._calls, request.topic, to))
        return _cursor((await self._calls.call(request)).cursor)

    async def delete_cursor(self, topic: str, cursor: str) -> None:
        """Delete a cursor. Raises NotFoundError, and InUseError if somebody holds its lease."""
        await self._calls.call(
            cursor_pb2.DeleteCursorRequest(topic=full_name(topic), cursor=text("cursor", cursor))
        )


def _put_after(
    request: cursor_pb2.CreateCursorRequest | cursor_pb2.ResetCursorRequest, place: Position | None
) -> None:
    if place is not None:
        request.mark_delete.CopyFrom(to_wire(place))


def _cursor(wire: cursor_pb2.Cursor) -> CursorInfo:
    return CursorInfo(
        topic=wire.topic,
        name=wire.name,
        mark_delete=optional_position(optional(wire, "mark_delete")),
        acknowledged_entries=wire.acknowledged_entries,
        partial_batches=wire.partial_batches,
        properties=dict(wire.properties),
        revision=wire.revision,
        created_at=time_of(wire.created),
        owner=wire.lease.owner if wire.HasField("lease") else None,
    )
