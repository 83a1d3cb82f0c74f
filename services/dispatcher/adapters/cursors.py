"""The cursor service, over the wire.

No call is retried here. After a lost answer nobody knows whether a call did what it was asked; each
may be made again.
"""

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NoReturn

import structlog

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.cursor.v1 import cursor_pb2_grpc as pb_grpc
from seqgate.api.entry.v1 import entry_pb2
from seqgate.owners import CHANGING_HANDS, FollowingChannel
from seqgate.types import Position, TopicName
from services.dispatcher.core.effects import Persist
from services.dispatcher.ports import (
    Cursor,
    CursorsUnavailable,
    InvalidProperty,
    Lease,
    NotOwner,
    Part,
    Run,
    SubscriptionNotFound,
)
from services.errors import Fenced, InvalidPage
from services.runtime.refused import Refused, answer

log = structlog.get_logger()

RETRY_AFTER_S: Final = 0.5
"""What a caller is told to wait when the cursor service does not answer."""

PAGE_SIZE: Final = 10_000
"""How many ranges, batches or attempts a page holds."""

CALL_ITEMS_MAX: Final = 10_000
"""How many ranges, batches, successions or attempts one call takes."""

EXPECTED: Final = frozenset({"", "STORE_UNAVAILABLE", "STORE_FULL", "DRAINING"}) | CHANGING_HANDS
"""Why the cursor service does nothing now; for any other reason, somebody has to look."""


class GrpcCursors:
    """See services.dispatcher.ports.Cursors."""

    def __init__(self, channel: FollowingChannel, *, timeout_s: float) -> None:
        self._stub: Any = pb_grpc.CursorServiceStub(channel)  # type: ignore[call-overload]
        self._timeout_s = timeout_s

    async def create(
        self,
        topic: TopicName,
        name: str,
        mark_delete: Position | None,
        properties: Mapping[str, str],
    ) -> tuple[Cursor, bool]:
        reply = await self._call(
            self._stub.CreateCursor,
            pb.CreateCursorRequest(
                topic=str(topic),
                name=name,
                mark_delete=_wire(mark_delete),
                properties=properties,
            ),
        )
        return _cursor(reply.cursor), reply.created

    async def get(self, topic: TopicName, name: str) -> Cursor:
        request = pb.GetCursorRequest(
            topic=str(topic), name=name, without_mark_delete_properties=True
        )
        return _cursor((await self._call(self._stub.GetCursor, request)).cursor)

    async def page(
        self, topic: TopicName, *, limit: int, token: str
    ) -> tuple[Sequence[Cursor], str]:
        request = pb.ListCursorsRequest(topic=str(topic), page_size=limit, page_token=token)
        reply = await self._call(self._stub.ListCursors, request)
        return [_cursor(each) for each in reply.cursors], reply.next_page_token

    async def delete(self, topic: TopicName, name: str) -> None:
        await self._call(
            self._stub.DeleteCursor, pb.DeleteCursorRequest(topic=str(topic), name=name)
        )

    async def reset(
        self, topic: TopicName, name: str, mark_delete: Position | None, epoch: int
    ) -> None:
        await self._call(
            self._stub.ResetCursor,
            pb.ResetCursorRequest(
                topic=str(topic), name=name, mark_delete=_wire(mark_delete), epoch=epoch
            ),
        )

    async def acknowledged(self, topic: TopicName, name: str) -> AsyncIterator[Run | Part]:
        request = pb.ReadAcknowledgedRequest(topic=str(topic), name=name, page_size=PAGE_SIZE)
        while True:
            page = await self._call(self._stub.ReadAcknowledged, request)
            for run in page.ranges:
                yield Run(_position(run.first), run.last_entry_id)
            for batch in page.batches:
                acknowledged = sum(1 << index for index in batch.indexes)
                yield Part(_position(batch.position), batch.batch_size, acknowledged)
            if not page.HasField("next_after"):
                return
            request.after.CopyFrom(page.next_after)

    async def attempts(self, topic: TopicName, name: str) -> AsyncIterator[tuple[Position, int]]:
        request = pb.ListAttemptsRequest(topic=str(topic), name=name, page_size=PAGE_SIZE)
        while True:
            page = await self._call(self._stub.ListAttempts, request)
            for each in page.entries:
                yield _position(each.position), each.attempts
            if not page.HasField("next_after"):
                return
            request.after.CopyFrom(page.next_after)

    async def persist(
        self, topic: TopicName, name: str, what: Persist, epoch: int
    ) -> Position | None:
        successions = iter(
            [pb.Succession(last=_wire(last), next=_wire(next_)) for last, next_ in what.successions]
        )
        ranges = iter(_ranges(what.entries))
        batches = iter([_batch(*part) for part in what.parts])
        while True:
            request = pb.AcknowledgeRequest(
                topic=str(topic),
                name=name,
                ranges=islice(ranges, CALL_ITEMS_MAX),
                batches=islice(batches, CALL_ITEMS_MAX),
                successions=islice(successions, CALL_ITEMS_MAX),
                epoch=epoch,
            )
            reply = await self._call(self._stub.Acknowledge, request)
            items = max(len(request.ranges), len(request.batches), len(request.successions))
            if items < CALL_ITEMS_MAX:
                return _position(reply.mark_delete) if reply.HasField("mark_delete") else None

    async def record(
        self, topic: TopicName, name: str, attempts: Sequence[tuple[Position, int]], epoch: int
    ) -> None:
        for start in range(0, len(attempts), CALL_ITEMS_MAX):
            some = attempts[start : start + CALL_ITEMS_MAX]
            await self._call(
                self._stub.RecordAttempts,
                pb.RecordAttemptsRequest(
                    topic=str(topic),
                    name=name,
                    positions=[_to_wire(position) for position, _ in some],
                    attempts=[count for _, count in some],
                    epoch=epoch,
                ),
            )

    async def set_properties(
        self,
        topic: TopicName,
        name: str,
        put: Mapping[str, str],
        remove: Sequence[str],
        *,
        epoch: int | None,
    ) -> Cursor:
        request = pb.UpdateCursorPropertiesRequest(
            topic=str(topic), name=name, put=put, remove=remove, epoch=epoch
        )
        return _cursor((await self._call(self._stub.UpdateCursorProperties, request)).cursor)

    async def acquire(self, topic: TopicName, name: str, owner: str, duration_ms: int) -> Lease:
        request = pb.AcquireLeaseRequest(
            topic=str(topic), name=name, owner=owner, duration_ms=duration_ms
        )
        lease = (await self._call(self._stub.AcquireLease, request)).lease
        return Lease(lease.owner, lease.epoch)

    async def renew(
        self, topic: TopicName, name: str, owner: str, epoch: int, duration_ms: int
    ) -> None:
        await self._call(
            self._stub.RenewLease,
            pb.RenewLeaseRequest(
                topic=str(topic), name=name, owner=owner, epoch=epoch, duration_ms=duration_ms
            ),
        )

    async def release(self, topic: TopicName, name: str, epoch: int) -> None:
        request = pb.ReleaseLeaseRequest(topic=str(topic), name=name, epoch=epoch)
        await self._call(self._stub.ReleaseLease, request)

    async def check(self) -> None:
        await self._call(self._stub.ListCursors, pb.ListCursorsRequest(page_size=1, local=True))

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await answer(method(request, timeout=self._timeout_s))
        except Refused as refused:
            _give_up(refused)


def _give_up(refused: Refused) -> NoReturn:
    match refused.reason:
        case "CURSOR_NOT_FOUND":
            raise SubscriptionNotFound("there is no such subscription") from refused
        case "FENCED":
            raise Fenced("another instance has the subscription") from refused
        case "LEASE_HELD":
            raise NotOwner(
                "another instance has the subscription",
                retry_after_s=RETRY_AFTER_S,
                owner=refused.details.get("owner", ""),
            ) from refused
        case "INVALID_PROPERTY":
            raise InvalidProperty(refused.message, field="properties") from refused
        case "INVALID_PAGE":
            raise InvalidPage(refused.message, field="page_token") from refused
    log.debug("cursors do not answer", reason=refused.reason, error=refused.message)
    if refused.reason not in EXPECTED:
        log.error("the cursor service refused", reason=refused.reason, detail=refused.message)
    because = {"because": refused.reason} if refused.reason else {}
    raise CursorsUnavailable(
        "the cursor service does not answer", retry_after_s=RETRY_AFTER_S, **because
    ) from refused


def _ranges(entries: Iterable[Position]) -> list[pb.PositionRange]:
    """Runs of neighbours."""
    ranges: list[pb.PositionRange] = []
    for position in sorted(entries):
        last = ranges[-1] if ranges else None
        if (
            last is not None
            and last.first.ledger_id == position.ledger_id
            and last.last_entry_id + 1 == position.entry_id
        ):
            last.last_entry_id += 1
        else:
            first = _wire(position)
            ranges.append(pb.PositionRange(first=first, last_entry_id=position.entry_id))
    return ranges


def _batch(position: Position, messages: int, bits: int) -> pb.BatchAcknowledgement:
    return pb.BatchAcknowledgement(
        position=_wire(position),
        batch_size=messages,
        indexes=[index for index in range(messages) if bits >> index & 1],
    )


def _wire(position: Position | None) -> entry_pb2.Position | None:
    return None if position is None else _to_wire(position)


def _to_wire(position: Position) -> entry_pb2.Position:
    return entry_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)


def _position(wire: entry_pb2.Position) -> Position:
    return Position(wire.ledger_id, wire.entry_id)


def _cursor(wire: pb.Cursor) -> Cursor:
    return Cursor(
        wire.name,
        _position(wire.mark_delete) if wire.HasField("mark_delete") else None,
        dict(wire.properties),
        wire.acknowledged_entries,
        wire.created.ToMilliseconds(),
        wire.lease.owner if wire.lease.expires.ToMilliseconds() > time.time() * 1000 else "",
    )
