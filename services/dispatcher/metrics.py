"""The dispatcher's metrics; seqgate/telemetry/metrics.py describes each.

A subscription counts from 0 each time this instance takes it, so counters include the counts of
subscriptions that have ended: they never fall.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from seqgate.services.dispatcher.auditing.publishing import Auditing
from seqgate.services.dispatcher.core.history import Histories
from seqgate.services.dispatcher.core.lane import Consumer, Reason
from seqgate.services.dispatcher.core.positions import Run
from seqgate.services.dispatcher.core.subscription import Subscription
from seqgate.services.dispatcher.filtering.estimate import after, size
from seqgate.services.dispatcher.filtering.tallies import Row
from seqgate.services.dispatcher.ports import Log
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.errors import DomainError
from seqgate.services.runtime.metrics import OFF, Metrics, Read, Values, summed
from seqgate.telemetry import metrics as told
from seqgate.types import TopicName

log = structlog.get_logger()

REASONS: Final = tuple(reason for reason in Reason if reason is not Reason.READY)

REDELIVERIES: Final = {
    "negative_acknowledgements": "negative_acknowledgement",
    "timed_out": "timed_out",
    "lost_consumers": "lost_consumer",
    "returned": "returned",
    "drained": "drained",
}
"""A machine's totals that count redeliveries, and the cause that each is reported under."""

TOTALS: Final = {
    told.DELIVERED_ENTRIES: "delivered_entries",
    told.DELIVERED_MESSAGES: "delivered_messages",
    told.ACKNOWLEDGED: "acknowledged_entries",
    told.DEAD_LETTERS: "dead_lettered",
    told.STALE: "stale",
    told.SCANNED: "scanned_entries",
    told.PASSED: "passed_entries",
}


class DispatcherMetrics:
    """The metrics of all subscriptions, current and past."""

    def __init__(self, metrics: Metrics = OFF, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.answer_duration = metrics.histogram(told.ANSWER_DURATION)
        self.handover_duration = metrics.histogram(told.HANDOVER_DURATION)
        self._label = metrics.topics.of
        self._now_ms = now_ms
        self._lives: list[Live] = []
        self._past: dict[str, Counter[str]] = {told.OTHER: Counter()}
        self._past_filtered: Counter[tuple[str, str, str]] = Counter()
        self._past_failures: Counter[tuple[str, str]] = Counter()
        self._past_lookups: Counter[str] = Counter()
        self._past_surprises: Counter[str] = Counter()
        self.lags: dict[Live, int] = {}
        self._metrics = metrics
        self._tell_counts(metrics)
        self._tell_filters(metrics)
        self._tell_state(metrics)

    # ---- subscriptions

    def begin(self, live: Live) -> None:
        """Start reporting a subscription."""
        self._lives.append(live)

    def end(self, live: Live) -> None:
        """Stop reporting a subscription, which counts nothing from now on. Its counts are kept."""
        if live not in self._lives:
            return
        self._lives.remove(live)
        self.lags.pop(live, None)
        self._past.setdefault(self._label(live.topic), Counter()).update(live.totals)
        self._past_filtered.update(self._filtered_of(live))
        self._past_failures.update(_failures_of(live))
        self._past_lookups.update(live.filtering.lookups)
        self._past_surprises[self._label(live.topic)] += live.failures

    @property
    def working(self) -> list[Live]:
        """The subscriptions that have not stopped."""
        return [live for live in self._lives if live.stopped is None]

    # ---- counters

    def _tell_counts(self, metrics: Metrics) -> None:
        for metric, name in TOTALS.items():
            metrics.tell(metric, self._total(name))
        metrics.tell(told.REDELIVERIES, self._redeliveries)
        metrics.tell(told.SUBSCRIPTION_FAILURES, self._surprises)

    def _totals(self) -> dict[str, Counter[str]]:
        totals = {label: Counter(counts) for label, counts in self._past.items()}
        for live in self._lives:
            totals.setdefault(self._label(live.topic), Counter()).update(live.totals)
        return totals

    def _total(self, name: str) -> Read:
        return lambda: [((label,), counts[name]) for label, counts in self._totals().items()]

    def _surprises(self) -> Iterable[tuple[Values, float]]:
        found = Counter(dict.fromkeys(self._past, 0))
        found.update(self._past_surprises)
        for live in self._lives:
            found[self._label(live.topic)] += live.failures
        return [((label,), count) for label, count in found.items()]

    def _redeliveries(self) -> Iterable[tuple[Values, float]]:
        return [
            ((label, cause), counts[name])
            for label, counts in self._totals().items()
            for name, cause in REDELIVERIES.items()
        ]

    # ---- histories

    def tell_histories(self, histories: Histories, auditing: Auditing | None) -> None:
        """Report histories, and what becomes of the events for audit topics."""
        counts = Counter(published=0, dropped=0) if auditing is None else auditing.counts
        self._metrics.tell(told.HISTORY_SIZE, lambda: [((), histories.size_bytes)])
        self._metrics.tell(told.HISTORY_MAX, lambda: [((), histories.bytes_max)])
        self._metrics.tell(
            told.AUDIT_EVENTS,
            lambda: [((each,), counts[each]) for each in told.AUDIT_OUTCOME.values],
        )

    # ---- filters

    def _tell_filters(self, metrics: Metrics) -> None:
        metrics.tell(told.FILTERED, self._filtered)
        metrics.tell(told.NO_VERDICTS, self._failures)
        metrics.tell(told.LOOKUPS, self._lookups)
        metrics.tell(
            told.OUTAGES,
            lambda: [((), sum(live.filtering.outage is not None for live in self.working))],
        )

    def _filtered(self) -> Iterable[tuple[Values, float]]:
        found = Counter(self._past_filtered)
        for live in self._lives:
            found.update(self._filtered_of(live))
        return list(found.items())

    def _filtered_of(self, live: Live) -> Counter[tuple[str, str, str]]:
        label = self._label(live.topic)
        found: Counter[tuple[str, str, str]] = Counter()
        for mode, row in _rows(live):
            found[label, mode, "accepted"] += row.accepted.entries
            found[label, mode, "rejected"] += row.rejected.entries
            found[label, mode, "rescheduled"] += row.rescheduled.entries
            found[label, mode, "failed"] += row.failed_all.entries
        return found

    def _failures(self) -> Iterable[tuple[Values, float]]:
        found = Counter(self._past_failures)
        for live in self._lives:
            found.update(_failures_of(live))
        return list(found.items())

    def _lookups(self) -> Iterable[tuple[Values, float]]:
        found = Counter(self._past_lookups)
        for live in self._lives:
            found.update(live.filtering.lookups)
        return [((result,), found[result]) for result in told.LOOKUP.values]

    # ---- state

    def _tell_state(self, metrics: Metrics) -> None:
        metrics.tell(told.SUBSCRIPTIONS, self._subscriptions)
        metrics.tell(told.CONSUMERS, self._consumers)
        metrics.tell(told.KEYS, self._keys)
        metrics.tell(told.WITHHELD_AGE, self._withheld_ages)
        metrics.tell(told.WAITING_ENTRIES, self._waiting)
        metrics.tell(told.PERMITS, self._each(_permits))
        metrics.tell(told.UNACKED, self._each(lambda machine: machine.unacked))
        metrics.tell(told.PARKED, self._each(_parked))
        metrics.tell(told.PARKED_MAX, self._each(_parked_max))
        metrics.tell(told.LAGGING, self._each(lambda machine: machine.lagging))
        metrics.tell(
            told.LAG,
            lambda: summed((self._label(live.topic), lag) for live, lag in self.lags.items()),
        )
        metrics.tell(
            told.CACHE_SIZE, lambda: [((), sum(live.cache_bytes for live in self.working))]
        )
        metrics.tell(
            told.CACHE_MAX, lambda: [((), sum(live.cache_bytes_max for live in self.working))]
        )

    def _each(self, value: Callable[[Subscription], float]) -> Read:
        return lambda: summed(
            (self._label(live.topic), value(live.machine)) for live in self.working
        )

    def _by(
        self, names: Sequence[str], counted: Callable[[Subscription], Counter[str]]
    ) -> Iterable[tuple[Values, float]]:
        found: dict[str, Counter[str]] = {told.OTHER: Counter()}
        for live in self.working:
            found.setdefault(self._label(live.topic), Counter()).update(counted(live.machine))
        return [((label, name), counts[name]) for label, counts in found.items() for name in names]

    def _subscriptions(self) -> Iterable[tuple[Values, float]]:
        return self._by(told.SUBSCRIPTION_STATE.values, lambda machine: Counter([_state(machine)]))

    def _consumers(self) -> Iterable[tuple[Values, float]]:
        return self._by(
            told.CONSUMER_STATE.values,
            lambda machine: Counter(map(_consumer_state, machine.consumers.values())),
        )

    def _keys(self) -> Iterable[tuple[Values, float]]:
        return self._by(told.KEY_REASON.values, _keys_of)

    def _waiting(self) -> Iterable[tuple[Values, float]]:
        return self._by(told.WAITING.values, _waiting_of)

    def _withheld_ages(self) -> Iterable[tuple[Values, float]]:
        now_ms = self._now_ms()
        ages = {(told.OTHER, reason): 0.0 for reason in REASONS}
        for live in self.working:
            label = self._label(live.topic)
            for reason in REASONS:
                lane = next(iter(live.machine.withheld[reason]), None)  # the first is the oldest
                age_s = 0.0 if lane is None else max(0, now_ms - lane.since_ms) / 1000
                ages[label, reason] = max(ages.get((label, reason), 0.0), age_s)
        return [((label, reason.name), age_s) for (label, reason), age_s in ages.items()]


def _state(machine: Subscription) -> str:
    if not machine.consumers:
        return "idle"
    if machine.is_waiting_for_filters:
        return "waiting_for_filters"
    return "unacked_limit" if machine.is_blocked else "delivering"


def _consumer_state(consumer: Consumer) -> str:
    if consumer.is_blocked:
        return "unacked_limit"
    return "ready" if consumer.permits > 0 else "no_permits"


def _keys_of(machine: Subscription) -> Counter[str]:
    counts = Counter({reason.name: len(machine.withheld[reason]) for reason in REASONS})
    counts["READY"] = len(machine.lanes) - counts.total()
    return counts


def _waiting_of(machine: Subscription) -> Counter[str]:
    return Counter(
        delayed=machine.delayed,
        unjudged=machine.unjudged,
        filter_failed=machine.filter_failed,
        rescheduled=machine.rescheduled,
    )


def _permits(machine: Subscription) -> int:
    return sum(max(0, consumer.permits) for consumer in machine.consumers.values())


def _parked(machine: Subscription) -> int:
    return sum(queue.parked for queue in machine.parking.queues)


def _parked_max(machine: Subscription) -> int:
    return sum(queue.parked_max for queue in machine.parking.queues)


def _rows(live: Live) -> Iterable[tuple[str, Row]]:
    """The counts of each mode, over all its filters."""
    return [
        ("shadow" if row.is_shadow else "applied", row)
        for row in live.filtering.tallies.rows()
        if not row.name
    ]


def _failures_of(live: Live) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for mode, row in _rows(live):
        for reason, tally in row.failed.items():
            found[mode, reason] += tally.entries
    return found


class LagSurvey:
    """Measures how far subscriptions lag behind the ends of their logs."""

    def __init__(self, metrics: DispatcherMetrics, ledger: Log) -> None:
        self._metrics = metrics
        self._log = ledger

    async def look(self) -> None:
        """Measure once. While a log is unavailable, its subscriptions keep their last values."""
        logs: dict[TopicName, Sequence[Run]] = {}
        for live in self._metrics.working:
            try:
                if live.topic not in logs:
                    logs[live.topic] = await self._log.ledgers(live.topic)
            except DomainError as error:
                log.debug("end of log unknown", topic=str(live.topic), why=error.message)
                continue
            if live in self._metrics.working:
                mark_delete = live.machine.acknowledged.mark_delete
                self._metrics.lags[live] = size(after(logs[live.topic], mark_delete))
