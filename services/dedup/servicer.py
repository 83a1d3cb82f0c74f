"""The wire of the dedup service: parse, call, translate the result."""

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from grpc import aio

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.dedup.v1 import dedup_pb2_grpc as pb_grpc
from seqgate.services.dedup.core.policy import (
    BOUNDS,
    EffectivePolicy,
    InvalidPolicy,
    OnConflict,
    OnFull,
    Policy,
    Source,
    check_namespace,
    check_number,
)
from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.dedup.core.topic import Tracked
from seqgate.services.dedup.policies import DurablePolicies, Level
from seqgate.services.dedup.service import Deduplication, TopicStatus
from seqgate.services.runtime import deduplication as wire
from seqgate.services.runtime.positions import to_position
from seqgate.services.runtime.requests import (
    read_duration_ms,
    read_limit,
    read_producer,
    read_sequence_id,
    read_topic,
)
from seqgate.times import duration, timestamp

PAGE_DEFAULT: Final = 1_000
PAGE_MAX: Final = 10_000
"""The default and the largest page size of ListProducers."""

MINUTE_MS: Final = 60_000
SECOND_MS: Final = 1_000

Context = aio.ServicerContext[Any, Any]


class DedupServicer(pb_grpc.DedupServiceServicer):
    """See dedup.proto."""

    def __init__(self, deduplication: Deduplication, policies: DurablePolicies) -> None:
        self._deduplication = deduplication
        self._policies = policies

    async def GetProducer(
        self, request: pb.GetProducerRequest, context: Context
    ) -> pb.GetProducerResponse:
        name = read_producer(request.producer_name)
        tracked = await self._deduplication.producer(read_topic(request.topic), name)
        return pb.GetProducerResponse(producer=_to_producer(name, tracked))

    async def ListProducers(
        self, request: pb.ListProducersRequest, context: Context
    ) -> pb.ListProducersResponse:
        topic = read_topic(request.topic)
        size = read_limit(request.page_size, PAGE_DEFAULT, PAGE_MAX)
        page = await self._deduplication.producers(topic, size=size, token=request.page_token)
        return pb.ListProducersResponse(
            producers=[_to_producer(name, tracked) for name, tracked in page.producers],
            next_page_token=page.next_token,
        )

    async def GetTopicStatus(
        self, request: pb.GetTopicStatusRequest, context: Context
    ) -> pb.GetTopicStatusResponse:
        return _to_status(await self._deduplication.status(read_topic(request.topic)))

    async def TakeSnapshot(
        self, request: pb.TakeSnapshotRequest, context: Context
    ) -> pb.TakeSnapshotResponse:
        taken = await self._deduplication.snapshot(read_topic(request.topic), let_go=request.let_go)
        if taken is None:
            return pb.TakeSnapshotResponse()
        return pb.TakeSnapshotResponse(
            position=to_position(taken.position), producers=taken.producers
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
        topic, name = read_topic(request.topic), read_producer(request.producer_name)
        sequence_id = read_sequence_id("sequence_id", request.sequence_id)
        explanation, tracked, status = await self._deduplication.explain(topic, name, sequence_id)
        return pb.ExplainResponse(
            verdict=wire.VERDICTS[explanation.verdict],
            explanation=explanation.text,
            producer=None if tracked is None else _to_producer(name, tracked),
            status=_to_status(status),
        )


def _level(request: pb.SetPolicyRequest | pb.GetPolicyRequest) -> Level:
    match request.WhichOneof("level"):
        case "topic":
            return Level.of_topic(read_topic(request.topic))
        case "namespace":
            return Level.of_namespace(check_namespace(request.namespace, "namespace"))
        case _:
            raise InvalidPolicy("level is required: set one of namespace, topic", field="level")


def _policy(values: pb.PolicyValues) -> Policy:
    def number(name: str) -> int | None:
        if not values.HasField(name):  # type: ignore[arg-type]
            return None
        return check_number(name, getattr(values, name), f"values.{name}")

    def whole(name: str, of_policy: str, unit_ms: int, unit: str) -> int | None:
        if not values.HasField(name):  # type: ignore[arg-type]
            return None
        field, (least, most) = f"values.{name}", BOUNDS[of_policy]
        given_ms = read_duration_ms(
            field,
            getattr(values, name),
            InvalidPolicy,
            least_ms=least * unit_ms,
            most_ms=most * unit_ms,
        )
        if given_ms % unit_ms:
            raise InvalidPolicy(f"{field} must be in whole {unit}", field=field)
        return given_ms // unit_ms

    if values.on_full not in _ON_FULL:
        raise InvalidPolicy("on_full must be EVICT or REFUSE", field="values.on_full")
    if values.on_conflict not in _ON_CONFLICT:
        raise InvalidPolicy("on_conflict must be REPORT or REFUSE", field="values.on_conflict")
    return Policy(
        enabled=values.enabled if values.HasField("enabled") else None,
        producer_inactivity_timeout_minutes=whole(
            "producer_inactivity_timeout",
            "producer_inactivity_timeout_minutes",
            MINUTE_MS,
            "minutes",
        ),
        max_producers=number("max_producers"),
        on_full=_ON_FULL[values.on_full],
        snapshot_entries=number("snapshot_entries"),
        snapshot_interval_s=whole("snapshot_interval", "snapshot_interval_s", SECOND_MS, "seconds"),
        on_conflict=_ON_CONFLICT[values.on_conflict],
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

_TO_CONFLICT_ACTION: Final = {
    OnConflict.REPORT: pb.CONFLICT_ACTION_REPORT,
    OnConflict.REFUSE: pb.CONFLICT_ACTION_REFUSE,
}

_ON_CONFLICT: Final[Mapping[int, OnConflict | None]] = {
    pb.CONFLICT_ACTION_UNSPECIFIED: None,
    **{action: on_conflict for on_conflict, action in _TO_CONFLICT_ACTION.items()},
}


def _to_producer(name: str, tracked: Tracked) -> pb.Producer:
    marks = tracked.marks
    return pb.Producer(
        name=name,
        persisted_sequence_id=wire.to_mark(marks.decided),
        pushed_sequence_id=wire.to_mark(marks.pushed if marks.in_flight else marks.decided),
        last_active=timestamp(tracked.active_ms),
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
        producer_inactivity_timeout=duration(timeout.value * MINUTE_MS),
        producer_inactivity_timeout_source=_TO_SOURCE[timeout.source],
        max_producers=policy.max_producers.value,
        max_producers_source=_TO_SOURCE[policy.max_producers.source],
        on_full=_TO_ACTION[policy.on_full.value],
        on_full_source=_TO_SOURCE[policy.on_full.source],
        snapshot_entries=policy.snapshot_entries.value,
        snapshot_entries_source=_TO_SOURCE[policy.snapshot_entries.source],
        snapshot_interval=duration(policy.snapshot_interval_s.value * SECOND_MS),
        snapshot_interval_source=_TO_SOURCE[policy.snapshot_interval_s.source],
        on_conflict=_TO_CONFLICT_ACTION[policy.on_conflict.value],
        on_conflict_source=_TO_SOURCE[policy.on_conflict.source],
    )


def _to_values(policy: Policy) -> pb.PolicyValues:
    on_full, on_conflict = pb.FULL_TOPIC_ACTION_UNSPECIFIED, pb.CONFLICT_ACTION_UNSPECIFIED
    if policy.on_full is not None:
        on_full = _TO_ACTION[policy.on_full]
    if policy.on_conflict is not None:
        on_conflict = _TO_CONFLICT_ACTION[policy.on_conflict]
    return pb.PolicyValues(
        enabled=policy.enabled,
        producer_inactivity_timeout=_optional_duration(
            policy.producer_inactivity_timeout_minutes, MINUTE_MS
        ),
        max_producers=policy.max_producers,
        on_full=on_full,
        snapshot_entries=policy.snapshot_entries,
        snapshot_interval=_optional_duration(policy.snapshot_interval_s, SECOND_MS),
        on_conflict=on_conflict,
    )


def _optional_duration(value: int | None, unit_ms: int) -> Duration | None:
    return None if value is None else duration(value * unit_ms)


def _to_status(status: TopicStatus) -> pb.GetTopicStatusResponse:
    response = pb.GetTopicStatusResponse(
        policy=_to_policy(status.policy),
        policy_file_error=status.policy_error,
        snapshot_error=status.snapshot_error,
        snapshot_unknown=status.snapshot_unknown,
    )
    if status.snapshot is not None:
        response.snapshot.CopyFrom(to_position(status.snapshot.position))
        if status.snapshot.taken_ms:
            response.snapshot_taken.CopyFrom(timestamp(status.snapshot.taken_ms))
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
        response.entries_since_snapshot = status.unsaved
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
