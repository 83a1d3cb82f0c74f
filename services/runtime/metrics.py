"""A service's metrics; seqgate/telemetry/metrics.py lists them all.

    plain numbers in the shells ──read, in the event loop──▶ Readings ──▶ observable instruments ──┐
    durations, sizes of groups  ──recorded as they come──▶ histograms ─────────────────────────────┤
                                                               OTLP, GET /metrics ◀────────────────┘

Counts per message are plain numbers in the object that counts, and are read on export. Exporters
and scrapes run in threads of their own: each requests one reading of all metrics from the event
loop, so no thread sees a half-made change. A metric that fails is left out of the reading.
Histograms are recorded once per call, group or batch.

Without METRICS in OTEL_* and without `metrics_listen` there is no provider and no thread, and
recorded values are dropped.
"""

import asyncio
import operator
import os
import resource
import socketserver
import ssl
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
from contextlib import ExitStack, asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from seqgate.services.errors import DomainError
from seqgate.services.runtime.config import MetricsConfig, ServiceConfig
from seqgate.services.runtime.globs import matches
from seqgate.services.runtime.security import metrics_context
from seqgate.services.runtime.startup import listening
from seqgate.services.runtime.tasks import end
from seqgate.services.runtime.worker import METRICS, tell_supervisor
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
"""The age at which a reading is renewed, in seconds. One collection, which requests each metric
separately, shares a reading."""

READING_TIMEOUT_S: Final = 5.0
"""The time limit for a reading from the event loop, in seconds; then the previous one is used."""

FLUSH_TIMEOUT_S: Final = 5.0
"""The time limit of the last export when the process ends, in seconds."""

SCRAPE_TIMEOUT_S: Final = 10.0
"""The time for which a client of /metrics may be silent, in seconds."""

TICK_S: Final = 1.0
"""The interval between measurements of the event loop's lag, in seconds."""

SURVEY_SHARE: Final = 20
"""The pause after a survey is this many times its duration, within the bounds of survey_rest_s."""

LABELS_MAX: Final = 10_000
"""The most topics whose labels are cached."""

Values = tuple[str, ...]
"""The values of a metric's attributes, in order; trailing ones may be omitted."""

Read = Callable[[], Iterable[tuple[Values, float]]]
"""Returns a metric's values, one per combination of attributes. Must not block: runs in the event
loop."""

Recorder = Callable[..., None]
"""Records a value of a histogram with the values of its attributes."""


class TopicLabels:
    """The label of each topic: its name, or OTHER."""

    def __init__(self, patterns: Sequence[str] = (), topics_max: int = TOPICS_MAX) -> None:
        """
        Args:
            patterns: tenant/namespace/name with * and ?, which stop at a slash.
            topics_max: the most topics with a label of their own; first come, first served.
        """
        self._patterns = [pattern.split("/") for pattern in patterns]
        self._topics_max = topics_max
        self._told: set[str] = set()
        self._labels: dict[str, str] = {}

    def of(self, topic: object) -> str:
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
    """The newest reading of all metrics, for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reads: list[tuple[Metric, Read]] = []
        self._found: Mapping[str, Sequence[Observation]] = {}
        self._read_at_s = -READING_S
        self._lock = threading.Lock()
        self._failing: set[str] = set()

    def add(self, metric: Metric, read: Read) -> None:
        self._reads.append((metric, read))

    def age(self) -> None:
        """Make the next request renew the reading."""
        self._read_at_s = -READING_S

    def of(self, metric: Metric) -> Sequence[Observation]:
        """The observations of a metric. Must not be called in the event loop."""
        with self._lock:
            if time.monotonic() - self._read_at_s >= READING_S:
                self._refresh()
            return self._found.get(metric.name, ())

    def _refresh(self) -> None:
        done: Future[Mapping[str, Sequence[Observation]]] = Future()
        try:
            self._loop.call_soon_threadsafe(lambda: done.set_result(self.read()))
            self._found = done.result(READING_TIMEOUT_S)
        except (TimeoutError, RuntimeError) as error:  # the event loop is busy or closed
            log.warning("metrics not refreshed, serving the previous values", error=repr(error))
        self._read_at_s = time.monotonic()

    def read(self) -> Mapping[str, Sequence[Observation]]:
        """Read all metrics. Runs in the event loop."""
        found: dict[str, list[Observation]] = {}
        for metric, read in self._reads:
            names = [each.name for each in metric.attributes]
            try:
                observed = [
                    Observation(value, dict(zip(names, values, strict=False)))
                    for values, value in read()
                ]
            except Exception:
                if metric.name not in self._failing:  # log once: it will fail each time
                    log.exception("metric failed", metric=metric.name)
                self._failing.add(metric.name)
                continue
            self._failing.discard(metric.name)
            found.setdefault(metric.name, []).extend(observed)
        return found


class Metrics:
    """The instruments of a service.

    Attributes:
        topics: the labels of topics.
        is_on: whether metrics are exported.
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
        """Register a metric; `read` is called on each export."""
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
    """Drops the value."""


OFF: Final = Metrics()
"""Metrics that are dropped."""


@asynccontextmanager
async def telling(config: MetricsConfig) -> AsyncIterator[Metrics]:
    """The instruments of a service, while the context lasts. On exit the last values are exported,
    within FLUSH_TIMEOUT_S.

    Raises:
        TelemetrySettingError: a variable names an unknown exporter.
        UnusableSetting: `metrics_listen` is not a usable address, or is in use.
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
        readers.append(_pushing(exporter))  # last, since it begins at once
    provider = MeterProvider(readers, resource_, shutdown_on_exit=False)
    try:
        meter = provider.get_meter("seqgate", version("seqgate"))
        topics = config.metrics_topics if isinstance(config, ServiceConfig) else ()
        metrics = Metrics(meter, readings, TopicLabels(topics))
        _tell_process(metrics)
        context = metrics_context(config)
        with ExitStack() as serving:
            with listening(config, "metrics_listen"):
                port = serving.enter_context(scraped(config.metrics_listen, app, context))
            tell_supervisor(METRICS, port)
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
    except Exception as error:  # the process ends in any case
        log.warning("final metrics export failed", error=repr(error))


# ---- scraping


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    context: Callable[[], ssl.SSLContext] | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread, so that nobody waits for another's handshake."""
        if self.context is not None:
            request.settimeout(SCRAPE_TIMEOUT_S)
            try:
                request = self.context().wrap_socket(request, server_side=True)
            except OSError:  # a caller without a certificate, or without TLS
                return
        with request:
            super().finish_request(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Do not log scrapes."""


def _app(readings: Readings, readers: "list[MetricReader]") -> Any:
    """The WSGI app for GET /metrics. Adds the reader that it needs to `readers`."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry, make_wsgi_app

    class OneAtATime(CollectorRegistry):
        """Serializes scrapes: concurrent ones would take metrics out of each other's reader. Each
        scrape has a reading of its own."""

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
def scraped(
    listen: str, app: Any, context: Callable[[], ssl.SSLContext] | None = None
) -> Iterator[int]:
    """Serve an app in threads while the context lasts; its value is the port. Without an address,
    nothing is served, and the value is 0. `context` has the TLS of each connection; None: none.

    Raises:
        OSError: the address cannot be used.
    """
    if not listen:
        yield 0
        return
    host, _, port = listen.rpartition(":")
    try:
        server = _Server((host.strip("[]"), int(port)), _Handler)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {listen}: {error.strerror}") from error
    server.set_app(app)
    server.context = context
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    log.info("serving metrics", address=listen, port=server.server_port)
    try:
        yield server.server_port
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
    except OSError:  # not Linux: use the peak
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
    """Values of topics combined by label. OTHER is always present, and combined with 0."""
    found: dict[str, float] = {OTHER: 0}
    for label, value in values:
        found[label] = combine(found[label], value) if label in found else value
    return [((label,), value) for label, value in found.items()]


SURVEY_REST_MAX_S: Final = 60.0
"""The longest pause between surveys due to a slow one, in seconds."""


def survey_rest_s(took_s: float, interval_s: float) -> float:
    """The pause after a survey, in seconds: longer after a slow survey, but at most the longer of
    SURVEY_REST_MAX_S and the interval."""
    return max(interval_s, min(took_s * SURVEY_SHARE, SURVEY_REST_MAX_S))


async def survey_forever(look: Callable[[], Awaitable[None]], interval_s: float) -> None:
    """Run a survey for metrics periodically. A failure is logged and the next survey runs as usual,
    since nothing depends on one."""
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


@asynccontextmanager
async def surveyed(
    look: Callable[[], Awaitable[None]], interval_s: float, metrics: Metrics
) -> AsyncIterator[None]:
    """Survey while the context lasts, if metrics are exported."""
    if not metrics.is_on:
        yield
        return
    looking = asyncio.create_task(survey_forever(look, interval_s))
    try:
        yield
    finally:
        await end(looking)


@asynccontextmanager
async def tables_surveyed(
    size_bytes: Callable[[], Awaitable[int]], interval_s: float, metrics: Metrics, size: Metric
) -> AsyncIterator[None]:
    """Register the size of tables in PostgreSQL, known from the first survey on, and survey it
    while the context lasts. Their free space is unknown: no query tells what a server's disk has
    left."""
    found: list[tuple[Values, float]] = []

    async def look() -> None:
        found[:] = [((), await size_bytes())]

    metrics.tell(size, lambda: found)
    async with surveyed(look, interval_s, metrics):
        yield


def tell_store(
    metrics: Metrics, size: Metric, free: Metric, path: Path, size_max_bytes: int
) -> None:
    """Register the size of a SQLite database and its free space."""
    metrics.tell(size, lambda: [((), store_size(path))])
    metrics.tell(free, lambda: [((), store_free(path, size_max_bytes))])


def store_size(path: Path) -> int:
    size = 0
    for each in (path, path.with_name(f"{path.name}-wal")):
        try:
            size += each.stat().st_size
        except OSError:
            continue
    return size


def store_free(path: Path, size_max_bytes: int) -> int:
    """The bytes by which a database may still grow; `size_max_bytes` 0: as the disk allows."""
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    if not size_max_bytes:
        return free
    return max(0, min(free, size_max_bytes - store_size(path)))
