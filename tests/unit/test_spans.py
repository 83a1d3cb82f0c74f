"""Spans of work other than calls."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import SpanKind, StatusCode

from seqgate.api.common.v1.common_pb2 import TraceContext
from seqgate.services.errors import StoreFull
from seqgate.telemetry import inject, names, spans
from tests.support.recorded import Recorded, links


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded(ALWAYS_ON)
    monkeypatch.setattr(spans, "_TRACER", recorded.tracer)
    return recorded


def message(recorded: Recorded) -> dict[str, str]:
    """The properties of a message with a sampled trace."""
    properties: dict[str, str] = {}
    with recorded.tracer.start_as_current_span("message") as span:
        inject(span.get_span_context(), properties)
    return properties


def test_a_part_is_a_child_of_the_current_span_only(recorded: Recorded) -> None:
    with spans.part("alone"):
        assert not spans.carrier()
    with recorded.tracer.start_as_current_span("whole"), spans.part("part", {"a": 1}):
        pass
    part, whole = recorded.spans
    assert (part.name, part.kind, dict(part.attributes or {})) == (
        "part",
        SpanKind.INTERNAL,
        {"a": 1},
    )
    assert part.parent is not None
    assert part.parent.span_id == whole.context.span_id


def test_database_spans_follow_the_conventions(recorded: Recorded) -> None:
    with recorded.tracer.start_as_current_span("whole"):
        with spans.database(names.REDIS, "EVALSHA", "admit"):
            pass
        with spans.database(names.SQLITE, "COMMIT"):
            pass
    script, commit, _ = recorded.spans
    assert (script.name, commit.name) == ("EVALSHA admit", "COMMIT")
    assert script.kind is SpanKind.CLIENT
    assert dict(script.attributes or {}) == {
        names.DB_SYSTEM_NAME: names.REDIS,
        names.DB_OPERATION_NAME: "EVALSHA",
    }


def test_a_shared_span_is_a_child_of_the_first_and_linked_to_the_others(
    recorded: Recorded,
) -> None:
    contexts = spans.followed([message(recorded), {}, message(recorded), message(recorded)])
    with spans.shared("group", contexts) as span:
        assert trace.get_current_span() is span
    group = recorded.one("group")
    first, *others = contexts
    assert group.parent is not None
    assert (group.parent.trace_id, group.parent.span_id) == (first.trace_id, first.span_id)
    assert links(group) == [(each.trace_id, each.span_id) for each in others]


def test_links_are_bounded(recorded: Recorded) -> None:
    contexts = spans.followed([message(recorded)] * (2 * spans.LINKS_MAX))
    assert len(contexts) == spans.LINKS_MAX + 1
    with spans.shared("group", contexts):
        pass
    assert len(recorded.one("group").links) == spans.LINKS_MAX


def test_untraced_work_is_no_child_of_the_current_span(recorded: Recorded) -> None:
    with recorded.tracer.start_as_current_span("stream"):
        with spans.shared("group", []), spans.part("part"):
            pass
        for damaged in (TraceContext(), TraceContext(traceparent="00-zz"), off()):
            with spans.asked("asked", damaged), spans.part("part"):
                assert not spans.carrier()
    assert [span.name for span in recorded.spans] == ["stream"]


def off() -> TraceContext:
    """A context that is not sampled."""
    return TraceContext(traceparent=f"00-{1:032x}-{1:016x}-00")


def test_work_for_a_stream_message_is_a_child_of_its_sender(recorded: Recorded) -> None:
    with recorded.tracer.start_as_current_span("asking") as asking:
        carried = TraceContext(**spans.carrier())
    with recorded.tracer.start_as_current_span("stream"), spans.asked("asked", carried):
        pass
    asked = recorded.one("asked")
    assert asked.kind is SpanKind.SERVER
    assert asked.parent is not None
    assert asked.parent.span_id == asking.get_span_context().span_id


def test_background_work_is_a_trace_of_its_own(recorded: Recorded) -> None:
    with recorded.tracer.start_as_current_span("else"), spans.own("own"):
        pass
    assert recorded.one("own").parent is None


def test_the_sampler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(ALWAYS_OFF)
    monkeypatch.setattr(spans, "_TRACER", recorded.tracer)
    with spans.own("own"), spans.part("part"):
        assert not spans.carrier()
    assert recorded.spans == []


def test_a_failed_span_records_its_failure(recorded: Recorded) -> None:
    with pytest.raises(StoreFull), spans.own("full"):
        raise StoreFull("no room")
    with pytest.raises(asyncio.CancelledError), spans.own("given up"):
        raise asyncio.CancelledError
    full, given_up = recorded.one("full"), recorded.one("given up")
    assert (full.attributes or {})[names.ERROR_TYPE] == StoreFull.reason
    assert full.status.status_code is StatusCode.ERROR
    assert (given_up.attributes or {})[names.ERROR_TYPE] == "CANCELLED"
    assert not trace.get_current_span().is_recording()


def test_work_of_another_process_is_a_child_of_its_starter(recorded: Recorded) -> None:
    with recorded.tracer.start_as_current_span("asking") as asking:
        handed = spans.handed_on()
    with recorded.tracer.start_as_current_span("else"), spans.joined("joined", handed, {"a": 1}):
        pass
    joined = recorded.one("joined")
    assert joined.kind is SpanKind.INTERNAL
    assert joined.parent is not None
    assert joined.parent.span_id == asking.get_span_context().span_id


def test_unsampled_work_stays_unsampled_in_another_process(recorded: Recorded) -> None:
    off = {"traceparent": f"00-{1:032x}-{1:016x}-00"}
    with spans.joined("joined", off), spans.part("part"):
        assert spans.handed_on() == off
    with recorded.tracer.start_as_current_span("else"), spans.joined("nobody's", {}):
        assert spans.handed_on() == {}
    assert [span.name for span in recorded.spans] == ["else"]


def test_the_span_of_a_process_is_a_child_of_its_starter(recorded: Recorded) -> None:
    with spans.command("first", {"TRACEPARENT": "damaged"}) as first:
        variables = spans.environment()
        assert list(variables) == ["TRACEPARENT"]
    with spans.command("second", {**variables, "PATH": "/bin"}):
        pass
    assert recorded.one("first").parent is None
    parent = recorded.one("second").parent
    assert parent is not None
    assert parent.span_id == first.get_span_context().span_id


def test_work_on_another_thread_has_the_span_of_its_caller(recorded: Recorded) -> None:
    def work() -> None:
        with spans.part("part"):
            pass

    with ThreadPoolExecutor(1) as pool:
        with recorded.tracer.start_as_current_span("whole") as whole:
            pool.submit(spans.threaded(work)).result()
        pool.submit(work).result()
    parent = recorded.one("part").parent
    assert parent is not None
    assert parent.span_id == whole.get_span_context().span_id


def test_a_failure_records_its_first_line(recorded: Recorded) -> None:
    with pytest.raises(ValueError, match="first"), spans.own("whole"):
        raise ValueError("first\n  at java.lang.Thread")
    assert recorded.one("whole").status.description == "first"
