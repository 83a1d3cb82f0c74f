"""The ledger's metrics; seqgate/telemetry/metrics.py describes each."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from seqgate.services.ledger.core.content import Comparison
from seqgate.services.ledger.core.entry import Entry
from seqgate.services.ledger.core.receipt import Status
from seqgate.services.runtime.metrics import OFF, Metrics, Read, Values, summed
from seqgate.telemetry import metrics as told
from seqgate.types import TopicName

STORED: Final = "stored"
FAILED: Final = "failed"


class TopicCounts:
    """The counts of the topics with one label.

    Attributes:
        stored: stored publications; the most frequent outcome has the fastest counter.
        receipts: the other outcomes.
        repeated: messages sent again, by how they compare with what is stored.
        appended_entries, appended_messages, appended_bytes: stored so far.
        read_entries: sent to readers.
        failures: unexpected errors.
    """

    __slots__ = (
        "appended_bytes",
        "appended_entries",
        "appended_messages",
        "failures",
        "read_entries",
        "receipts",
        "repeated",
        "stored",
    )

    def __init__(self) -> None:
        self.stored = 0
        self.receipts = dict.fromkeys(Status, 0)
        self.repeated = dict.fromkeys(Comparison, 0)
        self.appended_entries = 0
        self.appended_messages = 0
        self.appended_bytes = 0
        self.read_entries = 0
        self.failures = 0

    def compared(self, found: Sequence[Sequence[Comparison | None]]) -> None:
        for content in Comparison:
            self.repeated[content] += sum([each.count(content) for each in found])


class LedgerMetrics:
    """The counters and histograms of topics."""

    def __init__(self, metrics: Metrics = OFF) -> None:
        self.is_on = metrics.is_on
        self.trimmed_entries = 0
        self.replayed_entries = 0
        self.recoveries: Counter[str] = Counter()
        self.append_duration = metrics.histogram(told.APPEND_DURATION)
        self.judge_duration = metrics.histogram(told.JUDGE_DURATION)
        self.group_entries = metrics.histogram(told.GROUP_ENTRIES)
        self.group_size = metrics.histogram(told.GROUP_SIZE)
        self.recovery_duration = metrics.histogram(told.RECOVERY_DURATION)
        self.label = metrics.topics.of
        self._counts: dict[str, TopicCounts] = {}
        self._tell(metrics)

    def of(self, topic: TopicName) -> TopicCounts:
        label = self.label(topic)
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = TopicCounts()
        return counts

    def appended(self, counts: TopicCounts, entries: Sequence[Entry], took_s: float) -> None:
        counts.appended_entries += len(entries)
        if not self.is_on:
            return
        size_bytes = sum(entry.size_bytes for entry in entries)
        counts.appended_messages += sum(entry.message_count for entry in entries)
        counts.appended_bytes += size_bytes
        self.append_duration(took_s, STORED)
        self.group_entries(len(entries))
        self.group_size(size_bytes)

    def _tell(self, metrics: Metrics) -> None:
        self._counts[told.OTHER] = TopicCounts()
        metrics.tell(told.RECEIPTS, self._receipts)
        metrics.tell(told.REPEATED_MESSAGES, self._repeated)
        metrics.tell(told.APPENDED_ENTRIES, lambda: self._each("appended_entries"))
        metrics.tell(told.APPENDED_MESSAGES, lambda: self._each("appended_messages"))
        metrics.tell(told.APPENDED_SIZE, lambda: self._each("appended_bytes"))
        metrics.tell(told.READ_ENTRIES, lambda: self._each("read_entries"))
        metrics.tell(told.TOPIC_FAILURES, lambda: self._each("failures"))
        metrics.tell(told.TRIMMED_ENTRIES, lambda: [((), self.trimmed_entries)])
        metrics.tell(told.REPLAYED, lambda: [((), self.replayed_entries)])
        metrics.tell(
            told.RECOVERIES,
            lambda: [((cause,), self.recoveries[cause]) for cause in told.CAUSE.values],
        )

    def _each(self, name: str) -> Iterable[tuple[Values, float]]:
        return [((label,), getattr(each, name)) for label, each in self._counts.items()]

    def _receipts(self) -> Iterable[tuple[Values, float]]:
        return [
            ((label, status.name), each.stored if status is Status.STORED else count)
            for label, each in self._counts.items()
            for status, count in each.receipts.items()
        ]

    def _repeated(self) -> Iterable[tuple[Values, float]]:
        return [
            ((label, content.name.lower()), count)
            for label, each in self._counts.items()
            for content, count in each.repeated.items()
        ]


class Recovery:
    """The duration and cause of a writer's alignment; the first cause of one alignment counts."""

    def __init__(self, metrics: LedgerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._began_s: float | None = None
        self._cause = ""

    def record(self, cause: str, *, is_aligning: bool) -> None:
        """Record whether the writer aligns after an event, and the event as a possible cause."""
        if is_aligning:
            if self._began_s is None:
                self._began_s, self._cause = self._clock(), cause
                self._metrics.recoveries[cause] += 1
        elif self._began_s is not None:
            self._metrics.recovery_duration(self._clock() - self._began_s, self._cause)
            self._began_s = None


class Written(Protocol):
    """What the metrics read of a LiveTopic."""

    topic: TopicName

    @property
    def state(self) -> str: ...

    @property
    def producers(self) -> Sequence[str]: ...

    @property
    def unanswered_messages(self) -> int: ...

    @property
    def entries_to_replay(self) -> int: ...


def register_topics(
    metrics: Metrics, topics: Callable[[], Sequence[Written]], *, producers_max: int
) -> None:

    def each(value: Callable[[Written], float]) -> Read:
        return lambda: summed((metrics.topics.of(one.topic), value(one)) for one in topics())

    def states() -> Iterable[tuple[Values, float]]:
        found = Counter(one.state for one in topics())
        return [((state,), found[state]) for state in told.TOPIC_STATE.values]

    metrics.tell(told.TOPICS, states)
    metrics.tell(told.PRODUCERS, each(lambda one: len(one.producers)))
    metrics.tell(told.UNANSWERED, each(lambda one: one.unanswered_messages))
    metrics.tell(told.LACKING, each(lambda one: one.entries_to_replay))
    metrics.tell(told.PRODUCERS_MAX, lambda: [((), producers_max)])
