"""Clients of the cursor service, shared by other services: over gRPC, none, or in memory.

    CursorClient          one call, and the translation of its errors
      GrpcCursors         the calls of dedup and the ledger
      (dispatcher's own)  subscriptions: leases, acknowledgements, attempts

Calls are not retried here, except the two steps that set a property of a cursor that may not exist
yet. After a lost reply the outcome is unknown; every call is safe to retry.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Final, NoReturn, TypeVar

import structlog
from grpc import StatusCode, aio

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.cursor.v1 import cursor_pb2_grpc as pb_grpc
from seqgate.owners import NOT_OWNER, FollowingChannel
from seqgate.services.cursors import Cursor, CursorConflict, CursorsUnavailable, IsGone
from seqgate.services.errors import DomainError
from seqgate.services.runtime.positions import of_position, to_position
from seqgate.services.runtime.status import CallFailed, answer
from seqgate.telemetry.calls import expecting
from seqgate.types import Position, TopicName

Q = TypeVar("Q")
R = TypeVar("R")

log = structlog.get_logger()

RETRY_AFTER_S: Final = 0.5
"""RetryInfo for a caller when the cursor service does not answer."""

PAGE_SIZE: Final = 1_000
"""The most cursors per page."""

PUT_ROUNDS_MAX: Final = 3
"""How often setting a property creates a cursor that others keep deleting, before giving up."""

NOT_FOUND: Final = "CURSOR_NOT_FOUND"

CONFLICTS: Final = frozenset({"REVISION_CONFLICT", "ALREADY_MARK_DELETED", NOT_FOUND})
"""Reasons for which the cursor service does not move a cursor: the caller's view is outdated."""

EXPECTED: Final = frozenset(
    {"", "STORE_UNAVAILABLE", "STORE_FULL", "SERVICE_BUSY", "DRAINING", NOT_OWNER}
)
"""Transient reasons; any other is logged as an error for the operator."""


class CursorClient:
    """Callers plan for cursors that do not exist yet."""

    def __init__(self, channel: FollowingChannel, *, timeout_s: float | None = None) -> None:
        """Without `timeout_s`, a call may take the rest of its caller's deadline."""
        self._stub = pb_grpc.CursorServiceStub(channel)
        self._timeout_s = timeout_s

    def refusal(self, failed: CallFailed) -> DomainError:
        """The error to raise for a failed call."""
        log.debug("cursor service unavailable", reason=failed.reason, error=failed.message)
        if failed.reason not in EXPECTED:
            log.error("cursor service refused a call", reason=failed.reason, detail=failed.message)
        return unavailable(failed.reason)

    async def _call(self, method: "aio.UnaryUnaryMultiCallable[Q, R]", request: Q) -> R:
        try:
            with expecting(StatusCode.NOT_FOUND):
                return await answer(method(request, timeout=self._timeout_s))
        except CallFailed as failed:
            raise self.refusal(failed) from failed


class GrpcCursors(CursorClient):
    configured = True

    async def get(self, topic: TopicName, name: str, *, whole: bool) -> Cursor | None:
        request = pb.GetCursorRequest(
            topic=str(topic), cursor=name, without_mark_delete_properties=not whole
        )
        try:
            return _cursor((await self._call(self._stub.GetCursor, request)).cursor)
        except _NotFound:
            return None

    async def create(
        self, topic: TopicName, name: str, mark_delete: Position | None = None
    ) -> Cursor:
        # CreateCursor answers with the whole cursor, so try a get without properties first.
        found = await self.get(topic, name, whole=False)
        if found is not None:
            return found
        request = pb.CreateCursorRequest(
            topic=str(topic), cursor=name, mark_delete=to_position(mark_delete)
        )
        reply = await self._call(self._stub.CreateCursor, request)
        return _cursor(reply.cursor)._replace(mark_delete_properties={})

    async def mark_delete(
        self,
        topic: TopicName,
        name: str,
        position: Position,
        properties: Mapping[str, str],
        *,
        revision: int,
    ) -> None:
        request = pb.MarkDeleteRequest(
            topic=str(topic),
            cursor=name,
            position=to_position(position),
            properties=properties,
            revision=revision,
        )
        await self._call(self._stub.MarkDelete, request)

    async def put_property(self, topic: TopicName, name: str, key: str, value: str | None) -> None:
        request = pb.UpdateCursorPropertiesRequest(
            topic=str(topic),
            cursor=name,
            put={} if value is None else {key: value},
            remove=[key] if value is None else [],
        )
        for _ in range(PUT_ROUNDS_MAX):
            try:
                await self._call(self._stub.UpdateCursorProperties, request)
            except _NotFound:
                if value is None:
                    return
                await self.create(topic, name)
            else:
                return
        raise CursorsUnavailable("the cursor is deleted repeatedly", retry_after_s=RETRY_AFTER_S)

    async def delete(self, topic: TopicName, name: str) -> None:
        request = pb.DeleteCursorRequest(topic=str(topic), cursor=name)
        with suppress(_NotFound):
            await self._call(self._stub.DeleteCursor, request)

    async def mark_deletes(self, topic: TopicName) -> dict[str, Position | None]:
        return {each.name: _mark_delete(each) async for each in self._cursors(topic)}

    async def delete_all(self, topic: TopicName, is_gone: IsGone) -> bool:
        """Delete cursors one by one: after a failure, the remaining ones stay."""
        listed = [each async for each in self._cursors(topic)]
        if not await is_gone():
            return False
        for each in listed:
            request = pb.DeleteCursorRequest(
                topic=str(topic), cursor=each.name, created=each.created
            )
            with suppress(_NotFound):
                await self._call(self._stub.DeleteCursor, request)
        return True

    async def _cursors(self, topic: TopicName) -> AsyncIterator[pb.Cursor]:
        request = pb.ListCursorsRequest(topic=str(topic), page_size=PAGE_SIZE)
        while True:
            page = await self._call(self._stub.ListCursors, request)
            for cursor in page.cursors:
                yield cursor
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def refusal(self, failed: CallFailed) -> DomainError:
        """As in CursorClient, but conflicts become CursorConflict."""
        if failed.reason == NOT_FOUND:
            return _NotFound("cursor not found", because=failed.reason)
        if failed.reason in CONFLICTS:
            return CursorConflict("the cursor has changed", because=failed.reason)
        return super().refusal(failed)


class _NotFound(CursorConflict):
    """The cursor does not exist. Never leaves the service."""


class NoCursors:
    """An installation without a cursor service: it has no cursors and can create none."""

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
        revision: int,
    ) -> None:
        del position, properties, revision
        _refuse_without(topic, name)

    async def put_property(self, topic: TopicName, name: str, key: str, value: str | None) -> None:
        """Removing a property does nothing: none exists."""
        del key
        if value is not None:
            _refuse_without(topic, name)

    async def delete(self, topic: TopicName, name: str) -> None:
        del topic, name

    async def mark_deletes(self, topic: TopicName) -> dict[str, Position | None]:
        del topic
        return {}

    async def delete_all(self, topic: TopicName, is_gone: IsGone) -> bool:
        del topic
        return await is_gone()


class MemoryCursors:
    """Cursors in memory, lost when the process ends. For tests."""

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
        revision: int,
    ) -> None:
        self._answer()
        found = self.cursors.get((topic, name))
        if (
            found is None
            or found.revision != revision
            or (found.mark_delete is not None and position < found.mark_delete)
        ):
            raise CursorConflict("the cursor has changed")
        self.cursors[topic, name] = found._replace(
            mark_delete=position, mark_delete_properties=dict(properties), revision=revision + 1
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
        self.cursors[topic, name] = found._replace(
            properties=properties, revision=found.revision + 1
        )

    async def delete(self, topic: TopicName, name: str) -> None:
        self._answer()
        self.cursors.pop((topic, name), None)

    async def mark_deletes(self, topic: TopicName) -> dict[str, Position | None]:
        self._answer()
        its = sorted(name for of, name in self.cursors if of == topic)
        return {name: self.cursors[topic, name].mark_delete for name in its}

    async def delete_all(self, topic: TopicName, is_gone: IsGone) -> bool:
        listed = await self.mark_deletes(topic)
        if not await is_gone():
            return False
        for name in listed:
            self.cursors.pop((topic, name), None)
        return True

    def _answer(self) -> None:
        if not self.available:
            raise unavailable()


def unavailable(reason: str = "") -> CursorsUnavailable:
    """The error for a call that the cursor service did not answer, or refused for this reason."""
    because = {"because": reason} if reason else {}
    return CursorsUnavailable(
        "the cursor service does not answer", retry_after_s=RETRY_AFTER_S, **because
    )


def _refuse_without(topic: TopicName, name: str) -> NoReturn:
    raise CursorsUnavailable(
        "no cursor service: cursor_target is empty",
        retry_after_s=RETRY_AFTER_S,
        topic=topic,
        cursor=name,
    )


def _cursor(message: pb.Cursor) -> Cursor:
    return Cursor(
        message.name,
        _mark_delete(message),
        dict(message.mark_delete_properties),
        dict(message.properties),
        message.revision,
    )


def _mark_delete(message: pb.Cursor) -> Position | None:
    return of_position(message.mark_delete) if message.HasField("mark_delete") else None
