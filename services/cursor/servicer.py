"""The wire of the cursor service: parse, call, translate the result."""

from collections.abc import Mapping
from typing import Any, Final

from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.cursor.v1 import cursor_pb2_grpc as pb_grpc
from seqgate.services.cursor.core.cursor import (
    PROPERTIES_BYTES_MAX,
    PROPERTIES_MAX,
    BatchAck,
    Caller,
    CursorState,
    InvalidPosition,
    InvalidProperty,
    Range,
    Succession,
    properties_bytes,
)
from seqgate.services.cursor.core.managed import Imported, InvalidManagedCursor
from seqgate.services.cursor.core.state import RESERVED, Head, Lease
from seqgate.services.cursor.ports import CursorStore
from seqgate.services.cursor.service import ManagedCursors
from seqgate.services.errors import DomainError, InvalidPage, Kind
from seqgate.services.runtime.positions import to_position
from seqgate.services.runtime.requests import (
    read_limit,
    read_optional_position,
    read_position,
    read_position_token,
    read_time_ms,
    read_topic,
    to_position_token,
)
from seqgate.times import timestamp
from seqgate.types import (
    SEQUENCE_ID_MAX,
    InvalidNameError,
    Position,
    TopicName,
    check_cursor_name,
)

PROPERTY_BYTES_MAX: Final = 4 * 1024
"""The largest of a cursor's own properties, with its name, in bytes of UTF-8."""

MARK_DELETE_PROPERTIES_MAX: Final = 200_000
"""The most properties of a mark-delete position."""

MARK_DELETE_PROPERTIES_BYTES_MAX: Final = 16 * 1024 * 1024
"""The most bytes of a mark-delete position's properties, names included, in UTF-8."""

RANGES_MAX: Final = 10_000
"""The most ranges of one Acknowledge."""

RANGE_ENTRIES_MAX: Final = 10_000_000
"""The most entries of one range."""

ENTRIES_MAX: Final = 100_000_000
"""The most entries of all ranges of a call together: 12 MiB of bits."""

BATCHES_MAX: Final = 10_000
"""The most batches of one Acknowledge."""

BATCH_MESSAGES_MAX: Final = 10_000
"""The most messages of a batch."""

SUCCESSIONS_MAX: Final = 10_000
"""The most successions of one call."""

CURSORS_DEFAULT: Final = 100
CURSORS_MAX: Final = 1_000
"""The default and the largest page size of ListCursors."""

CURSORS_BYTES_MAX: Final = 4 * 1024 * 1024
"""The most bytes of a page of cursors; one cursor always fits."""

CURSORS_STEP: Final = 8
"""The number of cursors read at a time: each may have 4 MiB."""

HOLES_DEFAULT: Final = 10_000
HOLES_MAX: Final = 100_000
"""The default and the largest page size of ListAcknowledged, in ranges and batches."""

HOLES_STEP: Final = 1_000
"""The number of ranges and batches translated at a time."""

HOLES_INDEXES_MAX: Final = 1_000_000
"""The number of messages of batches at which a page ends; it may exceed this by one step."""

Context = aio.ServicerContext[Any, Any]


class InvalidCreationTime(DomainError):
    """A cursor's time of creation is out of range."""

    kind = Kind.INVALID
    reason = "INVALID_CREATION_TIME"


class InvalidCursorName(DomainError):
    """A cursor name is empty, too long, or contains control characters."""

    kind = Kind.INVALID
    reason = "INVALID_CURSOR_NAME"


class CursorServicer(pb_grpc.CursorServiceServicer):
    """See cursor.proto. Responses are built inside the step, before the cursor moves on."""

    def __init__(self, store: CursorStore, managed: ManagedCursors) -> None:
        self._store = store
        self._managed = managed

    # ---- cursors

    async def CreateCursor(
        self, request: pb.CreateCursorRequest, context: Context
    ) -> pb.CreateCursorResponse:
        topic, name = names(request)
        head, created = await self._store.create(
            topic,
            name,
            mark_delete=read_optional_position(request, "mark_delete", InvalidPosition),
            properties=_own_properties("properties", request.properties),
        )
        return pb.CreateCursorResponse(cursor=_to_cursor(head), created=created)

    async def GetCursor(
        self, request: pb.GetCursorRequest, context: Context
    ) -> pb.GetCursorResponse:
        def look(state: CursorState) -> pb.GetCursorResponse:
            return pb.GetCursorResponse(cursor=_to_cursor(state.head))

        whole = not request.without_mark_delete_properties
        return await self._store.look(*names(request), look, whole=whole)

    async def ListCursors(
        self, request: pb.ListCursorsRequest, context: Context
    ) -> pb.ListCursorsResponse:
        topic = read_topic(request.topic) if request.topic else None
        size = read_limit(request.page_size, CURSORS_DEFAULT, CURSORS_MAX)
        after = _page_token(request.page_token, topic)
        page: list[pb.Cursor] = []
        bytes_left = CURSORS_BYTES_MAX
        while len(page) < size:
            limit = min(CURSORS_STEP, size - len(page))
            heads = await self._store.cursors(topic, after=after, limit=limit)
            for cursor in map(_to_cursor, heads):
                bytes_left -= cursor.ByteSize()
                if bytes_left < 0 and page:
                    return _to_page(page)
                page.append(cursor)
            if len(heads) < limit:
                return pb.ListCursorsResponse(cursors=page)
            after = (page[-1].topic, page[-1].name)
        return _to_page(page)

    async def DeleteCursor(
        self, request: pb.DeleteCursorRequest, context: Context
    ) -> pb.DeleteCursorResponse:
        topic, name = names(request)
        created_ms = None
        if request.HasField("created"):
            created_ms = read_time_ms("created", request.created, InvalidCreationTime)
        await self._store.delete(topic, name, created_ms=created_ms)
        return pb.DeleteCursorResponse()

    async def UpdateCursorProperties(
        self, request: pb.UpdateCursorPropertiesRequest, context: Context
    ) -> pb.UpdateCursorPropertiesResponse:
        topic, name = names(request)
        put = _own_properties("put", request.put)
        if request.clear and any(each.startswith(RESERVED) for each in put):
            raise InvalidProperty(
                f"the prefix {RESERVED} is reserved and cannot be put with clear", field="put"
            )
        caller = Caller(revision=optional(request, "revision"), epoch=optional(request, "epoch"))

        def step(state: CursorState, _: int) -> pb.UpdateCursorPropertiesResponse:
            state.update_properties(put, request.remove, caller, clear=request.clear)
            return pb.UpdateCursorPropertiesResponse(cursor=_to_cursor(state.head))

        return await self._store.change(topic, name, step)

    # ---- moves

    async def ResetCursor(
        self, request: pb.ResetCursorRequest, context: Context
    ) -> pb.ResetCursorResponse:
        topic, name = names(request)
        mark_delete = read_optional_position(request, "mark_delete", InvalidPosition)
        caller = Caller(epoch=optional(request, "epoch"))

        def step(state: CursorState, _: int) -> pb.ResetCursorResponse:
            state.reset(mark_delete, caller)
            return pb.ResetCursorResponse(cursor=_to_cursor(state.head))

        return await self._store.change(topic, name, step)

    async def MarkDelete(
        self, request: pb.MarkDeleteRequest, context: Context
    ) -> pb.MarkDeleteResponse:
        topic, name = names(request)
        position = _required_position(request, "position")
        properties = _mark_delete_properties("properties", request.properties)
        caller = _caller(request)._replace(revision=optional(request, "revision"))

        def step(state: CursorState, _: int) -> pb.MarkDeleteResponse:
            state.mark_delete(position, properties, caller)
            head = state.head
            return pb.MarkDeleteResponse(
                mark_delete=to_position(head.mark_delete), revision=head.revision
            )

        return await self._store.change(topic, name, step)

    async def Acknowledge(
        self, request: pb.AcknowledgeRequest, context: Context
    ) -> pb.AcknowledgeResponse:
        topic, name = names(request)
        ranges, batches = _ranges(request.ranges), _batches(request.batches)
        caller = _caller(request)

        def step(state: CursorState, _: int) -> pb.AcknowledgeResponse:
            state.acknowledge(ranges, batches, caller)
            head = state.head
            return pb.AcknowledgeResponse(
                mark_delete=to_position(head.mark_delete), revision=head.revision
            )

        return await self._store.change(topic, name, step)

    async def ListAcknowledged(
        self, request: pb.ListAcknowledgedRequest, context: Context
    ) -> pb.ListAcknowledgedResponse:
        topic, name = names(request)
        after = read_position_token(request.page_token)
        size = read_limit(request.page_size, HOLES_DEFAULT, HOLES_MAX)

        def look(state: CursorState) -> pb.ListAcknowledgedResponse:
            return _to_acknowledged(state, after, size)

        return await self._store.look(topic, name, look)

    # ---- Pulsar's records

    async def ImportManagedCursor(
        self, request: pb.ImportManagedCursorRequest, context: Context
    ) -> pb.ImportManagedCursorResponse:
        topic, name = names(request)
        imported = _importable(
            self._managed.read(request.managed_cursor_info, request.position_info)
        )
        head = await self._managed.import_cursor(topic, name, imported, replacing=request.replace)
        return pb.ImportManagedCursorResponse(cursor=_to_cursor(head), stale=imported.stale)

    async def ExportManagedCursor(
        self, request: pb.ExportManagedCursorRequest, context: Context
    ) -> pb.ExportManagedCursorResponse:
        info = await self._managed.export_cursor(*names(request))
        return pb.ExportManagedCursorResponse(managed_cursor_info=info)


# ---- parsing


def _importable(imported: Imported) -> Imported:
    """The import itself, if it is within the limits of this service's own cursors."""
    _own_properties("managed_cursor_info", imported.properties)
    _mark_delete_properties("managed_cursor_info", imported.mark_delete_properties)
    entries = sum(each.last_entry - each.first.entry_id + 1 for each in imported.ranges)
    if entries > ENTRIES_MAX:
        raise InvalidManagedCursor(
            f"too many entries acknowledged beyond the mark-delete position (limit "
            f"{ENTRIES_MAX:,})",
            field="managed_cursor_info",
            entries=entries,
        )
    return imported


def names(request: Any) -> tuple[TopicName, str]:
    topic = read_topic(request.topic)
    try:
        return topic, check_cursor_name(request.cursor)
    except InvalidNameError as error:
        raise InvalidCursorName(str(error), field="cursor") from error


def _page_token(token: str, topic: TopicName | None) -> tuple[str, str]:
    """The topic and name of the previous page's last cursor: tenant/namespace/name/cursor."""
    if not token:
        return "", ""
    parts = token.split("/", 3)
    try:
        last = TopicName.parse("/".join(parts[:3]))
        name = check_cursor_name("".join(parts[3:]))
    except InvalidNameError as error:
        raise InvalidPage("page_token is invalid", field="page_token") from error
    if topic not in (None, last):
        raise InvalidPage("page_token is for another topic", field="page_token")
    return str(last), name


def optional(request: Any, field: str) -> Any:
    return getattr(request, field) if request.HasField(field) else None


def _required_position(message: Any, field: str, path: str = "") -> Position:
    if not message.HasField(field):
        raise InvalidPosition(f"{path}{field} is required", field=f"{path}{field}")
    return read_position(f"{path}{field}", getattr(message, field), InvalidPosition)


def _caller(request: pb.MarkDeleteRequest | pb.AcknowledgeRequest) -> Caller:
    if len(request.successions) > SUCCESSIONS_MAX:
        raise InvalidPosition(
            f"too many successions (limit {SUCCESSIONS_MAX:,})", field="successions"
        )
    return Caller(
        epoch=optional(request, "epoch"),
        log_end=read_optional_position(request, "log_end", InvalidPosition),
        successions=tuple(map(_succession, request.successions)),
    )


def _succession(given: pb.Succession) -> Succession:
    last = _required_position(given, "last", "successions.")
    following = _required_position(given, "next", "successions.")
    if last.ledger_id >= following.ledger_id:
        raise InvalidPosition(
            "successions.next must be in a later ledger than last",
            field="successions.next",
            last=last,
            next=following,
        )
    return Succession(last, following)


def _ranges(given: Any) -> list[Range]:
    if len(given) > RANGES_MAX:
        raise InvalidPosition(f"too many ranges (limit {RANGES_MAX:,})", field="ranges")
    ranges = [_range(each) for each in given]
    if sum(each.last_entry - each.first.entry_id + 1 for each in ranges) > ENTRIES_MAX:
        raise InvalidPosition(
            f"ranges cover too many entries (limit {ENTRIES_MAX:,})", field="ranges"
        )
    return ranges


def _range(given: pb.PositionRange) -> Range:
    first = _required_position(given, "first", "ranges.")
    if not first.entry_id <= given.last_entry_id <= SEQUENCE_ID_MAX:
        raise InvalidPosition(
            "last_entry_id must be from the range's first entry to 2^63 - 1",
            field="ranges.last_entry_id",
            first=first,
            last_entry_id=given.last_entry_id,
        )
    if given.last_entry_id - first.entry_id >= RANGE_ENTRIES_MAX:
        raise InvalidPosition(
            f"range too long (limit {RANGE_ENTRIES_MAX:,} entries)",
            field="ranges.last_entry_id",
            first=first,
            last_entry_id=given.last_entry_id,
        )
    return Range(first, given.last_entry_id)


def _batches(given: Any) -> list[BatchAck]:
    if len(given) > BATCHES_MAX:
        raise InvalidPosition(f"too many batches (limit {BATCHES_MAX:,})", field="batches")
    return [_batch(each) for each in given]


def _batch(given: pb.BatchAcknowledgement) -> BatchAck:
    position = _required_position(given, "position", "batches.")
    size = given.batch_size
    if not 1 <= size <= BATCH_MESSAGES_MAX:
        raise InvalidPosition(
            f"batch_size must be 1 to {BATCH_MESSAGES_MAX:,}",
            field="batches.batch_size",
            position=position,
            batch_size=size,
        )
    if len(given.indexes) > size or max(given.indexes, default=0) >= size:
        raise InvalidPosition(
            "indexes must be below batch_size and distinct",
            field="batches.indexes",
            position=position,
            batch_size=size,
        )
    return BatchAck(position, size, tuple(given.indexes))


def _own_properties(field: str, given: Mapping[str, str]) -> dict[str, str]:
    if len(given) > PROPERTIES_MAX:
        raise InvalidProperty(
            f"too many properties (limit {PROPERTIES_MAX:,})", field=field, count=len(given)
        )
    if any(properties_bytes({name: value}) > PROPERTY_BYTES_MAX for name, value in given.items()):
        raise InvalidProperty(
            f"property too large (limit {PROPERTY_BYTES_MAX:,} bytes with its name)", field=field
        )
    size_bytes = properties_bytes(given)
    if size_bytes > PROPERTIES_BYTES_MAX:
        raise InvalidProperty(
            f"properties too large (limit {PROPERTIES_BYTES_MAX:,} bytes together)",
            field=field,
            bytes=size_bytes,
        )
    return dict(given)


def _mark_delete_properties(field: str, given: Mapping[str, str]) -> dict[str, str]:
    if len(given) > MARK_DELETE_PROPERTIES_MAX:
        raise InvalidProperty(
            f"too many mark-delete properties (limit {MARK_DELETE_PROPERTIES_MAX:,})",
            field=field,
            count=len(given),
        )
    size_bytes = properties_bytes(given)
    if size_bytes > MARK_DELETE_PROPERTIES_BYTES_MAX:
        raise InvalidProperty(
            "mark-delete properties too large (limit "
            f"{MARK_DELETE_PROPERTIES_BYTES_MAX:,} bytes together)",
            field=field,
            bytes=size_bytes,
        )
    return dict(given)


# ---- translation of results


def to_lease(lease: Lease) -> pb.Lease:
    return pb.Lease(owner=lease.owner, epoch=lease.epoch, expires=timestamp(lease.expires_ms))


def _to_cursor(head: Head) -> pb.Cursor:
    return pb.Cursor(
        topic=str(head.topic),
        name=head.name,
        mark_delete=to_position(head.mark_delete),
        mark_delete_properties=head.mark_delete_properties,
        properties=head.properties,
        revision=head.revision,
        created=timestamp(head.created_ms),
        acknowledged_entries=head.acknowledged,
        partial_batches=head.partial,
        lease=None if head.lease is None else to_lease(head.lease),
    )


def _to_page(page: list[pb.Cursor]) -> pb.ListCursorsResponse:
    return pb.ListCursorsResponse(cursors=page, next_page_token=f"{page[-1].topic}/{page[-1].name}")


def _to_acknowledged(
    state: CursorState, after: Position | None, size: int
) -> pb.ListAcknowledgedResponse:
    response = pb.ListAcknowledgedResponse(mark_delete=to_position(state.head.mark_delete))
    indexes_left = HOLES_INDEXES_MAX
    while size > 0 and indexes_left > 0:
        page = state.acknowledged(after, min(size, HOLES_STEP))
        response.ranges.extend(map(_to_range, page.ranges))
        response.batches.extend(map(_to_batch, page.batches))
        if page.next_after is None:
            return response
        after = page.next_after
        size -= len(page.ranges) + len(page.batches)
        indexes_left -= sum(len(each.indexes) for each in page.batches)
    response.next_page_token = to_position_token(after)
    return response


def _to_range(range_: Range) -> pb.PositionRange:
    return pb.PositionRange(first=to_position(range_.first), last_entry_id=range_.last_entry)


def _to_batch(batch: BatchAck) -> pb.BatchAcknowledgement:
    return pb.BatchAcknowledgement(
        position=to_position(batch.position), batch_size=batch.size, indexes=batch.indexes
    )
