"""Where a process's spans go, by OpenTelemetry's own variables.

Nothing is recorded, and nothing of the SDK imported, unless a variable asks for it. That is

    OTEL_TRACES_EXPORTER               otlp, console or none
    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
                                       where to, if no exporter is named; it is otlp then
    OTEL_SDK_DISABLED                  true: nothing, whatever else is said

and likewise OTEL_METRICS_EXPORTER, OTEL_EXPORTER_OTLP_METRICS_ENDPOINT. The SDK reads the others
itself, among them OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and its _ARG,
OTEL_BSP_*, OTEL_EXPORTER_OTLP_*. The protocol is gRPC.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Final

from opentelemetry import trace

FLUSH_TIMEOUT_S: Final = 5.0
"""How long the last spans of a process may take to be exported when it ends."""

OTLP: Final = "otlp"
CONSOLE: Final = "console"
NONE: Final = "none"

_EXPORTERS: Final = (OTLP, CONSOLE, NONE)


class TelemetrySettingError(ValueError):
    """An OTEL_* variable asks for what there is not."""


def exporter_asked_for(signal: str, environment: Mapping[str, str] | None = None) -> str:
    """Which exporter the variables ask for.

    Args:
        signal: TRACES or METRICS.
        environment: the variables; None: this process's.

    Raises:
        TelemetrySettingError: there is no such exporter, or no such protocol.
    """
    variables = os.environ if environment is None else environment
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return NONE
    named = variables.get(f"OTEL_{signal}_EXPORTER", "").strip().lower()
    if named and named not in _EXPORTERS:
        raise TelemetrySettingError(
            f"OTEL_{signal}_EXPORTER must be one of {', '.join(_EXPORTERS)}, not {named!r}"
        )
    if not named:
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        named = OTLP if any(variables.get(each) for each in endpoints) else NONE
    if named == OTLP:
        _check_protocol(signal, variables)
    return named


def _check_protocol(signal: str, variables: Mapping[str, str]) -> None:
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = variables.get(name, "").strip().lower()
        if protocol and protocol != "grpc":
            raise TelemetrySettingError(f"{name} must be grpc, not {protocol!r}")
        if protocol:
            return


@contextmanager
def tracing(service: str) -> Iterator[bool]:
    """Record spans while the context lasts, if OTEL_* ask for it; whether they do is what the
    context gives. On the way out what is left is exported, for FLUSH_TIMEOUT_S at most.

    Args:
        service: service.name, where OTEL_SERVICE_NAME does not say another one.

    Raises:
        TelemetrySettingError: a variable asks for what there is not, or for the SDK where it is not
            installed (`pip install seqgate[otel]`).
    """
    named = exporter_asked_for("TRACES")
    if named == NONE:
        yield False
        return
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from seqgate.telemetry.exporting import resource_of, span_exporter
    except ImportError as error:
        raise TelemetrySettingError(
            "exporting spans requires opentelemetry-sdk: pip install seqgate[otel]"
        ) from error
    exporter = span_exporter(named)
    provider = TracerProvider(resource=resource_of(service, version("seqgate")))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    try:
        yield True
    finally:
        giving_up = threading.Timer(FLUSH_TIMEOUT_S, exporter.shutdown)
        giving_up.daemon = True
        giving_up.start()
        provider.shutdown()
        giving_up.cancel()
