"""The spans of a topic's publications, and their parents."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.services.errors import StoreFull
from seqgate.services.ledger import tracing
from seqgate.services.ledger.core.entry import Entry, Unit, unit_of
from seqgate.services.ledger.tracing import TopicTracing
from seqgate.telemetry import names, spans
from seqgate.types import TopicName
from tests.support.entries import single
from tests.support.recorded import Recorded, links

TOPIC = TopicName.parse("public/default/t")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    recorded = Recorded(ALWAYS_ON)
    monkeypatch.setattr(tracing, "_TRACER", recorded.tracer)
    monkeypatch.setattr(spans, "_TRACER", recorded.tracer)
    return recorded


def traced(sequence_id: int) -> Entry:
    parent = f"00-{sequence_id + 1:032x}-{sequence_id + 1:016x}-01"
    metadata = EntryMetadata(properties={"traceparent": parent}).SerializeToString()
    return single(sequence_id)._replace(metadata=metadata)


def unit(entry: Entry, session: int = 1) -> Unit:
    return unit_of(session, entry.lowest, [entry])


def test_a_publication_span_is_a_child_of_its_sender_until_answered(recorded: Recorded) -> None:
    of = TopicTracing(TOPIC)
    units = [unit(traced(0)), unit(single(1))]
    of.arrived(units)
    assert recorded.spans == []
    for each in units:
        of.answered(each, "STORED")
    (publish,) = recorded.spans
    assert publish.name == f"publish {TOPIC}"
    assert publish.kind is SpanKind.SERVER
    assert publish.parent is not None
    assert (publish.parent.trace_id, publish.parent.span_id) == (1, 1)
    assert (publish.attributes or {})[names.RECEIPT] == "STORED"


def test_a_group_is_linked_to_each_publication_and_a_child_of_the_first(recorded: Recorded) -> None:
    of = TopicTracing(TOPIC)
    entries = [single(0), traced(1), traced(2)]
    of.arrived([unit(entry) for entry in entries])
    with of.appending(entries):
        within = trace.get_current_span().get_span_context()
    first, second = sorted(
        (span for span in recorded.spans if span.name == f"append {TOPIC}"),
        key=lambda span: span.context.trace_id,
    )
    assert (first.context.trace_id, second.context.trace_id) == (2, 3)
    assert first.context.span_id == within.span_id
    assert links(second) == [(within.trace_id, within.span_id)]
    assert {(span.attributes or {})[names.GROUP_ENTRIES] for span in (first, second)} == {3}


def test_stored_entries_are_confirmed_in_one_span(recorded: Recorded) -> None:
    of = TopicTracing(TOPIC)
    entries = [traced(0), traced(1)]
    units = [unit(entry) for entry in entries]
    of.arrived(units)
    with of.asking(names.ADMIT, units, confirms=False):
        pass
    with of.appending(entries):
        pass
    for _ in range(2):
        with of.asking(names.CONFIRM, (), confirms=True):
            pass
    admit, confirm = recorded.one(f"admit {TOPIC}"), recorded.one(f"confirm {TOPIC}")
    assert [span.context.trace_id for span in (admit, confirm)] == [1, 1]
    assert [trace_id for span in (admit, confirm) for trace_id, _ in links(span)] == [2, 2]
    assert (admit.attributes or {})[names.ENTRIES] == 2


@pytest.mark.parametrize("is_traced", [False, True])
def test_an_admit_belongs_to_the_publications_that_it_judges(
    recorded: Recorded, *, is_traced: bool
) -> None:
    of = TopicTracing(TOPIC)
    stored, judged = traced(0), traced(1)
    of.arrived([unit(stored)])
    with of.appending([stored]):
        pass
    if is_traced:
        of.arrived([unit(judged)])
    with of.asking(names.ADMIT, [unit(judged)], confirms=True):
        pass
    admits = [span for span in recorded.spans if span.name == f"admit {TOPIC}"]
    assert [span.context.trace_id for span in admits] == ([2] if is_traced else [])
    assert [trace_id for span in admits for trace_id, _ in links(span)] == [1] * is_traced


def test_a_failed_group_has_no_confirmation_span(recorded: Recorded) -> None:
    of = TopicTracing(TOPIC)
    entries = [traced(0), traced(1)]
    of.arrived([unit(entry) for entry in entries])
    with pytest.raises(StoreFull), of.appending(entries):
        raise StoreFull("no room")
    with of.asking(names.CONFIRM, (), confirms=True):
        pass
    assert [(span.attributes or {})[names.ERROR_TYPE] for span in recorded.spans] == [
        StoreFull.reason,
        StoreFull.reason,
    ]


def test_contexts_kept_for_a_confirmation_are_bounded_by_its_links(recorded: Recorded) -> None:
    of = TopicTracing(TOPIC)
    entries = [traced(number) for number in range(2 * spans.LINKS_MAX)]
    of.arrived([unit(entry) for entry in entries])
    for entry in entries:
        with of.appending([entry]):
            pass
    with of.asking(names.CONFIRM, (), confirms=True):
        pass
    assert len(recorded.one(f"confirm {TOPIC}").links) == spans.LINKS_MAX


def test_a_retried_publication_has_two_spans_and_the_newer_continues(recorded: Recorded) -> None:
    of = TopicTracing(TOPIC)
    before, again = unit(traced(0), session=1), unit(traced(0), session=2)
    of.arrived([before])
    of.arrived([again])
    of.dropped(before, "CLOSED")
    with of.appending([traced(0)]):
        pass
    of.answered(again, "STORED")
    dropped, append, answered = recorded.spans
    assert (dropped.attributes or {})[names.ERROR_TYPE] == "CLOSED"
    assert append.parent is not None
    assert append.parent.span_id == answered.context.span_id


def test_all_entries_of_a_unit_share_a_parent_span(recorded: Recorded) -> None:
    of = TopicTracing(TOPIC)
    entries = [traced(0), traced(1)]
    both = unit_of(1, 1, entries)
    of.arrived([both])
    with of.appending(entries):
        pass
    of.answered(both, "STORED")
    *appends, publish = recorded.spans
    assert [append.parent.span_id for append in appends if append.parent is not None] == [
        publish.context.span_id
    ] * 2


def test_losing_a_topic_ends_all_spans(recorded: Recorded) -> None:
    of = TopicTracing(TOPIC)
    of.aligned("takeover", is_aligning=True)
    of.arrived([unit(traced(0))])
    of.stopped("FENCED")
    publish, recover = recorded.spans
    for span in (publish, recover):
        assert (span.attributes or {})[names.ERROR_TYPE] == "FENCED"
    of.answered(unit(traced(0)), "STORED")
    of.aligned("takeover", is_aligning=False)
    assert recorded.spans == [publish, recover]


def test_without_tracing_nothing_is_inspected(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    of = TopicTracing(TOPIC)
    of.arrived([unit(traced(0))])
    of.aligned("takeover", is_aligning=True)
    with of.appending([traced(0)]), of.recovering(), of.replaying():
        pass
    of.stopped("FENCED")
    assert recorded.spans == []
