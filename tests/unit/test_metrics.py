"""Metrics: the catalogue agrees with the services, and reporting causes no failures."""

import asyncio
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from pydantic import ValidationError

from seqgate.dev.ports import free_ports
from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.holes import holes_of
from seqgate.services.cursor.core.state import Head
from seqgate.services.dedup.metrics import DedupMetrics
from seqgate.services.deduplication import Judged, ProducerVerdicts, Verdict
from seqgate.services.dispatcher.core.lane import Reason
from seqgate.services.filter.core.chain import Verdict as FilterVerdict
from seqgate.services.filter.core.program import FailureReason
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core.receipt import Status
from seqgate.services.ledger.metrics import LedgerMetrics, Recovery
from seqgate.services.runtime import metrics as runtime
from seqgate.services.runtime.config import UnusableSetting
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.guard import PermissionDenied, record_denial
from seqgate.services.runtime.load import busy
from seqgate.services.runtime.metrics import (
    OFF,
    Metrics,
    Readings,
    TopicLabels,
    store_free,
    store_size,
    summed,
    survey_rest_s,
    telling,
)
from seqgate.services.runtime.refusal_log import RefusalLog
from seqgate.services.runtime.server import tell_calls
from seqgate.telemetry import metrics as told
from seqgate.telemetry.metrics import CATALOGUE, OTHER, TOPICS_MAX, Kind, Metric
from seqgate.types import Position, TopicName
from tests.support.authority import Authority
from tests.support.waiting import eventually

GAUGE = Metric("seqgate.test.gauge", Kind.GAUGE, "1", "", (), (told.TOPIC,))
COUNTER = Metric("seqgate.test.counter", Kind.COUNTER, "1", "", (), (told.TOPIC, told.STATUS))
HISTOGRAM = Metric(
    "seqgate.test.histogram", Kind.HISTOGRAM, "s", "", (), (told.STATUS,), (1.0, 2.0)
)

Points = dict[tuple[tuple[str, Any], ...], Any]


class Telling:
    """Metrics over the SDK, and a reader that collects them."""

    def __init__(self, topics: TopicLabels | None = None) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], shutdown_on_exit=False)
        loop = asyncio.get_running_loop()
        meter = self._provider.get_meter("test")
        self.metrics = Metrics(meter, Readings(loop), topics)

    async def collect(self) -> dict[str, Points]:
        """All points, by metric name and attributes."""
        data: Any = await asyncio.to_thread(self._reader.get_metrics_data)
        found: dict[str, Points] = {}
        for of_resource in () if data is None else data.resource_metrics:
            for scope in of_resource.scope_metrics:
                for metric in scope.metrics:
                    found[metric.name] = {
                        tuple(sorted(point.attributes.items())): point
                        for point in metric.data.data_points
                    }
        return found

    async def close(self) -> None:
        await asyncio.to_thread(self._provider.shutdown)


@pytest.fixture
async def telling_() -> Any:
    made = Telling()
    yield made
    await made.close()


# ---- the catalogue


def test_no_two_metrics_have_one_name() -> None:
    assert len({each.name for each in CATALOGUE}) == len(CATALOGUE)
    assert len({each.prometheus for each in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda each: each.name)
def test_every_metric_has_a_description(metric: Metric) -> None:
    assert metric.description
    assert metric.unit
    assert set(metric.services) <= set(told.PROCESSES)
    assert metric.services
    assert bool(metric.bounds) is (metric.kind is Kind.HISTOGRAM)
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert len({each.label for each in metric.attributes}) == len(metric.attributes)
    own = metric.name.removeprefix("seqgate.").split(".")[0]
    if own in told.SERVICES:
        assert metric.services == (own,)


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda each: each.name)
def test_the_series_of_a_metric_stay_below_the_librarys_limit(
    metric: Metric,
) -> None:
    library_max = 2_000  # beyond this opentelemetry-sdk merges series: its cardinality limit
    series = 1
    for attribute in metric.attributes:
        assert attribute.name not in (
            *("producer", "consumer", "key", "subscription", "message", "sequence_id", "principal"),
        )
        assert 0 < attribute.values_max <= max(TOPICS_MAX + 1, told.METHODS_MAX)
        if attribute.name not in ("error.type", "rpc.response.status_code"):
            series *= attribute.values_max
    assert series <= library_max


def names(values: Iterable[Enum]) -> set[str]:
    return {each.name for each in values}


@pytest.mark.parametrize(
    ("attribute", "known"),
    [
        (told.STATUS, names(Status)),
        (told.VERDICT, names(Verdict)),
        (told.KEY_REASON, names(Reason)),
        (told.FILTER_VERDICT, names(FilterVerdict) | {"FAILED"}),
        (told.FAILURE, names(FailureReason)),
        (told.RPC_CODE, names(StatusCode)),
    ],
)
def test_closed_sets_are_those_of_the_services(attribute: told.Attribute, known: set[str]) -> None:
    assert set(attribute.values) == known


def test_buckets_of_calls_are_those_of_the_conventions() -> None:
    bounds = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
    assert told.SERVER_CALLS.bounds == told.CLIENT_CALLS.bounds == bounds


# ---- topics


def test_only_selected_topics_have_a_label() -> None:
    labels = TopicLabels(["a/b/*", "a/?/c"])
    assert labels.of("a/b/one") == "a/b/one"
    assert labels.of("a/x/c") == "a/x/c"
    assert labels.of("a/x/one") == OTHER
    assert labels.of("a/b/one/more") == OTHER
    assert labels.of(TopicName.parse("a/b/two")) == "a/b/two"
    assert TopicLabels().of("a/b/one") == OTHER


def test_labeled_topics_are_bounded() -> None:
    labels = TopicLabels(["*/*/*"])
    first = {labels.of(f"a/b/{number}") for number in range(TOPICS_MAX)}
    assert len(first) == TOPICS_MAX
    assert labels.of("a/b/one-more") == OTHER
    assert labels.of("a/b/0") == "a/b/0"


def test_a_topic_keeps_its_label_after_eviction_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "LABELS_MAX", 3)
    labels = TopicLabels(["a/b/told-*"], topics_max=2)
    assert [labels.of(f"a/b/told-{number}") for number in range(3)] == [
        *("a/b/told-0", "a/b/told-1", OTHER),
    ]
    for number in range(10):
        assert labels.of(f"a/b/{number}") == OTHER
    assert labels.of("a/b/told-1") == "a/b/told-1"
    assert labels.of("a/b/told-2") == OTHER


@pytest.mark.parametrize("pattern", ["", "a", "a/b", "a/b/c/d"])
def test_an_invalid_topic_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValidationError, match="tenant/namespace/name"):
        LedgerConfig(metrics_topics=(pattern,))


@pytest.mark.parametrize("listen", ["9464", ":9464", "0.0.0.0:", "0.0.0.0:99999"])
def test_an_address_for_scrapes_has_a_host_and_a_port(listen: str) -> None:
    with pytest.raises(ValidationError, match="host:port"):
        LedgerConfig(metrics_listen=listen)


# ---- collection


async def test_measurements_are_reported_with_their_attributes(telling_: Telling) -> None:
    telling_.metrics.tell(COUNTER, lambda: [(("a/b/c", "STORED"), 3), ((OTHER, "STALE"), 1)])
    telling_.metrics.tell(GAUGE, lambda: [((OTHER,), 0.5)])
    found = await telling_.collect()
    assert {key: point.value for key, point in found[COUNTER.name].items()} == {
        (("status", "STORED"), ("topic", "a/b/c")): 3,
        (("status", "STALE"), ("topic", OTHER)): 1,
    }
    assert found[GAUGE.name][(("topic", OTHER),)].value == 0.5


async def test_a_histogram_has_the_bounds_of_the_catalogue(telling_: Telling) -> None:
    record = telling_.metrics.histogram(HISTOGRAM)
    for value in (0.5, 1.5, 3.0):
        record(value, "STORED")
    record(1.0)  # trailing attributes may be omitted
    found = (await telling_.collect())[HISTOGRAM.name]
    assert found[(("status", "STORED"),)].bucket_counts == (1, 1, 1)
    assert found[(("status", "STORED"),)].explicit_bounds == (1.0, 2.0)
    assert found[()].count == 1


async def test_a_failing_measurement_is_left_out(telling_: Telling) -> None:
    def fail() -> list[tuple[tuple[str, ...], float]]:
        raise LookupError("no more")

    telling_.metrics.tell(COUNTER, fail)
    telling_.metrics.tell(GAUGE, lambda: [((OTHER,), 1)])
    found = await telling_.collect()
    assert not found.get(COUNTER.name)
    assert found[GAUGE.name][(("topic", OTHER),)].value == 1


async def test_everything_is_read_in_the_event_loop(telling_: Telling) -> None:
    threads: set[int] = set()

    def read() -> list[tuple[tuple[str, ...], float]]:
        threads.add(threading.get_ident())
        return [((OTHER,), 1)]

    telling_.metrics.tell(GAUGE, read)
    await telling_.collect()
    assert threads == {threading.get_ident()}


async def test_one_collection_reads_once_for_all_metrics(
    telling_: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "READING_S", 60)
    reads = 0

    def read() -> list[tuple[tuple[str, ...], float]]:
        nonlocal reads
        reads += 1
        return [((OTHER,), reads)]

    telling_.metrics.tell(GAUGE, read)
    telling_.metrics.tell(COUNTER, lambda: [((OTHER,), 1)])
    await telling_.collect()
    await telling_.collect()
    assert reads == 1


async def test_a_blocked_event_loop_makes_a_scrape_repeat_earlier_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "READING_S", 0)
    telling = Telling()
    telling.metrics.tell(GAUGE, lambda: [((OTHER,), 7)])
    await telling.collect()
    monkeypatch.setattr(runtime, "READING_TIMEOUT_S", 0.01)
    done = threading.Event()
    found: list[Any] = []

    def scrape() -> None:
        found.append(telling._reader.get_metrics_data())
        done.set()

    thread = threading.Thread(target=scrape)
    thread.start()
    assert done.wait(30)  # meanwhile this loop is blocked
    thread.join()
    (metric,) = found[0].resource_metrics[0].scope_metrics[0].metrics
    assert metric.data.data_points[0].value == 7
    await telling.close()


async def test_without_a_reader_nothing_is_measured() -> None:
    def never() -> list[tuple[tuple[str, ...], float]]:
        raise AssertionError

    assert not OFF.is_on
    OFF.tell(GAUGE, never)
    OFF.histogram(HISTOGRAM)(1.0, "STORED")


async def test_without_an_exporter_and_an_address_metrics_are_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    threads = threading.active_count()
    async with telling(LedgerConfig()) as metrics:
        assert metrics is OFF
        assert threading.active_count() == threads
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with telling(LedgerConfig()) as metrics:
        assert metrics is OFF


async def test_a_service_that_cannot_listen_for_scrapes_does_not_start() -> None:
    with pytest.raises(UnusableSetting, match="SEQGATE_LEDGER_METRICS_LISTEN: cannot listen on"):
        async with telling(LedgerConfig(metrics_listen="192.0.2.1:9464")):  # no machine's address
            raise AssertionError


async def test_metrics_over_tls_are_for_callers_with_a_certificate(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    files = authority.issue("ledger", hosts=["seqgate-metrics"])
    (port,) = free_ports(1)
    config = LedgerConfig(
        metrics_listen=f"127.0.0.1:{port}",
        metrics_tls=True,
        tls_certificate_file=files.certificate,
        tls_key_file=files.key,
        tls_client_ca_file=authority.file,
        access_file=tmp_path / "access.toml",
    )

    def answer(shows: Authority | None, trusted: Authority = authority) -> str:
        context = ssl.create_default_context(cafile=trusted.file)
        if shows is not None:
            shown = shows.issue("prometheus")
            context.load_cert_chain(shown.certificate, shown.key)
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname="seqgate-metrics") as encrypted,
        ):
            encrypted.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            return encrypted.makefile("rb").read().decode()

    async with telling(config):
        assert "seqgate_process" in await asyncio.to_thread(answer, authority)
        for shows, trusted in ((None, authority), (other, authority), (authority, other)):
            with pytest.raises(ssl.SSLError):
                await asyncio.to_thread(answer, shows, trusted)
        renewed = authority.issue("ledger", hosts=["elsewhere"])
        assert renewed == files

        async def is_renewed() -> bool:
            try:
                await asyncio.to_thread(answer, authority)
            except ssl.SSLCertVerificationError:
                return True
            return False

        await eventually(is_renewed, "the renewed certificate is shown")
    with pytest.raises(ValidationError, match="metrics_tls requires tls_certificate_file"):
        LedgerConfig(metrics_tls=True)


# ---- counts


def test_unlabeled_topics_are_summed_and_always_reported() -> None:
    assert dict(summed([])) == {(OTHER,): 0}
    assert dict(summed([("a/b/c", 1), (OTHER, 2), (OTHER, 3)])) == {("a/b/c",): 1, (OTHER,): 5}
    assert dict(summed([("a/b/c", 1), ("a/b/c", 3)], max)) == {("a/b/c",): 3, (OTHER,): 0}


@given(st.lists(st.sampled_from(Verdict), max_size=30))
def test_each_verdict_is_counted_once(verdicts: list[Verdict]) -> None:
    metrics = DedupMetrics()
    topic = TopicName.parse("a/b/c")
    metrics.judged(topic, Judged(1, [ProducerVerdicts(verdicts, -1, {})]))
    expected = dict.fromkeys(Verdict, 0) | Counter(verdicts)
    assert metrics.verdicts[OTHER] == expected


class Recorded:
    """The values that a histogram records."""

    def __init__(self) -> None:
        self.values: list[tuple[object, ...]] = []

    def __call__(self, *value: object) -> None:
        self.values.append(value)


def test_a_recovery_counts_its_first_cause_and_lasts_until_the_writer_judges() -> None:
    metrics = LedgerMetrics()
    durations = metrics.recovery_duration = Recorded()
    now_s = 0.0
    recovery = Recovery(metrics, lambda: now_s)
    recovery.record("takeover", is_aligning=True)
    now_s = 1.0
    recovery.record("behind", is_aligning=True)
    assert not durations.values
    now_s = 3.0
    recovery.record("behind", is_aligning=False)
    recovery.record("behind", is_aligning=False)
    assert durations.values == [(3.0, "takeover")]
    recovery.record("changed", is_aligning=True)
    assert metrics.recoveries == {"takeover": 1, "changed": 1}


async def test_denials_and_streams_are_reported(telling_: Telling) -> None:
    denials, drain = RefusalLog(), Drain()
    tell_calls(telling_.metrics, drain, RefusalLog(), denials)
    method = "/seqgate.api.ledger.v1.LedgerService/Publish"
    record_denial(denials, PermissionDenied("no"), method, "sub:alice", "peer")
    record_denial(denials, PermissionDenied("no"), method, "sub:bob", "peer")
    with drain.stream():
        found = await telling_.collect()
    (key,) = found[told.DENIALS.name]
    assert dict(key) == {"reason": "PERMISSION_DENIED", "rpc.method": method[1:]}
    assert found[told.DENIALS.name][key].value == 2
    assert found[told.STREAMS.name][()].value == 1


async def test_refusals_for_lack_of_room_are_counted_by_limit(telling_: Telling) -> None:
    refusals = RefusalLog()
    tell_calls(telling_.metrics, Drain(), refusals, None)
    for limit in ("calls_max", "calls_max", "streams_max"):
        refusals.record_busy(busy("no room", limit=limit))
    refusals.record_busy(PermissionDenied("no"))
    found = (await telling_.collect())[told.BUSY.name]
    values = {dict(key)["limit"]: point.value for key, point in found.items()}
    assert values == {**dict.fromkeys(told.BUSY_LIMIT.values, 0), "calls_max": 2, "streams_max": 1}


def test_a_store_may_grow_to_its_limit_and_to_the_end_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    assert store_size(path) == 0
    path.write_bytes(bytes(1_000))
    (tmp_path / "a.db-wal").write_bytes(bytes(500))
    assert store_size(path) == 1_500
    assert store_free(path, 2_000) == 500
    assert store_free(path, 1_000) == 0
    assert store_free(path, 0) > 10_000
    assert store_free(path, 2**62) == pytest.approx(store_free(path, 0), rel=0.1)


# ---- holes


class Pages:
    """The holes of a cursor, in memory, as far as counting needs them."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], int] = {}

    def pages(self, after: Position | None) -> Iterable[tuple[int, int, int]]:
        first = (0, 0) if after is None else (after.ledger_id, after.entry_id // 65_536)
        return ((*place, bits) for place, bits in sorted(self.kept.items()) if place >= first)


POSITIONS = st.builds(Position, st.integers(1, 3), st.integers(65_500, 65_580))


@given(st.none() | POSITIONS, st.sets(POSITIONS, max_size=12))
def test_holes_lie_between_the_mark_delete_position_and_acknowledged_entries(
    mark_delete: Position | None, acknowledged: set[Position]
) -> None:
    pages = Pages()
    for ledger_id, entry_id in acknowledged:
        place = ledger_id, entry_id // 65_536
        pages.kept[place] = pages.kept.get(place, 0) | 1 << entry_id % 65_536
    holes: Any = pages
    head = Head(TopicName.parse("a/b/c"), "s", 0, mark_delete)
    beyond = {each for each in acknowledged if mark_delete is None or each > mark_delete}
    expected = 0
    for ledger_id in {each.ledger_id for each in beyond}:
        ids = {each.entry_id for each in beyond if each.ledger_id == ledger_id}
        is_marked = mark_delete is not None and mark_delete.ledger_id == ledger_id
        first = mark_delete.entry_id + 1 if is_marked and mark_delete else 0
        expected += sum(entry_id not in ids for entry_id in range(first, max(ids)))
    assert holes_of(CursorState(head, holes)) == expected


@pytest.mark.parametrize(
    ("took_s", "interval_s", "rest_s"),
    [(0.1, 15.0, 15.0), (2.0, 15.0, 40.0), (100.0, 15.0, 60.0), (100.0, 300.0, 300.0)],
)
def test_the_pause_after_a_survey_grows_with_its_duration_up_to_a_bound(
    took_s: float, interval_s: float, rest_s: float
) -> None:
    assert survey_rest_s(took_s, interval_s) == rest_s
