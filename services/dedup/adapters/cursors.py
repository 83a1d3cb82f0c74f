"""Cursors, where deduplication keeps what must outlast its state store: over the wire, none at all,
and in memory.

No call is retried here, but for the two halves of setting a property of a cursor that may not exist
yet. After a lost answer nobody knows whether a call did what it was asked; each may be made again.
"""

from collections.abc import Mapping
from typing import Final, NoReturn

import structlog

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.cursor.v1 import cursor_pb2_grpc as pb_grpc
from seqgate.api.entry.v1 import entry_pb2
from seqgate.owners import NOT_OWNER, FollowingChannel
from seqgate.types import Position, TopicName
from services.dedup.ports import Cursor, CursorConflict, CursorsUnavailable
from services.runtime.status import CallFailed, answer

log = structlog.get_logger()

RETRY_AFTER_S: Final = 0.5
"""What a caller is told to wait when the cursor service does not answer."""

PUT_ROUNDS_MAX: Final = 3
"""How often a cursor is made for a property before giving up: others may remove it meanwhile."""

NOT_FOUND: Final = "CURSOR_NOT_FOUND"

CONFLICTS: Final = frozenset({"VERSION_CONFLICT", "ALREADY_MARK_DELETED", NOT_FOUND})
"""Why the cursor service does not move a cursor: it is not what the caller took it for."""

EXPECTED: Final = frozenset(
    {"", "STORE_UNAVAILABLE", "STORE_FULL", "SERVICE_BUSY", "DRAINING", NOT_OWNER}
)
"""Why it does nothing now; for any other reason, somebody has to look."""


class GrpcCursors:
    """See services.dedup.ports.Cursors."""

    configured = True

    def __init__(self, channel: FollowingChannel, *, timeout_s: float) -> None:
        self._stub = pb_grpc.CursorServiceStub(channel)
        self._timeout_s = timeout_s

    async def get(self, topic: TopicName, name: str, *, whole: bool) -> Cursor | None:
        request = pb.GetCursorRequest(
            topic=str(topic), name=name, without_mark_delete_properties=not whole
        )
        try:
            reply = await answer(self._stub.GetCursor(request, timeout=self._timeout_s))
        except CallFailed as failed:
            if failed.reason == NOT_FOUND:
                return None
            _give_up(failed)
        return _cursor(reply.cursor)

    async def create(
        self, topic: TopicName, name: str, mark_delete: Position | None = None
    ) -> Cursor:
        # The answer to CreateCursor is whole, so a cursor that exists is asked for first.
        found = await self.get(topic, name, whole=False)
        if found is not None:
            return found
        request = pb.CreateCursorRequest(
            topic=str(topic), name=name, mark_delete=_optional_wire(mark_delete)
        )
        try:
            reply = await answer(self._stub.CreateCursor(request, timeout=self._timeout_s))
        except CallFailed as failed:
            _give_up(failed)
        return _cursor(reply.cursor)._replace(mark_delete_properties={})

    async def mark_delete(
        self,
        topic: TopicName,
        name: str,
        position: Position,
        properties: Mapping[str, str],
        *,
        version: int,
    ) -> None:
        request = pb.MarkDeleteRequest(
            topic=str(topic),
            name=name,
            position=_wire(position),
            properties=properties,
            version=version,
        )
        try:
            await answer(self._stub.MarkDelete(request, timeout=self._timeout_s))
        except CallFailed as failed:
            if failed.reason in CONFLICTS:
                raise CursorConflict(
                    "the cursor is not what it was taken for", because=failed.reason
                ) from failed
            _give_up(failed)

    async def put_property(self, topic: TopicName, name: str, key: str, value: str | None) -> None:
        request = pb.UpdateCursorPropertiesRequest(
            topic=str(topic),
            name=name,
            put={} if value is None else {key: value},
            remove=[key] if value is None else [],
        )
        for _ in range(PUT_ROUNDS_MAX):
            try:
                await answer(self._stub.UpdateCursorProperties(request, timeout=self._timeout_s))
            except CallFailed as failed:
                if failed.reason != NOT_FOUND:
                    _give_up(failed)
                if value is None:
                    return
                await self.create(topic, name)
            else:
                return
        raise CursorsUnavailable(
            "the cursor is removed again and again", retry_after_s=RETRY_AFTER_S
        )

    async def delete(self, topic: TopicName, name: str) -> None:
        request = pb.DeleteCursorRequest(topic=str(topic), name=name)
        try:
            await answer(self._stub.DeleteCursor(request, timeout=self._timeout_s))
        except CallFailed as failed:
            if failed.reason != NOT_FOUND:
                _give_up(failed)


class NoCursors:
    """An installation without a cursor service: there is no cursor, and none can be made."""

    configured = False

    async def get(self, topic: TopicName, name: str, *, whole: bool) -> Cursor | None:
        del topic, name, whole
        return None

    async def create(
        self, topic: TopicName, name: str, mark_delete: Position | None = None
    ) -> Cursor:
        del mark_delete
        _refuse_without(topic, name)

    async def mark_delete(
        self,
        topic: TopicName,
        name: str,
        position: Position,
        properties: Mapping[str, str],
        *,
        version: int,
    ) -> None:
        del position, properties, version
        _refuse_without(topic, name)

    async def put_property(self, topic: TopicName, name: str, key: str, value: str | None) -> None:
        """Removing is no write here: there is nothing to remove."""
        del key
        if value is not None:
            _refuse_without(topic, name)

    async def delete(self, topic: TopicName, name: str) -> None:
        del topic, name


class MemoryCursors:
    """Cursors that are forgotten when the process ends. For tests."""

    configured = True

    def __init__(self) -> None:
        self.cursors: dict[tuple[TopicName, str], Cursor] = {}
        self.available = True

    async def get(self, topic: TopicName, name: str, *, whole: bool) -> Cursor | None:
        self._answer()
        found = self.cursors.get((topic, name))
        if found is None or whole:
            return found
        return found._replace(mark_delete_properties={})

    async def create(
        self, topic: TopicName, name: str, mark_delete: Position | None = None
    ) -> Cursor:
        self._answer()
        found = self.cursors.setdefault((topic, name), Cursor(name, mark_delete, {}, {}, 0))
        return found._replace(mark_delete_properties={})

    async def mark_delete(
        self,
        topic: TopicName,
        name: str,
        position: Position,
        properties: Mapping[str, str],
        *,
        version: int,
    ) -> None:
        self._answer()
        found = self.cursors.get((topic, name))
        if (
            found is None
            or found.version != version
            or (found.mark_delete is not None and position < found.mark_delete)
        ):
            raise CursorConflict("the cursor is not what it was taken for")
        self.cursors[topic, name] = found._replace(
            mark_delete=position, mark_delete_properties=dict(properties), version=version + 1
        )

    async def put_property(self, topic: TopicName, name: str, key: str, value: str | None) -> None:
        self._answer()
        found = self.cursors.get((topic, name))
        if found is None:
            if value is None:
                return
            found = Cursor(name, None, {}, {}, 0)
        properties = {each: text for each, text in found.properties.items() if each != key}
        if value is not None:
            properties[key] = value
        self.cursors[topic, name] = found._replace(properties=properties, version=found.version + 1)

    async def delete(self, topic: TopicName, name: str) -> None:
        self._answer()
        self.cursors.pop((topic, name), None)

    def _answer(self) -> None:
        if not self.available:
            raise CursorsUnavailable(
                "the cursor service does not answer", retry_after_s=RETRY_AFTER_S
            )


def _give_up(failed: CallFailed) -> NoReturn:
    log.debug("cursors do not answer", reason=failed.reason, error=failed.message)
    if failed.reason not in EXPECTED:
        log.error("the cursor service refused", reason=failed.reason, detail=failed.message)
    raise CursorsUnavailable(
        "the cursor service does not answer",
        retry_after_s=RETRY_AFTER_S,
        **({"because": failed.reason} if failed.reason else {}),
    ) from failed


def _refuse_without(topic: TopicName, name: str) -> NoReturn:
    raise CursorsUnavailable(
        "no cursor service is configured",
        retry_after_s=RETRY_AFTER_S,
        topic=topic,
        cursor=name,
    )


def _optional_wire(position: Position | None) -> entry_pb2.Position | None:
    return None if position is None else _wire(position)


def _wire(position: Position) -> entry_pb2.Position:
    return entry_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)


def _cursor(given: pb.Cursor) -> Cursor:
    mark_delete = None
    if given.HasField("mark_delete"):
        mark_delete = Position(given.mark_delete.ledger_id, given.mark_delete.entry_id)
    return Cursor(
        name=given.name,
        mark_delete=mark_delete,
        mark_delete_properties=dict(given.mark_delete_properties),
        properties=dict(given.properties),
        version=given.version,
    )
