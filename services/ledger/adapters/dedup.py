"""The dedup service, over one Exchange stream per topic.

A stream costs half as much per group as unary calls. It is opened on first use, and dropped at the
first irregularity: after a lost reply the outcome is unknown, and the writer's alignment resolves
it.
"""

import asyncio
import sys
from collections.abc import Awaitable, Sequence
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import structlog
from google.rpc import status_pb2
from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.dedup.v1 import dedup_pb2_grpc as pb_grpc
from seqgate.api.internal.dedup.v1 import writer_pb2, writer_pb2_grpc
from seqgate.services.deduplication import (
    Applied,
    Behind,
    Changed,
    Confirmation,
    Disabled,
    Judged,
    ProducerClaims,
    TooManyProducers,
    Writer,
)
from seqgate.services.errors import DomainError, Fenced
from seqgate.services.ledger.ports import DedupBusy, DedupUnavailable
from seqgate.services.runtime import deduplication as wire
from seqgate.services.runtime.channels import check_health
from seqgate.services.runtime.limiter import Limiter, NotSent, Outcome
from seqgate.services.runtime.positions import of_position
from seqgate.status import decode
from seqgate.telemetry.spans import apart, carrier, exchange
from seqgate.times import duration, milliseconds
from seqgate.types import Position, TopicName

T = TypeVar("T")

log = structlog.get_logger()

RETRY_AFTER_S: Final = 0.5
"""RetryInfo for a producer when deduplication does not answer."""

KEEP_MAX: Final = 10_000
"""The most producers of one KeepProducersAlive."""

_SERVICE: Final = writer_pb2.DESCRIPTOR.services_by_name["DedupWriterService"].full_name


_Stream: TypeAlias = "aio.StreamStreamCall[writer_pb2.ExchangeRequest, writer_pb2.ExchangeResponse]"


class GrpcDeduplicator:
    """See seqgate.services.ledger.ports.Deduplicator. Allows one call at a time per topic."""

    def __init__(
        self, channel: aio.Channel, *, timeout_s: float, limiter: Limiter | None = None
    ) -> None:
        """`timeout_s` is the time limit of a call, which begins when it is sent. `limiter` limits
        the calls on streams; None: nothing does."""
        self._channel = channel
        self._limiter = limiter or Limiter(sys.maxsize)
        self._stub = pb_grpc.DedupServiceStub(channel)
        self._writer_stub = writer_pb2_grpc.DedupWriterServiceStub(channel)
        self._timeout_s = timeout_s
        self._timeout = duration(int(timeout_s * 1000))
        self._streams: dict[TopicName, _Stream] = {}
        self._request_id = 0

    async def admit(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
    ) -> Judged | Behind | Changed | Disabled:
        request = wire.admit_request(topic, writer, confirmation, claims)
        return wire.read_admit_response((await self._ask(topic, "Admit", request)).admit)

    async def confirm(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation
    ) -> Applied | Behind | Disabled:
        request = wire.confirm_request(topic, writer, confirmation)
        return wire.read_confirm_response((await self._ask(topic, "Confirm", request)).confirm)

    async def rollback(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation | None
    ) -> Applied | Behind | Disabled:
        request = wire.rollback_request(topic, writer, confirmation)
        return wire.read_rollback_response((await self._ask(topic, "Rollback", request)).rollback)

    async def keep(
        self, topic: TopicName, producers: Sequence[str], *, only_due: bool = False
    ) -> float | None:
        keep_within_s = 0.0
        for i in range(0, len(producers), KEEP_MAX):
            names = producers[i : i + KEEP_MAX]
            request = writer_pb2.KeepProducersAliveRequest(
                topic=str(topic), producer_names=names, only_due=only_due
            )
            reply = await self._unary(self._writer_stub.KeepProducersAlive(request))
            keep_within_s = milliseconds(reply.keep_within) / 1000
        return keep_within_s or None

    async def forget_topic(self, topic: TopicName, incarnation: int, *, deleted: bool) -> None:
        request = writer_pb2.ForgetTopicRequest(
            topic=str(topic), incarnation=incarnation, deleted=deleted
        )
        await self._unary(self._writer_stub.ForgetTopic(request))
        self._drop(topic)

    async def snapshot(self, topic: TopicName) -> Position | None:
        request = pb.TakeSnapshotRequest(topic=str(topic), let_go=True)
        reply = await self._unary(self._stub.TakeSnapshot(request))
        if not reply.HasField("position"):
            return None
        return of_position(reply.position)

    async def check(self) -> None:
        await check_health(self._channel)

    async def _unary(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except aio.AioRpcError as error:
            raise _unavailable(error) from error

    async def _ask(
        self, topic: TopicName, method: str, request: Any
    ) -> writer_pb2.ExchangeResponse:
        """Send a request on the topic's stream, in its turn; `method` is its name.

        Raises:
            DedupBusy: it was not sent in time, or the service did not begin it.
            DedupUnavailable: the outcome is unknown.
        """
        try:
            async with self._limiter.slot(self._timeout_s) as slot:
                with exchange(f"{_SERVICE}/{method}"):
                    try:
                        return await self._answered(topic, **{method.lower(): request})
                    except DedupUnavailable:
                        slot.outcome = Outcome.FAILED
                        raise
        except NotSent as why:
            raise DedupBusy(
                f"the dedup service is busy: {why}", retry_after_s=RETRY_AFTER_S
            ) from why

    async def _answered(self, topic: TopicName, **request: Any) -> writer_pb2.ExchangeResponse:
        self._request_id += 1
        request_id = self._request_id
        stream = self._streams.pop(topic, None)
        if stream is None:
            with apart():
                stream = self._writer_stub.Exchange()
        asked = writer_pb2.ExchangeRequest(request_id=request_id, timeout=self._timeout, **request)
        if carried := carrier():
            asked.trace.CopyFrom(common_pb2.TraceContext(**carried))
        try:
            async with asyncio.timeout(self._timeout_s):
                await stream.write(asked)
                response: Any = await stream.read()
        except (aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
            stream.cancel()
            raise _unavailable(error) from error
        except asyncio.CancelledError:
            stream.cancel()
            raise
        if response is aio.EOF or response.request_id != request_id:
            # The stream ended, or the peer is draining: the outcome of the request is unknown.
            stream.cancel()
            raise _unavailable(None)
        self._streams[topic] = stream
        if response.HasField("error"):
            _refuse(response.error)
        return response  # type: ignore[no-any-return]

    def _drop(self, topic: TopicName) -> None:
        stream = self._streams.pop(topic, None)
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        for topic in list(self._streams):
            self._drop(topic)


def _unavailable(error: BaseException | None) -> DedupUnavailable:
    log.debug("dedup service unavailable", error=repr(error))
    return DedupUnavailable("the dedup service does not answer", retry_after_s=RETRY_AFTER_S)


def _refuse(status: status_pb2.Status) -> NoReturn:
    refused = decode(status)
    error: DomainError
    match refused.reason:
        case "FENCED":
            error = Fenced(refused.message)
        case "TOO_MANY_PRODUCERS":
            error = TooManyProducers(refused.message, retry_after_s=RETRY_AFTER_S)
        case "SERVICE_BUSY":
            raise DedupBusy(refused.message, retry_after_s=RETRY_AFTER_S)
        case "STATE_UNAVAILABLE" | "CURSORS_UNAVAILABLE":
            raise DedupUnavailable(refused.message, retry_after_s=RETRY_AFTER_S)
        case _:
            log.error("deduplication refused", reason=refused.reason, detail=refused.message)
            raise _unavailable(None)
    error.details |= refused.details
    raise error
