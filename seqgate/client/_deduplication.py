"""The admin client's calls about deduplication: its state, its policies and its verdicts."""

from dataclasses import dataclass, fields
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.client._arguments import UINT32_MAX, flag, instance, text, whole
from seqgate.client._arguments import sequence_id as sequence_id_of
from seqgate.client._calls import Calls
from seqgate.client._fields import enum_name, full_name, optional, optional_position
from seqgate.times import duration
from seqgate.types import Position, TopicName


@dataclass(frozen=True, slots=True)
class PolicyValues:
    """Values of a deduplication policy; None: the level above decides.

    Attributes:
        enabled: whether topics deduplicate.
        producer_inactivity_timeout_s: seconds after which an inactive producer is forgotten, in
            whole minutes, at most 365 days; 0: never.
        max_producers: the most producers that a topic tracks: 1 to 100,000.
        evicts_when_full: on one more producer, forget the longest inactive one, instead of refusing
            it.
        snapshot_entries: a snapshot is taken after this many entries: at most 1,000,000; 0: not by
            count.
        snapshot_interval_s: a snapshot is taken this many seconds after a new entry, whole ones, at
            most a day; 0: not by time.
        refuses_conflicts: refuse a message whose sequence id is stored with other content, with
            ConflictError, instead of reporting it in its receipt (Receipt.differs).
    """

    enabled: bool | None = None
    producer_inactivity_timeout_s: int | None = None
    max_producers: int | None = None
    evicts_when_full: bool | None = None
    snapshot_entries: int | None = None
    snapshot_interval_s: int | None = None
    refuses_conflicts: bool | None = None


@dataclass(frozen=True, slots=True)
class DeduplicationInfo:
    """A topic's deduplication.

    Attributes:
        state: ACTIVE, REPLAYING, or as TopicState in dedup.proto names it.
        policy: the values in effect; none is None.
        confirmed: the state covers the log up to here; None: no entry.
        entries_to_replay: how many entries it lacks.
        producers: how many it tracks.
        duplicates: how many publications it judged duplicates, since Redis last lost the state.
        snapshot: the newest snapshot covers the log up to here; None: there is none, or
            `snapshot_unknown`.
        snapshot_unknown: whether it is unknown if there is a snapshot.
    """

    state: str
    policy: PolicyValues
    confirmed: Position | None
    entries_to_replay: int
    producers: int
    duplicates: int
    snapshot: Position | None
    snapshot_unknown: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What would become of a message if it was sent now.

    Attributes:
        verdict: NEW, DUPLICATE, or as ClaimVerdict in dedup.proto names it.
        explanation: why, in one or two sentences.
        persisted_sequence_id: the producer's last one that is stored; None: none is known.
        pushed_sequence_id: its last one that was accepted; None: none is known.
    """

    verdict: str
    explanation: str
    persisted_sequence_id: int | None
    pushed_sequence_id: int | None


class DeduplicationCalls:
    """The part of Admin for deduplication."""

    _calls: Calls

    async def deduplication(self, topic: str) -> DeduplicationInfo:
        """A topic's deduplication and the policy in effect. Raises NotFoundError."""
        found = await self._calls.call(dedup_pb2.GetTopicStatusRequest(topic=full_name(topic)))
        return DeduplicationInfo(
            state=enum_name(dedup_pb2.TopicState, found.state),
            policy=_policy(found.policy),
            confirmed=optional_position(optional(found, "confirmed")),
            entries_to_replay=found.entries_remaining,
            producers=found.producers,
            duplicates=found.counts.duplicate_claims,
            snapshot=optional_position(optional(found, "snapshot")),
            snapshot_unknown=found.snapshot_unknown,
        )

    async def policy(self, level: str) -> PolicyValues:
        """The values that `set_policy` has set on a topic, or on a namespace: tenant/namespace."""
        found = await self._calls.call(dedup_pb2.GetPolicyRequest(**_level(level)))
        given = {field.name for field, _ in found.values.ListFields()}
        return _policy(found.values, given)

    async def set_policy(self, level: str, values: PolicyValues) -> None:
        """Set the policy of a topic or of a namespace, replacing what was set there before. When
        this returns, it is in effect on all instances. Without any value, the level's policy is
        removed. Raises InvalidRequestError if a value is out of bounds."""
        request = dedup_pb2.SetPolicyRequest(values=_policy_to_wire(values), **_level(level))
        await self._calls.call(request)

    async def take_snapshot(self, topic: str) -> Position | None:
        """Take a snapshot of the deduplication state now. Returns the last entry that it covers;
        None: there is nothing to keep."""
        answer = await self._calls.call(dedup_pb2.TakeSnapshotRequest(topic=full_name(topic)))
        return optional_position(optional(answer, "position"))

    async def explain_publication(self, topic: str, producer: str, sequence_id: int) -> Verdict:
        """What would become of a message if it was sent now, and why. Changes nothing."""
        request = dedup_pb2.ExplainRequest(
            topic=full_name(topic),
            producer_name=text("producer", producer),
            sequence_id=sequence_id_of(sequence_id),
        )
        found = await self._calls.call(request)
        return Verdict(
            enum_name(dedup_pb2.ClaimVerdict, found.verdict),
            found.explanation,
            optional(found.producer, "persisted_sequence_id"),
            optional(found.producer, "pushed_sequence_id"),
        )


def _level(level: str) -> dict[str, Any]:
    """A namespace (tenant/namespace), or else a topic."""
    name = text("level", level)
    if name.count("/") == 1:
        return {"namespace": TopicName.parse(f"{name}/a").namespace}
    return {"topic": full_name(name)}


_ON_FULL: Final = {
    True: dedup_pb2.FULL_TOPIC_ACTION_EVICT,
    False: dedup_pb2.FULL_TOPIC_ACTION_REFUSE,
    None: dedup_pb2.FULL_TOPIC_ACTION_UNSPECIFIED,
}

_ON_CONFLICT: Final = {
    True: dedup_pb2.CONFLICT_ACTION_REFUSE,
    False: dedup_pb2.CONFLICT_ACTION_REPORT,
    None: dedup_pb2.CONFLICT_ACTION_UNSPECIFIED,
}

_POLICY_FIELDS: Final = {
    "producer_inactivity_timeout_s": "producer_inactivity_timeout",
    "evicts_when_full": "on_full",
    "snapshot_interval_s": "snapshot_interval",
    "refuses_conflicts": "on_conflict",
}
"""The values whose fields on the wire have other names."""


def _policy(wire: Any, given: set[str] | None = None) -> PolicyValues:
    """The values of a policy; only those of the fields `given`, if it is."""
    values: dict[str, Any] = {}
    for field in fields(PolicyValues):
        name = _POLICY_FIELDS.get(field.name, field.name)
        if given is not None and name not in given:
            continue
        value = getattr(wire, name)
        if name == "on_full":
            value = value == dedup_pb2.FULL_TOPIC_ACTION_EVICT
        elif name == "on_conflict":
            value = value == dedup_pb2.CONFLICT_ACTION_REFUSE
        elif isinstance(value, Duration):
            value = value.seconds
        values[field.name] = value
    return PolicyValues(**values)


def _policy_to_wire(values: PolicyValues) -> dedup_pb2.PolicyValues:
    instance("values", values, PolicyValues)

    def switch(name: str) -> bool | None:
        value = getattr(values, name)
        return None if value is None else flag(name, value)

    def count(name: str) -> int | None:
        value = getattr(values, name)
        return None if value is None else whole(name, value, 0, UINT32_MAX)

    def span(name: str) -> Duration | None:
        seconds = count(name)
        return None if seconds is None else duration(seconds * 1000)

    return dedup_pb2.PolicyValues(
        enabled=switch("enabled"),
        producer_inactivity_timeout=span("producer_inactivity_timeout_s"),
        max_producers=count("max_producers"),
        on_full=_ON_FULL[switch("evicts_when_full")],
        snapshot_entries=count("snapshot_entries"),
        snapshot_interval=span("snapshot_interval_s"),
        on_conflict=_ON_CONFLICT[switch("refuses_conflicts")],
    )
