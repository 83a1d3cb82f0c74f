"""The gRPC servicer: parse, call the service, translate back."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from grpc import aio
from opentelemetry.trace import Span

from seqgate.api.common.v1 import common_pb2
from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2_grpc as pb_grpc
from seqgate.services.errors import DomainError, Kind
from seqgate.services.filter.core.chain import Chain, Decision, ReadKey, Verdict, weight_of
from seqgate.services.filter.core.explain import Step, steps_of
from seqgate.services.filter.core.faults import Fault, InvalidExpression
from seqgate.services.filter.core.judging import Judging
from seqgate.services.filter.core.program import Failure, FailureReason, Program, Type
from seqgate.services.filter.core.reads import Reads
from seqgate.services.filter.core.room import ChainShare
from seqgate.services.filter.metadata import reader_of
from seqgate.services.filter.service import (
    Filter,
    Filters,
    InvalidChain,
    chain_of,
    check_subscription,
)
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.load import busy, weighed
from seqgate.services.runtime.refusal_log import in_stream
from seqgate.services.runtime.requests import read_name, read_topic
from seqgate.telemetry import names, spans
from seqgate.times import duration

CHAINS_MAX: Final = 1_000
"""The most chains of a stream; their numbers are below this."""

CHAIN_BYTES_MAX: Final = 64 * 1024 * 1024
"""The most memory of a stream's chains, in bytes, approximately."""

ENTRIES_MAX: Final = 10_000
"""The most entries of a batch."""

BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""The largest batch, in bytes, serialized."""

TURN_STEPS: Final = 500_000
"""The steps after which a batch yields to other requests; at least one entry is judged."""

METHOD: Final = "seqgate.api.filter.v1.FilterService/Evaluate"

Context = aio.ServicerContext[Any, Any]
Ready = tuple[Chain, ReadKey]


class InvalidBatch(DomainError):
    """A batch has too many entries, is too large, or refers to metadata that it does not contain;
    or a request is empty."""

    kind = Kind.INVALID
    reason = "INVALID_BATCH"


class _Over(Exception):
    """The stream was evicted to make room for the chains of other streams."""


class _Chains:
    """The chains of a stream, by number; `over` is set when the stream is evicted."""

    def __init__(self) -> None:
        self.ready: dict[int, Ready] = {}
        self.share = ChainShare(self._end)
        self.over = asyncio.Event()

    def check(self) -> None:
        """Raises _Over if the stream was evicted."""
        if self.share.is_over:
            raise _Over

    def _end(self) -> None:
        self.ready.clear()
        self.over.set()


class FilterServicer(pb_grpc.FilterServiceServicer):
    """See filter.proto."""

    def __init__(self, filters: Filters, drain: Drain) -> None:
        self._filters = filters
        self._drain = drain

    # A coroutine that reads and writes on the context; grpc's stubs know only generators.
    async def Evaluate(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.EvaluateRequest], context: Context
    ) -> None:
        chains = _Chains()
        try:
            async for request in self._drain.requests(context, chains.over):
                with spans.asked(METHOD, request.trace, _ASKED) as span:
                    response = await self._answer(chains, request, span)
                if response is None:
                    break
                await context.write(response)
        finally:
            self._filters.chain_room.give(chains.share)
        if self._drain.begun:
            await context.write(pb.EvaluateResponse(draining=common_pb2.Draining()))

    async def Compile(self, request: pb.CompileRequest, context: Context) -> pb.CompileResponse:
        try:
            program = self._filters.program(request.expression)
        except InvalidExpression as error:
            faults = pb.Faults(faults=map(_to_fault, error.faults))
            return pb.CompileResponse(faults=faults)
        return pb.CompileResponse(compiled=_to_compiled(program))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        topic, subscription = _topic(request.topic), dict(request.subscription)
        check_subscription(subscription)
        program = self._filters.program(request.expression)
        chain = chain_of([program], topic, subscription)
        key = reader_of(chain)(request.metadata)
        decision = chain.decide(key, weight_of(key))
        response = pb.ExplainResponse(outcome=_to_outcome(decision))
        if chain.can_ask(key):
            for step in steps_of(program, chain.values(key)):
                response.steps.append(_to_step(step))
                await asyncio.sleep(0)
        return response

    async def _answer(
        self, chains: _Chains, request: pb.EvaluateRequest, span: Span
    ) -> pb.EvaluateResponse | None:
        """None: the stream was evicted, and its caller should repeat the request on another one."""
        request_id = request.request_id
        try:
            chains.check()
            with weighed(request):
                match request.WhichOneof("request"):
                    case "batch":
                        verdicts = await self._judge(chains, request.batch, span)
                        return pb.EvaluateResponse(request_id=request_id, verdicts=verdicts)
                    case "set_chain":
                        chain = await self._set_chain(chains, request.set_chain)
                        return pb.EvaluateResponse(request_id=request_id, chain_set=_to_set(chain))
                    case _:
                        raise InvalidBatch(
                            "empty request: set one of set_chain, batch", field="request"
                        )
        except _Over:
            return None
        except DomainError as refusal:
            span.set_attribute(names.REASON, refusal.reason)
            return pb.EvaluateResponse(request_id=request_id, error=in_stream(refusal))

    async def _set_chain(self, chains: _Chains, request: pb.SetChain) -> Chain:
        number = request.chain_id
        if number >= CHAINS_MAX:
            raise InvalidChain(f"chain_id must be 0 to {CHAINS_MAX - 1}", field="chain_id")
        given = request.chain
        chain = await self._filters.chain(
            _filters(given.filters), _topic(given.topic), dict(given.subscription)
        )
        chains.check()
        before = chains.ready[number][0].size_bytes if number in chains.ready else 0
        if chains.share.size_bytes - before + chain.size_bytes > CHAIN_BYTES_MAX:
            raise InvalidChain(
                f"chains of this stream too large (limit {CHAIN_BYTES_MAX:,} bytes)", field="chain"
            )
        room = self._filters.chain_room
        if not room.take(chains.share, chain.size_bytes, before, time.monotonic()):
            raise busy(
                "chains of all streams too large (limit chain_bytes_max)", limit="chain_bytes_max"
            )
        chains.ready[number] = chain, reader_of(chain)
        return chain

    async def _judge(self, chains: _Chains, batch: pb.Batch, span: Span) -> pb.Verdicts:
        if batch.chain_id not in chains.ready:
            raise InvalidChain("unknown chain_id", field="chain_id", given=batch.chain_id)
        _check_batch(batch)
        chain, read = chains.ready[batch.chain_id]
        began_s = time.monotonic()
        judging = Judging(chain, read, self._filters.memo, batch.metadata)
        is_left = judging.go_on(TURN_STEPS)
        while is_left:
            await asyncio.sleep(0)
            chains.check()
            is_left = judging.go_on(TURN_STEPS)
        decisions, of_metadata = judging.outcomes()
        which = [of_metadata[each] for each in batch.which] or of_metadata
        now_s = time.monotonic()
        took_s = now_s - began_s
        chains.share.judged(now_s)
        self._filters.metrics.judged(decisions, which, evaluated=judging.evaluated, took_s=took_s)
        if span.is_recording():
            span.set_attributes(_said(decisions, which, len(batch.metadata), judging.evaluated))
        return pb.Verdicts(outcomes=map(_to_outcome, decisions), which=which)


# ---- checking


def _topic(text: str) -> str:
    """A topic's name; empty: none."""
    return str(read_topic(text)) if text else ""


def _filters(given: Sequence[pb.Filter]) -> list[Filter]:
    filters = []
    names: set[str] = set()
    for index, each in enumerate(given):
        field = f"filters[{index}].name"
        name = read_name(field, each.name, InvalidChain)
        if name in names:
            raise InvalidChain("duplicate filter name", field=field, filter=name)
        names.add(name)
        filters.append(Filter(name, each.version, each.expression))
    return filters


def _check_batch(batch: pb.Batch) -> None:
    count = max(len(batch.metadata), len(batch.which))
    if count > ENTRIES_MAX:
        raise InvalidBatch(
            f"too many entries in batch (limit {ENTRIES_MAX:,})", field="metadata", count=count
        )
    size = batch.ByteSize()
    if size > BATCH_BYTES_MAX:
        raise InvalidBatch(
            f"batch too large (limit {BATCH_BYTES_MAX:,} bytes)", field="metadata", bytes=size
        )
    if batch.which and max(batch.which) >= len(batch.metadata):
        raise InvalidBatch("which must be indexes of metadata", field="which")


# ---- translating back


_ASKED: Final = spans.rpc_attributes(METHOD)


def _said(
    decisions: Sequence[Decision], which: Sequence[int], different: int, evaluated: int
) -> dict[str, int]:
    """The attributes of a batch's span: its number of entries, in total and by verdict, and of its
    distinct entries how many were evaluated and how many had a cached decision."""
    said: Counter[str] = Counter()
    for place, count in Counter(which).items():
        result = decisions[place].result
        name = "failed" if isinstance(result, Failure) else _AS_TOLD[result]
        said[names.VERDICTS + name] += count
    return {
        names.ENTRIES: len(which),
        names.EVALUATED: evaluated,
        names.REMEMBERED: different - evaluated,
        **said,
    }


_AS_TOLD: Final = {
    Verdict.ACCEPT: "accepted",
    Verdict.REJECT: "rejected",
    Verdict.RESCHEDULE: "rescheduled",
}
"""Verdicts as the dispatcher's spans and metrics call them."""
_VERDICTS: Final = {
    Verdict.ACCEPT: pb.FILTER_VERDICT_ACCEPT,
    Verdict.REJECT: pb.FILTER_VERDICT_REJECT,
    Verdict.RESCHEDULE: pb.FILTER_VERDICT_RESCHEDULE,
}
_REASONS: Final = {
    FailureReason.PROPERTY_ABSENT: pb.FAILURE_REASON_PROPERTY_ABSENT,
    FailureReason.EVALUATION_FAILED: pb.FAILURE_REASON_EVALUATION_FAILED,
    FailureReason.INVALID_DELAY: pb.FAILURE_REASON_INVALID_DELAY,
    FailureReason.INVALID_METADATA: pb.FAILURE_REASON_INVALID_METADATA,
}
_TYPES: Final = {Type.BOOL: pb.TYPE_BOOL, Type.DURATION: pb.TYPE_DURATION}


def _to_outcome(decision: Decision) -> pb.FilterOutcome:
    outcome = pb.FilterOutcome(
        filter=decision.filter,
        delay=duration(decision.delay_ms) if decision.delay_ms else None,
    )
    if isinstance(decision.result, Failure):
        failure = decision.result
        outcome.failure.reason = _REASONS[failure.reason]
        outcome.failure.message = failure.message
    else:
        outcome.verdict = _VERDICTS[decision.result]
    return outcome


def _to_set(chain: Chain) -> pb.ChainSet:
    return pb.ChainSet(reads=_to_reads(chain.reads), cost=chain.steps)


def _to_reads(reads: Reads) -> pb.Reads:
    return pb.Reads(
        variables=sorted(reads.variables),
        properties=sorted(reads.properties or ()),
        all_properties=reads.properties is None,
        subscription=sorted(reads.subscription or ()),
        all_subscription=reads.subscription is None,
    )


def _to_compiled(program: Program) -> pb.Compiled:
    return pb.Compiled(
        type=_TYPES[program.type],
        reads=_to_reads(program.reads),
        cost=program.cost.steps,
        iterations=program.cost.iterations,
    )


def _to_fault(fault: Fault) -> pb.Fault:
    return pb.Fault(
        offset=fault.offset, line=fault.line, column=fault.column, message=fault.message
    )


def _to_step(step: Step) -> pb.Step:
    return pb.Step(
        start=step.span.start,
        end=step.span.end,
        depth=step.depth,
        type=step.value.type_name,
        value=step.value.text,
        failed=step.value.is_failure,
    )
