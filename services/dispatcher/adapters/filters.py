"""The filter service over gRPC: a stream for each line.

A stream that breaks, or whose answer is late, is dropped, and the next request opens another. If a
stream breaks that was open before the request, or the service is draining, the request is repeated
once at once: another replica may answer.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, NoReturn, TypeVar

import structlog
from google.rpc import status_pb2
from grpc import aio

from seqgate.api.common.v1.common_pb2 import TraceContext
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2_grpc as pb_grpc
from seqgate.services.dispatcher.core.effects import ACCEPT, FILTER_FAILED, REJECT
from seqgate.services.dispatcher.ports import (
    Decision,
    Failure,
    FiltersUnavailable,
    InvalidChain,
    InvalidExpression,
    Reads,
    Rules,
)
from seqgate.services.errors import ServiceBusy
from seqgate.services.runtime.channels import CALLS_AT_ONCE
from seqgate.services.runtime.limiter import Limiter, NotSent, Outcome
from seqgate.services.runtime.status import call_failed
from seqgate.status import decode
from seqgate.telemetry import spans
from seqgate.times import milliseconds

log = structlog.get_logger()

T = TypeVar("T")

RETRY_AFTER_S: Final = 0.5
"""The retry delay of refusals while the filter service does not answer, in seconds."""

BATCH_ENTRIES_MAX: Final = 2_000
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
"""How many entries' metadata one request holds, and their bytes: below the service's limits."""

CHAINS_MAX: Final = 16
"""How many chains a stream holds; then the oldest is replaced."""

METHOD: Final = "seqgate.api.filter.v1.FilterService/Evaluate"

NO_RULES: Final = frozenset({"INVALID_EXPRESSION", "INVALID_CHAIN"})


class _Moved(Exception):
    """The stream ended without an answer; another one may answer."""


class _Nonsense(Exception):
    """The answer does not match the request: the service has another version, or is broken."""


class GrpcFilters:
    """See seqgate.services.dispatcher.ports.Filters."""

    def __init__(self, channel: aio.Channel, *, timeout_s: float) -> None:
        self._stub = pb_grpc.FilterServiceStub(channel)
        self._timeout_s = timeout_s
        self._limiter = Limiter(CALLS_AT_ONCE)

    def line(self) -> "GrpcLine":
        return GrpcLine(self._stub, self._timeout_s, self._limiter)


class GrpcLine:
    """See seqgate.services.dispatcher.ports.Line."""

    def __init__(
        self, stub: "pb_grpc.FilterServiceAsyncStub", timeout_s: float, limiter: Limiter
    ) -> None:
        self._stub = stub
        self._timeout_s = timeout_s
        self._limiter = limiter
        self._call: Any = None
        self._asked = 0
        self._chains: OrderedDict[Rules, tuple[int, Reads]] = OrderedDict()
        self._one_by_one = asyncio.Lock()

    async def reads(self, rules: Rules) -> Reads:
        async def ask() -> Reads:
            _, reads = await self._told(rules)
            return reads

        return await self._answered(ask)

    async def judge(
        self, rules: Rules, metadata: Sequence[entry_pb2.EntryMetadata]
    ) -> Sequence[Decision]:
        decisions: list[Decision] = []
        for some in _batches(metadata):

            async def ask(some: Sequence[entry_pb2.EntryMetadata] = some) -> list[Decision]:
                number, _ = await self._told(rules)
                batch = pb.Batch(chain_id=number, metadata=some)
                answer = await self._ask(pb.EvaluateRequest(batch=batch), "verdicts")
                return _decisions(answer.verdicts, len(some), len(rules.filters))

            decisions += await self._answered(ask)
        return decisions

    async def close(self) -> None:
        self._drop()

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, within the time limit, which begins in this line's turn among all lines, and
        includes the wait for earlier requests of this line."""
        try:
            async with self._limiter.slot(self._timeout_s) as slot:
                try:
                    async with asyncio.timeout(self._timeout_s), self._one_by_one:
                        return await self._answered_now(ask)
                except (TimeoutError, FiltersUnavailable):
                    slot.outcome = Outcome.FAILED
                    raise
        except (NotSent, TimeoutError) as error:
            raise FiltersUnavailable(
                "the filter service does not answer in time", retry_after_s=RETRY_AFTER_S
            ) from error

    async def _answered_now(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, on this stream or on another one."""
        was_open = self._call is not None
        try:
            try:
                return await ask()
            except _Moved:
                self._drop()
                return await ask()
            except aio.AioRpcError:
                self._drop()
                if not was_open:
                    raise
                return await ask()
        except (aio.AioRpcError, _Moved) as error:
            self._drop()
            _give_up(error)
        except _Nonsense as error:
            self._drop()
            log.warning("filter service sent an invalid answer", detail=str(error))
            raise FiltersUnavailable(
                "the filter service sent an invalid answer", retry_after_s=RETRY_AFTER_S
            ) from error
        except asyncio.CancelledError:  # by the caller, or by the time limit
            self._drop()  # the next request would read this answer
            raise

    async def _told(self, rules: Rules) -> tuple[int, Reads]:
        """The number of the chain on this stream, and what it reads. If the service has no room for
        it, it replaces older chains of the stream."""
        known = self._chains.get(rules)
        if known is not None:
            return known
        if len(self._chains) >= CHAINS_MAX:
            self._chains.popitem(last=False)
        taken = {number for number, _ in self._chains.values()}
        number = next(each for each in range(CHAINS_MAX) if each not in taken)
        while True:
            try:
                reads = await self._tell(number, rules)
            except FiltersUnavailable as error:
                if error.details.get("because") != ServiceBusy.reason:
                    raise
                if not self._chains:
                    self._drop()  # so the service frees what it still holds of it
                    raise
                _, (number, _) = self._chains.popitem(last=False)
            else:
                self._chains[rules] = number, reads
                return number, reads

    async def _tell(self, number: int, rules: Rules) -> Reads:
        """Set a chain, which replaces the one that had its number."""
        chain = pb.Chain(
            filters=[
                pb.Filter(name=each.name, version=each.version, expression=each.expression)
                for each in rules.filters
            ],
            topic=rules.topic,
            subscription=dict(rules.properties),
        )
        request = pb.EvaluateRequest(set_chain=pb.SetChain(chain_id=number, chain=chain))
        return _reads((await self._ask(request, "chain_set")).chain_set.reads)

    async def _ask(self, request: pb.EvaluateRequest, wanted: str) -> pb.EvaluateResponse:
        """Send a request. Its answer must be of the wanted kind, or a refusal, which is raised."""
        with spans.exchange(METHOD):
            if carrier := spans.carrier():
                request.trace.CopyFrom(TraceContext(**carrier))
            return await self._exchanged(request, wanted)

    async def _exchanged(self, request: pb.EvaluateRequest, wanted: str) -> pb.EvaluateResponse:
        if self._call is None:
            with spans.apart():
                self._call = self._stub.Evaluate()
        call = self._call
        self._asked += 1
        request.request_id = self._asked
        try:
            await call.write(request)
            answer = await call.read()
        except asyncio.InvalidStateError as error:  # it has ended
            raise _Moved from error
        if answer is aio.EOF or answer.HasField("draining"):
            raise _Moved
        kind = answer.WhichOneof("response")
        if answer.request_id != self._asked or kind not in (wanted, "error"):
            raise _Nonsense(
                f"{kind} for request {answer.request_id}, expected {wanted} for {self._asked}"
            )
        if kind == "error":
            _refuse(answer.error)
        response: pb.EvaluateResponse = answer
        return response

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call = None
        self._chains.clear()


def _batches(
    metadata: Sequence[entry_pb2.EntryMetadata],
) -> Iterator[Sequence[entry_pb2.EntryMetadata]]:
    """The metadata in parts that fit one request."""
    some: list[entry_pb2.EntryMetadata] = []
    size_bytes = 0
    for each in metadata:
        added = each.ByteSize()
        if some and (len(some) >= BATCH_ENTRIES_MAX or size_bytes + added > BATCH_BYTES_MAX):
            yield some
            some, size_bytes = [], 0
        some.append(each)
        size_bytes += added
    if some:
        yield some


def _reads(wire: pb.Reads) -> Reads:
    return Reads(
        frozenset(wire.variables),
        None if wire.all_properties else tuple(wire.properties),
        None if wire.all_subscription else tuple(wire.subscription),
    )


def _decisions(verdicts: pb.Verdicts, entries: int, filters: int) -> list[Decision]:
    """The decision on each entry, if the answer fits the numbers of entries and filters."""
    outcomes = [_decision(each) for each in verdicts.outcomes]
    which = verdicts.which
    if len(which) != entries or (which and max(which) >= len(outcomes)):
        raise _Nonsense(f"{len(which)} of {len(outcomes)} outcomes for {entries} entries")
    if any(each.filter is not None and each.filter >= filters for each in outcomes):
        raise _Nonsense(f"an outcome of a filter beyond {filters}")
    return [outcomes[each] for each in which]


def _decision(outcome: pb.FilterOutcome) -> Decision:
    place = outcome.filter if outcome.HasField("filter") else None
    if outcome.HasField("failure"):
        known = pb.FailureReason.DESCRIPTOR.values_by_number.get(outcome.failure.reason)
        reason = "UNSPECIFIED" if known is None else known.name.removeprefix("FAILURE_REASON_")
        return Decision(FILTER_FAILED, place, Failure(reason, outcome.failure.message))
    match outcome.verdict:
        case pb.FILTER_VERDICT_ACCEPT:
            return Decision(ACCEPT, place)
        case pb.FILTER_VERDICT_REJECT:
            return Decision(REJECT, place)
        case pb.FILTER_VERDICT_RESCHEDULE:
            return Decision(max(1, milliseconds(outcome.delay)), place)
    return Decision(
        FILTER_FAILED, place, Failure("UNSPECIFIED", "the filter service is of a newer version")
    )


def _refuse(status: status_pb2.Status) -> NoReturn:
    refused = decode(status)
    if refused.reason not in NO_RULES:
        log.error("filter service refused a call", reason=refused.reason, detail=refused.message)
        raise FiltersUnavailable(
            "the filter service refused the call",
            retry_after_s=RETRY_AFTER_S,
            because=refused.reason,
        )
    refusal = InvalidExpression if refused.reason == "INVALID_EXPRESSION" else InvalidChain
    error = refusal(refused.message, field="filters")
    error.details |= refused.details
    raise error


def _give_up(error: aio.AioRpcError | _Moved) -> NoReturn:
    refusal = call_failed(error) if isinstance(error, aio.AioRpcError) else None
    because = {"because": refusal.reason} if refusal is not None and refusal.reason else {}
    raise FiltersUnavailable(
        "the filter service does not answer", retry_after_s=RETRY_AFTER_S, **because
    ) from error
