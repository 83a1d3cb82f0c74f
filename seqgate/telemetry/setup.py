"""Exports a process's spans, as OpenTelemetry's own variables configure.

By default nothing is recorded, and the SDK is not imported. These variables enable it:

    OTEL_TRACES_EXPORTER               otlp, console or none
    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
                                       the endpoint; if no exporter is named, it is otlp
    OTEL_SDK_DISABLED                  true: record nothing, whatever the others say

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

from seqgate.extras import pip_install

FLUSH_TIMEOUT_S: Final = 5.0
"""How long the export of a process's last spans may take when it ends."""

OTLP: Final = "otlp"
CONSOLE: Final = "console"
NONE: Final = "none"

_EXPORTERS: Final = (OTLP, CONSOLE, NONE)


class TelemetrySettingError(ValueError):
    """An OTEL_* variable has an unsupported value."""


def exporter_asked_for(signal: str, environment: Mapping[str, str] | None = None) -> str:
    """The exporter that the variables (None: this process's) select for a signal, TRACES or
    METRICS. Raises TelemetrySettingError if the exporter or the protocol is not supported."""
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
    """Record spans within the context if OTEL_* enable it; the context's value is whether they do.
    On exit, remaining spans are exported, within FLUSH_TIMEOUT_S.

    Args:
        service: service.name, unless OTEL_SERVICE_NAME is set.

    Raises:
        TelemetrySettingError: a variable has an unsupported value, or requires the SDK, which is
            not installed (extra `otel`).
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
            f"exporting spans requires opentelemetry-sdk: {pip_install('otel')}"
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
