"""The filter service's metrics; seqgate/telemetry/metrics.py describes each."""

from collections import Counter
from collections.abc import Callable, Sequence

from seqgate.services.filter.core.chain import Decision
from seqgate.services.filter.core.program import Failure
from seqgate.services.runtime.metrics import OFF, Metrics
from seqgate.telemetry import metrics as told


class FilterMetrics:
    """The counters, updated once per batch, and the histograms."""

    def __init__(self, metrics: Metrics = OFF) -> None:
        self.compilations: Counter[str] = Counter()
        self.batch_entries = metrics.histogram(told.BATCH_ENTRIES)
        self.batch_duration = metrics.histogram(told.BATCH_DURATION)
        self._verdicts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        for metric, counts, attribute in (
            (told.FILTER_VERDICTS, self._verdicts, told.FILTER_VERDICT),
            (told.FILTER_FAILURES, self._failures, told.FAILURE),
            (told.DECISIONS, self._sources, told.SOURCE),
            (told.COMPILATIONS, self.compilations, told.COMPILATION),
        ):
            _tell(metrics, metric, counts, attribute)

    def judged(
        self, decisions: Sequence[Decision], which: Sequence[int], *, evaluated: int, took_s: float
    ) -> None:
        """Count a judged batch. `which` has the index in `decisions` for each entry; `evaluated`
        entries had no cached decision."""
        for place, count in Counter(which).items():
            result = decisions[place].result
            if isinstance(result, Failure):
                self._verdicts["FAILED"] += count
                self._failures[result.reason.name] += count
            else:
                self._verdicts[result.name] += count
        self._sources["evaluated"] += evaluated
        # A batch may have metadata that no entry refers to.
        self._sources["remembered"] += max(0, len(which) - evaluated)
        self.batch_entries(len(which))
        self.batch_duration(took_s)


def _tell(
    metrics: Metrics, metric: told.Metric, counts: Counter[str], attribute: told.Attribute
) -> None:
    metrics.tell(metric, lambda: [((value,), counts[value]) for value in attribute.values])


def tell_caches(
    metrics: Metrics,
    kept: Callable[[], dict[str, tuple[int, int]]],
    allowed: dict[str, tuple[int, int]],
) -> None:
    """Register the number of items, the bytes, and the byte limit of each cache."""
    metrics.tell(told.CACHED, lambda: [((name,), count) for name, (count, _) in kept().items()])
    metrics.tell(told.CACHED_SIZE, lambda: [((name,), size) for name, (_, size) in kept().items()])
    metrics.tell(
        told.CACHED_MAX, lambda: [((name,), count) for name, (count, _) in allowed.items()]
    )
    metrics.tell(
        told.CACHED_SIZE_MAX, lambda: [((name,), size) for name, (_, size) in allowed.items()]
    )
