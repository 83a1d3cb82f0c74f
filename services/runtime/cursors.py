"""The cursor service, as other services call it: over the wire, none at all, or in memory.

    CursorClient          one call, and what a refusal means
      GrpcCursors         what dedup and the ledger do with cursors
      (dispatcher's own)  subscriptions: leases, acknowledgements, attempts

No call is retried here, but for the two halves of setting a property of a cursor that may not exist
yet. After a lost reply it is not known whether a call took effect; each may be made again.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Final, NoReturn, TypeVar

import structlog
from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.cursor.v1 import cursor_pb2_grpc as pb_grpc
from seqgate.owners import NOT_OWNER, FollowingChannel
from seqgate.services.cursors import Cursor, CursorConflict, CursorsUnavailable
from seqgate.services.errors import DomainError
from seqgate.services.runtime.positions import of_position, to_position
from seqgate.services.runtime.status import CallFailed, answer
from seqgate.types import Position, TopicName

Q = TypeVar("Q")
R = TypeVar("R")

log = structlog.get_logger()

RETRY_AFTER_S: Final = 0.5
"""RetryInfo for a caller when the cursor service does not answer."""

PAGE_SIZE: Final = 1_000
"""How many cursors a page holds."""

PUT_ROUNDS_MAX: Final = 3
"""How often a cursor is made for a property before giving up: others may remove it meanwhile."""

NOT_FOUND: Final = "CURSOR_NOT_FOUND"

CONFLICTS: Final = frozenset({"VERSION_CONFLICT", "ALREADY_MARK_DELETED", NOT_FOUND})
"""Why the cursor service does not move a cursor: it is not what the caller took it for."""

EXPECTED: Final = frozenset(
    {"", "STORE_UNAVAILABLE", "STORE_FULL", "SERVICE_BUSY", "DRAINING", NOT_OWNER}
)
"""Reasons that pass by themselves; any other is logged as an error, for an operator."""


class CursorClient:
    """Calls the cursor service."""

    def __init__(self, channel: FollowingChannel, *, timeout_s: float | None = None) -> None:
        """Without `timeout_s`, a call has the time that its caller's own deadline leaves."""
        self._stub = pb_grpc.CursorServiceStub(channel)
        self._timeout_s = timeout_s

    def refusal(self, failed: CallFailed) -> DomainError:
        """What a refusal of the cursor service means here."""
        log.debug("cursor service unavailable", reason=failed.reason, error=failed.message)
        if failed.reason not in EXPECTED:
            log.error("cursor service refused a call", reason=failed.reason, detail=failed.message)
        return unavailable(failed.reason)

    async def _call(self, method: "aio.UnaryUnaryMultiCallable[Q, R]", request: Q) -> R:
        try:
            return await answer(method(request, timeout=self._timeout_s))
        except CallFailed as failed:
            raise self.refusal(failed) from failed


class GrpcCursors(CursorClient):
    """See the ports of dedup and the ledger."""

    configured = True

    async def get(self, topic: TopicName, name: str, *, whole: bool) -> Cursor | None:
        request = pb.GetCursorRequest(
            topic=str(topic), name=name, without_mark_delete_properties=not whole
        )
        try:
            return _cursor((await self._call(self._stub.GetCursor, request)).cursor)
        except _NotFound:
            return None

    async def create(
        self, topic: TopicName, name: str, mark_delete: Position | None = None
    ) -> Cursor:
        # The answer to CreateCursor is whole, so a cursor that exists is asked for first.
        found = await self.get(topic, name, whole=False)
        if found is not None:
            return found
        request = pb.CreateCursorRequest(
            topic=str(topic), name=name, mark_delete=to_position(mark_delete)
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
        version: int,
    ) -> None:
        request = pb.MarkDeleteRequest(
            topic=str(topic),
            name=name,
            position=to_position(position),
            properties=properties,
            version=version,
        )
        await self._call(self._stub.MarkDelete, request)

    async def put_property(self, topic: TopicName, name: str, key: str, value: str | None) -> None:
        request = pb.UpdateCursorPropertiesRequest(
            topic=str(topic),
            name=name,
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
        raise CursorsUnavailable("the cursor keeps being removed", retry_after_s=RETRY_AFTER_S)

    async def delete(self, topic: TopicName, name: str) -> None:
        request = pb.DeleteCursorRequest(topic=str(topic), name=name)
        with suppress(_NotFound):
            await self._call(self._stub.DeleteCursor, request)

    async def mark_deletes(self, topic: TopicName) -> dict[str, Position | None]:
        return {each.name: _mark_delete(each) async for each in self._cursors(topic)}

    async def delete_all(self, topic: TopicName) -> None:
        """One by one: when one cannot be removed, those after it are not, either."""
        for name in await self.mark_deletes(topic):
            await self.delete(topic, name)

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
        """As in CursorClient, and a conflict is told apart."""
        if failed.reason == NOT_FOUND:
            return _NotFound("there is no such cursor", because=failed.reason)
        if failed.reason in CONFLICTS:
            return CursorConflict("the cursor has changed", because=failed.reason)
        return super().refusal(failed)


class _NotFound(CursorConflict):
    """There is no such cursor. Stays inside the service."""


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

    async def mark_deletes(self, topic: TopicName) -> dict[str, Position | None]:
        del topic
        return {}

    async def delete_all(self, topic: TopicName) -> None:
        del topic


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
            raise CursorConflict("the cursor has changed")
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

    async def mark_deletes(self, topic: TopicName) -> dict[str, Position | None]:
        self._answer()
        its = sorted(name for of, name in self.cursors if of == topic)
        return {name: self.cursors[topic, name].mark_delete for name in its}

    async def delete_all(self, topic: TopicName) -> None:
        for name in await self.mark_deletes(topic):
            del self.cursors[topic, name]

    def _answer(self) -> None:
        if not self.available:
            raise unavailable()


def unavailable(reason: str = "") -> CursorsUnavailable:
    """The refusal for a call that the cursor service did not answer, or refused for this reason."""
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
        message.version,
    )


def _mark_delete(message: pb.Cursor) -> Position | None:
    return of_position(message.mark_delete) if message.HasField("mark_delete") else None
