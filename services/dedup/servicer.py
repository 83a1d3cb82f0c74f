"""The wire of the dedup service: check, translate, call, translate back."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio
from opentelemetry.trace import get_current_span

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.dedup.v1 import dedup_pb2_grpc as pb_grpc
from seqgate.services.dedup.core.policy import (
    EffectivePolicy,
    InvalidPolicy,
    OnFull,
    Policy,
    Source,
    check_namespace,
    check_number,
)
from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.dedup.core.topic import Persisted, Tracked
from seqgate.services.dedup.policies import DurablePolicies, Level
from seqgate.services.dedup.service import Deduplication, TopicStatus
from seqgate.services.deduplication import Judged
from seqgate.services.errors import (
    DomainError,
    InvalidPage,
    InvalidProducerName,
    Kind,
)
from seqgate.services.runtime import deduplication as wire
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.load import weighed
from seqgate.services.runtime.positions import to_position
from seqgate.services.runtime.refusal_log import in_stream
from seqgate.telemetry import names
from seqgate.telemetry.spans import asked, rpc_attributes
from seqgate.types import (
    Chunk,
)

LOADED_PRODUCERS_MAX: Final = 100_000
"""How many producers one LoadState may hold."""

PAGE_DEFAULT: Final = 1_000
PAGE_MAX: Final = 10_000
"""How many producers a page holds, unless asked otherwise, and at most."""

Context = aio.ServicerContext[Any, Any]


class InvalidState(DomainError):
    """A state to be loaded has no header or two, repeats a producer, or a value in it is out of
    range: `given`."""

    kind = Kind.INVALID
    reason = "INVALID_STATE"


class DedupServicer(pb_grpc.DedupServiceServicer):
    """See dedup.proto."""

    def __init__(
        self, deduplication: Deduplication, policies: DurablePolicies, drain: Drain
    ) -> None:
        self._deduplication = deduplication
        self._policies = policies
        self._drain = drain

    async def Admit(self, request: pb.AdmitRequest, context: Context) -> pb.AdmitResponse:
        return await self._admit(request)

    async def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.ConfirmResponse:
        return await self._confirm(request)

    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.RollbackResponse:
        return await self._rollback(request)

    # A coroutine that reads and writes on the context; grpc's stubs know only generators.
    async def Exchange(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ExchangeRequest], context: Context
    ) -> None:
        async for request in self._drain.requests(context):
            await context.write(await self._exchange(request))
        if self._drain.begun:
            await context.write(pb.ExchangeResponse(draining=pb.Draining()))

    async def KeepProducers(
        self, request: pb.KeepProducersRequest, context: Context
    ) -> pb.KeepProducersResponse:
        topic = wire.read_topic(request.topic)
        if len(request.producer_names) > wire.PRODUCERS_MAX:
            raise InvalidProducerName(
                f"a call names at most {wire.PRODUCERS_MAX:,} producers", field="producer_names"
            )
        names = [wire.read_producer(name) for name in request.producer_names]
        keep_within_s = await self._deduplication.keep(topic, names, only_due=request.only_due)
        return pb.KeepProducersResponse(keep_within_s=keep_within_s)

    async def GetProducer(
        self, request: pb.GetProducerRequest, context: Context
    ) -> pb.GetProducerResponse:
        name = wire.read_producer(request.producer_name)
        tracked = await self._deduplication.producer(wire.read_topic(request.topic), name)
        return pb.GetProducerResponse(producer=_to_producer(name, tracked))

    async def ListProducers(
        self, request: pb.ListProducersRequest, context: Context
    ) -> pb.ListProducersResponse:
        topic = wire.read_topic(request.topic)
        if not 0 <= request.page_size <= PAGE_MAX:
            raise InvalidPage(
                f"page_size must be 1 to {PAGE_MAX:,}, or 0 for {PAGE_DEFAULT:,}", field="page_size"
            )
        page = await self._deduplication.producers(
            topic, size=request.page_size or PAGE_DEFAULT, token=request.page_token
        )
        return pb.ListProducersResponse(
            producers=[_to_producer(name, tracked) for name, tracked in page.producers],
            next_page_token=page.next_token,
        )

    async def GetTopicStatus(
        self, request: pb.GetTopicStatusRequest, context: Context
    ) -> pb.GetTopicStatusResponse:
        return _to_status(await self._deduplication.status(wire.read_topic(request.topic)))

    async def ForgetTopic(
        self, request: pb.ForgetTopicRequest, context: Context
    ) -> pb.ForgetTopicResponse:
        incarnation = wire.read_number("incarnation", request.incarnation, wire.InvalidWriter)
        await self._deduplication.forget_topic(
            wire.read_topic(request.topic), incarnation, deleted=request.deleted
        )
        return pb.ForgetTopicResponse()

    async def TakeSnapshot(
        self, request: pb.TakeSnapshotRequest, context: Context
    ) -> pb.TakeSnapshotResponse:
        taken = await self._deduplication.snapshot(
            wire.read_topic(request.topic), let_go=request.let_go
        )
        if taken is None:
            return pb.TakeSnapshotResponse()
        return pb.TakeSnapshotResponse(
            position=to_position(taken.position), producers=taken.producers
        )

    # A coroutine that reads on the context: it ends in good order when the caller goes away.
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
            wire.read_topic(header.topic),
            wire.read_number("header.incarnation", header.incarnation, InvalidState),
            wire.read_position("header.through", header.through, InvalidState),
            list(producers.values()),
            replacing=header.replace,
        )
        return pb.LoadStateResponse(
            loaded=outcome.loaded,
            confirmed=to_position(outcome.confirmed),
            left_out=outcome.left_out,
        )

    async def SetPolicy(
        self, request: pb.SetPolicyRequest, context: Context
    ) -> pb.SetPolicyResponse:
        level, policy = _level(request), _policy(request.values)
        await self._policies.set(level, policy)
        return pb.SetPolicyResponse()

    async def GetPolicy(
        self, request: pb.GetPolicyRequest, context: Context
    ) -> pb.GetPolicyResponse:
        policy = await self._policies.get(_level(request))
        return pb.GetPolicyResponse(values=_to_values(policy))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        topic, name = wire.read_topic(request.topic), wire.read_producer(request.producer_name)
        sequence_id = wire.read_sequence_id("sequence_id", request.sequence_id)
        explanation, tracked, status = await self._deduplication.explain(topic, name, sequence_id)
        return pb.ExplainResponse(
            verdict=wire.VERDICTS[explanation.verdict],
            explanation=explanation.text,
            producer=None if tracked is None else _to_producer(name, tracked),
            status=_to_status(status),
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


_SERVICE: Final = pb.DESCRIPTOR.services_by_name["DedupService"].full_name


def _trace_verdicts(judged: Judged) -> None:
    """The span of a call that is traced says how many claims got each verdict."""
    span = get_current_span()
    if span.is_recording():
        for verdict, count in judged.tally().items():
            span.set_attribute(names.VERDICTS + verdict.name.lower(), count)


def _add_states(producers: dict[str, Persisted], given: Iterable[pb.ProducerState]) -> None:
    for each in given:
        name = wire.read_producer(each.name)
        if name in producers:
            raise InvalidState("duplicate producer", field="producers", given=name)
        producers[name] = Persisted(
            name,
            wire.read_sequence_id("producers.highest_sequence_id", each.highest_sequence_id),
            _unfinished(each),
            wire.read_number(
                "producers.last_active", each.last_active, InvalidState, wire.APPEND_TIME_MAX_MS
            ),
        )
    if len(producers) > LOADED_PRODUCERS_MAX:
        raise InvalidState(
            f"too many producers (limit {LOADED_PRODUCERS_MAX:,})", field="producers"
        )


def _unfinished(state: pb.ProducerState) -> Chunk | None:
    if not state.HasField("unfinished"):
        return None
    field = "producers.unfinished"
    chunk = wire.read_chunk(field, state.unfinished, InvalidState)
    if chunk.is_last:
        raise InvalidState("the last chunk of a message cannot be unfinished", field=field)
    return chunk


def _level(request: pb.SetPolicyRequest | pb.GetPolicyRequest) -> Level:
    match request.WhichOneof("level"):
        case "topic":
            return Level.of_topic(wire.read_topic(request.topic))
        case "namespace":
            return Level.of_namespace(check_namespace(request.namespace, "namespace"))
        case _:
            raise InvalidPolicy("level is required: set one of namespace, topic", field="level")


def _policy(values: pb.PolicyValues) -> Policy:
    def number(name: str) -> int | None:
        if not values.HasField(name):  # type: ignore[arg-type]
            return None
        return check_number(name, getattr(values, name), f"values.{name}")

    if values.on_full not in _ON_FULL:
        raise InvalidPolicy("on_full must be EVICT or REFUSE", field="values.on_full")
    return Policy(
        enabled=values.enabled if values.HasField("enabled") else None,
        producer_inactivity_timeout_minutes=number("producer_inactivity_timeout_minutes"),
        max_producers=number("max_producers"),
        on_full=_ON_FULL[values.on_full],
        snapshot_entries=number("snapshot_entries"),
        snapshot_interval_s=number("snapshot_interval_s"),
    )


_TO_SOURCE: Final = {
    Source.DEFAULT: pb.POLICY_SOURCE_DEFAULT,
    Source.CLUSTER: pb.POLICY_SOURCE_CLUSTER,
    Source.NAMESPACE: pb.POLICY_SOURCE_NAMESPACE,
    Source.TOPIC: pb.POLICY_SOURCE_TOPIC,
    Source.SYSTEM_TOPIC: pb.POLICY_SOURCE_SYSTEM_TOPIC,
}

_TO_ACTION: Final = {
    OnFull.EVICT: pb.FULL_TOPIC_ACTION_EVICT,
    OnFull.REFUSE: pb.FULL_TOPIC_ACTION_REFUSE,
}


_ON_FULL: Final[Mapping[int, OnFull | None]] = {
    pb.FULL_TOPIC_ACTION_UNSPECIFIED: None,
    **{action: on_full for on_full, action in _TO_ACTION.items()},
}


def _to_producer(name: str, tracked: Tracked) -> pb.Producer:
    last_active = Timestamp()
    last_active.FromMilliseconds(tracked.active_ms)
    marks = tracked.marks
    return pb.Producer(
        name=name,
        persisted_sequence_id=wire.to_mark(marks.decided),
        pushed_sequence_id=wire.to_mark(marks.pushed if marks.in_flight else marks.decided),
        last_active=last_active,
        unfinished=_to_unfinished(marks),
    )


def _to_unfinished(marks: Marks) -> pb.UnfinishedMessage | None:
    chunk = marks.persisted_chunk
    if chunk is None:
        return None
    return pb.UnfinishedMessage(sequence_id=marks.persisted, last_chunk=wire.to_chunk(chunk))


def _to_policy(policy: EffectivePolicy) -> pb.Policy:
    timeout = policy.producer_inactivity_timeout_minutes
    return pb.Policy(
        enabled=policy.enabled.value,
        enabled_source=_TO_SOURCE[policy.enabled.source],
        producer_inactivity_timeout_minutes=timeout.value,
        producer_inactivity_timeout_source=_TO_SOURCE[timeout.source],
        max_producers=policy.max_producers.value,
        max_producers_source=_TO_SOURCE[policy.max_producers.source],
        on_full=_TO_ACTION[policy.on_full.value],
        on_full_source=_TO_SOURCE[policy.on_full.source],
        snapshot_entries=policy.snapshot_entries.value,
        snapshot_entries_source=_TO_SOURCE[policy.snapshot_entries.source],
        snapshot_interval_s=policy.snapshot_interval_s.value,
        snapshot_interval_source=_TO_SOURCE[policy.snapshot_interval_s.source],
    )


def _to_values(policy: Policy) -> pb.PolicyValues:
    on_full = pb.FULL_TOPIC_ACTION_UNSPECIFIED
    if policy.on_full is not None:
        on_full = _TO_ACTION[policy.on_full]
    return pb.PolicyValues(
        enabled=policy.enabled,
        producer_inactivity_timeout_minutes=policy.producer_inactivity_timeout_minutes,
        max_producers=policy.max_producers,
        on_full=on_full,
        snapshot_entries=policy.snapshot_entries,
        snapshot_interval_s=policy.snapshot_interval_s,
    )


def _to_status(status: TopicStatus) -> pb.GetTopicStatusResponse:
    response = pb.GetTopicStatusResponse(
        policy=_to_policy(status.policy),
        policy_file_error=status.policy_error,
        snapshot_error=status.snapshot_error,
        snapshot_unknown=status.snapshot_unknown,
    )
    if status.snapshot is not None:
        response.snapshot.ledger_id, response.snapshot.entry_id = status.snapshot
    summary = status.summary
    if not status.policy.enabled.value:
        response.state = pb.TOPIC_STATE_DISABLED
    elif summary is None:
        response.state = pb.TOPIC_STATE_ABSENT
    elif summary.remaining:
        response.state = pb.TOPIC_STATE_RECOVERING
    else:
        response.state = pb.TOPIC_STATE_ACTIVE
    if summary is not None:
        response.epoch = summary.epoch
        if summary.confirmed is not None:
            response.confirmed.ledger_id, response.confirmed.entry_id = summary.confirmed
        response.entries_remaining = summary.remaining
        response.producers = summary.producers
        response.entries_since_snapshot = summary.unsaved
        if summary.saved.position is not None and summary.saved.taken_ms:  # and not let go
            response.snapshot.ledger_id, response.snapshot.entry_id = summary.saved.position
            response.snapshot_taken.FromMilliseconds(summary.saved.taken_ms)
        counts = summary.counts
        response.counts.confirmed_entries = counts.confirmed_entries
        response.counts.new_claims = counts.new
        response.counts.duplicate_claims = counts.duplicate
        response.counts.partial_claims = counts.partial
        response.counts.waiting_claims = counts.waiting
        response.counts.purged_producers = counts.purged
        response.counts.evicted_producers = counts.evicted
        response.counts.misplaced_chunk_claims = counts.misplaced
        response.counts.aborted_attempts = counts.aborted
    return response
