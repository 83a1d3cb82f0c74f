"""Basics of telemetry: names, variables, contexts in messages; without a connection."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.semconv._incubating.attributes import (
    db_attributes,
    messaging_attributes,
    rpc_attributes,
)
from opentelemetry.semconv._incubating.metrics import rpc_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from seqgate.telemetry import TelemetrySettingError, extract, inject, names, trace_id_of
from seqgate.telemetry.setup import CONSOLE, NONE, OTLP, exporter_asked_for

CONVENTIONS = {
    **vars(db_attributes),
    **vars(messaging_attributes),
    **vars(rpc_attributes),
    **vars(rpc_metrics),
    **vars(error_attributes),
    **vars(server_attributes),
}


def test_names_are_those_of_the_conventions() -> None:
    compared = 0
    for name, value in vars(names).items():
        if name.startswith(("RPC_", "MESSAGING_", "DB_", "SERVER_", "ERROR_")):
            assert CONVENTIONS[name] == value
            compared += 1
    assert compared >= 15
    types = {each.value for each in messaging_attributes.MessagingOperationTypeValues}
    ours = {names.CREATE, names.SEND, names.RECEIVE, names.PROCESS, names.SETTLE}
    assert ours <= types
    systems = {each.value for each in rpc_attributes.RpcSystemNameValues}
    assert names.GRPC in systems


def test_our_own_names_have_our_prefix() -> None:
    for value in (names.PRODUCER_NAME, names.SEQUENCE_ID, names.REASON):
        assert value.startswith("seqgate.")
        assert value not in CONVENTIONS.values()


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}


@pytest.mark.parametrize(
    ("variables", "exporter"),
    [
        ({}, NONE),
        (ENDPOINT, OTLP),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, NONE),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4317"}, OTLP),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://localhost:4317"}, NONE),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, OTLP),
        ({"OTEL_TRACES_EXPORTER": " OTLP "}, OTLP),
        ({"OTEL_TRACES_EXPORTER": "console"}, CONSOLE),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, NONE),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}, NONE),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "false"}, OTLP),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, OTLP),
    ],
)
def test_variables_select_the_exporter(variables: Mapping[str, str], exporter: str) -> None:
    assert exporter_asked_for("TRACES", variables) == exporter


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        {**ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
    ],
)
def test_unsupported_exporters_are_refused(variables: Mapping[str, str]) -> None:
    with pytest.raises(TelemetrySettingError):
        exporter_asked_for("TRACES", variables)


@given(
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9]{0,9}", fullmatch=True),
        st.from_regex(r"[a-z0-9]{1,9}", fullmatch=True),
        max_size=3,
    ),
)
def test_a_context_is_read_back_from_properties(
    trace_id: int, span_id: int, sampled: bool, state: dict[str, str]
) -> None:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    context = SpanContext(trace_id, span_id, False, flags, TraceState(list(state.items())))
    properties = {"own": "value"}
    inject(context, properties)
    assert properties["own"] == "value"
    found = extract(properties)
    assert (found.trace_id, found.span_id) == (trace_id, span_id)
    assert found.trace_flags == flags
    assert dict(found.trace_state) == state
    assert trace_id_of(properties) == f"{trace_id:032x}"


@given(st.text(max_size=80))
def test_properties_without_a_context_have_none(text: str) -> None:
    """Whatever an application writes there: at worst there is no trace."""
    found = extract({"traceparent": text, "tracestate": text})
    assert not found.is_valid or found.trace_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
    ],
)
def test_a_damaged_context_is_ignored(text: str) -> None:
    assert not extract({"traceparent": text}).is_valid
    assert trace_id_of({"traceparent": text}) == ""


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", TRACE),
        (f"00-{TRACE}-00f067aa0ba902b7-00", TRACE),
        (f"cc-{TRACE}-00f067aa0ba902b7-01-later-versions", TRACE),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", ""),
        (TRACE, ""),
    ],
)
def test_only_the_standards_form_is_a_trace(value: str, expected: str) -> None:
    assert trace_id_of({"traceparent": value}) == expected


def test_no_context_is_written_without_a_span() -> None:
    properties: dict[str, str] = {}
    inject(extract({}), properties)
    assert properties == {}
