"""What a service says of itself in numbers: seqgate/telemetry/metrics.py lists all of it.

    plain numbers in the shells ──read, in the event loop──▶ Readings ──▶ observable instruments ──┐
    durations, sizes of groups  ──recorded as they come──▶ histograms ─────────────────────────────┤
                                                               OTLP, GET /metrics ◀────────────────┘

What is counted for each message is a plain number of whoever counts it, and is read when somebody
wants to know. Exporters and scrapes have threads of their own: whichever comes asks the event loop
for one reading of everything, so that nobody looks at what is just being changed. A reading that
fails leaves out what it could not read. Histograms are told once for a call, a group or a batch.

Without METRICS in OTEL_* and without `metrics_listen` there is no provider and no thread, and what
is recorded goes nowhere.
"""

import asyncio
import operator
import os
import resource
import socketserver
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from seqgate.services.errors import DomainError
from seqgate.services.runtime.config import ServiceConfig
from seqgate.services.runtime.globs import matches
from seqgate.services.runtime.tasks import end
from seqgate.telemetry.metrics import (
    CPU_TIME,
    LOOP_LAG,
    MEMORY,
    OPEN_FILES,
    OPEN_FILES_MAX,
    OTHER,
    TOPICS_MAX,
    UPTIME,
    Kind,
    Metric,
)
from seqgate.telemetry.setup import CONSOLE, NONE, exporter_asked_for

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader

log = structlog.get_logger()

READING_S: Final = 0.2
"""For how long a reading counts: one collection asks for each metric by itself."""

READING_TIMEOUT_S: Final = 5.0
"""How long a thread waits for the event loop; then it has the reading before."""

FLUSH_TIMEOUT_S: Final = 5.0
"""How long the last export may take when the process ends."""

SCRAPE_TIMEOUT_S: Final = 10.0
"""How long a client of /metrics may be silent."""

TICK_S: Final = 1.0
"""How often it is looked how late the event loop is."""

SURVEY_SHARE: Final = 20
"""A survey rests for so many times as long as the last one took."""

LABELS_MAX: Final = 10_000
"""Of how many topics it is remembered how they are told."""

Values = tuple[str, ...]
"""Those of a metric's attributes, in their order; of the last ones, which are not said, none."""

Read = Callable[[], Iterable[tuple[Values, float]]]
"""What is told of a metric now: each combination of attributes once. Runs in the event loop, and
does not wait."""

Recorder = Callable[..., None]
"""Tells a histogram a value, with the values of its attributes."""


class TopicLabels:
    """Which topics are told apart."""

    def __init__(self, patterns: Sequence[str] = (), topics_max: int = TOPICS_MAX) -> None:
        """
        Args:
            patterns: tenant/namespace/name with * and ?, which stop at a slash.
            topics_max: how many are told apart; the first ones that come.
        """
        self._patterns = [pattern.split("/") for pattern in patterns]
        self._topics_max = topics_max
        self._told: set[str] = set()
        self._labels: dict[str, str] = {}

    def of(self, topic: object) -> str:
        """A topic's label: its name, or OTHER."""
        if not self._patterns:
            return OTHER
        name = str(topic)
        label = self._labels.get(name)
        if label is None:
            if len(self._labels) >= LABELS_MAX:
                self._labels.clear()
            label = self._labels[name] = self._label(name)
        return label

    def _label(self, name: str) -> str:
        parts = name.split("/")
        if name in self._told:
            return name
        if not any(
            len(pattern) == len(parts) and all(map(matches, pattern, parts))
            for pattern in self._patterns
        ):
            return OTHER
        if len(self._told) >= self._topics_max:
            return OTHER
        self._told.add(name)
        if len(self._told) == self._topics_max:
            log.warning(
                "topic limit of metrics reached, further topics count as _other",
                topics_max=self._topics_max,
            )
        return name


class Readings:
    """The newest reading of everything, for whatever thread asks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reads: list[tuple[Metric, Read]] = []
        self._found: Mapping[str, Sequence[Observation]] = {}
        self._read_at_s = -READING_S
        self._lock = threading.Lock()
        self._failing: set[str] = set()

    def add(self, metric: Metric, read: Read) -> None:
        """Read a metric so."""
        self._reads.append((metric, read))

    def age(self) -> None:
        """Whoever asks next gets a new reading."""
        self._read_at_s = -READING_S

    def of(self, metric: Metric) -> Sequence[Observation]:
        """What is told of a metric. Not to be called in the event loop."""
        with self._lock:
            if time.monotonic() - self._read_at_s >= READING_S:
                self._refresh()
            return self._found.get(metric.name, ())

    def _refresh(self) -> None:
        done: Future[Mapping[str, Sequence[Observation]]] = Future()
        try:
            self._loop.call_soon_threadsafe(lambda: done.set_result(self.read()))
            self._found = done.result(READING_TIMEOUT_S)
        except (TimeoutError, RuntimeError) as error:  # it is busy, or closed
            log.warning("metrics not refreshed, serving the previous values", error=repr(error))
        self._read_at_s = time.monotonic()

    def read(self) -> Mapping[str, Sequence[Observation]]:
        """Read everything. Runs in the event loop."""
        found: dict[str, list[Observation]] = {}
        for metric, read in self._reads:
            names = [each.name for each in metric.attributes]
            try:
                observed = [
                    Observation(value, dict(zip(names, values, strict=False)))
                    for values, value in read()
                ]
            except Exception:
                if metric.name not in self._failing:  # once: it will fail each time
                    log.exception("metric failed", metric=metric.name)
                self._failing.add(metric.name)
                continue
            self._failing.discard(metric.name)
            found.setdefault(metric.name, []).extend(observed)
        return found


class Metrics:
    """The instruments of a service.

    Attributes:
        topics: which topics are told apart.
        is_on: whether anybody is told.
    """

    def __init__(
        self,
        meter: Meter | None = None,
        readings: Readings | None = None,
        topics: TopicLabels | None = None,
    ) -> None:
        self.topics = topics or TopicLabels()
        self._meter = meter
        self._readings = readings

    @property
    def is_on(self) -> bool:
        return self._meter is not None

    def tell(self, metric: Metric, read: Read) -> None:
        """Tell a metric by what `read` says when somebody asks."""
        if self._meter is None or self._readings is None:
            return
        make: Callable[..., Any] = {
            Kind.COUNTER: self._meter.create_observable_counter,
            Kind.UP_DOWN: self._meter.create_observable_up_down_counter,
            Kind.GAUGE: self._meter.create_observable_gauge,
        }[metric.kind]
        readings = self._readings
        readings.add(metric, read)

        def callback(_: CallbackOptions) -> Iterable[Observation]:
            return readings.of(metric)

        make(metric.name, [callback], unit=metric.unit, description=metric.description)

    def histogram(self, metric: Metric) -> Recorder:
        """How to record a value of a metric: itself, and the values of the attributes."""
        assert metric.kind is Kind.HISTOGRAM
        if self._meter is None:
            return nowhere
        histogram = self._meter.create_histogram(
            metric.name,
            unit=metric.unit,
            description=metric.description,
            explicit_bucket_boundaries_advisory=list(metric.bounds),
        )
        names = [each.name for each in metric.attributes]
        known: dict[Values, dict[str, str]] = {}

        def record(value: float, *values: str) -> None:
            attributes = known.get(values)
            if attributes is None:
                attributes = dict(zip(names, values, strict=False))
                known[values] = attributes
            histogram.record(value, attributes)

        return record


def nowhere(value: float, *values: str) -> None:
    """Nobody is told."""


OFF: Final = Metrics()
"""Nobody is told anything."""


@asynccontextmanager
async def telling(config: ServiceConfig) -> AsyncIterator[Metrics]:
    """The instruments of a service, for as long as the context lasts; on the way out, what is left
    is exported, for FLUSH_TIMEOUT_S at most.

    Raises:
        TelemetrySettingError: a variable asks for what there is not.
        OSError: nobody can listen at `metrics_listen`.
    """
    exporter = exporter_asked_for("METRICS")
    if exporter == NONE and not config.metrics_listen:
        yield OFF
        return
    from opentelemetry.sdk.metrics import MeterProvider

    from seqgate.telemetry.exporting import resource_of

    resource_ = resource_of(config.service, version("seqgate"))
    readings = Readings(asyncio.get_running_loop())
    readers: list[MetricReader] = []
    app = _app(readings, readers) if config.metrics_listen else None
    if exporter != NONE:
        readers.append(_pushing(exporter))  # the last one: it begins at once
    provider = MeterProvider(readers, resource_, shutdown_on_exit=False)
    try:
        meter = provider.get_meter("seqgate", version("seqgate"))
        metrics = Metrics(meter, readings, TopicLabels(config.metrics_topics))
        _tell_process(metrics)
        with _scraped(config.metrics_listen, app):
            ticking = asyncio.create_task(_tick(metrics.histogram(LOOP_LAG)))
            try:
                yield metrics
            finally:
                await end(ticking)
    finally:
        await asyncio.to_thread(_flush, provider)


def _pushing(exporter: str) -> "MetricReader":
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import (
        ConsoleMetricExporter,
        PeriodicExportingMetricReader,
    )

    return PeriodicExportingMetricReader(
        ConsoleMetricExporter() if exporter == CONSOLE else OTLPMetricExporter()
    )


def _flush(provider: "MeterProvider") -> None:
    try:
        provider.shutdown(timeout_millis=FLUSH_TIMEOUT_S * 1000)
    except Exception as error:  # whatever it is, the process ends
        log.warning("final metrics export failed", error=repr(error))


# ---- what is scraped


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """A scrape is nothing to be told."""


def _app(readings: Readings, readers: "list[MetricReader]") -> Any:
    """What answers GET /metrics; adds the reader that it needs."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry, make_wsgi_app

    class OneAtATime(CollectorRegistry):
        """Two scrapes at a time would take each other's metrics out of the reader. Each has a
        reading of its own."""

        def __init__(self) -> None:
            super().__init__()
            self._scrapes = threading.Lock()

        def collect(self) -> Iterator[Any]:
            with self._scrapes:
                readings.age()
                return iter(list(super().collect()))

    registry = OneAtATime()
    readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=registry))
    return make_wsgi_app(registry)


@contextmanager
def _scraped(listen: str, app: Any) -> Iterator[None]:
    """Serve an app in threads. Nothing without an address."""
    if not listen:
        yield
        return
    host, _, port = listen.rpartition(":")
    server = _Server((host.strip("[]"), int(port)), _Handler)
    server.set_app(app)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    log.info("serving metrics", address=listen, port=server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ---- the process


def _tell_process(metrics: Metrics) -> None:
    began_s = time.monotonic()
    metrics.tell(CPU_TIME, _cpu_time)
    metrics.tell(MEMORY, lambda: [((), _memory_bytes())])
    metrics.tell(OPEN_FILES, lambda: [((), len(os.listdir("/dev/fd")))])  # noqa: PTH208
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    metrics.tell(OPEN_FILES_MAX, lambda: [((), limit)])
    metrics.tell(UPTIME, lambda: [((), time.monotonic() - began_s)])


def _cpu_time() -> Iterable[tuple[Values, float]]:
    times = os.times()
    return [(("user",), times.user), (("system",), times.system)]


def _memory_bytes() -> int:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:  # no Linux: at most so much
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(pages) * resource.getpagesize()


async def _tick(record: Recorder) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + TICK_S
        await asyncio.sleep(TICK_S)
        record(max(0.0, loop.time() - due_s))


def summed(
    values: Iterable[tuple[str, float]], combine: Callable[[float, float], float] = operator.add
) -> Iterable[tuple[Values, float]]:
    """What topics have together, by their label; at least 0 of OTHER, which is always told."""
    found: dict[str, float] = {OTHER: 0}
    for label, value in values:
        found[label] = combine(found[label], value) if label in found else value
    return [((label,), value) for label, value in found.items()]


SURVEY_REST_MAX_S: Final = 60.0
"""How long the longest rest is, in seconds."""


def survey_rest_s(took_s: float, interval_s: float) -> float:
    """How long to rest after a look: longer after a long one, but what is told grows no older than
    by SURVEY_REST_MAX_S, or an interval that is longer still."""
    return max(interval_s, min(took_s * SURVEY_SHARE, SURVEY_REST_MAX_S))


async def survey_forever(look: Callable[[], Awaitable[None]], interval_s: float) -> None:
    """Look something up for metrics, again and again. A look that fails is the next one's matter:
    nothing depends on it."""
    while True:
        began_s, rest_s = time.monotonic(), interval_s
        try:
            await look()
            rest_s = survey_rest_s(time.monotonic() - began_s, interval_s)
        except DomainError as error:
            log.warning("metrics survey failed", reason=error.reason, error=error.message)
        except Exception:
            log.exception("metrics survey failed")
        await asyncio.sleep(rest_s)


def tell_store(
    metrics: Metrics, size: Metric, free: Metric, path: Path, size_max_bytes: int
) -> None:
    """Tell how large a SQLite database is, and may still grow."""
    metrics.tell(size, lambda: [((), store_size(path))])
    metrics.tell(free, lambda: [((), store_free(path, size_max_bytes))])


def store_size(path: Path) -> int:
    """How large a SQLite database is, with its write-ahead log, in bytes."""
    size = 0
    for each in (path, path.with_name(f"{path.name}-wal")):
        try:
            size += each.stat().st_size
        except OSError:
            continue
    return size


def store_free(path: Path, size_max_bytes: int) -> int:
    """How much it may still grow, in bytes; `size_max_bytes` 0: no limit but the disk."""
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    if not size_max_bytes:
        return free
    return max(0, min(free, size_max_bytes - store_size(path)))
