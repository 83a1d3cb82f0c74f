"""The ledger service over gRPC: the log that subscriptions read.

Calls are not retried here: the shell retries those that must succeed.
"""

from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NoReturn, TypeVar

import structlog
from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.owners import NOT_OWNER, FollowingChannel
from seqgate.services.dispatcher.core.positions import Run
from seqgate.services.dispatcher.ports import (
    Ends,
    EntryCorrupt,
    Fetched,
    LedgerUnavailable,
    TopicNotFound,
)
from seqgate.services.runtime.channels import check_health
from seqgate.services.runtime.status import CallFailed, answer, call_failed
from seqgate.times import timestamp
from seqgate.types import Position, TopicName

Q = TypeVar("Q")
R = TypeVar("R")

log = structlog.get_logger()

SERVICE: Final = "seqgate.api.ledger.v1.LedgerService"

RETRY_AFTER_S: Final = 0.5
"""The retry delay of refusals while the ledger does not answer, in seconds."""

READ_TIMEOUT_S: Final = 30.0
"""The time limit of one page of a log, in seconds."""

RESPONSE_BYTES_MAX: Final = 1024 * 1024
"""The approximate size of one response of the ledger, unless it is a single entry."""

SCAN_BYTES_MAX: Final = 4 * 1024 * 1024
"""The bytes after which a page of a scan ends early."""

_BUSY: Final = frozenset({"SERVICE_BUSY", "TOO_MANY_STREAMS", "SLOW_READER"})
EXPECTED: Final = frozenset({"", "STORE_UNAVAILABLE", "DRAINING", NOT_OWNER}) | _BUSY
"""Reasons that pass by themselves; any other is logged as an error, for the operator."""


class _BeyondTheEnd(LedgerUnavailable):
    """The log does not reach the place where a read starts: it was replaced by an older copy, or
    the place is a caller's."""


class GrpcLog:
    """See seqgate.services.dispatcher.ports.Log."""

    def __init__(self, channel: FollowingChannel, *, timeout_s: float) -> None:
        self._channel = channel
        self._stub = pb_grpc.LedgerServiceStub(channel)
        self._timeout_s = timeout_s

    async def ends(self, topic: TopicName) -> Ends:
        request = pb.GetTopicRequest(topic=str(topic))
        found = (await self._call(self._stub.GetTopic, request)).topic
        return Ends(
            _position(found.first) if found.HasField("first") else None,
            _position(found.last) if found.HasField("last") else None,
        )

    async def follow(
        self, topic: TopicName, after: Position | None
    ) -> AsyncIterator[Sequence[pb.StoredEntry]]:
        request = pb.ReadRequest(topic=str(topic), follow=True)
        if after is None:
            request.start.earliest.SetInParent()
        else:
            request.start.after.CopyFrom(_wire(after))
        call = self._stub.Read(request)
        try:
            async for response in call:
                if response.entries.entries:
                    yield response.entries.entries
        except aio.AioRpcError as error:
            _give_up(call_failed(error))
        finally:
            call.cancel()

    async def scan(
        self, topic: TopicName, at: Position | None, after: Position | None, limit: int
    ) -> Sequence[pb.StoredEntry]:
        request = pb.ReadRequest(topic=str(topic), max_entries=limit, metadata_only=True)
        if at is not None:
            request.start.at.CopyFrom(_wire(at))
        elif after is not None:
            request.start.after.CopyFrom(_wire(after))
        else:
            request.start.earliest.SetInParent()
        call = self._stub.Read(request, timeout=READ_TIMEOUT_S)
        try:
            return await self._collect(call, SCAN_BYTES_MAX)
        except _BeyondTheEnd:
            return []  # a page token may name any place

    async def fetch(
        self, topic: TopicName, positions: Sequence[Position], *, metadata_only: bool = False
    ) -> Sequence[pb.StoredEntry]:
        request = pb.ReadEntriesRequest(
            topic=str(topic), positions=map(_wire, positions), metadata_only=metadata_only
        )
        return await self._collect(self._stub.ReadEntries(request, timeout=READ_TIMEOUT_S))

    async def fetch_some(
        self,
        topic: TopicName,
        positions: Sequence[Position],
        *,
        bytes_max: int,
        metadata_only: bool = False,
    ) -> Fetched:
        request = pb.ReadEntriesRequest(
            topic=str(topic), positions=map(_wire, positions), metadata_only=metadata_only
        )
        entries: list[pb.StoredEntry] = []
        size_bytes = 0
        call = self._stub.ReadEntries(request, timeout=READ_TIMEOUT_S)
        try:
            async for response in call:
                if response.HasField("draining"):
                    raise LedgerUnavailable(
                        "the ledger is shutting down", retry_after_s=RETRY_AFTER_S
                    )
                entries += response.entries.entries
                size_bytes += response.ByteSize()
                if entries and size_bytes + RESPONSE_BYTES_MAX > bytes_max:
                    last = _position(entries[-1].position)
                    return Fetched(entries, bisect_right(positions, last))
        except aio.AioRpcError as error:
            _give_up(call_failed(error))
        finally:
            call.cancel()
        return Fetched(entries, len(positions))

    async def last_before(self, topic: TopicName, ledger_id: int) -> Position | None:
        last = None
        for first, last_entry_id in await self.ledgers(topic):
            if first.ledger_id >= ledger_id:
                break
            last = Position(first.ledger_id, last_entry_id)
        return last

    async def ledgers(self, topic: TopicName) -> Sequence[Run]:
        found: list[Run] = []
        request = pb.ListLedgersRequest(topic=str(topic))
        while True:
            page = await self._call(self._stub.ListLedgers, request)
            found += [
                Run(Position(each.ledger_id, each.first_entry_id), each.last_entry_id)
                for each in page.ledgers
            ]
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def find(self, topic: TopicName, append_ms: int) -> Position | None:
        request = pb.FindPositionRequest(topic=str(topic), append_time=timestamp(append_ms))
        reply = await self._call(self._stub.FindPosition, request)
        return _position(reply.position) if reply.HasField("position") else None

    async def check(self) -> None:
        await check_health(self._channel, SERVICE)

    async def _collect(self, call: Any, bytes_max: int | None = None) -> Sequence[pb.StoredEntry]:
        """The entries of a finite stream: all, or the first ones of about `bytes_max`."""
        entries: list[pb.StoredEntry] = []
        size_bytes = 0
        try:
            async for response in call:
                if response.HasField("entries"):
                    entries += response.entries.entries
                    size_bytes += response.ByteSize()
                    if bytes_max is not None and size_bytes >= bytes_max:
                        break
                elif response.HasField("draining"):
                    raise LedgerUnavailable(
                        "the ledger is shutting down", retry_after_s=RETRY_AFTER_S
                    )
        except aio.AioRpcError as error:
            _give_up(call_failed(error))
        finally:
            call.cancel()
        return entries

    async def _call(self, method: "aio.UnaryUnaryMultiCallable[Q, R]", request: Q) -> R:
        try:
            return await answer(method(request, timeout=self._timeout_s))
        except CallFailed as error:
            _give_up(error)


def _give_up(error: CallFailed) -> NoReturn:
    if error.reason == "TOPIC_NOT_FOUND":
        raise TopicNotFound("topic not found", **dict[str, Any](error.details)) from error
    if error.reason == "ENTRY_CORRUPT":
        raise EntryCorrupt(error.message, **dict[str, Any](error.details)) from error
    if error.reason == "INVALID_RANGE":
        raise _BeyondTheEnd("the place is beyond the end of the log", retry_after_s=RETRY_AFTER_S)
    log.debug("ledger unavailable", reason=error.reason, error=error.message)
    if error.reason not in EXPECTED:
        log.error("ledger refused a call", reason=error.reason, detail=error.message)
    because = {"because": error.reason} if error.reason else {}
    raise LedgerUnavailable(
        "the ledger does not answer", retry_after_s=RETRY_AFTER_S, **because
    ) from error


def _wire(position: Position) -> common_pb2.Position:
    return common_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)


def _position(wire: common_pb2.Position) -> Position:
    return Position(wire.ledger_id, wire.entry_id)
