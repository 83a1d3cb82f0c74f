"""The wire of the cursor service for holders of leases: see lease.proto."""

from typing import Any, Final

from grpc import aio

from seqgate.api.internal.cursor.v1 import lease_pb2 as pb
from seqgate.api.internal.cursor.v1 import lease_pb2_grpc as pb_grpc
from seqgate.services.cursor.core.cursor import Attempts, Caller, CursorState, InvalidPosition
from seqgate.services.cursor.core.state import LEASE_MAX_MS
from seqgate.services.cursor.ports import CursorStore
from seqgate.services.cursor.servicer import names, optional, to_lease
from seqgate.services.errors import DomainError, Kind
from seqgate.services.runtime.positions import to_position
from seqgate.services.runtime.requests import (
    read_duration_ms,
    read_limit,
    read_name,
    read_position,
    read_position_token,
    to_position_token,
)

ATTEMPTS_MAX: Final = 10_000
"""The most deliveries of one RecordAttempts."""

COUNTS_DEFAULT: Final = 10_000
COUNTS_MAX: Final = 100_000
"""The default and the largest page size of ListAttempts."""

LEASE_MIN_MS: Final = 100
"""The shortest duration of a lease, in milliseconds; the longest is LEASE_MAX_MS."""

Context = aio.ServicerContext[Any, Any]


class InvalidLease(DomainError):
    """A lease's owner is invalid, or its duration is out of range."""

    kind = Kind.INVALID
    reason = "INVALID_LEASE"


class CursorLeaseServicer(pb_grpc.CursorLeaseServiceServicer):
    """See lease.proto. Responses are built inside the step, before the cursor moves on."""

    def __init__(self, store: CursorStore) -> None:
        self._store = store

    async def AcquireLease(
        self, request: pb.AcquireLeaseRequest, context: Context
    ) -> pb.AcquireLeaseResponse:
        topic, name = names(request)
        owner, duration_ms = _owner_and_duration(request)

        def step(state: CursorState, now_ms: int) -> pb.AcquireLeaseResponse:
            lease = state.acquire_lease(owner, now_ms, duration_ms)
            return pb.AcquireLeaseResponse(lease=to_lease(lease))

        return await self._store.change(topic, name, step)

    async def RenewLease(
        self, request: pb.RenewLeaseRequest, context: Context
    ) -> pb.RenewLeaseResponse:
        topic, name = names(request)
        owner, duration_ms = _owner_and_duration(request)

        def step(state: CursorState, now_ms: int) -> pb.RenewLeaseResponse:
            lease = state.renew_lease(
                owner, request.epoch, now_ms, duration_ms, next_epoch=request.next_epoch
            )
            return pb.RenewLeaseResponse(lease=to_lease(lease))

        return await self._store.change(topic, name, step)

    async def ReleaseLease(
        self, request: pb.ReleaseLeaseRequest, context: Context
    ) -> pb.ReleaseLeaseResponse:
        topic, name = names(request)

        def step(state: CursorState, now_ms: int) -> pb.ReleaseLeaseResponse:
            state.release_lease(request.epoch, now_ms)
            return pb.ReleaseLeaseResponse()

        return await self._store.change(topic, name, step)

    async def RecordAttempts(
        self, request: pb.RecordAttemptsRequest, context: Context
    ) -> pb.RecordAttemptsResponse:
        topic, name = names(request)
        if len(request.positions) > ATTEMPTS_MAX:
            raise InvalidPosition(f"too many positions (limit {ATTEMPTS_MAX:,})", field="positions")
        positions = [
            read_position("positions", each, InvalidPosition) for each in request.positions
        ]
        caller = Caller(epoch=optional(request, "epoch"))

        def step(state: CursorState, _: int) -> pb.RecordAttemptsResponse:
            counts = state.record_attempts(positions, caller, request.attempts, request.notes)
            return pb.RecordAttemptsResponse(attempts=counts)

        return await self._store.change(topic, name, step)

    async def ListAttempts(
        self, request: pb.ListAttemptsRequest, context: Context
    ) -> pb.ListAttemptsResponse:
        topic, name = names(request)
        after = read_position_token(request.page_token)
        size = read_limit(request.page_size, COUNTS_DEFAULT, COUNTS_MAX)

        def look(state: CursorState) -> pb.ListAttemptsResponse:
            return _to_attempts(state.attempts(after, size))

        return await self._store.look(topic, name, look, whole=False)


def _owner_and_duration(request: pb.AcquireLeaseRequest | pb.RenewLeaseRequest) -> tuple[str, int]:
    owner = read_name("owner", request.owner, InvalidLease)
    duration_ms = read_duration_ms(
        "duration", request.duration, InvalidLease, least_ms=LEASE_MIN_MS, most_ms=LEASE_MAX_MS
    )
    return owner, duration_ms


def _to_attempts(page: Attempts) -> pb.ListAttemptsResponse:
    return pb.ListAttemptsResponse(
        entries=[
            pb.EntryAttempts(position=to_position(position), attempts=count, note=note)
            for position, count, note in page.counts
        ],
        next_page_token=to_position_token(page.next_after),
    )
