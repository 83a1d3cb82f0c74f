"""The wire of the dedup service for writers of logs: see writer.proto."""

from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from typing import Any, Final

from grpc import aio
from opentelemetry.trace import get_current_span

from seqgate.api.common.v1 import common_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2 as pb
from seqgate.api.internal.dedup.v1 import writer_pb2_grpc as pb_grpc
from seqgate.services.dedup.core.topic import Persisted
from seqgate.services.dedup.service import Deduplication
from seqgate.services.deduplication import Judged
from seqgate.services.errors import DomainError, InvalidProducerName, Kind
from seqgate.services.runtime import deadline
from seqgate.services.runtime import deduplication as wire
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.load import weighed
from seqgate.services.runtime.positions import to_position
from seqgate.services.runtime.refusal_log import in_stream
from seqgate.services.runtime.requests import (
    read_chunk,
    read_number,
    read_position,
    read_producer,
    read_sequence_id,
    read_time_ms,
    read_topic,
)
from seqgate.telemetry import names
from seqgate.telemetry.spans import asked, rpc_attributes
from seqgate.times import duration, milliseconds
from seqgate.types import Chunk

LOADED_PRODUCERS_MAX: Final = 100_000
"""The most producers of one LoadState."""

Context = aio.ServicerContext[Any, Any]


class InvalidState(DomainError):
    """A state to load has no header or two, or repeats a producer; or a value of a state to load or
    forget is out of range: `given`."""

    kind = Kind.INVALID
    reason = "INVALID_STATE"


class DedupWriterServicer(pb_grpc.DedupWriterServiceServicer):
    """See writer.proto."""

    def __init__(self, deduplication: Deduplication, drain: Drain) -> None:
        self._deduplication = deduplication
        self._drain = drain

    async def Admit(self, request: pb.AdmitRequest, context: Context) -> pb.AdmitResponse:
        return await self._admit(request)

    async def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.ConfirmResponse:
        return await self._confirm(request)

    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.RollbackResponse:
        return await self._rollback(request)

    # A coroutine that reads and writes on the context; grpc's stubs allow only generators.
    async def Exchange(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ExchangeRequest], context: Context
    ) -> None:
        async for request in self._drain.requests(context):
            await context.write(await self._exchange(request))
        if self._drain.begun:
            await context.write(pb.ExchangeResponse(draining=common_pb2.Draining()))

    async def KeepProducersAlive(
        self, request: pb.KeepProducersAliveRequest, context: Context
    ) -> pb.KeepProducersAliveResponse:
        topic = read_topic(request.topic)
        if len(request.producer_names) > wire.PRODUCERS_MAX:
            raise InvalidProducerName(
                f"too many producers (limit {wire.PRODUCERS_MAX:,})", field="producer_names"
            )
        names = [read_producer(name) for name in request.producer_names]
        keep_within_s = await self._deduplication.keep(topic, names, only_due=request.only_due)
        within = duration(keep_within_s * 1000) if keep_within_s else None
        return pb.KeepProducersAliveResponse(keep_within=within)

    async def ForgetTopic(
        self, request: pb.ForgetTopicRequest, context: Context
    ) -> pb.ForgetTopicResponse:
        incarnation = read_number("incarnation", request.incarnation, InvalidState)
        await self._deduplication.forget_topic(
            read_topic(request.topic), incarnation, deleted=request.deleted
        )
        return pb.ForgetTopicResponse()

    # A coroutine that reads on the context, so that it ends cleanly if the caller disconnects.
    async def LoadState(
        self, request_iterator: AsyncIterator[pb.LoadStateRequest], context: Context
    ) -> pb.LoadStateResponse:
        with ExitStack() as weights:
            return await self._loaded(context, weights)

    async def _loaded(self, context: Context, weights: ExitStack) -> pb.LoadStateResponse:
        header: pb.LoadHeader | None = None
        producers: dict[str, Persisted] = {}
        while (request := await context.read()) is not aio.EOF:
            weights.enter_context(weighed(request))
            if request.HasField("header") != (header is None):
                raise InvalidState(
                    "the header is required in the first message, and allowed in no other",
                    field="header",
                )
            header = request.header if header is None else header
            _add_states(producers, request.producers)
        if header is None or not header.HasField("through"):
            raise InvalidState("header.through is required", field="header.through")
        outcome = await self._deduplication.load(
            read_topic(header.topic),
            read_number("header.incarnation", header.incarnation, InvalidState),
            read_position("header.through", header.through, InvalidState),
            list(producers.values()),
            replacing=header.replace,
        )
        return pb.LoadStateResponse(
            loaded=outcome.loaded,
            confirmed=to_position(outcome.confirmed),
            left_out=outcome.left_out,
        )

    async def _admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        topic, writer, confirmation, claims = wire.read_admit(request)
        outcome = await self._deduplication.admit(topic, writer, confirmation, claims)
        if isinstance(outcome, Judged):
            _trace_verdicts(outcome)
        return wire.admit_response(outcome, claims)

    async def _confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmResponse:
        return wire.confirm_response(await self._deduplication.confirm(*wire.read_confirm(request)))

    async def _rollback(self, request: pb.RollbackRequest) -> pb.RollbackResponse:
        asked_for = wire.read_rollback(request)
        return wire.rollback_response(await self._deduplication.rollback(*asked_for))

    async def _exchange(self, request: pb.ExchangeRequest) -> pb.ExchangeResponse:
        asked_for = request.WhichOneof("request")
        name = f"{_SERVICE}/{(asked_for or 'exchange').capitalize()}"
        with asked(name, request.trace, rpc_attributes(name)):
            return await self._exchanged(request, asked_for)

    async def _exchanged(
        self, request: pb.ExchangeRequest, asked_for: str | None
    ) -> pb.ExchangeResponse:
        request_id = request.request_id
        timeout_s = milliseconds(request.timeout) / 1000 if request.HasField("timeout") else None
        deadline.set_remaining_s(timeout_s)
        try:
            with weighed(request):
                match asked_for:
                    case "admit":
                        admitted = await self._admit(request.admit)
                        return pb.ExchangeResponse(request_id=request_id, admit=admitted)
                    case "confirm":
                        confirmed = await self._confirm(request.confirm)
                        return pb.ExchangeResponse(request_id=request_id, confirm=confirmed)
                    case "rollback":
                        rolled_back = await self._rollback(request.rollback)
                        return pb.ExchangeResponse(request_id=request_id, rollback=rolled_back)
                    case _:
                        raise wire.InvalidClaim("request is required", field="request")
        except DomainError as refusal:
            return pb.ExchangeResponse(request_id=request_id, error=in_stream(refusal))


_SERVICE: Final = pb.DESCRIPTOR.services_by_name["DedupWriterService"].full_name


def _trace_verdicts(judged: Judged) -> None:
    span = get_current_span()
    if span.is_recording():
        for verdict, count in judged.tally().items():
            span.set_attribute(names.VERDICTS + verdict.name.lower(), count)


def _add_states(producers: dict[str, Persisted], given: Iterable[pb.ProducerState]) -> None:
    for each in given:
        name = read_producer(each.name)
        if name in producers:
            raise InvalidState("duplicate producer", field="producers", given=name)
        producers[name] = Persisted(
            name,
            read_sequence_id("producers.highest_sequence_id", each.highest_sequence_id),
            _unfinished(each),
            read_time_ms("producers.last_active", each.last_active, InvalidState),
        )
    if len(producers) > LOADED_PRODUCERS_MAX:
        raise InvalidState(
            f"too many producers (limit {LOADED_PRODUCERS_MAX:,})", field="producers"
        )


def _unfinished(state: pb.ProducerState) -> Chunk | None:
    if not state.HasField("unfinished"):
        return None
    field = "producers.unfinished"
    chunk = read_chunk(field, state.unfinished, InvalidState)
    if chunk.is_last:
        raise InvalidState("the last chunk of a message cannot be unfinished", field=field)
    return chunk
