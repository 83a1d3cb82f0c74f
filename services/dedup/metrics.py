"""The dedup service's metrics; seqgate/telemetry/metrics.py describes each.

The state of topics is in Redis, which all replicas share: each replica surveys it periodically, and
reports the whole.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Final, NamedTuple

import structlog

from seqgate.services.dedup.core.policy import EffectivePolicy
from seqgate.services.dedup.ports import PolicySource, StateStore, Summary
from seqgate.services.deduplication import Judged, Verdict
from seqgate.services.errors import DomainError
from seqgate.services.runtime.metrics import OFF, Metrics, Read, Values, summed
from seqgate.telemetry import metrics as told
from seqgate.types import TopicName

log = structlog.get_logger()

_OTHERS: Final = tuple(verdict for verdict in Verdict if verdict is not Verdict.NEW)


class DedupMetrics:
    """The counters and histograms."""

    def __init__(self, metrics: Metrics = OFF) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.forgotten: Counter[str] = Counter()
        self.snapshots: Counter[str] = Counter()
        self.restores: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.store_duration = metrics.histogram(told.STATE_DURATION)
        self.snapshot_duration = metrics.histogram(told.SNAPSHOT_DURATION)
        self.verdicts: dict[str, dict[Verdict, int]] = {told.OTHER: dict.fromkeys(Verdict, 0)}
        self._label = metrics.topics.of
        self._tell(metrics)

    def called(self, operation: str, outcome: object) -> None:
        name = outcome if isinstance(outcome, str) else type(outcome).__name__.lower()
        self.calls[operation, name] += 1

    def judged(self, topic: TopicName, judged: Judged) -> None:
        """Count verdicts. Most are NEW, so these are counted first; often there are no others."""
        label = self._label(topic)
        counts = self.verdicts.get(label)
        if counts is None:
            counts = self.verdicts[label] = dict.fromkeys(Verdict, 0)
        for each in judged.producers:
            _count(each.verdicts, counts)

    @contextmanager
    def unforeseen(self, work: str, of: object = "") -> Iterator[None]:
        """Contain an unexpected exception in one topic or policy: count and log it."""
        try:
            yield
        except DomainError:
            raise
        except Exception:
            self.failures[work] += 1
            log.exception("failed", work=work, of=str(of))

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
            (told.DEDUP_FAILURES, self.failures, told.WORK),
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


UNSAVED_MAX: Final = 10_000
"""The most topics without a snapshot whose age is tracked, about 3 MB; others are reported as 0."""


class Seen(NamedTuple):
    """A survey's result for the topics of one label: totals, or the largest value of any topic."""

    topics: int
    producers: int
    producers_max: int
    share: float
    replay_entries: int
    snapshot_age_s: float

    def with_(self, other: "Seen") -> "Seen":
        return Seen(
            self.topics + other.topics,
            self.producers + other.producers,
            self.producers_max + other.producers_max,
            max(self.share, other.share),
            max(self.replay_entries, other.replay_entries),
            max(self.snapshot_age_s, other.snapshot_age_s),
        )


@dataclass(slots=True)
class Survey:
    """Surveys the state of all topics periodically.

    Attributes:
        seen: the result of the last survey, by label.
    """

    store: StateStore
    policies: PolicySource
    metrics: Metrics
    seen: dict[str, Seen] = field(default_factory=dict)
    _unsaved_since_ms: dict[TopicName, int] = field(default_factory=dict)

    def tell(self) -> None:
        metrics = self.metrics
        metrics.tell(told.POLICY_FAILING, lambda: [((), int(bool(self.policies.error)))])
        metrics.tell(
            told.DEDUP_TOPICS, lambda: [((), sum(each.topics for each in self.seen.values()))]
        )
        for metric, name in (
            (told.TRACKED, "producers"),
            (told.TRACKED_MAX, "producers_max"),
            (told.TRACKED_SHARE, "share"),
            (told.SNAPSHOT_AGE, "snapshot_age_s"),
            (told.REPLAY_DISTANCE, "replay_entries"),
        ):
            metrics.tell(metric, self._each(name))

    def _each(self, name: str) -> Read:
        return lambda: summed((label, getattr(seen, name)) for label, seen in self.seen.items())

    async def look(self) -> None:
        """Survey once.

        Raises:
            StateUnavailable, CursorsUnavailable: the previous result remains.
        """
        now_ms = await self.store.now_ms()
        seen: dict[str, Seen] = {}
        since_ms: dict[TopicName, int] = {}
        async for topic in self.store.topics():
            summary = await self.store.summary(topic)
            if summary is not None:
                policy = await self.policies.effective(topic)
                label = self.metrics.topics.of(topic)
                found = self._seen(topic, policy, summary, now_ms, since_ms)
                seen[label] = seen[label].with_(found) if label in seen else found
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
            began_ms = summary.saved.taken_ms
            if not began_ms:
                began_ms = self._unsaved_since_ms.get(topic, now_ms)
                if len(since_ms) < UNSAVED_MAX:
                    since_ms[topic] = began_ms
            age_s = max(0, now_ms - began_ms) / 1000
        most = policy.max_producers.value
        return Seen(
            1,
            summary.producers,
            most,
            summary.producers / max(1, most),
            max(0, summary.unsaved),
            age_s,
        )
