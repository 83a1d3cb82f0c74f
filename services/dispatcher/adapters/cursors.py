"""Subscriptions in the cursor service over gRPC: see services/runtime/cursors.py.

Calls are not retried here, except as halves of one that was too large.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, TypeVar

import structlog
from google.protobuf.message import Message
from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.internal.cursor.v1 import lease_pb2, lease_pb2_grpc
from seqgate.owners import FollowingChannel
from seqgate.services.dispatcher.core.effects import FailedEntry, Persist
from seqgate.services.dispatcher.core.positions import Run
from seqgate.services.dispatcher.letters.lives import failures_of, noted
from seqgate.services.dispatcher.ports import (
    Cursor,
    CursorCorrupt,
    CursorsRefused,
    InvalidProperty,
    Lease,
    NotOwner,
    Part,
    SubscriptionNotFound,
)
from seqgate.services.errors import DomainError, Fenced, InvalidPage
from seqgate.services.runtime.channels import check_health
from seqgate.services.runtime.cursors import EXPECTED, RETRY_AFTER_S, CursorClient
from seqgate.services.runtime.positions import of_position, to_position
from seqgate.services.runtime.status import CallFailed, call_failed
from seqgate.times import duration, milliseconds
from seqgate.types import Position, TopicName

log = structlog.get_logger()

SERVICE: Final = "seqgate.api.cursor.v1.CursorService"

T = TypeVar("T")
R = TypeVar("R", bound=Message)

PAGE_SIZE: Final = 10_000
"""How many ranges, batches or attempts a page holds."""

CALL_ITEMS_MAX: Final = 10_000
"""How many ranges, batches, successions or attempts one call takes."""

RUN_ENTRIES_MAX: Final = 10_000_000
"""How many entries one range holds."""

CALL_ENTRIES_MAX: Final = 100_000_000
"""How many entries the ranges of one call hold together."""

CALL_INDEXES_MAX: Final = 1_000_000
"""How many messages the batches of one call name together: two bytes each."""

RIGHTS: Final = frozenset(
    {
        "MISSING_CREDENTIALS",
        "INVALID_TOKEN",
        "TOKEN_EXPIRED",
        "TOKEN_NOT_YET_VALID",
        "WRONG_AUDIENCE",
        "WRONG_ISSUER",
        "PERMISSION_DENIED",
    }
)
"""Refusals that last until an operator corrects the dispatcher's credentials or rights."""


class SubscriptionCursors(CursorClient):
    """See seqgate.services.dispatcher.ports.Cursors."""

    def __init__(self, channel: FollowingChannel, *, timeout_s: float | None = None) -> None:
        super().__init__(channel, timeout_s=timeout_s)
        self._channel = channel
        self._lease_stub = lease_pb2_grpc.CursorLeaseServiceStub(channel)

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
                cursor=name,
                mark_delete=to_position(mark_delete),
                properties=properties,
            ),
        )
        return _cursor(reply.cursor), reply.created

    async def get(self, topic: TopicName, name: str) -> Cursor:
        request = pb.GetCursorRequest(
            topic=str(topic), cursor=name, without_mark_delete_properties=True
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
            self._stub.DeleteCursor, pb.DeleteCursorRequest(topic=str(topic), cursor=name)
        )

    async def reset(
        self, topic: TopicName, name: str, mark_delete: Position | None, epoch: int
    ) -> None:
        await self._call(
            self._stub.ResetCursor,
            pb.ResetCursorRequest(
                topic=str(topic), cursor=name, mark_delete=to_position(mark_delete), epoch=epoch
            ),
        )

    async def acknowledged(self, topic: TopicName, name: str) -> AsyncIterator[Run | Part]:
        request = pb.ListAcknowledgedRequest(topic=str(topic), cursor=name, page_size=PAGE_SIZE)
        while True:
            page = await self._page(self._stub.ListAcknowledged, request)
            for run in page.ranges:
                yield Run(of_position(run.first), run.last_entry_id)
            for batch in page.batches:
                acknowledged = sum(1 << index for index in batch.indexes)
                yield Part(of_position(batch.position), batch.batch_size, acknowledged)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def attempts(self, topic: TopicName, name: str) -> AsyncIterator[FailedEntry]:
        request = lease_pb2.ListAttemptsRequest(topic=str(topic), cursor=name, page_size=PAGE_SIZE)
        while True:
            page = await self._page(self._lease_stub.ListAttempts, request)
            for each in page.entries:
                failures = failures_of(each.note.decode(errors="replace"))
                yield FailedEntry(of_position(each.position), each.attempts, failures)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def persist(
        self, topic: TopicName, name: str, what: Persist, epoch: int
    ) -> Position | None:
        successions = [
            pb.Succession(last=to_position(last), next=to_position(next_))
            for last, next_ in what.successions
        ]
        batches = [_batch(*part) for part in what.parts]
        calls = zip_longest(
            _shares(successions, lambda _: 0, CALL_ITEMS_MAX),
            _shares(_ranges(what.runs), _entries_of, CALL_ENTRIES_MAX),
            _shares(batches, lambda batch: len(batch.indexes), CALL_INDEXES_MAX),
            fillvalue=(),
        )
        reply: pb.AcknowledgeResponse | None = None
        for said, ranges, parts in calls:
            request = pb.AcknowledgeRequest(
                topic=str(topic),
                cursor=name,
                ranges=ranges,
                batches=parts,
                successions=said,
                epoch=epoch,
            )
            reply = await self._in_parts(
                self._stub.Acknowledge, request, "ranges", "batches", "successions"
            )
        assert reply is not None
        return of_position(reply.mark_delete) if reply.HasField("mark_delete") else None

    async def record(
        self, topic: TopicName, name: str, failed: Sequence[FailedEntry], epoch: int
    ) -> None:
        for start in range(0, len(failed), CALL_ITEMS_MAX):
            some = failed[start : start + CALL_ITEMS_MAX]
            request = lease_pb2.RecordAttemptsRequest(
                topic=str(topic),
                cursor=name,
                positions=[to_position(each.position) for each in some],
                attempts=[each.attempts for each in some],
                notes=[noted(each.failures).encode() for each in some],
                epoch=epoch,
            )
            fields = "positions", "attempts", "notes"
            await self._in_parts(self._lease_stub.RecordAttempts, request, *fields)

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
            topic=str(topic), cursor=name, put=put, remove=remove, epoch=epoch
        )
        return _cursor((await self._call(self._stub.UpdateCursorProperties, request)).cursor)

    async def acquire(self, topic: TopicName, name: str, owner: str, duration_ms: int) -> Lease:
        request = lease_pb2.AcquireLeaseRequest(
            topic=str(topic), cursor=name, owner=owner, duration=duration(duration_ms)
        )
        lease = (await self._call(self._lease_stub.AcquireLease, request)).lease
        return Lease(lease.owner, lease.epoch)

    async def renew(
        self,
        topic: TopicName,
        name: str,
        owner: str,
        epoch: int,
        duration_ms: int,
        *,
        next_epoch: bool = False,
    ) -> Lease:
        request = lease_pb2.RenewLeaseRequest(
            topic=str(topic),
            cursor=name,
            owner=owner,
            epoch=epoch,
            duration=duration(duration_ms),
            next_epoch=next_epoch,
        )
        lease = (await self._call(self._lease_stub.RenewLease, request)).lease
        return Lease(lease.owner, lease.epoch)

    async def release(self, topic: TopicName, name: str, epoch: int) -> None:
        request = lease_pb2.ReleaseLeaseRequest(topic=str(topic), cursor=name, epoch=epoch)
        await self._call(self._lease_stub.ReleaseLease, request)

    async def check(self) -> None:
        try:
            await check_health(self._channel, SERVICE)
        except aio.AioRpcError as error:
            raise self.refusal(call_failed(error)) from error

    async def _in_parts(
        self, method: "aio.UnaryUnaryMultiCallable[R, T]", request: R, *fields: str
    ) -> T:
        """Make a request, split into halves as long as it is too large for the cursor service.
        Returns the last response."""
        waiting = [request]
        while True:
            part = waiting.pop()
            try:
                reply = await self._call(method, part)
            except _TooLarge:
                halves = _halves(part, *fields)
                if halves is None:
                    raise
                waiting += reversed(halves)
            else:
                if not waiting:
                    return reply

    async def _page(self, method: Any, request: Any) -> Any:
        """A page of a list. While the response is too large, the page size is halved."""
        while True:
            try:
                return await self._call(method, request)
            except _TooLarge:
                if request.page_size == 1:
                    raise
                request.page_size //= 2

    def refusal(self, failed: CallFailed) -> DomainError:
        """The refusal in the subscription's terms. A call that would be refused again becomes
        CursorsRefused, which is not retried."""
        match failed.reason:
            case "CURSOR_NOT_FOUND":
                return SubscriptionNotFound(
                    "subscription not found",
                    topic=failed.details.get("topic", ""),
                    subscription=failed.details.get("cursor", ""),
                )
            case "FENCED":
                return Fenced("another instance owns the subscription")
            case "LEASE_HELD":
                return NotOwner(
                    "another instance owns the subscription",
                    retry_after_s=RETRY_AFTER_S,
                    owner=failed.details.get("owner", ""),
                )
            case "INVALID_PROPERTY":
                return InvalidProperty(failed.message, field="properties")
            case "INVALID_PAGE":
                return InvalidPage(failed.message, field="page_token")
            case "CURSOR_CORRUPT":
                return CursorCorrupt("the subscription's cursor is damaged")
        if failed.code is StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE in failed.message:
            return _TooLarge(
                "message too large for the cursor service (its message_bytes_max)",
                because=failed.code.name,
            )
        is_known = failed.reason in EXPECTED or failed.reason in RIGHTS
        if is_known and failed.code is not StatusCode.UNIMPLEMENTED:
            return super().refusal(failed)
        log.error("cursor service refused a call", reason=failed.reason, detail=failed.message)
        return CursorsRefused(
            "the cursor service refused a write for good",
            because=failed.reason or failed.code.name,
        )


class _TooLarge(CursorsRefused):
    """A message exceeds the limit of its sender or receiver."""


TOO_LARGE: Final = "message larger than max"
"""Part of gRPC's message for a message above the limit of either end."""


def _shares(
    items: Sequence[T], weight: Callable[[T], int], weight_max: int
) -> Iterator[Sequence[T]]:
    """Items in shares of at most CALL_ITEMS_MAX and `weight_max`, or of one item above it. Without
    items there is one empty share."""
    start = total = 0
    for index, item in enumerate(items):
        added = weight(item)
        if index > start and (index - start >= CALL_ITEMS_MAX or total + added > weight_max):
            yield items[start:index]
            start, total = index, 0
        total += added
    yield items[start:]


def _halves(request: R, *fields: str) -> tuple[R, R] | None:
    """A request in two, each with half of the items in `fields`; None: none has two items."""
    if all(len(getattr(request, field)) < 2 for field in fields):
        return None
    first, second = _copied(request), _copied(request)
    for field in fields:
        half = (len(getattr(request, field)) + 1) // 2
        del getattr(first, field)[half:]
        del getattr(second, field)[:half]
    return first, second


def _copied(request: R) -> R:
    copy = type(request)()
    copy.CopyFrom(request)
    return copy


def _entries_of(run: pb.PositionRange) -> int:
    return int(run.last_entry_id - run.first.entry_id + 1)


def _ranges(runs: Iterable[Run]) -> list[pb.PositionRange]:
    return [
        pb.PositionRange(
            first=common_pb2.Position(ledger_id=ledger_id, entry_id=start),
            last_entry_id=min(last, start + RUN_ENTRIES_MAX - 1),
        )
        for (ledger_id, first), last in runs
        for start in range(first, last + 1, RUN_ENTRIES_MAX)
    ]


def _batch(position: Position, messages: int, bits: int) -> pb.BatchAcknowledgement:
    return pb.BatchAcknowledgement(
        position=to_position(position),
        batch_size=messages,
        indexes=[index for index in range(messages) if bits >> index & 1],
    )


def _cursor(wire: pb.Cursor) -> Cursor:
    return Cursor(
        wire.name,
        of_position(wire.mark_delete) if wire.HasField("mark_delete") else None,
        dict(wire.properties),
        wire.acknowledged_entries,
        milliseconds(wire.created),
        wire.lease.owner if milliseconds(wire.lease.expires) > time.time() * 1000 else "",
    )
