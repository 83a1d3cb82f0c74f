"""What the dedup service says of itself in numbers; seqgate/telemetry/metrics.py says what each
means.

What is remembered of topics lies in Redis, which all replicas share: a survey looks through it now
and then, and each replica tells all of it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final, NamedTuple

import structlog

from seqgate.telemetry import metrics as told
from seqgate.types import TopicName
from services.dedup.core.policy import EffectivePolicy
from services.dedup.core.sequence import Verdict
from services.dedup.core.topic import Judged
from services.dedup.ports import PolicySource, StateStore, Summary
from services.runtime.metrics import OFF, Metrics, Read, Values, summed

log = structlog.get_logger()

_OTHERS: Final = tuple(verdict for verdict in Verdict if verdict is not Verdict.NEW)


class DedupMetrics:
    """What is counted, and the histograms that are told."""

    def __init__(self, metrics: Metrics = OFF) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.forgotten: Counter[str] = Counter()
        self.snapshots: Counter[str] = Counter()
        self.restores: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()
        self.store_duration = metrics.histogram(told.STATE_DURATION)
        self.snapshot_duration = metrics.histogram(told.SNAPSHOT_DURATION)
        self.verdicts: dict[str, dict[Verdict, int]] = {told.OTHER: dict.fromkeys(Verdict, 0)}
        self._label = metrics.topics.of
        self._tell(metrics)

    def called(self, operation: str, outcome: object) -> None:
        """A writer is told this."""
        name = outcome if isinstance(outcome, str) else type(outcome).__name__.lower()
        self.calls[operation, name] += 1

    def judged(self, topic: TopicName, judged: Judged) -> None:
        """Claims got verdicts. Most are new: these are counted first, and often there is no more
        to count."""
        label = self._label(topic)
        counts = self.verdicts.get(label)
        if counts is None:
            counts = self.verdicts[label] = dict.fromkeys(Verdict, 0)
        for each in judged.producers:
            _count(each.verdicts, counts)

    def _tell(self, metrics: Metrics) -> None:
        metrics.tell(told.VERDICTS, self._verdicts)
        metrics.tell(
            told.DEDUP_CALLS,
            lambda: [
                (which, self.calls[which])
                for which in product(told.OPERATION.values, told.CALL_OUTCOME.values)
            ],
        )
        for metric, counts, attribute in (
            (told.FORGOTTEN_PRODUCERS, self.forgotten, told.FORGOTTEN),
            (told.SNAPSHOTS, self.snapshots, told.SNAPSHOT_OUTCOME),
            (told.RESTORES, self.restores, told.RESTORE_OUTCOME),
            (told.LOADS, self.loads, told.LOAD_OUTCOME),
        ):
            metrics.tell(metric, _each(counts, attribute))

    def _verdicts(self) -> Iterable[tuple[Values, float]]:
        return [
            ((label, verdict.name), count)
            for label, counts in self.verdicts.items()
            for verdict, count in counts.items()
        ]


def _count(verdicts: Sequence[Verdict], counts: dict[Verdict, int]) -> None:
    left = len(verdicts)
    new = verdicts.count(Verdict.NEW)
    counts[Verdict.NEW] += new
    left -= new
    for verdict in _OTHERS:
        if not left:
            return
        found = verdicts.count(verdict)
        counts[verdict] += found
        left -= found


def _each(counts: Counter[str], attribute: told.Attribute) -> Read:
    return lambda: [((value,), counts[value]) for value in attribute.values]


class Seen(NamedTuple):
    """What a survey found of a topic."""

    label: str
    producers: int
    producers_max: int
    replay_entries: int
    snapshot_age_s: float


@dataclass(slots=True)
class Survey:
    """Looks through what is remembered of all topics, again and again.

    Attributes:
        seen: what the last look has found.
    """

    store: StateStore
    policies: PolicySource
    metrics: Metrics
    seen: list[Seen] = field(default_factory=list)
    _unsaved_since_ms: dict[TopicName, int] = field(default_factory=dict)

    def tell(self) -> None:
        """Tell what is found."""
        metrics = self.metrics
        metrics.tell(told.POLICY_FAILING, lambda: [((), int(bool(self.policies.error)))])
        metrics.tell(told.DEDUP_TOPICS, lambda: [((), len(self.seen))])
        metrics.tell(
            told.TRACKED, lambda: summed((each.label, each.producers) for each in self.seen)
        )
        metrics.tell(
            told.TRACKED_MAX, lambda: summed((each.label, each.producers_max) for each in self.seen)
        )
        metrics.tell(
            told.TRACKED_SHARE,
            lambda: summed(
                ((each.label, each.producers / max(1, each.producers_max)) for each in self.seen),
                max,
            ),
        )
        metrics.tell(
            told.SNAPSHOT_AGE,
            lambda: summed(((each.label, each.snapshot_age_s) for each in self.seen), max),
        )
        metrics.tell(
            told.REPLAY_DISTANCE,
            lambda: summed(((each.label, each.replay_entries) for each in self.seen), max),
        )

    async def look(self) -> None:
        """Look once.

        Raises:
            StateUnavailable, CursorsUnavailable: what was seen before stays.
        """
        now_ms = await self.store.now_ms()
        seen: list[Seen] = []
        since_ms: dict[TopicName, int] = {}
        async for topic in self.store.topics():
            summary = await self.store.summary(topic)
            if summary is not None:
                policy = await self.policies.effective(topic)
                seen.append(self._seen(topic, policy, summary, now_ms, since_ms))
        self.seen, self._unsaved_since_ms = seen, since_ms

    def _seen(
        self,
        topic: TopicName,
        policy: EffectivePolicy,
        summary: Summary,
        now_ms: int,
        since_ms: dict[TopicName, int],
    ) -> Seen:
        age_s = 0.0
        if summary.unsaved:
            since_ms[topic] = self._unsaved_since_ms.get(topic, now_ms)
            age_s = max(0, now_ms - (summary.saved.taken_ms or since_ms[topic])) / 1000
        return Seen(
            self.metrics.topics.of(topic),
            summary.producers,
            policy.max_producers.value,
            max(0, summary.unsaved),
            age_s,
        )
