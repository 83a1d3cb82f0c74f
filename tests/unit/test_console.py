"""The console's parts: charts, histories, payloads, forms, settings."""

from contextlib import nullcontext
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.channels import Call
from seqgate.client._frames import Sample, Subscription, Topic
from seqgate.client._life import MessageEvent, SubscriptionLife
from seqgate.errors import AuthenticationError
from seqgate.payloads import PayloadDamaged
from seqgate.services.console import history as history_module
from seqgate.services.console.alerts import Letters
from seqgate.services.console.calls import reading_as, show_reader
from seqgate.services.console.charts import POINTS_MAX, line_chart
from seqgate.services.console.config import ConsoleConfig
from seqgate.services.console.history import History, latest, levels, rates
from seqgate.services.console.pages.life import (
    EVENTS_MAX,
    EVENTS_OF_ALL_MAX,
    TEXTS_CHARACTERS_MAX,
    timelines,
)
from seqgate.services.console.pages.visit import LETTERS_MAX, SAMPLES_MAX, Memory
from seqgate.services.console.payloads import (
    OPENED_BYTES_MAX,
    SHOWN_BYTES_MAX,
    check_size,
    editable,
    key_text,
    parsed,
    shown,
)
from seqgate.services.console.security import local_path
from seqgate.types import NACK_REASON_BYTES_MAX

# ---- charts and histories


def test_a_chart_fits_its_points_between_its_edges() -> None:
    chart = line_chart("Lag", {"a": [(10, 0), (12, 30), (20, 50)], "b": []}, "entries")
    assert (chart.top, chart.span_s) == (50, 10)
    assert chart.lines[0].points == "6.0,104.0 99.6,51.2 474.0,16.0"
    assert [each.last for each in chart.lines] == [50, None]


def test_a_long_line_has_its_last_point_and_no_more_than_the_most() -> None:
    points = [(float(each), float(each)) for each in range(301)]
    (line,) = line_chart("", {"a": points}, "").lines
    drawn = line.points.split()
    assert 60 < len(drawn) <= POINTS_MAX
    assert drawn[-1].startswith("474.0,")


@pytest.mark.parametrize("points", [[], [(3.0, 7.0)]])
def test_a_chart_with_fewer_than_two_points_has_no_span(points: list[tuple[float, float]]) -> None:
    assert line_chart("Lag", {"a": points}, "").span_s == 0


@pytest.mark.parametrize(
    ("most", "top"), [(0, 1), (1, 1), (1.1, 2), (4, 5), (51, 100), (999, 1_000)]
)
def test_a_chart_ends_at_a_round_number(most: float, top: float) -> None:
    assert line_chart("", {"a": [(0, 0), (1, most)]}, "").top == top


def test_rates_are_growth_per_second_and_none_over_a_restart() -> None:
    history = History()
    counts = ((0.0, 10), (2.0, 14), (4.0, 1), (6.0, 7))
    *_, points = [history.add(("a",), at_s, {"count": count}) for at_s, count in counts]
    assert rates(points, "count") == [(2.0, 2.0), (6.0, 3.0)]
    assert rates(points, "absent") == []
    assert latest(levels(points, "count")) == 7
    assert latest([]) is None


def test_two_windows_on_one_page_add_one_point() -> None:
    history = History()
    history.add(("a",), 1.0, {"count": 1})
    assert len(history.add(("a",), 1.1, {"count": 2})) == 1


def test_histories_of_readers_are_apart_and_bounded() -> None:
    history = History(series_max=2, points_max=3)
    *_, points = [history.add(("a",), at_s, {"n": at_s}) for at_s in range(5)]
    assert [each.at_s for each in points] == [2, 3, 4]
    for name in ("b", "c"):
        assert len(history.add((name,), 9, {})) == 1
    assert len(history.add(("a",), 9, {})) == 1  # it was the longest unused
    assert history_module.SERIES_MAX * history_module.POINTS_MAX <= 1_000_000


def test_samples_and_counts_are_bounded() -> None:
    memory = Memory()
    samples = [Sample(at_s, 0) for at_s in range(SAMPLES_MAX + 1)]
    for number, sample in enumerate(samples):
        assert memory.exchange(("reader", str(number)), sample) is None
        memory.count(("reader", str(number)), (0.0, 0, Letters(0, 0)))
    before = memory.exchange(("reader", str(SAMPLES_MAX)), samples[0])
    assert before is not None
    assert before.at_s == SAMPLES_MAX
    assert len(memory.samples) == SAMPLES_MAX
    assert len(memory.letters) <= LETTERS_MAX


def test_of_a_sample_the_counts_are_kept() -> None:
    report = dispatcher_pb2.ReportResponse(
        epoch=3,
        totals=dispatcher_pb2.Totals(delivered_messages=7),
        consumers=[dispatcher_pb2.ConsumerReport(name="till-1")],
    )
    subscriptions = [Subscription("billing", "a:1", 2, report=report)]
    topic = Topic(ledger_pb2.Topic(name="t"), subscriptions=subscriptions)
    memory = Memory()
    memory.exchange(("reader",), Sample(0, 0, {"t": topic}))
    before = memory.exchange(("reader",), Sample(1, 0))
    assert before is not None
    counts = dispatcher_pb2.ReportResponse(epoch=3, totals=report.totals)
    kept = before.topics["t"].subscriptions or []
    assert [each.report for each in kept] == [counts]


# ---- payloads


@pytest.mark.parametrize(
    ("payload", "forms"),
    [
        (b'{"a": [1]}', ("json", "text", "hex")),
        (b"plain", ("text", "hex")),
        (b"", ("text", "hex")),
        (b"\x00\x01", ("hex",)),
        (b"\xff", ("hex",)),
        (b"[" * 100_000, ("text", "hex")),
        (b"[" * 50_000, ("text", "hex")),
        ("ä".encode() * SHOWN_BYTES_MAX, ("text", "hex")),
        (b"a" + "ä".encode() * SHOWN_BYTES_MAX, ("text", "hex")),
    ],
)
def test_a_payload_has_the_forms_that_it_can_be_read_in(
    payload: bytes, forms: tuple[str, ...]
) -> None:
    assert shown(payload).forms == forms
    for form in forms:
        assert shown(payload, form).form == form
        assert len(shown(payload, form).text) <= 2 * SHOWN_BYTES_MAX


@pytest.mark.parametrize(
    ("payload", "wanted", "form", "text"),
    [
        (b'{"a":1.50}', "", "json", '{"a":1.50}'),
        (b'{"a":1.50}', "text", "text", '{"a":1.50}'),
        (b"plain", "json", "text", "plain"),
        (b"\xff\x00", "text", "hex", "ff 00"),
        (b"ab", "hex", "hex", "61 62"),
    ],
)
def test_a_form_has_a_payload_as_it_is_written(
    payload: bytes, wanted: str, form: str, text: str
) -> None:
    assert editable(payload, wanted) == (form, text)
    assert parsed(form, text, payload) == payload


def test_a_forms_line_ends_are_those_of_the_payload_before() -> None:
    assert parsed("text", "a\r\nb", b"a\nc") == b"a\nb"
    assert parsed("text", "a\r\nb", b"a\r\nc") == b"a\r\nb"


def test_hex_has_places_bytes_and_letters() -> None:
    assert shown(b"\x00Hello, Seqgate\xff!", "hex").text.splitlines() == [
        "00000000  00 48 65 6c 6c 6f 2c 20 53 65 71 67 61 74 65 ff  .Hello, Seqgate.",
        "00000010  21                                               !",
    ]


@pytest.mark.parametrize(("size", "is_opened"), [(OPENED_BYTES_MAX, True), (2**31, False)])
def test_a_payload_is_decompressed_up_to_a_limit(size: int, is_opened: bool) -> None:
    metadata = entry_pb2.EntryMetadata(
        compression=entry_pb2.COMPRESSION_TYPE_ZSTD, uncompressed_size=size
    )
    with nullcontext() if is_opened else pytest.raises(PayloadDamaged, match="limit 16 MiB"):
        check_size(metadata)


def test_what_is_left_out_of_a_payload_is_counted() -> None:
    assert shown(b"a" * (SHOWN_BYTES_MAX + 5)).left_out == 5
    assert shown(b"\xff" * SHOWN_BYTES_MAX).left_out == SHOWN_BYTES_MAX * 3 // 4


def refusals(name: str, count: int) -> SubscriptionLife:
    said = "r" * NACK_REASON_BYTES_MAX
    event = MessageEvent("FAILED", datetime(2026, 5, 31, tzinfo=UTC), "crew", "REFUSED", text=said)
    return SubscriptionLife(name, (event,) * count)


def test_the_events_of_many_subscriptions_share_a_page() -> None:
    (alone,) = timelines([refusals("s", 50)])
    assert (len(alone["events"]), alone["earlier"]) == (EVENTS_MAX, 10)
    assert all("r" * NACK_REASON_BYTES_MAX in each["what"] for each in alone["events"])
    rows = timelines([refusals(str(each), 50) for each in range(80)])
    shown = [each["what"] for row in rows for each in row["events"]]
    assert [row["earlier"] for row in rows] == [48] * 80
    assert len(shown) == EVENTS_OF_ALL_MAX
    assert sum(each.count("r") for each in shown) < 2 * TEXTS_CHARACTERS_MAX


def test_a_key_that_is_no_text_is_shown_as_hex() -> None:
    assert (key_text(b"k-1"), key_text(b"\xfe\x00")) == ("k-1", "0xfe00")


# ---- readers


def test_a_call_without_a_reader_fails_and_one_with_shows_the_token() -> None:
    call = Call("m", True, 1.0, ())
    with pytest.raises(AuthenticationError):
        show_reader(call)
    with reading_as("abc"):
        show_reader(call)
    assert call.metadata == (("authorization", "Bearer abc"),)
    with pytest.raises(AuthenticationError):
        show_reader(call)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/topic?topic=a/b/c", "/topic?topic=a/b/c"),
        ("//elsewhere.example/", "/"),
        ("/\\elsewhere.example/", "/"),
        ("https://elsewhere.example/", "/"),
        ("javascript:alert(1)", "/"),
        ("", "/"),
        ("/a\r\nSet-Cookie: b", "/"),
    ],
)
def test_signing_in_leads_to_pages_of_the_console_only(given: str, path: str) -> None:
    assert local_path(given) == path


# ---- settings

PUBLIC = {"listen": "0.0.0.0:7707", "origin": "https://console.example"}


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"credentials": "certificate"}, "requires peer_certificate_file"),
        ({"peer_certificate_file": "a"}, "must be set together"),
        ({"peer_certificate_file": "a", "peer_key_file": "b"}, "requires peer_ca_file"),
        (
            {"peer_ca_file": "c", "peer_certificate_file": "a", "peer_key_file": "b"},
            "credentials is token or certificate",
        ),
        ({"credentials": "token", "ledger_target": "ledger:7702"}, "tokens are not sent in plain"),
        ({"listen": "0.0.0.0:7707", "allow_insecure": True}, "origin is required"),
        (PUBLIC, "readers need a token, and TLS"),
        ({**PUBLIC, "credentials": "token"}, "readers need a token, and TLS"),
    ],
)
def test_settings_that_expose_something_are_refused(
    settings: dict[str, object], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        ConsoleConfig(**settings).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"credentials": "token"},
        {**PUBLIC, "allow_insecure": True},
        {**PUBLIC, "credentials": "token", "tls_certificate_file": "a", "tls_key_file": "b"},
    ],
)
def test_settings_that_expose_nothing_are_accepted(settings: dict[str, object]) -> None:
    ConsoleConfig(**settings).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("origin", ["console.example", "https://a/b", "ftp://a", "https://"])
def test_an_origin_has_a_scheme_and_a_host_and_no_path(origin: str) -> None:
    with pytest.raises(ValidationError, match="origin"):
        ConsoleConfig(origin=origin)
